"""A method's hyper-parameters as a user sees them: names, types, defaults, meanings, and which values are accepted."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from perfed.core.method import Method
from perfed.core.registry import make, method_class
from perfed.errors import ConfigError, unknown

NONE = "none"
"""How a file or a flag writes "no value"."""

_BOUNDS: dict[str, Any] = {
    "lr": Field(gt=0),
    "batch_size": Field(ge=1),
    "momentum": Field(ge=0, lt=1),
    "weight_decay": Field(ge=0),
    "lr_decay": Field(gt=0),
}


@dataclasses.dataclass(frozen=True)
class HyperParameter:
    """One field of a method's dataclass."""

    name: str
    type: str
    default: Any
    meaning: str


def listing(cls: type[Method]) -> list[HyperParameter]:
    """All hyper-parameters of a method, its own first."""
    hints, meanings = _hints(cls), _meanings(cls)
    own = set(vars(cls).get("__annotations__", {}))
    fields = sorted(dataclasses.fields(cls), key=lambda field: field.name not in own)
    return [
        HyperParameter(
            f.name, ranged(_bounded(f.name, hints.get(f.name, Any))), plain(_default(f)), meanings.get(f.name, "")
        )
        for f in fields
    ]


def check(name: str, settings: Mapping[str, Any]) -> Method:
    """The method of this name with these hyper-parameters, or an error that names the key, the value and the cure."""
    cls = method_class(name)
    hints = _hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    values = {}
    for key, value in settings.items():
        if key not in known:
            raise unknown(f"hyper-parameter of {name}", key, known)
        values[key] = fitting(f"method.{key}", value, _bounded(key, hints.get(key, Any)))
    try:
        return make(name, **values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"The method {name!r} refuses its hyper-parameters: {error}.") from error


def table(method: Method) -> dict[str, Any]:
    """A method's hyper-parameters as plain values."""
    return {field.name: plain(getattr(method, field.name)) for field in dataclasses.fields(method)}


def fitting(key: str, value: Any, hint: Any) -> Any:
    """The value as the type wants it; whole numbers pass for numbers and lists for tuples, no more."""
    if value == NONE and type(None) in typing.get_args(_bare(hint)):
        return None
    config = (
        None if dataclasses.is_dataclass(_bare(hint)) else ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    )
    try:
        return TypeAdapter(hint, config=config).validate_json(json.dumps(value, default=_item), strict=True)
    except ValidationError as error:
        raise refusal(key, value, hint, error) from None
    except (TypeError, ValueError, RecursionError):
        raise ConfigError(f"{key} = {_shown(value)} is not a plain value.", f"Accepted: {accepted(hint)}.") from None


def refusal(key: str, value: Any, hint: Any, error: ValidationError) -> ConfigError:
    """The error for a value of the wrong type or out of range."""
    reason = error.errors(include_url=False)[0]
    bounds = [str(_SAYS[name]).format(limit) for name, limit in reason.get("ctx", {}).items() if name in _SAYS]
    want = accepted(hint) + (" " + " and ".join(bounds) if bounds else "")
    return ConfigError(f"{key} = {_shown(value)} is not accepted.", f"It must be {want}.")


_SAYS = {"gt": "above {}", "ge": "of at least {}", "lt": "below {}", "le": "of at most {}"}
_WORDS = {float: "a number", int: "a whole number", str: "a word", bool: "true or false", type(None): f"{NONE!r}"}


def accepted(hint: Any) -> str:
    """A type in words."""
    hint = _bare(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is Literal:
        return "one of " + ", ".join(repr(value) for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(accepted(arg) for arg in args)
    if origin in (tuple, list):
        kinds = dict.fromkeys(accepted(arg) for arg in args if arg is not Ellipsis)
        return "a list, each " + " or ".join(kinds)
    return "a value" if hint is Any else getattr(hint, "__name__", str(hint))


def ranged(hint: Any) -> str:
    """A type in words, with its limits."""
    marks = [mark for info in getattr(hint, "__metadata__", ()) for mark in getattr(info, "metadata", ())]
    limits = {name: getattr(mark, name) for mark in marks for name in _SAYS if hasattr(mark, name)}
    if set(limits) == {"ge", "le"}:
        return f"{accepted(hint)} from {limits['ge']} to {limits['le']}"
    return " ".join([accepted(hint), " and ".join(_SAYS[name].format(limits[name]) for name in limits)]).strip()


def plain(value: Any) -> Any:
    """A value as TOML and JSON have it."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list | set | frozenset) else value


def _bounded(key: str, hint: Any) -> Any:
    """The type with its limits: those it is annotated with, else the usual ones of the field's name and kind."""
    if hint not in (int, float):
        return hint
    usual = _BOUNDS.get("lr" if key.endswith("_lr") else key)
    if usual is not None:
        return Annotated[hint, usual]
    return Annotated[int, Field(ge=0)] if hint is int else hint


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _item(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(type(value).__name__)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _hints(cls: type[Method]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):  # a type known only inside the user's function
        return {}


def _meanings(cls: type[Method]) -> dict[str, str]:
    """The docstrings below the fields, of the class and those it is made from."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):
            continue
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                value = text.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[field.target.id] = " ".join(value.value.split())
    return found
