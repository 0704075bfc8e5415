"""Attention between two feature maps, the classifier's first block in PSE.

Personalized semantics excitation for federated image classification, equations 5 to 7: 1x1 convolutions
make queries, keys and values; every position of the map is a token;

    O = softmax((Q K^T + Q P^T) / sqrt(w h)) V

with a learnable position P of the feature map's shape. With several heads the channels are divided among
them. The paper has no output projection and no residual connection, and neither has this block.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from perfed.errors import NetError
from perfed.nets import attending, compiler, fused


class CrossAttention(nn.Module):
    """Queries from one feature map, keys and values from another; from the same one it is self-attention."""

    compiled = False
    """whether heads are computed by compiled code, where there is some for their size"""

    def __init__(self, channels: int, height: int, width: int, *, heads: int = 4, position: bool = True) -> None:
        """For maps of this shape; `position=False` leaves out the term Q P^T, and P itself."""
        super().__init__()
        if channels % heads:
            raise NetError(f"{channels} channels cannot be divided among {heads} attention heads.")
        self.heads, self.shape = heads, (channels, height, width)
        self.query = nn.Conv2d(channels, channels, 1, bias=False)
        self.key = nn.Conv2d(channels, channels, 1, bias=False)
        self.value = nn.Conv2d(channels, channels, 1, bias=False)
        self.position: nn.Parameter | None
        self.register_parameter("position", None)
        self.set_position(position)

    @property
    def size(self) -> tuple[int, int]:
        """The tokens, and the channels of a head."""
        channels, height, width = self.shape
        return height * width, channels // self.heads

    def set_position(self, present: bool) -> None:
        """Give the block a new position P, or take it away."""
        self.position = nn.Parameter(0.02 * torch.randn(self.shape)) if present else None

    def forward(self, q_from: Tensor, kv_from: Tensor | None = None) -> Tensor:
        """Attend from `q_from` to `kv_from` (to itself if not given); the result has the map's shape."""
        kv_from = q_from if kv_from is None else kv_from
        if self.compiled and self._known(q_from, kv_from):
            filters = self.query.weight, self.key.weight, self.value.weight
            return attending.attend((q_from, kv_from), filters, self.position, self.heads)
        height, width = q_from.shape[-2:]
        keys = self.key(kv_from)
        if self.position is not None:
            keys = keys + self.position  # Q K^T + Q P^T = Q (K + P)^T
        q, k, v = (self._tokens(z) for z in (self.query(q_from), keys, self.value(kv_from)))
        weights = (q @ k.transpose(-2, -1) / sqrt(height * width)).softmax(-1)
        return (weights @ v).transpose(-2, -1).reshape(q_from.shape)

    def _known(self, q_from: Tensor, kv_from: Tensor) -> bool:
        """Whether maps and filters are what the kernel is for: as the block was made, and nothing hooked to them."""
        channels = self.shape[0]
        shapes = q_from.shape[1:] == self.shape and kv_from.shape == q_from.shape
        placed = self.position is None or self.position.shape == self.shape
        return (
            shapes
            and placed
            and channels % self.heads == 0
            and attending.takes(*self.size)
            and compiler.single(q_from, kv_from, *self.parameters())
            and all(_is_filter(conv, channels) for conv in (self.query, self.key, self.value))
        )

    def _tokens(self, z: Tensor) -> Tensor:
        """(batch, channels, height, width) as (batch, heads, positions, channels of a head)."""
        batch, channels = z.shape[:2]
        return z.reshape(batch, self.heads, channels // self.heads, -1).transpose(-2, -1)


def _is_filter(conv: nn.Conv2d, channels: int) -> bool:
    """Whether it is what the block was made with: as many channels as before, position by position."""
    ways = conv.weight.shape, conv.stride, conv.padding, conv.groups
    return (
        fused.is_plain(conv, nn.Conv2d)
        and ways == ((channels, channels, 1, 1), (1, 1), (0, 0), 1)
        and conv.bias is None
    )
