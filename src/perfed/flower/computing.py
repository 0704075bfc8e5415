"""A task computed as every executor does, after what was received has been checked."""

from __future__ import annotations

from functools import lru_cache

import torch

from perfed import config as configuration
from perfed.core.download import verify_download
from perfed.core.plan import Round
from perfed.core.server import Peer
from perfed.engine.executors import one_thread
from perfed.engine.worker import Reply, Task, Worker
from perfed.prepare import Prepared, first_weights, prepare


def compute(worker: Worker, task: Task) -> Reply:
    """Check what was received, and do the task."""
    peer = Peer(task.client, task.since, learns=task.op == "train" or not task.options.get("seen", True))
    clients = worker.federation.num_clients
    with one_thread(), torch.random.fork_rng(devices=[]):
        verify_download(worker.method, worker.plan, task.received, peer, Round(task.t, worker.rounds), clients)
        return worker.run(task)


@lru_cache(maxsize=2)
def simulated(words: str) -> Worker:
    """The worker of a run whose data is made from its configuration; a process has many tasks of one run."""
    with one_thread():
        return worker_of(prepare(configuration.resolve(configuration.parse(words))))


def worker_of(prepared: Prepared) -> Worker:
    """The worker of a prepared run."""
    net = first_weights(prepared.config, prepared.net, prepared.method)
    return Worker(prepared.federation, net, prepared.method, prepared.config.rounds, prepared.config.seed)
