"""Runs of another machine, another day or another recipe, taken over from a results file if they would be the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from perfed import recipes, rundir
from perfed.errors import StoreError
from perfed.ran import Ran, Runs
from perfed.recipes import Cell
from perfed.recipes.budget import shared
from perfed.recipes.column import Column

if TYPE_CHECKING:
    from perfed.reproduce import Plan

GIVE = "Give a results file that 'perfed reproduce' wrote, such as results/NAME.json."
OTHER_RECIPE = "Leave it out of --join. If --tune chose other learning rates there, put them into [tuned]."
OTHER_END = (
    "Versions, processor or data may differ there. Delete the run that is wrong, or leave that file out of --join."
)
PROTOCOL = ("method", "hyper", "defaults", "run")
"""What a row tells of the way its method was run."""
_RAN = TypeAdapter(Ran)


def taken(plan: Plan, source: Path) -> Runs:
    """The runs of a plan that a results file tells of: of the same recipe, or of one of perfed's own with such runs."""
    name, other = results_in(source).get("recipe"), plan
    if name != plan.recipe.name and name in recipes.names():
        other = replace(plan, recipe=recipes.load(name))
    if other.recipe.dry:
        raise StoreError(f"{source} is of {name}, which is counted and has no runs.", "Leave it out of --join.")
    made: dict[str, list[tuple[Cell, Ran]]] = {}
    for there, ran in ((there, ran) for there, some in told(other, source).items() for ran in some):
        made.setdefault(other.words(there, ran.seed), []).append((there, ran))
    seeds = sorted({ran.seed for some in made.values() for _, ran in some})
    runs: Runs = {}
    for cell in plan.recipe.cells:
        for seed in seeds:
            same = sorted(made.get(plan.words(cell, seed), ()), key=lambda one: one[0] != cell)
            read = [(ran, _read_as(plan, cell, other, there, ran)) for there, ran in same]
            if found := [replace(ran, values=values) for ran, values in read if values is not None]:
                runs.setdefault(cell, []).append(found[0])
    if not runs:
        raise StoreError(
            f"{source} has no run that {plan.recipe.name} would make too, with a figure for each of its columns.",
            "Leave it out of --join.",
        )
    return runs


def _read_as(plan: Plan, cell: Cell, other: Plan, there: Cell, ran: Ran) -> dict[str, float] | None:
    """A run's values under the columns of another recipe; None if it was not read for all of them."""
    held = {which: key for key, which in _readings(other, there).items()}
    wanted = _readings(plan, cell)
    if not set(wanted.values()) <= held.keys():
        return None
    return {key: ran.values[held[which]] for key, which in wanted.items() if held[which] in ran.values}


def _readings(plan: Plan, cell: Cell) -> dict[str, tuple[str, int | None]]:
    """For every column of a cell, what is read and after which of the rounds that are run."""
    share = plan.recipe.quick if plan.budget == "quick" else 1.0
    return {
        c.key: (c.metric, None if c.round is None else shared(c.round, share))
        for c in plan.recipe.columns
        if c.setting == cell.setting
    }


def told(plan: Plan, source: Path) -> Runs:
    """The runs that a results file tells of. They must be of the plan's recipe as it is now."""
    found = results_in(source)
    cures = {
        "recipe": "Give one of this recipe, or of one of perfed's own that has some of its runs.",
        "budget": f"Give --budget {found.get('budget')}.",
    }
    for key, wanted in (("recipe", plan.recipe.name), ("budget", plan.budget)):
        if found.get(key) != wanted:
            raise StoreError(f"{source} has {key} = {found.get(key)!r}, not {wanted!r}.", cures[key])
    runs = _runs(found, source)
    for cell in runs:
        if cell not in plan.recipe.cells:
            raise StoreError(f"{source} has {cell.name}, which the recipe has not.", OTHER_RECIPE)
        held = found["rows"][cell.label]["cells"]
        if lacking := [c.key for c in plan.recipe.columns if c.setting == cell.setting and c.key not in held]:
            raise StoreError(f"{source} has no column {lacking[0]}: the recipe has got it since.", OTHER_RECIPE)
    then, now = _protocol(found), json.loads(json.dumps(_protocol(plan.facts(runs))))
    if then != now:
        where, was, wanted = _difference(then, now)
        raise StoreError(f"{source} has {where} = {was!r}, not {wanted!r} as the recipe says.", OTHER_RECIPE)
    return runs


