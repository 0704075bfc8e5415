"""The configuration's words as flags, so that file, flags and Python cannot differ."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perfed import config
from perfed.config import CHOICES, Config

FILE = "A TOML file with the same words; flags and --set go before it."
SET = "A setting such as method.lr=0.01; goes before flags and file. May be repeated."


def with_words(without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes `words` every word of the configuration as a flag, and --config and --set."""

    def change(command: Callable[..., None]) -> Callable[..., None]:
        flags = [name for name in Config.model_fields if name not in without]

        def called(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in flags}
            file, settings = given.pop("config"), given.pop("set") or []
            words = config.read(file) if file else {}
            words = config.merged(words, {name: value for name, value in chosen.items() if value is not None})
            command(words=words, settings=settings, **given)

        own = [
            p
            for p in inspect.signature(command, eval_str=True).parameters.values()
            if p.name not in ("words", "settings")
        ]
        extra = [_flag(name) for name in flags]
        extra.append(_parameter("config", Path | None, typer.Option("--config", "-c", help=FILE, show_default=False)))
        extra.append(_parameter("set", list[str] | None, typer.Option("--set", "-s", help=SET, show_default=False)))
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *extra)]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return change


def _flag(name: str) -> inspect.Parameter:
    field = Config.model_fields[name]
    hint = str if name in CHOICES else _kind(field.annotation)
    default = field.default["name"] if name in CHOICES else field.default
    shown = f" (default: {default})" if default is not None else ""
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if hint is bool else flag, help=f"{field.description}{shown}", show_default=False
    )
    return _parameter(name, hint | None, option)


def _kind(hint: Any) -> type:
    """The plain type below optional, bounded and literal ones."""
    if typing.get_origin(hint) is Literal:
        return str
    if typing.get_origin(hint) is Annotated:
        return _kind(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _kind(next(arg for arg in typing.get_args(hint) if arg is not types.NoneType))
    assert isinstance(hint, type)
    return hint


def _parameter(name: str, hint: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint, option])
