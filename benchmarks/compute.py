"""What the papers' tables cost on two cores, and what they would without perfed's fast paths.

    python benchmarks/compute.py --data-dir DATA

Rounds are sampled and not run: of every method of a recipe, the local round of two clients of middling size and the
scoring of eight, with the fast paths and without them, in CPU seconds. They are taken for all participants of
all rounds, settings and seeds. Without the fast paths means: no outputs of frozen layers are kept, heads are trained
like other layers, every client is scored by itself, and convolutions keep torch's default layout.
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
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from perfed import recipes
from perfed.core.plan import Round
from perfed.engine.rounds import Simulation
from perfed.prepare import Prepared, prepare
from perfed.recipes.budget import Budget
from perfed.reproduce import Plan

ROOT = Path(__file__).parents[1]
SET: dict[str, tuple[Budget, int]] = {
    "cd2-table1": ("full", 3),
    "cd2-table5": ("full", 1),
    "cd2-figure5": ("full", 1),
    "scheduling-table2-mnist": ("full", 1),
    "scheduling-table2-cifar10-100": ("full", 1),
    "fedbsd-table1-cifar10": ("full", 1),
    "pfedc-table1-mnist": ("full", 1),
    "pfedc-table2-mnist": ("full", 1),
    "pse-table2-fashionmnist": ("quick", 1),
    "pse-table1-fashionmnist-gray-colour": ("quick", 1),
    "pse-table1-fashionmnist-colour-edge": ("quick", 1),
    "pse-fairness": ("quick", 1),
}
"""the tables that are shown in full, or at a share of their rounds, and the seeds of each"""
CORES = 2
TRAINED, SCORED = 2, 8


@contextmanager
def plainly() -> Iterator[None]:
    """Without the fast paths."""
    with ExitStack() as stack:
        for name, value in (
            ("perfed.core.fit.PREFIX_BYTES", -1),
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
        simulations["plain"] = made.simulation(place / "plain")
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


def measured(name: str, data_dir: str) -> dict[str, Any]:
    """Hours of a recipe on two cores."""
    budget, seeds = SET[name]
    recipe = recipes.load(name)
    plan, spent, alike = Plan(recipe=recipe, budget=budget, out=Path(), data_dir=data_dir), {}, None
    cells = set(plan.makers.values())  # rows that share their runs cost once
    for label in recipe.entries:
        mine = [cell for cell in recipe.cells if cell.label == label and cell in cells]
        if not mine:
            continue
        made = alike = prepare(plan.config(mine[0], 0), alike=alike)
        with tempfile.TemporaryDirectory() as place:
            found = sampled(made, Path(place))
        spent[label] = {kind: round(len(mine) * seeds * value / CORES / 3600, 4) for kind, value in found.items()}
        print(name, label, spent[label], flush=True)
    tries = 0.0
    if recipe.tune:  # every rate for every method once, for a share of the rounds
        tries = len(recipe.tune.lr) * recipe.tune.rounds / seeds
    hours = {kind: round((1 + tries) * sum(one[kind] for one in spent.values()), 3) for kind in ("fast", "plain")}
    return {"budget": budget, "seeds": seeds, "runs": len(cells) * seeds, "hours": hours, "methods": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--only", nargs="*", default=list(SET))
    parser.add_argument("--out", default=str(ROOT / "results" / "compute.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    out = Path(given.out)
    facts = json.loads(out.read_text()) if out.exists() else {"recipes": {}}
    facts |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "versions": {"torch": torch.__version__}}
    for name in given.only:
        facts["recipes"][name] = measured(name, given.data_dir)
        out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
