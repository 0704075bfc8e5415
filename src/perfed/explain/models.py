"""The models that are set side by side: a client's personal one, the server's, and what the client learns alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from perfed import rundir
from perfed.core.client import Client
from perfed.core.method import Method
from perfed.core.registry import make, method_class
from perfed.core.state import State
from perfed.engine.executors import one_thread
from perfed.engine.rounds import Simulation
from perfed.engine.worker import Task, Worker
from perfed.errors import ConfigError, PerfedError, StoreError
from perfed.nets.net import Net
from perfed.prepare import first_weights
from perfed.result import Personal, Result

ALONE = "local"


@dataclass
class Model:
    """A model to look into: its name, what is to be known about it, and how it predicts."""

    name: str
    note: str
    module: nn.Module
    net: Net

    def conv(self) -> nn.Module | None:
        """The last convolution of the body that sees more than one pixel: where Grad-CAM looks."""
        held = {name.rpartition(".")[0] for name in self.net.names(*(self.net.body or self.net.layers))}
        inside = [m for n, m in self.net.module.named_modules() if isinstance(m, nn.Conv2d) and (n in held or n == "")]
        wide = [m for m in inside if max(m.kernel_size) > 1]
        return (wide or inside or [None])[-1]  # type: ignore[list-item]


class Bare(nn.Module):
    """A network as it is."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net.module

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.net(x)  # type: ignore[no-any-return]


@contextmanager
def opened(result: Result, client: int) -> Iterator[Simulation]:
    """The finished run, for as long as the context lasts."""
    made = result.made()
    if client not in made.federation.participants:
        last = len(made.federation.participants) - 1
        raise ConfigError(f"client = {client} is not accepted.", f"It must be from 0 to {last}.")
    simulation = made.simulation(result.directory)
    try:
        if simulation.store.round < made.settings.rounds:
            raise StoreError(f"The run in {result.directory} is not finished.", "Resume it first.")
        yield simulation
    finally:
        simulation.close()


def side_by_side(result: Result, client: int) -> list[Model]:
    """The personal model; the global one, unless nothing was ever shared; and Local training."""
    with opened(result, client) as simulation, torch.enable_grad():
        found = simulation.scored(client)
        name = result.config.method["name"]
        models = [Model("personal", f"the personal model of {name}", Personal(found).eval(), found.net)]
        shared = _global(simulation)
    if shared:
        models.append(shared)
    if name != ALONE:
        models.append(_alone(result, client))
    return models


def _global(simulation: Simulation) -> Model | None:
    """The server's network; what never travels has its first values there."""
    plan, rounds = simulation.plan, simulation.settings.rounds
    ever = plan.download(rounds, 0)
    if not any(which is not False for which in ever.values()):
        return None
    net = simulation.worker.net.clone()
    values = {key: tensor for key, tensor in simulation.server.state.items() if key in plan.parts}
    with torch.no_grad():
        own = net.module.state_dict()
        for key, first in plan.initial.items():
            own[key].copy_(values.get(key, first))
    stays = sorted(
        {part.layer for key, part in plan.parts.items() if ever[key] is False and not part.is_buffer},
        key=net.layers.index,
    )
    note = f"the server's network; {', '.join(stays)} never travels and has its first values" if stays else ""
    return Model("global", note or "the server's network", Bare(net).eval(), net)


def _alone(result: Result, client: int) -> Model:
    """Local training of the same client: from the comparison's own run, else trained now with the same budget."""
    beside = _beside(result)
    if beside:
        beside.prepared = None
        with opened(beside, client) as simulation:
            found = simulation.scored(client)
        return Model("Local", "from the comparison's run of local", Personal(found).eval(), found.net)
    found, rounds = _train_alone(result, client)
    note = f"trained for this picture: the {rounds} rounds in which the client took part, with the same seed"
    return Model("Local", note, Personal(found).eval(), found.net)


def _beside(result: Result) -> Result | None:
    place = result.directory.resolve().parents[1] / ALONE / str(result.config.seed)
    if not rundir.is_comparison(place.parents[1]) or not rundir.is_finished(place):
        return None
    try:
        found = Result.load(place)
    except PerfedError:
        return None
    return found if found.partition_sha256 == result.partition_sha256 else None


def _train_alone(result: Result, client: int) -> tuple[Client, int]:
    made = result.made()
    usual = {f.name for f in fields(Method)} & {f.name for f in fields(method_class(ALONE))}
    method = make(ALONE, **{n: getattr(made.method, n) for n in usual if not n.startswith(("finetune", "buffers"))})
    net = first_weights(made.config, made.net, method)
    worker = Worker(made.federation, net, method, made.settings.rounds, made.settings.seed)
    since = 0
    private: State = {}
    rounds = [record["t"] for record in rundir.records(Path(result.directory)) if client in record["cohort"]]
    with one_thread():
        for t in rounds:
            private = worker.run(Task("train", client, t, since, {}, private)).private
            since = t
        found = worker.client(Task("evaluate", client, made.settings.rounds, since, {}, private))
        worker.personal(found)
    found.net.module.eval()
    found.net.plain()
    return found, len(rounds)
