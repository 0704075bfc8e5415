"""A network seen as channels: which channel each element of its state belongs to, and which channels are private.

A layer's output channels are rows of its weight (dimension 0), its input channels are columns (dimension 1). A
BatchNorm's scale, shift and running statistics follow their channel, and after a flatten a channel owns its block of
H * W inputs. Of every hidden layer the last floor(p * C) channels are private, so that the two sides of a residual
addition agree on them. The layer that makes the logits has classes for rows and is divided by its columns; what
belongs to no channel, such as its bias, is shared.

How channels pass through a module is found by following its forward pass (`perfed.nets.flow`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from perfed.nets.flow import Channels, Flow, follow

if TYPE_CHECKING:
    from perfed.nets.net import Net

_maps: WeakKeyDictionary[Net, ChannelMap] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class ChannelMap:
    """The channels of a network's state."""

    flow: Flow
    axes: Mapping[str, tuple[Channels | None, Channels | None]]
    """output and input channels of every tensor, by state name; None where a dimension is not divided"""

    def divides(self, p: float) -> bool:
        """Whether a ratio p gives every hidden layer both a private and a shared channel."""
        return all(0 < channels.private(p) < channels.count for channels in self.flow.hidden)

    def private(self, name: str, tensor: Tensor, p: float) -> Tensor | None:
        """The private elements of a tensor, as a view of it; None if there are none."""
        rows, columns = self.axes[name]
        if p >= 1:
            return tensor
        dim, channels = (0, rows) if rows else (1, columns)
        if channels is None or not channels.private(p):
            return None
        return tensor.narrow(dim, channels.cut(p), channels.size - channels.cut(p))

    def mask(self, name: str, tensor: Tensor, p: float) -> bool | Tensor:
        """The private elements of a tensor as a selection: none, all, or a mask that takes no memory of its size."""
        rows, columns = self.axes[name]
        if p >= 1:
            return True
        dim, channels = (0, rows) if rows else (1, columns)
        if channels is None or not channels.private(p):
            return False
        line = torch.arange(channels.size) >= channels.cut(p)
        return line.view(-1, *(1,) * (tensor.dim() - dim - 1)).expand(tensor.shape)


def channel_map(net: Net) -> ChannelMap:
    """The channels of a network; refused with the name of the layer where its channels cannot be followed."""
    if net not in _maps:
        flow = follow(net.module, net.input_shape)
        state = net.module.state_dict(keep_vars=True)
        axes = {name: flow.axes.get(id(tensor), (None, None)) for name, tensor in state.items()}
        _maps[net] = ChannelMap(flow, axes)
    return _maps[net]
