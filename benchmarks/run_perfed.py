"""perfed on a workload: two workers, and for W3 cohorts."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from workload import given, report, timed

import perfed
from perfed import nets
from perfed.core import registry
from perfed.core.rng import sample
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings


def main() -> None:
    work = given()
    with np.load(sys.argv[1]) as held:
        facts = json.loads(str(held["facts"]))
        owners = {part: held[f"owner/{part}"] for part in ("train", "test")}
        x, y = torch.from_numpy(held["x"]), torch.from_numpy(held["y"])
    owners["val"] = np.full_like(owners["train"], -1)
    federation = Federation(x, y, owners, facts["clients"], [str(i) for i in range(10)])
    options = {"hidden": [200]} if work.net == "mlp" else {}
    net = nets.build(work.net, federation.input_shape, 10, **options)
    net.module.load_state_dict(work.initial)
    hyper = {"head_epochs": work.head_epochs} if work.method == "fedrep" else {}
    method = registry.make(work.method, lr=work.lr, batch_size=work.batch, **hyper)
    fraction = len(work.cohorts[0]) / facts["clients"]
    assert [sample(work.seed, t + 1, federation.participants, fraction) for t in range(work.rounds)] == work.cohorts
    settings = Settings(rounds=work.rounds + 1, fraction=fraction, seed=work.seed, eval_every=10**6, new=False)
    with tempfile.TemporaryDirectory() as place:
        simulation = Simulation(
            federation, net, method, settings, directory=Path(place), workers=2,
            numerics="cohort" if work.net == "mlp" else "plain",
        )  # fmt: skip
        train = [timed(lambda t=t: simulation.step(t)) for t in range(1, work.rounds + 1)]
        found = {}
        evaluation = timed(lambda: found.update(simulation.scoring.evaluate(work.rounds)))
        simulation.close()
    report("perfed", perfed.__version__, train, evaluation, found["local.weighted"])


if __name__ == "__main__":
    main()
