"""Budgets: the published setting, a share of its rounds, or seconds on small data to see that everything works."""

from __future__ import annotations

import re
from typing import Any, Literal

Budget = Literal["smoke", "quick", "full"]
BUDGETS: tuple[Budget, ...] = ("smoke", "quick", "full")
SMOKE: dict[str, Any] = {"rounds": 2, "eval_every": 2, "last_k": 1}
SMOKE_METHOD: dict[str, Any] = {"epochs": 1, "batch_size": 32}
SMOKE_DATA = {"name": "digits", "samples": 240}
SMOKE_CLIENTS = 4
SMOKE_CLASSES = 5
IN_ROUNDS = ("unfreeze",)
"""Hyper-parameters that are rounds; a share of the rounds has them at the same share."""


def shared(rounds: int, share: float) -> int:
    """A share of some rounds."""
    return round(rounds * share)


def quick_words(words: dict[str, Any], share: float, *, read_between: bool) -> dict[str, Any]:
    """A share of the rounds; where figures are read before the end, they are read at the same share."""
    scaled = ("rounds", "eval_every") if read_between else ("rounds",)
    return words | {key: max(1, shared(words[key], share)) for key in scaled if words.get(key)}


def quick_method(values: dict[str, Any], share: float) -> dict[str, Any]:
    """Hyper-parameters for a share of the rounds."""
    return {key: [shared(t, share) for t in value] if key in IN_ROUNDS else value for key, value in values.items()}


def smoke_words(words: dict[str, Any], own_data: bool) -> dict[str, Any]:
    """Two rounds among few clients, on digits or on the recipe's own data."""
    found = words | SMOKE
    split = str(words.get("split", "classes:2"))
    if found.get("clients") is not None:
        found["clients"] = min(SMOKE_CLIENTS, found["clients"])
    if held := re.fullmatch(r"classes:(\d+)(:some)?", split):
        found["split"] = f"classes:{held[1] if own_data else min(int(held[1]), SMOKE_CLASSES)}:some"
    if own_data:
        return found
    found["data"] = SMOKE_DATA
    found.pop("external", None)
    if found.get("shift"):  # photographs are data too; a stain colours as well
        found["shift"] = re.sub(r"colour(:[^+]*)?", "stain", found["shift"])
    if split == "domain":
        found |= {"split": "dirichlet:1", "clients": SMOKE_CLIENTS}
    if found.get("test") == "published":
        found["test"] = "pooled"
    return found
