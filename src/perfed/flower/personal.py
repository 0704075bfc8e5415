"""A site's finished model: made when the run hands over, and used without the data that it was made from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perfed import config as configuration
from perfed.core.method import Method, probabilities
from perfed.core.state import State, under, within
from perfed.data import Federation, images
from perfed.data.federation import PARTS
from perfed.engine.executors import one_thread
from perfed.engine.worker import Task, Worker
from perfed.flower.computing import worker_of
from perfed.flower.messages import Job
from perfed.prepare import prepare

COUNTS = "counts"
"""how many training samples of each class the site has: a method may weigh classes by it when it predicts"""


@dataclass(frozen=True)
class Model:
    """A personal model as it was scored, and what its run must be known by to use it."""

    run: str
    client: int
    t: int
    words: str
    classes: tuple[str, ...]
    clients: int
    shape: tuple[int, ...]
    state: State


def finish(worker: Worker, task: Task, job: Job) -> Model:
    """The personal model that the last round's scores are those of, adapted as they were."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        client = worker.client(task)
        worker.personal(client)
        if configuration.resolve(configuration.parse(job.words)).adapt != "never":
            worker.prepare(client, seen=True)
    state = under("weights", client.weights()) | {COUNTS: client.data.class_counts}
    if type(worker.method).predict is not Method.predict:  # it may look at more than the network
        state |= under("memory", client.memory) | under("received", client.received)
    shape = worker.federation.input_shape
    return Model(job.run, task.client, task.t, job.words, job.classes, job.clients, shape, state)


def predict(model: Model, x: Tensor) -> Tensor:
    """The model's class probabilities for images: uint8, or float in [-1, 1] as the network takes them."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        config = configuration.resolve(configuration.parse(model.words))
        worker = worker_of(prepare(config, data=_blank(model)))
        client = worker.newcomer(model.client, model.t)
        client.memory, client.received = within("memory", model.state), within("received", model.state)
        client.load(within("weights", model.state))
        client.net.module.eval()
        client.net.plain()
        ready = images.normalise(images.fit(x, worker.federation.input_shape)) if x.dtype == torch.uint8 else x
        return probabilities(worker.method, client, ready)


def _blank(model: Model) -> Federation:
    """The site's place among the others with as many images of each class as it had, all of them blank."""
    counts = model.state[COUNTS]
    y = torch.cat([torch.arange(len(counts)).repeat_interleave(counts), torch.zeros(1, dtype=torch.int64)])
    x = torch.zeros((1, *model.shape), dtype=torch.uint8).expand(len(y), *model.shape)
    owners = {part: np.full(len(y), -1, np.int64) for part in PARTS}
    owners["train"][:-1], owners["test"][-1] = model.client, model.client
    return Federation(x, y, owners, model.clients, model.classes, alone=model.client)
