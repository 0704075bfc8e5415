"""What was measured beside what was published: the facts that results/NAME.json holds, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from perfed import hyperparameters, rundir, standing
from perfed.core.method import Method
from perfed.recipes import Budget, Cell, Entry, Recipe
from perfed.recipes.budget import quick_method, shared
from perfed.recipes.column import CLIENT, SETTLED, TOOK_PART, Column
from perfed.result import Result, versions

Runs = Mapping[Cell, Sequence[Result]]
"""The finished runs of every cell, one per seed."""
POINT = 0.01
COSTS = ("bytes_up", "bytes_down", "flops", "adapt_flops", "param_batches")


def facts(recipe: Recipe, budget: Budget, runs: Runs, configs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What the results file holds; all that depends on the clock is under `timing`."""
    labels = [label for label in recipe.entries if any(cell.label == label for cell in runs)]
    rows = {label: _row(recipe, label, runs, budget) for label in labels}
    standing.rank(rows, columns(recipe))
    settings = {
        name: {
            "config": configs[name],
            **_changes(recipe, budget, name),
            "partition_sha256": _partitions(
                [r for cell, results in runs.items() if cell.setting == name for r in results]
            ),
        }
        for name in recipe.settings
        if name in configs
    }
    first = next(iter(settings.values()))
    return {
        **_head(recipe, budget),
        "seeds": sorted({result.config.seed for results in runs.values() for result in results}),
        "partition_sha256": list(first["partition_sha256"].values()),
        "config": first["config"],
        "settings": settings,
        "missing": [f"{c.setting}/{c.label}".strip("/") for c in recipe.cells if c not in runs and budget != "smoke"],
        "rows": rows,
        "within": recipe.within,
        "within_2_points": standing.close(rows, recipe.within),
        "versions": _versions([result for results in runs.values() for result in results]),
        "timing": {
            f"{cell.setting}/{cell.label}".strip("/"): [result.cost["seconds"] for result in results]
            for cell, results in runs.items()
        },
    }


def _head(recipe: Recipe, budget: str) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "title": recipe.title,
        "paper": recipe.paper,
        "table": recipe.table,
        "budget": budget,
        "own": list(recipe.own),
    }


