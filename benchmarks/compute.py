"""What the papers' tables cost on two cores, and what they would without perfed's fast paths.

    python benchmarks/compute.py --data-dir DATA

Rounds are sampled and not run: of every method of a recipe, the local round of two clients of middling size and the
scoring of eight, with the fast paths and without them, in CPU seconds. They are taken for all participants of
all rounds and for all settings. Without the fast paths means: no outputs of frozen layers are kept, all gradients are
autograd's, every client is scored by itself, convolutions keep torch's default layout and kernels, and all is computed
in float32 where a recipe's quick budget has bfloat16.

At the full budget a run of less than ten minutes is counted three times, for three seeds, and so is one of a setting's
best three methods; any other is counted once. A run that two tables share is counted in the first of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from perfed import recipes
from perfed.core.plan import Round
from perfed.engine.rounds import Simulation
from perfed.measured import results_file
from perfed.prepare import Prepared, prepare
from perfed.recipes import Cell
from perfed.recipes.budget import Budget
from perfed.reproduce import Plan, best_cells

ROOT = Path(__file__).parents[1]
SET: dict[str, Budget] = {
    "cd2-table1": "full",
    "cd2-table5": "full",
    "cd2-figure5": "full",
    "scheduling-table2-mnist": "full",
    "scheduling-table2-cifar10-100": "full",
    "fedbsd-table1-cifar10": "full",
    "pfedc-table1-mnist": "full",
    "pfedc-table2-mnist": "full",
    "pse-table2-fashionmnist": "quick",
    "pse-table1-fashionmnist-gray-colour": "quick",
    "pse-table1-fashionmnist-colour-edge": "quick",
    "pse-fairness": "quick",
}
"""the tables that are shown in full, or at a share of their rounds"""
CORES = 2
SHORT = 1 / 6
"""hours of a run that is worth three seeds"""
SEEDS, BEST = 3, 3
TRAINED, SCORED = 2, 8


@contextmanager
def plainly() -> Iterator[None]:
    """Without the fast paths."""
    with ExitStack() as stack:
        for name, value in (
            ("perfed.core.fit.PREFIX_BYTES", -1),
            ("perfed.core.fit.written", lambda *_: None),
            ("perfed.engine.scoring.stackable", lambda _: False),
            ("perfed.engine.worker._lay_out", lambda net, shape: torch.contiguous_format),
        ):
            stack.enter_context(patch(name, value))
        yield


def cpu(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def sampled(made: Prepared, place: Path) -> dict[str, float]:
    """CPU seconds of the whole run with one worker, from a few clients."""
    settings, federation = made.settings, made.federation
    clients = sorted(federation.participants, key=federation.size)
    middle = clients[len(clients) // 2 :][:TRAINED]
    per_round = max(1, round(settings.fraction * len(clients)))
    stages = {made.method.stage(Round(t, settings.rounds)): t for t in (1, settings.rounds // 2 + 1, settings.rounds)}
    simulations: dict[str, Simulation] = {"fast": made.simulation(place / "fast")}
    with plainly():
        in_full = replace(made, config=made.config.changed(precision=None, kernels=None))
        simulations["plain"] = in_full.simulation(place / "plain")
    spent = {"fast": 0.0, "plain": 0.0}
    share = per_round * settings.rounds / len(stages)
    share *= sum(map(federation.size, clients)) / len(clients) / (sum(map(federation.size, middle)) / len(middle))
    scorings = len([t for t in range(1, settings.rounds + 1) if settings.due(t)])
    adapts = made.method.adapts and settings.adapt != "never"
    for kind, one in simulations.items():
        with ExitStack() as stack:
            if kind == "plain":
                stack.enter_context(plainly())
            one.executor.run([one._task("train", clients[0], 1)])  # for warming up
            for t in stages.values():
                tasks = [one._task("train", client, t) for client in middle]
                spent[kind] += share * cpu(partial(one.executor.run, tasks)) / len(middle)
            some = clients[:: max(1, len(clients) // SCORED)][:SCORED]
            for adapt, times in ((False, scorings), (True, scorings if settings.adapt == "always" else 1)):
                if adapt <= adapts:
                    score = partial(one.scoring._measure, some, 1, seen=True, adapt=adapt)
                    spent[kind] += times * cpu(score) * len(clients) / len(some)
        one.close()
    return spent


def plan_of(name: str, data_dir: str | None = None) -> Plan:
    """A recipe at the budget that it is shown at, with the runs that results/ holds."""
    plan = Plan(recipe=recipes.load(name), budget=SET[name], out=Path("none"), data_dir=data_dir)
    place = results_file(name, SET[name], ROOT / "results")
    return plan.join([place]) if place.exists() else plan


def measured(name: str, data_dir: str, labels: list[str]) -> dict[str, dict[str, float]]:
    """Hours on two cores of one run of each of these methods, in the recipe's first setting that has it."""
    plan, spent, alike = plan_of(name, data_dir), {}, None
    made_by = {plan.makers[cell] for cell in plan.recipe.cells}  # rows that share their runs cost once
    for label in labels or plan.recipe.entries:
        mine = [cell for cell in plan.recipe.cells if cell.label == label and cell in made_by]
        if not mine:
            continue
        made = alike = prepare(plan.config(mine[0], 0), alike=alike)
        with tempfile.TemporaryDirectory() as place:
            found = sampled(made, Path(place))
        spent[label] = {kind: round(value / CORES / 3600, 4) for kind, value in found.items()}
        print(name, label, spent[label], flush=True)
    return spent


