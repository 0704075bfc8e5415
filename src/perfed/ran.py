"""What a finished run says in the columns of a recipe."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfed import rundir
from perfed.recipes import Budget, Cell, Recipe
from perfed.recipes.budget import shared
from perfed.recipes.column import CLIENT, SETTLED, TOOK_PART, TOOK_PART_STD, Column
from perfed.result import Result

POINT = 0.01
COSTS = ("bytes_up", "bytes_down", "flops", "adapt_flops", "param_batches")
AND = " and "
"""Between the versions of a package, if runs were made with several."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of a recipe."""

    seed: int
    values: Mapping[str, float]
    """by column, without those that the run has no figure for"""
    cost: Mapping[str, float]
    seconds: float
    state_sha256: str
    partition_sha256: str
    made_with: Mapping[str, str]
    faults: int = 0
    """updates that were refused"""

    @classmethod
    def of(cls, result: Result, recipe: Recipe, budget: Budget, setting: str) -> Ran:
        """A run's figures in the columns of its setting."""
        share = recipe.quick if budget == "quick" else 1.0
        read_in = {c.key: read(result, c, share) for c in recipe.columns if c.setting == setting}
        return cls(
            seed=result.config.seed,
            values={key: value for key, value in read_in.items() if value is not None},
            cost={key: result.cost[key] for key in COSTS if key in result.cost},
            seconds=result.cost["seconds"],
            state_sha256=result.state_sha256,
            partition_sha256=result.partition_sha256,
            made_with=result.made_with,
            faults=len(result.faults),
        )


Runs = dict[Cell, list[Ran]]
"""The finished runs of every cell, one per seed."""


def read(result: Result, column: Column, share: float = 1.0) -> float | None:
    """A column's value in a run of this share of the rounds, parts of one in per cent; None if it was not measured."""
    name = column.metric
    if name.startswith(SETTLED):
        return _settled(result, name.removeprefix(SETTLED))
    if name.startswith(CLIENT):
        accuracy, number = result.clients["accuracy"], int(name.removeprefix(CLIENT))
        return 100 * accuracy[number] if number < len(accuracy) and accuracy[number] is not None else None
    if name in (TOOK_PART, TOOK_PART_STD):
        values = _took_part(result)
        how = statistics.fmean if name == TOOK_PART else statistics.pstdev
        return 100 * how(values) if values else None
    found: Mapping[str, Any] = result.metrics
    at = None if column.round is None else shared(column.round, share)
    if at is not None and at != result.config.rounds:
        found = next((entry for entry in result.history if entry["t"] == at), {})
    value = found.get(name)
    return None if value is None else float(value) * (1 if name.endswith(".loss") else 100)


def _took_part(result: Result) -> list[float]:
    """The accuracies of the clients that have been in a cohort."""
    seen = {client for record in rundir.records(result.directory) for client in record["cohort"]}
    scores = zip(result.clients["ids"], result.clients["accuracy"], strict=True)
    return [accuracy for client, accuracy in scores if client in seen and accuracy is not None]


def _settled(result: Result, metric: str) -> float | None:
    values = [(entry["t"], entry[metric]) for entry in result.history if entry.get(metric) is not None]
    if not values:
        return None
    last = values[-1][1]
    late = [t for t, value in values if abs(value - last) > POINT]
    return float(next(t for t, _ in values if not late or t > late[-1]))
