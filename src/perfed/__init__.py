"""Personalised federated learning: clients learn together and each ends with a model of its own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from perfed.comparison import compare
    from perfed.config import Config
    from perfed.core.method import Method
    from perfed.core.registry import register
    from perfed.data import Federation, Source, federate, from_tensors
    from perfed.errors import PerfedError
    from perfed.experiment import resume, run
    from perfed.leaderboard import Comparison
    from perfed.nets import Net, wrap
    from perfed.result import Result

__all__ = [
    "Comparison",
    "Config",
    "Federation",
    "Method",
    "Net",
    "PerfedError",
    "Result",
    "Source",
    "compare",
    "federate",
    "from_tensors",
    "load",
    "register",
    "resume",
    "run",
    "wrap",
]

_WHERE = {
    "Comparison": "leaderboard",
    "Config": "config",
    "Federation": "data",
    "Method": "core.method",
    "Net": "nets",
    "PerfedError": "errors",
    "Result": "result",
    "Source": "data",
    "compare": "comparison",
    "federate": "data",
    "from_tensors": "data",
    "register": "core.registry",
    "resume": "experiment",
    "run": "experiment",
    "wrap": "nets",
}


def load(directory: str | Path) -> Result:
    """The result of a finished run, from its directory."""
    from perfed.result import Result

    return Result.load(directory)


def __getattr__(name: str) -> Any:
    """Import torch and the rest only when something of it is asked for."""
    if name == "__version__":
        from importlib.metadata import version

        return version("perfed")
    if name in _WHERE:
        return getattr(import_module(f"perfed.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'perfed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
