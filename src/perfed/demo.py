"""The main job on embedded data: every method on twenty clients with two digits each, ranked, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perfed.comparison import Announce, compare
from perfed.core import registry
from perfed.leaderboard import Comparison
from perfed.report.page import write

ROUNDS = 20
PAGE = "report.html"
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
NETS: dict[str, str | dict[str, Any]] = {
    "fedbn": {"name": "mlp", "hidden": [64, 32], "batchnorm": True},
    "pse": {"name": "conv3attn", "width": 0.25, "hidden": 32},
}
"""Networks of the methods that are about a part the demo's network does not have: attention, BatchNorm."""


def names() -> list[str]:
    """All methods, FedAvg also with fine-tuning."""
    return [name for known in registry.methods() for name in ([known, f"{known}+ft"] if known == "fedavg" else [known])]


def demo(out: Path | str, *, workers: int = 2, announce: Announce | None = None) -> Comparison:
    """Run the demo; what is finished in `out` is kept."""
    wanted = names()
    made = compare(wanted, out=out, workers=workers, announce=announce, settings=SETTINGS, nets=NETS, **WORDS)
    write([made.directory], made.directory / PAGE)
    return made
