"""What tests of single methods share: a run that can be looked into, and one client at work."""

from __future__ import annotations

from typing import Any

import torch

from perfed.core.client import Batch, Client
from perfed.core.method import Method
from perfed.core.state import State
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.worker import Task, Worker
from perfed.nets.net import Net
from tests.conftest import small_net


def stepped(
    method: Method,
    federation: Federation,
    *,
    net: Net | str = "mlp",
    rounds: int = 3,
    fraction: float = 0.5,
    **simulation: Any,
) -> Simulation:
    """A federation after its last round, still open."""
    start = small_net(federation, net) if isinstance(net, str) else net
    given = Settings(rounds=rounds, fraction=fraction)
    made = Simulation(federation, method.build(start), method, given, **simulation)
    for t in range(1, rounds + 1):
        made.step(t)
    return made


def personal(simulation: Simulation, client: int) -> State:
    """The weights that a client predicts with."""
    return simulation.scored(client).weights()


def at_work(
    method: Method,
    federation: Federation,
    *,
    net: Net | str = "mlp",
    client: int = 0,
    t: int = 1,
    since: int = 0,
    received: State | None = None,
    private: State | None = None,
) -> Client:
    """A client with what it received (the initial weights, unless given) and what it keeps, before its round."""
    start = small_net(federation, net) if isinstance(net, str) else net
    worker = Worker(federation, method.build(start), method, rounds=9, seed=0)
    down = dict(worker.plan.initial) if received is None else received
    return worker.client(Task("train", client, t, since, down, private or {}))


def whole(client: Client) -> Batch:
    """All training samples of a client as one batch."""
    data = client.data.train
    return Batch(data.x, data.y, torch.arange(len(data)))


def shaken(state: State, seed: int = 0, size: float = 0.1) -> State:
    """Other values of the same shapes, near the given ones; whole numbers stay."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: t + size * torch.randn(t.shape, generator=noise) if t.is_floating_point() else t
        for name, t in state.items()
    }


def alike(a: State, b: State) -> bool:
    """Whether two states have the same names and bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
