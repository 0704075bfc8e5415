"""Methods by name: the package's own, and any that an installed package offers.

A package adds methods by the entry-point group `perfed.methods`: each entry names a Method class, or a module whose
import registers some.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from perfed.core.method import Method
from perfed.errors import ConfigError, unknown

FINETUNED = "+ft"
FINETUNE_EPOCHS = 10

_registered: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(name: str) -> Callable[[M], M]:
    """Make a Method class known by a name."""

    def enter(cls: M) -> M:
        if _registered.get(name, cls).__qualname__ != cls.__qualname__:
            raise ConfigError(f"Two methods are called {name!r}.", "Register one of them by another name.")
        _registered[name] = cls
        return cls

    return enter


@cache
def _discover() -> None:
    package = importlib.import_module("perfed.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"perfed.methods.{module.name}")
    for entry in entry_points(group="perfed.methods"):
        found = entry.load()
        if isinstance(found, type) and issubclass(found, Method):
            register(entry.name)(found)


def methods() -> dict[str, type[Method]]:
    """All registered methods, in the order of their names."""
    _discover()
    return dict(sorted(_registered.items()))


def method_class(name: str) -> type[Method]:
    """The class of a method; `+ft` behind the name is allowed."""
    known, base = methods(), name.removesuffix(FINETUNED)
    if base not in known:
        raise unknown("method", base, known)
    return known[base]


def make(name: str, **settings: Any) -> Method:
    """A method by name with its hyper-parameters; `NAME+ft` fine-tunes every client at the end."""
    cls = method_class(name)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in settings:
        if key not in fields:
            raise unknown(f"hyper-parameter of {name}", key, fields)
    if name.endswith(FINETUNED):
        own = fields["finetune_epochs"].default
        settings.setdefault("finetune_epochs", own or FINETUNE_EPOCHS)
    return cls(**settings)
