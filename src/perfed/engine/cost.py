"""What a configuration would cost, without running it: counted from the method's phases and plan.

Every client takes part in every round. The counts are those of the ledger of a real run; only what a method counts
itself (the ledger's `extra`) and seconds are left out, as they are known after the work alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch

from perfed.core.client import Meter
from perfed.core.fit import batches
from perfed.core.method import Method
from perfed.core.plan import Round
from perfed.core.server import Peer, Server
from perfed.core.state import serialised_bytes
from perfed.data.federation import Federation
from perfed.engine.ledger import PROBE_SAMPLES, Flops, by_layer
from perfed.engine.worker import Task, Worker
from perfed.errors import ConfigError
from perfed.nets.net import Net


@dataclass
class Cost:
    """Totals over all rounds and clients, named as in the ledger."""

    samples: int = 0
    batches: int = 0
    param_batches: int = 0
    flops: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    layers: Counter[str] = field(default_factory=Counter)


def estimate(net: Net, method: Method, rounds: int, sizes: Sequence[int]) -> Cost:
    """The cost of `rounds` rounds among clients with these numbers of training samples.

    `net` is what `method.build` made. A method that trains by other means than its phases is refused.
    """
    worker = Worker(blank(net.input_shape, net.num_classes, sizes), net.clone(), method, rounds, seed=0)
    plan = worker.plan
    server = Server(method.start(net, len(sizes), plan.initial), plan, len(sizes))
    flops = Flops(worker)
    count = cache(partial(work, worker))
    began: dict[Hashable, int] = {}
    total = Cost()
    for t in range(1, rounds + 1):
        round = Round(t, rounds)
        stage = method.stage(round)
        kept = plan.pick(plan.initial, plan.private(t - 1)) | flops.memory if t > 1 else {}
        up = method.schema(server, round)
        for client, size in enumerate(sizes):
            down = method.send(server, Peer(client, t - 1), round)
            spent = flops.of(Task("train", client, t, t - 1, down, kept))
            if stage not in began:
                began[stage] = t
                _compare(method, flops.rehearsed[stage], work(worker, t, PROBE_SAMPLES))
            meter = count(began[stage], size)
            total.samples += meter.samples
            total.batches += meter.batches
            total.param_batches += meter.param_batches
            total.flops += spent
            total.bytes_up += serialised_bytes(up)
            total.bytes_down += serialised_bytes(down)
            for way, state in (("up", up), ("down", down)):
                for layer, weight in by_layer(state, net).items():
                    total.layers[f"{way}/{layer}"] += weight
    return total


def work(worker: Worker, t: int, size: int) -> Meter:
    """What the phases of round t count for a client with this many training samples."""
    method, meter = worker.method, Meter()
    client = worker.newcomer(0, t)
    for phase in method.phases(client):
        names = worker.net.names(*phase.trains)
        trainable = sum(p.numel() for name, p in worker.net.module.named_parameters() if name in names)
        step = method.optimiser(client.round).batch_size
        per_epoch = sum(1 for _ in batches(size, step, torch.Generator(), whole=worker.net.has_batchnorm))
        meter.samples += phase.epochs * size
        meter.batches += phase.epochs * per_epoch
        meter.param_batches += phase.epochs * per_epoch * trainable
    return meter


def _compare(method: Method, done: Meter, counted: Meter) -> None:
    """Refuse a method that did other work in its rehearsal than its phases say."""
    if (done.samples, done.batches, done.param_batches) != (counted.samples, counted.batches, counted.param_batches):
        raise ConfigError(
            f"{method.title} trains by other means than its phases: on {PROBE_SAMPLES} samples {done}, not {counted}.",
            "Run it; the ledger counts what it does.",
        )


def blank(shape: tuple[int, ...], classes: int, sizes: Sequence[int]) -> Federation:
    """Clients with so many blank images each, which take no memory, of all classes in turn."""
    clients = np.arange(len(sizes))
    train = np.concatenate([np.repeat(clients, sizes), np.full(len(sizes), -1)])
    test = np.concatenate([np.full(sum(sizes), -1), clients])
    owners = {"train": train, "val": np.full(len(train), -1), "test": test}
    x = torch.zeros((1, *shape), dtype=torch.uint8).expand(len(train), *shape)
    y = torch.arange(len(train)) % classes
    return Federation(x, y, owners, len(sizes), [str(c) for c in range(classes)])
