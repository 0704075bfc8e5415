"""What was measured beside what was published: the facts that results/NAME.json holds, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from perfed import hyperparameters, standing
from perfed.core.method import Method
from perfed.ran import AND, COSTS, Ran, Runs
from perfed.recipes import Budget, Cell, Entry, Recipe
from perfed.recipes.budget import quick_method
from perfed.recipes.column import Column
from perfed.result import versions


def facts(recipe: Recipe, budget: Budget, runs: Runs, configs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What the results file holds; all that depends on the clock is under `timing`."""
    labels = [label for label in recipe.entries if any(cell.label == label for cell in runs)]
    rows = {label: _row(recipe, label, runs, budget) for label in labels}
    standing.rank(rows, columns(recipe))
    settings = {
        name: {
            "config": configs[name],
            **_changes(recipe, budget, name),
            "partition_sha256": _partitions([r for cell, some in runs.items() if cell.setting == name for r in some]),
        }
        for name in recipe.settings
        if name in configs
    }
    first = next(iter(settings.values()))
    return {
        **_head(recipe, budget),
        "seeds": sorted({ran.seed for some in runs.values() for ran in some}),
        "partition_sha256": list(first["partition_sha256"].values()),
        "config": first["config"],
        "settings": settings,
        "missing": [cell.name for cell in recipe.cells if cell not in runs and budget != "smoke"],
        "rows": rows,
        "within": recipe.within,
        "within_2_points": standing.close(rows, recipe.within),
        "versions": _versions([ran for some in runs.values() for ran in some]),
        "timing": {cell.name: [ran.seconds for ran in some] for cell, some in runs.items()},
    }


def results_file(recipe: str, budget: str, results: Path) -> Path:
    """Where the facts are kept: one file per recipe and budget."""
    return results / f"{recipe}{'' if budget == 'full' else f'.{budget}'}.json"


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


def _row(recipe: Recipe, label: str, runs: Runs, budget: Budget) -> dict[str, Any]:
    entry, cells = recipe.entries[label], {}
    mine = {cell.setting: some for cell, some in runs.items() if cell.label == label}
    for column in recipe.columns:
        values = [ran.values.get(column.key) for ran in mine.get(column.setting, ())]
        cells[column.key] = _compare(entry, column, values)
    faults = {setting or "run": [ran.faults for ran in some] for setting, some in mine.items()}
    return {
        "method": entry.method,
        **trained(recipe, budget, Cell(next(iter(mine)), label)),
        "cells": cells,
        "seeds": {setting or "run": [ran.seed for ran in some] for setting, some in mine.items()},
        "cost": {
            setting or "run": {key: statistics.fmean(ran.cost[key] for ran in some) for key in _costs(some)}
            for setting, some in mine.items()
        },
        "state_sha256": {setting or "run": [ran.state_sha256 for ran in some] for setting, some in mine.items()},
        **({"faults": faults} if any(map(any, faults.values())) else {}),
    }


def trained(recipe: Recipe, budget: Budget, cell: Cell) -> dict[str, Any]:
    """How a row says with what its method was trained, in the first of its settings."""
    hyper, own = recipe.hyper(budget, cell), recipe.entries[cell.label].run
    name = hyper.pop("name")
    return {"hyper": hyper, "defaults": defaults(name, hyper), **({"run": own} if own else {})}


def defaults(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a method was trained with beside what the recipe gives: its own hyper-parameters, and its fine-tuning."""
    made = hyperparameters.check(method, given)
    tuning = {"finetune_epochs", "finetune"} if made.finetune_epochs else set()
    common = {field.name for field in fields(Method)} - tuning
    return {k: v for k, v in hyperparameters.table(made).items() if k not in common and k not in given}


def _compare(entry: Entry, column: Column, values: Sequence[float | None]) -> dict[str, Any]:
    """Published and measured. The values are one per seed: None where a run has no figure."""
    cell: dict[str, Any] = {}
    seen = [value for value in values if value is not None]
    if column.key in entry.published:
        cell["published"] = entry.published[column.key]
    if column.key in entry.deviation:
        cell["published_spread"] = entry.deviation[column.key]
    if seen:
        cell |= {"measured": statistics.fmean(seen), "values": list(values)}
        cell["spread"] = statistics.stdev(seen) if len(seen) > 1 else None
    if "published" in cell and "measured" in cell:
        cell["difference"] = cell["measured"] - cell["published"]
    return cell


def _costs(runs: Sequence[Ran]) -> list[str]:
    """The costs that all of these runs have counted."""
    return [key for key in COSTS if all(key in ran.cost for ran in runs)]


def _changes(recipe: Recipe, budget: Budget, name: str) -> dict[str, Any]:
    """What a setting changes of the methods, for all of them and for single ones."""
    held = recipe.settings[name]
    scaled = (lambda values: quick_method(values, recipe.quick)) if budget == "quick" else dict
    single = {label: scaled(values) for label, values in held.methods.items()}
    return {key: value for key, value in (("method", scaled(held.method)), ("methods", single)) if value}


def _versions(runs: Sequence[Ran]) -> dict[str, str]:
    """What the runs were made with; more than one version if they were made with several."""
    found: dict[str, set[str]] = {}
    for ran in runs:
        for name, version in ran.made_with.items():
            found.setdefault(name, set()).update(version.split(AND))
    return {name: AND.join(sorted(some)) for name, some in found.items()}


def _partitions(runs: Sequence[Ran]) -> dict[str, str]:
    """By seed; methods of one seed have the same."""
    return {str(ran.seed): ran.partition_sha256 for ran in sorted(runs, key=lambda ran: ran.seed)}


def markdown(found: Mapping[str, Any]) -> str:
    """The table for people: published, measured, difference, ranks, a column of the paper after the other."""
    rows = found["rows"]
    done = {key for row in rows.values() for key, cell in row["cells"].items() if "measured" in cell}
    lines: list[str] = []
    for key in standing.keys(rows):
        if done and key not in done:  # a column without figures says nothing, unless it is all there is
            continue
        shown = {label: row["cells"][key] for label, row in rows.items() if row["cells"].get(key)}
        uneven = len({_count(cell) for cell in shown.values() if "measured" in cell}) > 1
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
        count = _count(cell)
        measured += f" ({count} seed{'s' if count > 1 else ''})"
    return published, measured, f"{cell['difference']:+z.2f}" if "difference" in cell else "–"


def _count(cell: Mapping[str, Any]) -> int:
    """Of how many runs a mean is."""
    return sum(value is not None for value in cell["values"])