def dry_facts(recipe: Recipe, counted: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The facts of a table that is counted and not run."""
    rows: dict[str, dict[str, Any]] = {}
    for label, values in counted.items():
        entry = recipe.entries[label]
        cells = {column.key: _compare(entry, column, [values[column.metric]]) for column in columns(recipe)}
        rows[label] = {"method": entry.method, "hyper": entry.hyper, "cells": cells}
    standing.rank(rows, columns(recipe))
    words = {"config": recipe.words, "dry": recipe.dry, "seeds": [], "missing": [], "timing": {}}
    return _head(recipe, "full") | words | {
        "rows": rows,
        "within": recipe.within,
        "within_2_points": standing.close(rows, recipe.within),
        "versions": versions(),
    }  # fmt: skip


def columns(recipe: Recipe) -> list[Column]:
    """The published columns; a table that is counted also shows the true FLOPs."""
    return recipe.columns + ([Column("flops")] if recipe.dry else [])


def read(result: Result, column: Column, share: float = 1.0) -> float | None:
    """A column's value in a run of this share of the rounds, parts of one in per cent; None if it was not measured."""
    name = column.metric
    if name.startswith(SETTLED):
        return _settled(result, name.removeprefix(SETTLED))
    if name.startswith(CLIENT):
        accuracy, number = result.clients["accuracy"], int(name.removeprefix(CLIENT))
        return 100 * accuracy[number] if number < len(accuracy) and accuracy[number] is not None else None
    if name == TOOK_PART:
        return _took_part(result)
    found: Mapping[str, Any] = result.metrics
    at = None if column.round is None else shared(column.round, share)
    if at is not None and at != result.config.rounds:
        found = next((entry for entry in result.history if entry["t"] == at), {})
    value = found.get(name)
    return None if value is None else 100 * float(value)


def readings(recipe: Recipe, budget: Budget, column: Column, results: Sequence[Result]) -> list[float]:
    """A column's values in the results that have one."""
    share = recipe.quick if budget == "quick" else 1.0
    return [value for result in results if (value := read(result, column, share)) is not None]


def _took_part(result: Result) -> float | None:
    """The mean over the clients that have been in a cohort."""
    seen = {client for record in rundir.records(result.directory) for client in record["cohort"]}
    scores = zip(result.clients["ids"], result.clients["accuracy"], strict=True)
    values = [accuracy for client, accuracy in scores if client in seen and accuracy is not None]
    return 100 * statistics.fmean(values) if values else None


def _settled(result: Result, metric: str) -> float | None:
    values = [(entry["t"], entry[metric]) for entry in result.history if entry.get(metric) is not None]
    if not values:
        return None
    last = values[-1][1]
    late = [t for t, value in values if abs(value - last) > POINT]
    return float(next(t for t, _ in values if not late or t > late[-1]))


def _row(recipe: Recipe, label: str, runs: Runs, budget: Budget) -> dict[str, Any]:
    entry, cells = recipe.entries[label], {}
    mine = {cell.setting: results for cell, results in runs.items() if cell.label == label}
    for column in recipe.columns:
        values = readings(recipe, budget, column, mine.get(column.setting, ()))
        cells[column.key] = _compare(entry, column, values)
    hyper = recipe.hyper(budget, Cell(next(iter(mine)), label))
    name = hyper.pop("name")
    return {
        "method": entry.method,
        "hyper": hyper,
        "defaults": defaults(name, hyper),
        **({"run": entry.run} if entry.run else {}),
        "cells": cells,
        "cost": {
            setting or "run": {key: statistics.fmean(r.cost[key] for r in results) for key in _costs(results)}
            for setting, results in mine.items()
        },
        "state_sha256": {setting or "run": [r.state_sha256 for r in results] for setting, results in mine.items()},
    }


def defaults(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a method was trained with beside what the recipe gives: its own hyper-parameters, and its fine-tuning."""
    made = hyperparameters.check(method, given)
    tuning = {"finetune_epochs", "finetune"} if made.finetune_epochs else set()
    common = {field.name for field in fields(Method)} - tuning
    return {k: v for k, v in hyperparameters.table(made).items() if k not in common and k not in given}


def _compare(entry: Entry, column: Column, values: Sequence[float]) -> dict[str, Any]:
    cell: dict[str, Any] = {}
    if column.key in entry.published:
        cell["published"] = entry.published[column.key]
    if column.key in entry.deviation:
        cell["published_spread"] = entry.deviation[column.key]
    if values:
        cell |= {"measured": statistics.fmean(values), "values": list(values)}
        cell["spread"] = statistics.stdev(values) if len(values) > 1 else None
    if "published" in cell and "measured" in cell:
        cell["difference"] = cell["measured"] - cell["published"]
    return cell


def _costs(results: Sequence[Result]) -> list[str]:
    """The costs that all of these runs have counted."""
    return [key for key in COSTS if all(key in result.cost for result in results)]


def _changes(recipe: Recipe, budget: Budget, name: str) -> dict[str, Any]:
    """What a setting changes of the methods, for all of them and for single ones."""
    held = recipe.settings[name]
    scaled = (lambda values: quick_method(values, recipe.quick)) if budget == "quick" else dict
    single = {label: scaled(values) for label, values in held.methods.items()}
    return {key: value for key, value in (("method", scaled(held.method)), ("methods", single)) if value}


def _versions(results: Sequence[Result]) -> dict[str, str]:
    """What the runs were made with; more than one version if they were made with several."""
    names = dict.fromkeys(name for result in results for name in result.made_with)
    return {name: " and ".join(sorted({r.made_with[name] for r in results if name in r.made_with})) for name in names}


def _partitions(results: Sequence[Result]) -> dict[str, str]:
    """By seed; methods of one seed have the same."""
    return {str(r.config.seed): r.partition_sha256 for r in sorted(results, key=lambda r: r.config.seed)}


def markdown(found: Mapping[str, Any]) -> str:
    """The table for people: published, measured, difference, ranks, a column of the paper after the other."""
    rows = found["rows"]
    done = {key for row in rows.values() for key, cell in row["cells"].items() if "measured" in cell}
    lines: list[str] = []
    for key in standing.keys(rows):
        if done and key not in done:  # a column without figures says nothing, unless it is all there is
            continue
        shown = {label: row["cells"][key] for label, row in rows.items() if row["cells"].get(key)}
        uneven = len({len(cell["values"]) for cell in shown.values() if "measured" in cell}) > 1
        if not any("published" in cell for cell in shown.values()):
            lines += [_heading(key), "", *_ranking(shown, found["own"], uneven), ""]
            continue
        lines += [_heading(key), "", "| method | published | measured | difference | rank published | rank measured |"]
        lines += ["|---|---:|---:|---:|---:|---:|"]
        for label, cell in shown.items():
            own = f"**{label}**" if label in found["own"] else label
            ranks = f"{cell.get('rank_published', '–')} | {cell.get('rank_measured', '–')}"
            lines.append(f"| {own} | {' | '.join(figures(cell, uneven))} | {ranks} |")
        lines.append("")
    return "\n".join(lines)


def _heading(key: str) -> str:
    words = Column(key).words
    return f"**{key}**: {words}" if words else f"**{key}**"


def _ranking(shown: Mapping[str, Mapping[str, Any]], own: Sequence[str], uneven: bool) -> list[str]:
    """A column for which nothing is published, best first."""
    ordered = sorted(shown.items(), key=lambda item: item[1].get("rank_measured", len(shown)))
    lines = ["| rank | method | measured |", "|---:|---|---:|"]
    for label, cell in ordered:
        name = f"**{label}**" if label in own else label
        lines.append(f"| {cell.get('rank_measured', '–')} | {name} | {figures(cell, uneven)[1]} |")
    return lines


def figures(cell: Mapping[str, Any], uneven: bool = False) -> tuple[str, str, str]:
    """Published and measured with their deviations, and their difference, as text; `uneven` names the seeds."""
    published, measured = (
        f"{cell[kind]:.2f}" + (f" ± {cell[spread]:.2f}" if cell.get(spread) is not None else "")
        if kind in cell
        else "–"
        for kind, spread in (("published", "published_spread"), ("measured", "spread"))
    )
    if uneven and "measured" in cell:
        count = len(cell["values"])
        measured += f" ({count} seed{'s' if count > 1 else ''})"
    return published, measured, f"{cell['difference']:+z.2f}" if "difference" in cell else "–"
