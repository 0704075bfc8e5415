"""Every failure that a user can cause or meet has a class here, with a code, a cause and a cure.

docs/errors.md lists them; the command line prints them in one or two lines, never a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class PerfedError(Exception):
    """A failure that a user can act on: what happened, and what to do about it."""

    code = "E000"

    def __init__(self, cause: str, cure: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.cure = cure

    def __str__(self) -> str:
        return f"[{self.code}] {self.cause}" + (f" {self.cure}" if self.cure else "")


class ConfigError(PerfedError):
    """A key or a value of the configuration is wrong."""

    code = "E100"


class UnknownNameError(ConfigError):
    """A method, network, data set or key of that name does not exist."""

    code = "E101"


class DataError(PerfedError):
    """A data file is missing, damaged or not what its publisher made."""

    code = "E200"


class SplitError(PerfedError):
    """The data cannot be divided among the clients as asked."""

    code = "E201"


class NetError(PerfedError):
    """The network does not fit the data, or a method cannot work on it."""

    code = "E300"


class StoreError(PerfedError):
    """A run's directory is damaged, foreign or in use."""

    code = "E400"


class UpdateError(PerfedError):
    """What a client sent is not what its method declares."""

    code = "E500"


class QuorumError(PerfedError):
    """Too few clients sent a good update for a round to count."""

    code = "E502"

    def __init__(self, t: int, arrived: int, asked: int, faults: Sequence[Mapping[str, Any]] = ()) -> None:
        why = " ".join(str(fault["reason"]) for fault in faults)
        super().__init__(
            f"Round {t} has {arrived} good updates of {asked}, which is below the quorum. {why}",
            f"Bring the clients back and start the same run again: it goes on at round {t}.",
        )


class ExtraError(PerfedError):
    """A feature needs a package that is not installed."""

    code = "E600"


def unknown(kind: str, given: str, known: Iterable[str], listed: str = "") -> UnknownNameError:
    """The error for a name that is not there, with the nearest name that is; `listed` says where all of many are."""
    names = sorted(known)
    close = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.5)
    cure = f"Did you mean {close[0]!r}? " if close else ""
    return UnknownNameError(f"There is no {kind} {given[:80]!r}.", cure + (listed or f"Known: {', '.join(names)}."))
