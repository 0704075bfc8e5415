"""The main job on embedded data: every method on twenty clients with two digits each, ranked, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perfed.comparison import Announce, compare
from perfed.core import registry
from perfed.leaderboard import Comparison

ROUNDS = 20
WORDS: dict[str, Any] = {
    "data": "digits",
    "split": "classes:2",
    "clients": 20,
    "fraction": 0.5,
    "rounds": ROUNDS,
    "net": {"name": "mlp", "hidden": [64, 32]},
    "method": {"lr": 0.05, "batch_size": 10},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "anti": {"unfreeze": [0, ROUNDS // 2]},
    "vanilla": {"unfreeze": [0, ROUNDS // 2]},
}
"""Schedules count rounds, and the demo has few."""
ELSEWHERE = {"pse": {"name": "conv3attn"}, "fedbn": {"name": "digitsnet"}}
"""Methods that are about a part the demo's network does not have: attention, BatchNorm."""


def names() -> list[str]:
    """The methods that the demo's network can run, FedAvg also with fine-tuning."""
    return [name for known in registry.methods() if known not in ELSEWHERE for name in _variants(known)]


def _variants(name: str) -> list[str]:
    return [name, f"{name}+ft"] if name == "fedavg" else [name]


def demo(out: Path | str, *, workers: int = 2, announce: Announce | None = None) -> Comparison:
    """Run the demo; what is finished in `out` is kept."""
    wanted = names()
    settings = {name: values for name, values in SETTINGS.items() if name in wanted}
    return compare(wanted, out=out, workers=workers, announce=announce, settings=settings, **WORDS)
