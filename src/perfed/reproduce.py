"""Run a recipe and set what was measured beside what was published."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perfed import rundir
from perfed.comparison import Announce, compare
from perfed.errors import DataError
from perfed.recipes import Budget, Column, Recipe
from perfed.result import Result, versions

WITHIN = 2.0
"""Points within which a measured figure counts as reproduced."""


def reproduce(
    recipe: Recipe,
    *,
    budget: Budget = "quick",
    seeds: Iterable[int] = (0,),
    out: Path,
    data_dir: str | None = None,
    workers: int = 1,
    only: Iterable[str] = (),
    announce: Announce | None = None,
) -> dict[str, Any]:
    """Run every method of the recipe with every seed under `out`, skipping what is done; the facts to keep."""
    words = recipe.run_words(budget) | {"workers": workers}
    if data_dir and budget != "smoke":
        words["data_dir"] = data_dir
    wanted = list(only) or list(recipe.entries)
    if missing := [label for label in wanted if label not in recipe.entries]:
        raise DataError(f"The recipe {recipe.name} has no {missing[0]!r}.", f"It has {', '.join(recipe.entries)}.")
    runs: dict[str, list[Result]] = {}
    for label in wanted:
        entry = recipe.entries[label]
        made = compare([{"name": entry.method, **entry.hyper}], seeds, out=out / label, announce=announce, **words)
        runs[label] = made.runs[entry.method]
        for result in runs[label]:
            result.prepared = None  # the next method makes its own; memory must not grow with the table
    return facts(recipe, budget, runs)


def facts(recipe: Recipe, budget: Budget, runs: dict[str, list[Result]]) -> dict[str, Any]:
    """What results/NAME.json holds."""
    first = next(iter(runs.values()))
    rows = {label: _row(recipe, label, results) for label, results in runs.items()}
    for column in recipe.columns:
        _rank(rows, column.key, "published")
        _rank(rows, column.key, "measured")
    compared = [cell for row in rows.values() for cell in row["cells"].values() if "difference" in cell]
    close = [cell for cell in compared if abs(cell["difference"]) <= WITHIN]
    return {
        "recipe": recipe.name,
        "title": recipe.title,
        "paper": recipe.paper,
        "table": recipe.table,
        "budget": budget,
        "own": list(recipe.own),
        "seeds": [result.config.seed for result in first],
        "partition_sha256": [result.partition_sha256 for result in first],
        "config": {k: v for k, v in first[0].config.identity().items() if k not in ("method", "seed")},
        "rows": rows,
        "within_2_points": [len(close), len(compared)],
        "versions": versions(),
    }


def read(result: Result, column: Column) -> float | None:
    """A column's value in a result, in per cent; None if the run did not measure it."""
    found = result.metrics
    if column.round is not None and column.round != result.config.rounds:
        at = [entry for entry in result.history if entry["t"] == column.round]
        if not at:
            return None
        found = at[0]
    value = found.get(column.metric)
    return None if value is None else 100 * value


def _row(recipe: Recipe, label: str, results: list[Result]) -> dict[str, Any]:
    entry, cells = recipe.entries[label], {}
    for column in recipe.columns:
        cell: dict[str, Any] = {}
        if column.key in entry.published:
            cell["published"] = entry.published[column.key]
        values = [value for result in results if (value := read(result, column)) is not None]
        if values:
            cell |= {"measured": statistics.fmean(values), "values": values}
            cell["spread"] = statistics.stdev(values) if len(values) > 1 else None
        if "published" in cell and "measured" in cell:
            cell["difference"] = cell["measured"] - cell["published"]
        cells[column.key] = cell
    costs = {
        key: statistics.fmean(r.cost[key] for r in results)
        for key in ("bytes_up", "bytes_down", "flops", "param_batches")
    }
    return {
        "method": entry.method,
        "hyper": entry.hyper,
        "cells": cells,
        "cost": costs,
        "timing": {"seconds": [result.cost["seconds"] for result in results]},
        "state_sha256": [result.state_sha256 for result in results],
    }


def _rank(rows: dict[str, dict[str, Any]], key: str, kind: str) -> None:
    held = [(row["cells"][key][kind], row) for row in rows.values() if kind in row["cells"][key]]
    for value, row in held:
        row["cells"][key][f"rank_{kind}"] = 1 + sum(other > value for other, _ in held)


def markdown(found: dict[str, Any]) -> str:
    """The table for people: published, measured, difference, ranks, a column of the paper after the other."""
    rows = found["rows"]
    keys = list(dict.fromkeys(key for row in rows.values() for key in row["cells"]))
    lines: list[str] = []
    for key in keys:
        lines += [f"**{key}**", "", "| method | published | measured | difference | rank published | rank measured |"]
        lines += ["|---|---:|---:|---:|---:|---:|"]
        for label, row in rows.items():
            cell = row["cells"][key]
            if not cell:
                continue
            own = f"**{label}**" if label in found["own"] else label
            spread = f" ± {cell['spread']:.2f}" if cell.get("spread") is not None else ""
            measured = f"{cell['measured']:.2f}{spread}" if "measured" in cell else "–"
            published = f"{cell['published']:.2f}" if "published" in cell else "–"
            difference = f"{cell['difference']:+.2f}" if "difference" in cell else "–"
            ranks = f"{cell.get('rank_published', '–')} | {cell.get('rank_measured', '–')}"
            lines.append(f"| {own} | {published} | {measured} | {difference} | {ranks} |")
        lines.append("")
    return "\n".join(lines)


def write(found: dict[str, Any], results: Path) -> Path:
    """Keep the facts under results/, one file per recipe and budget."""
    suffix = "" if found["budget"] == "full" else f".{found['budget']}"
    results.mkdir(parents=True, exist_ok=True)
    place = results / f"{found['recipe']}{suffix}.json"
    rundir.write_json(place, found)
    return place