def best_of(plan: Plan) -> set[Cell]:
    """The best methods of every setting: as measured, or as published where nothing is measured."""
    if plan.finished():
        return {plan.makers[cell] for cell in best_cells(plan, BEST)}
    best: set[Cell] = set()
    for column in plan.recipe.columns:
        held = {label: e.published[column.key] for label, e in plan.recipe.entries.items() if column.key in e.published}
        order = sorted(held, key=lambda label: held[label], reverse=not column.falls)
        distinct = dict.fromkeys(plan.makers[Cell(column.setting, label)] for label in order)
        best |= set(list(distinct)[:BEST])
    return best


def counted(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Runs and hours of every table, without those that an earlier one has made."""
    tables, made = {}, set()
    for name, one in facts.items():
        plan, hours, runs = plan_of(name), {"fast": 0.0, "plain": 0.0}, 0
        best = best_of(plan)
        for cell in dict.fromkeys(plan.makers.values()):
            spent = one[cell.label]
            often = SEEDS if SET[name] == "full" and (spent["fast"] < SHORT or cell in best) else 1
            for seed in range(often):
                if (words := plan.words(cell, seed)) not in made:
                    made.add(words)
                    runs += 1
                    hours = {kind: hours[kind] + spent[kind] for kind in hours}
        if tune := plan.recipe.tune:  # every rate for every method once, for a share of the rounds
            tries = len(tune.lr) * tune.rounds
            hours = {kind: hours[kind] + tries * sum(spent[kind] for spent in one.values()) for kind in hours}
        tables[name] = {
            "budget": SET[name],
            "runs": runs,
            "hours": {kind: round(value, 3) for kind, value in hours.items()},
        }
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data")
    parser.add_argument(
        "--only", nargs="*", default=list(SET), help="recipes to sample; without a name, hours are only counted again"
    )
    parser.add_argument("--methods", nargs="*", default=[], help="rows of the recipe; all if not given")
    parser.add_argument("--out", default=str(ROOT / "results" / "compute.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    out = Path(given.out)
    facts = json.loads(out.read_text()) if out.exists() else {"hours_of_a_run": {}}
    facts |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "versions": {"torch": torch.__version__}}
    spent = facts["hours_of_a_run"]
    for name in given.only:
        spent[name] = spent.get(name, {}) | measured(name, given.data_dir, given.methods)
        out.write_text(json.dumps(facts, indent=1) + "\n")
    facts["hours_of_a_run"] = {name: spent[name] for name in SET if name in spent}
    facts["recipes"] = counted(facts["hours_of_a_run"])
    out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
