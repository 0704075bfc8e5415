"""How much work runs are, before any of them is made: FLOPs from the dry ledger, for telling the time that is left."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfed.core.method import Method
from perfed.core.registry import make
from perfed.engine.cost import estimate
from perfed.errors import PerfedError
from perfed.grid import Job
from perfed.prepare import Prepared, prepare, settings_of

FEW = 2
"""rounds that are counted; the others are taken to be alike"""


def weigh(jobs: Sequence[Job]) -> None:
    """Give every job its weight. Jobs on the same data are weighed together, and its data is read once."""
    alike: Prepared | None = None
    words: dict[str, object] = {}
    known: dict[str, tuple[float, float]] = {}
    for job in jobs:
        own = {k: v for k, v in job.config.words().items() if k not in ("method", "rounds", "seed", "workers")}
        key = str((own, job.config.method))
        if key not in known:
            if alike is None or own != words:
                alike, words = prepare(job.config), own
            else:
                alike = prepare(job.config, alike=alike)
            known[key] = _flops(alike)
        rounds, settings = job.config.rounds, settings_of(job.config)
        job.adapts = [t for t in range(1, rounds + 1) if settings.due(t)] if settings.adapt == "always" else [rounds]
        training, adapting = known[key][0] * rounds, known[key][1] * len(job.adapts)
        job.weight, job.adapting = training + adapting, adapting / (training + adapting)


def _flops(made: Prepared) -> tuple[float, float]:
    """Of a round, and of the adaptation of all clients; from one client of mean size."""
    federation, method = made.federation, made.method
    size = max(1, round(float(federation.sizes().mean())))
    people = len(federation.participants)
    shared = ("lr", "momentum", "epochs", "batch_size")
    plain = make("fedavg", **{key: made.config.method[key] for key in shared if key in made.config.method})
    usual = _of_client(made, plain, size)
    own = _of_client(made, method, size)
    training = (usual if own is None else own) or 1.0
    adapting = 0.0
    if method.adapts and made.settings.adapt != "never":
        epochs = method.finetune_epochs if method.finetune == "all" else 1  # the head alone costs little more than once
        adapting = (usual or 1.0) / max(1, plain.epochs) * max(1, epochs) * people
    return training * math.ceil(made.config.fraction * people), adapting


def _of_client(made: Prepared, method: Method, size: int) -> float | None:
    """A client's round; None of a method that cannot be counted."""
    try:
        return estimate(method.build(made.net.clone()), method, FEW, [size]).flops / FEW
    except PerfedError:
        return None
