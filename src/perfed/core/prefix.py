"""The output of frozen layers, kept over rounds for as long as these layers cannot change.

A layer that in this round neither travels nor is private, and has its first weights, is the same for every client and
in every round until it is unfrozen. Its output is stored under the digest of the samples, so a hit has the very bits
that would be computed.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from perfed.core.client import Client

LIMIT = 256 << 20
"""Bytes that one process keeps."""


class Prefixes:
    """The most recently used outputs, up to a number of bytes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.used, self.hits = limit, 0, 0
        self._held: OrderedDict[tuple[int, str], Tensor] = OrderedDict()

    def get(self, key: tuple[int, str]) -> Tensor | None:
        """What was kept under this key."""
        if key in self._held:
            self.hits += 1
            self._held.move_to_end(key)
        return self._held.get(key)

    def put(self, key: tuple[int, str], output: Tensor) -> None:
        """Keep an output, and let the oldest ones go."""
        size = output.numel() * output.element_size()
        if key in self._held or size > self.limit:
            return
        self._held[key] = output
        self.used += size
        while self.used > self.limit:
            _, oldest = self._held.popitem(last=False)
            self.used -= oldest.numel() * oldest.element_size()


def key(client: Client, x: Tensor, cut: int) -> tuple[int, str] | None:
    """What the output of the first `cut` layers for these samples is kept under; None if it may change."""
    net, plan, t = client.net, client.plan, client.round.t
    names = net.names(*net.layers[:cut])
    travels, private = plan.travels(t), plan.private(t)
    if any(travels.get(name, True) is not False or private.get(name, True) is not False for name in names):
        return None
    now = net.module.state_dict()
    if not all(torch.equal(now[name], plan.initial[name]) for name in names):
        return None
    return cut, sha256(x.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
