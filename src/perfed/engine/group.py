"""Clients whose networks and data lie side by side, so that they train in one batched step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perfed.core.client import Meter
from perfed.core.state import State, finite
from perfed.engine.batched import Dual
from perfed.engine.worker import Task


@dataclass
class Group:
    """The clients of one batched step, the one with the most steps first."""

    tasks: list[Task]
    weights: State
    """every tensor of the network, one row per client; but for what all clients have in common, until it is needed"""
    common: State
    """what all clients begin with"""
    x: Tensor
    y: Tensor
    starts: list[int]
    sizes: list[int]
    meters: list[Meter]
    room: Callable[[str], Tensor]
    """memory for every client's row of a tensor"""
    duals: dict[str, Dual] = field(default_factory=dict)
    """weights that are not written out"""

    def begin(self, name: str, x: Tensor, lr: float) -> Dual:
        """Let a layer train from here in its dual form, on these inputs of all clients."""
        if name in self.duals or name not in self.common:
            self.write_out([name])
        start = self.weights.pop(name) if name in self.weights else self.common[name]
        self.duals[name] = Dual(x, self.sizes, start, lr)
        return self.duals[name]

    def finite(self, name: str, row: int) -> bool:
        """Whether a client's tensor has nothing but numbers."""
        if name in self.duals and self.duals[name].alike:
            return self.duals[name].finite(row)
        self.write_out([name])
        return finite(self.weights[name][row])

    def write_out(self, names: Iterable[str]) -> None:
        """Give every client a row of these tensors."""
        for name in names:
            if name in self.duals:
                self.weights[name] = self.duals.pop(name).weights()
            elif name not in self.weights:
                self.weights[name] = self.room(name).copy_(self.common[name])

    def mean(self, names: Sequence[str], rows: Sequence[int]) -> State:
        """The mean of these clients' tensors, weighted by their sizes."""
        total = sum(self.sizes[row] for row in rows)
        shares = torch.tensor([self.sizes[row] / total for row in rows])
        found = {}
        for name in names:
            dual = self.duals.get(name)
            if dual and dual.alike:
                found[name] = dual.mean(rows, shares)
                continue
            self.write_out([name])
            stack = self.weights[name]
            some = stack if len(rows) == len(stack) else stack[list(rows)]
            found[name] = (shares @ some.flatten(1)).view(stack.shape[1:])
        return found
