"""A client as its method sees it: built anew every round from what it received, its memory, data and randomness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perfed.core import rng
from perfed.core.plan import Plan, Round
from perfed.core.prefix import Prefixes
from perfed.core.state import Scalars, State
from perfed.data.federation import ClientData
from perfed.nets.net import Net


@dataclass(frozen=True)
class Batch:
    """Samples of one step. With `cut` = k, x is the output of the first k layers instead of the image."""

    x: Tensor
    y: Tensor
    index: Tensor
    cut: int = 0


@dataclass
class Meter:
    """Work that a client did: what the ledger adds up."""

    samples: int = 0
    batches: int = 0
    param_batches: int = 0
    prefix_samples: int = 0

    def count(self, samples: int, trainable: int, steps: int = 1) -> None:
        """Enter steps that each see this many samples and move this many parameters."""
        self.enter(samples * steps, steps, trainable)

    def enter(self, samples: int, steps: int, trainable: int) -> None:
        """Enter steps that together see this many samples and each move this many parameters."""
        self.samples += samples
        self.batches += steps
        self.param_batches += trainable * steps


@dataclass
class Update:
    """What a client sends: named tensors, its weight in the mean, and plain scalars."""

    client: int
    state: State
    weight: float
    scalars: Scalars = field(default_factory=dict)


@dataclass
class Client:
    """All that a local rule may touch."""

    id: int
    round: Round
    net: Net
    data: ClientData
    plan: Plan
    received: State
    memory: State
    seed: int
    num_clients: int
    meter: Meter = field(default_factory=Meter)
    prefixes: Prefixes | None = None
    """where the output of layers that stay frozen is kept over rounds"""

    @property
    def size(self) -> int:
        """The number of training samples."""
        return len(self.data.train)

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers for one purpose of this client in this round."""
        return rng.generator(self.seed, purpose, self.round.t, self.id)

    def logits(self, batch: Batch) -> Tensor:
        """The network's output for a batch."""
        return self.net.run_suffix(batch.x, batch.cut) if batch.cut else self.net(batch.x)

    def weights(self) -> State:
        """A copy of the network's tensors as they are now."""
        return {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in self.net.module.state_dict().items()
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Write named tensors into the network."""
        own = self.net.module.state_dict()
        for name, tensor in state.items():
            own[name].copy_(tensor)

    def update(self, extra: State | None = None, weight: float | None = None) -> Update:
        """The update that the method's answers call for: every element that travels, weighted by data size."""
        shared = self.plan.pick(self.weights(), self.plan.travels(self.round.t))
        return Update(self.id, shared | (extra or {}), float(self.size if weight is None else weight))
