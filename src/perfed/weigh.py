"""How much work runs are, before any of them is made: FLOPs from the dry ledger, for telling the time that is left."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfed.core.registry import make
from perfed.engine.cost import estimate
from perfed.errors import PerfedError
from perfed.grid import Job
from perfed.prepare import Prepared, prepare

FEW = 2
"""rounds that are counted; the others are taken to be alike"""


def weigh(jobs: Sequence[Job]) -> None:
    """Give every job its weight. Jobs on the same data are weighed together, and its data is read once."""
    alike: Prepared | None = None
    words: dict[str, object] = {}
    known: dict[str, float] = {}
    for job in jobs:
        own = {k: v for k, v in job.config.words().items() if k not in ("method", "rounds", "seed", "workers")}
        key = str((own, job.config.method))
        if key not in known:
            if alike is None or own != words:
                alike, words = prepare(job.config), own
            else:
                alike = prepare(job.config, alike=alike)
            known[key] = _flops_per_round(alike)
        job.weight = known[key] * job.config.rounds


def _flops_per_round(made: Prepared) -> float:
    """One client of mean size, times the participants; a method that cannot be counted is taken for FedAvg."""
    federation = made.federation
    size = max(1, round(float(federation.sizes().mean())))
    people = math.ceil(made.config.fraction * len(federation.participants))
    shared = ("lr", "momentum", "epochs", "batch_size")
    plain = make("fedavg", **{key: made.config.method[key] for key in shared if key in made.config.method})
    for method in (made.method, plain):
        try:
            net = method.build(made.net.clone())
            return estimate(net, method, FEW, [size]).flops / FEW * people
        except PerfedError:
            continue
    return 1.0
