"""A program for a network namespace of its own: methods on Flower's simulated nodes beside the same in this process.

python -m tests.e2e.simulated METHOD ...      prints one JSON object: for every method both sums
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfed import config as configuration
from perfed.engine.worker import Worker
from perfed.flower.messages import Job
from perfed.flower.nodes import Nodes
from perfed.flower.simulate import simulate
from perfed.prepare import Prepared, prepare
from tests.contract.rows import ROWS

NETS: dict[str, Any] = {"mlp": {"name": "mlp", "hidden": [16, 12]}, "batchnorm": {"name": "resnet32", "width": 0.25}}


def prepared(name: str) -> Prepared:
    row = ROWS[name]
    words = {
        "method": {"name": name, "lr": 0.05, **row.hyper},
        "net": NETS.get(row.net, row.net),
        "clients": 6,
        "rounds": 3,
        "fraction": 0.5,
        "eval_every": 2,
        "unseen": 1,
        "workers": 2,
    }
    return prepare(configuration.resolve(words))


def main(names: list[str]) -> None:
    runs = {name: prepared(name) for name in names}
    found: dict[str, Any] = {}

    def run(make: Callable[[Worker | None], Nodes]) -> None:
        nodes = make(None)
        for name, made in runs.items():
            with tempfile.TemporaryDirectory() as there, tempfile.TemporaryDirectory() as here:
                mine = replace(nodes, job=Job(made.config.toml()))
                flower = made.simulation(Path(there), executor=lambda worker, mine=mine: mine.limited(worker)).run()
                local = made.simulation(Path(here)).run()
            assert flower is not None
            assert local is not None
            found[name] = {
                "flower": flower.state_sha256,
                "local": local.state_sha256,
                "faults": flower.faults,
                "metrics": all(math.isclose(flower.metrics[k], v, abs_tol=1e-6) for k, v in local.metrics.items()),
            }
            print(name, flower.state_sha256 == local.state_sha256, file=sys.stderr, flush=True)

    simulate(next(iter(runs.values())), run)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:] or list(ROWS))
