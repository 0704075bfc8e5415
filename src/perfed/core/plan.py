"""What a method's answers mean for a network: which elements are private and which travel, round by round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from perfed.core.state import Selection, State, complement, put, take, union, without

if TYPE_CHECKING:
    from perfed.core.method import Method
    from perfed.nets.net import Net


class Round(NamedTuple):
    """Round t of T. Rounds count from 1; t = 0 stands for before the first round."""

    t: int
    T: int


@dataclass(frozen=True)
class Part:
    """One named tensor of the network, and where it stands in it."""

    name: str
    tensor: Tensor
    layer: str
    is_head: bool
    is_buffer: bool
    is_batchnorm: bool
    net: Net


class Plan:
    """The answers of one method for one network over T rounds."""

    def __init__(self, method: Method, net: Net, rounds: int) -> None:
        self.method, self.net, self.rounds = method, net, rounds
        self.initial: State = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in net.module.state_dict().items()
        }
        parameters = {name for name, _ in net.module.named_parameters(remove_duplicate=False)}
        self.parts = {
            name: Part(
                name=name,
                tensor=tensor,
                layer=net.layer_of(name),
                is_head=net.layer_of(name) == net.head,
                is_buffer=name not in parameters,
                is_batchnorm=name in net.batchnorm_names,
                net=net,
            )
            for name, tensor in self.initial.items()
        }
        self._ever: tuple[int, dict[str, Selection]] = (0, dict.fromkeys(self.parts, False))
        self._private = lru_cache(maxsize=64)(self._compute_private)
        self._travels = lru_cache(maxsize=64)(self._compute_travels)

    def private(self, t: int) -> Mapping[str, Selection]:
        """Which elements a client keeps for itself after round t."""
        return self._private(t)

    def travels(self, t: int) -> Mapping[str, Selection]:
        """Which elements go to the server in round t."""
        return self._travels(t)

    def download(self, t: int, since: int) -> dict[str, Selection]:
        """What a client that last took part in round `since` needs from the server in round t."""
        kept, changed = self.private(since), self._travelled(t)
        return {name: without(changed[name], kept[name]) for name in self.parts}

    def _travelled(self, t: int) -> Mapping[str, Selection]:
        """Which elements have travelled in any round up to t: all that may differ from the first values."""
        reached, so_far = self._ever
        if t < reached:
            reached, so_far = 0, dict.fromkeys(self.parts, False)
        for r in range(reached + 1, t + 1):
            now = self.travels(r)
            so_far = {name: union(so_far[name], now[name]) for name in self.parts}
        self._ever = (t, so_far)
        return so_far

    def shares(self, t: int) -> list[tuple[str, int, int, int]]:
        """For each layer in order: name, elements, how many of them a client keeps after round t, how many it sends."""
        found = {layer: [0, 0, 0] for layer in self.net.layers}
        for name, part in self.parts.items():
            sums = found[part.layer]
            sums[0] += part.tensor.numel()
            sums[1] += _elements(part.tensor, self.private(t)[name])
            sums[2] += _elements(part.tensor, self.travels(t)[name])
        return [(layer, size, kept, sent) for layer, (size, kept, sent) in found.items()]

    def pick(self, state: Mapping[str, Tensor], which: Mapping[str, Selection]) -> State:
        """The selected elements of a state."""
        picked = {name: take(state[name], chosen) for name, chosen in which.items() if name in state}
        return {name: tensor for name, tensor in picked.items() if tensor is not None}

    @torch.no_grad()
    def place(self, target: Mapping[str, Tensor], which: Mapping[str, Selection], values: Mapping[str, Tensor]) -> None:
        """Write picked elements into a full state."""
        for name, chosen in which.items():
            if name in values:
                put(target[name], chosen, values[name])

    def _compute_private(self, t: int) -> Mapping[str, Selection]:
        round = Round(t, self.rounds)
        policy = self.method.buffers
        answers: dict[str, Selection] = {}
        for name, part in self.parts.items():
            keep_buffer = policy == "private" and part.is_buffer
            answers[name] = True if keep_buffer else self.method.private(part, round)
        return answers

    def _compute_travels(self, t: int) -> Mapping[str, Selection]:
        round, private = Round(t, self.rounds), self.private(t)
        answers: dict[str, Selection] = {}
        for name, part in self.parts.items():
            stays = private[name] is True or (self.method.buffers == "reset" and part.is_buffer)
            answers[name] = False if stays else self.method.travels(part, round, complement(private[name]))
        return answers


def _elements(tensor: Tensor, which: Selection) -> int:
    return int(which.sum()) if isinstance(which, Tensor) else tensor.numel() * which
