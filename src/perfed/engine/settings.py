"""How a federation is run, where it stands, and what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from perfed.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a federation is run, apart from its data, network and method."""

    rounds: int = 50
    fraction: float = 1.0
    seed: int = 0
    eval_every: int = 0
    """rounds between evaluations; 0 makes about ten of them"""
    last_k: int = 1
    """how many of the last rounds are all evaluated, and averaged as `local.last`"""
    adapt: str = "final"
    """when clients adapt before scoring: `final`, `always` or `never`"""
    new: bool | None = None
    """whether New is measured; None: when it takes less than 250,000 forward passes"""

    def due(self, t: int) -> bool:
        """Whether round t ends with an evaluation."""
        every = self.eval_every or max(1, self.rounds // 10)
        return t % every == 0 or t > self.rounds - self.last_k


@dataclass
class Outcome:
    """What a finished run found."""

    state_sha256: str
    partition_sha256: str
    metrics: dict[str, float]
    cost: dict[str, float]
    history: list[dict[str, Any]]
    clients: dict[str, Any]
    faults: list[dict[str, Any]]


@dataclass
class Progress:
    """Where a run stands; sent to whoever watches."""

    t: int
    rounds: int
    doing: str
    done: int
    of: int
    metrics: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    refused: int = 0
    """updates that were refused so far"""


Watcher = Callable[[Progress], None]


def check_settings(settings: Settings) -> None:
    """Refuse settings that no run can have."""
    for key, ok, want in (
        ("rounds", settings.rounds >= 1, "at least 1"),
        ("fraction", 0 < settings.fraction <= 1, "above 0 and at most 1"),
        ("last_k", settings.last_k >= 1, "at least 1"),
        ("eval_every", settings.eval_every >= 0, "0 or more"),
        ("adapt", settings.adapt in ("final", "always", "never"), "'final', 'always' or 'never'"),
    ):
        if not ok:
            raise ConfigError(f"{key} = {getattr(settings, key)!r} cannot be.", f"It must be {want}.")