def joined(here: Runs, there: Runs, source: object) -> Runs:
    """Both, in order of the seeds. A run that is in both must have ended in the same state."""
    runs = {cell: {ran.seed: ran for ran in some} for cell, some in here.items()}
    divided = {(cell.setting, ran.seed): ran.partition_sha256 for cell, some in here.items() for ran in some}
    for cell, some in there.items():
        for ran in some:
            if divided.setdefault((cell.setting, ran.seed), ran.partition_sha256) != ran.partition_sha256:
                raise StoreError(
                    f"{source} has {cell.name}, seed {ran.seed}, on another division of the data.", OTHER_END
                )
            own = runs.setdefault(cell, {}).setdefault(ran.seed, ran)
            if own.state_sha256 == ran.state_sha256 and own.values != ran.values:
                raise StoreError(f"{source} has other figures of {cell.name}, seed {ran.seed}.", OTHER_END)
            if own.state_sha256 != ran.state_sha256:
                raise StoreError(
                    f"{cell.name}, seed {ran.seed}, ended in another state than in {source}:"
                    f" {own.state_sha256[:12]}, not {ran.state_sha256[:12]}.",
                    OTHER_END,
                )
            runs[cell][ran.seed] = replace(own, faults=max(own.faults, ran.faults))  # older files do not count them
    return {cell: [some[seed] for seed in sorted(some)] for cell, some in runs.items()}


def joined_rates(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """How learning rates were chosen, for the methods of two calls; the later one stands where both have a method."""
    alike = all(before.get(key) == now.get(key) for key in ("setting", "rounds", "val_fraction", "seed"))
    if not alike:
        return dict(now)
    return dict(now) | {key: before[key] | now[key] for key in ("scores", "chosen")}


def taken_rates(rates: Mapping[str, Any], rows: Mapping[str, Any]) -> dict[str, Any]:
    """How learning rates were chosen, without methods that were then run with another one."""
    other = {label for label, row in rows.items() if row["hyper"].get("lr") != rates["chosen"].get(label)}
    kept = {key: {label: v for label, v in rates[key].items() if label not in other} for key in ("scores", "chosen")}
    return dict(rates) | kept


def results_in(source: Path) -> dict[str, Any]:
    """What a results file holds."""
    try:
        found: dict[str, Any] = rundir.read_json(source)
    except StoreError as error:
        raise StoreError(error.cause, GIVE) from None
    if not isinstance(found.get("rows"), dict) or not found["rows"]:
        raise StoreError(f"{source} is not a results file.", GIVE)
    return found


def _runs(found: Mapping[str, Any], source: Path) -> Runs:
    try:
        runs = {
            Cell("" if word == "run" else word, label): [_ran(found, label, word, n) for n in range(len(seeds))]
            for label, row in found["rows"].items()
            for word, seeds in row["seeds"].items()
        }
        whole = {cell.label for cell, some in runs.items() if some} == set(found["rows"])
    except (AttributeError, IndexError, KeyError, TypeError, ValidationError):
        whole = False
    if not whole:
        raise StoreError(f"{source} is not a whole results file.", GIVE)
    return runs


def _ran(found: Mapping[str, Any], label: str, word: str, number: int) -> Ran:
    """The run with the n-th seed of a row. Its cost is the mean over the seeds, as that is what the file has."""
    row, cell = found["rows"][label], Cell("" if word == "run" else word, label)
    here = {key: one["values"] for key, one in row["cells"].items()
            if Column(key).setting == cell.setting and "values" in one}  # fmt: skip
    seed = row["seeds"][word][number]
    facts = {
        "seed": seed,
        "values": {key: values[number] for key, values in here.items() if values[number] is not None},
        "cost": row["cost"][word],
        "seconds": found["timing"][cell.name][number],
        "state_sha256": row["state_sha256"][word][number],
        "partition_sha256": found["settings"][cell.setting]["partition_sha256"][str(seed)],
        "made_with": found["versions"],
        "faults": row["faults"][word][number] if "faults" in row else 0,
    }
    return _RAN.validate_json(json.dumps(facts), strict=True)


def _protocol(found: Mapping[str, Any]) -> dict[str, Any]:
    rows = {label: {key: row[key] for key in PROTOCOL if key in row} for label, row in found["rows"].items()}
    return {"settings": found["settings"], "methods": rows}


def _difference(then: Any, now: Any, at: tuple[str, ...] = ()) -> tuple[str, Any, Any]:
    """Where two tables differ first, and what they have there."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in then | now:
            if then.get(key) != now.get(key):
                return _difference(then.get(key), now.get(key), (*at, key))
    return " ".join(at), then, now
