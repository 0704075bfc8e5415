"""Whether a cohort would pay: both ways of training on a few clients, timed. It advises; no run chooses by it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from perfed.core.method import Method
from perfed.data.federation import Federation
from perfed.engine.cohort import CohortWorker
from perfed.engine.executors import one_thread
from perfed.engine.worker import Task, Worker
from perfed.errors import ConfigError
from perfed.nets.net import Net

CLIENTS = 16
SAMPLES = 2000
PAYS = 1.3


@torch.random.fork_rng(devices=[])
def speedup(federation: Federation, net: Net, method: Method, rounds: int, fraction: float) -> float | None:
    """How many times as fast a cohort trains the first few clients; None where it does not fit or is not tried."""
    few = range(min(CLIENTS, int(fraction * len(federation.participants))))
    if len(few) < 4 or sum(federation.size(client) for client in few) > SAMPLES:
        return None
    try:
        batched = CohortWorker(federation, net.clone(), method, rounds, seed=0)
    except ConfigError:
        return None
    plain = Worker(federation, net.clone(), method, rounds, seed=0)
    received = plain.plan.pick(plain.plan.initial, plain.plan.download(1, 0))
    tasks = [Task("train", client, 1, 0, received, {}) for client in few]
    with one_thread():
        return _least(plain, tasks) / _least(batched, tasks)


def _least(worker: Worker, tasks: Sequence[Task]) -> float:
    """The less of two times, after one for warming up."""
    times = []
    for _ in range(3):
        started = time.process_time()
        for job in worker.jobs(tasks):
            worker.run_all([tasks[number] for number in job])
        times.append(time.process_time() - started)
    return max(min(times[1:]), 1e-9)
