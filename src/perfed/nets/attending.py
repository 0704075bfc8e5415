"""The products of attention's heads and the softmax between them as one compiled step (`attend.c`).

    O = softmax(Q (K + P)^T / sqrt(w h)) V, head by head

torch goes through every head's small matrices several times and copies them into another order; here a head stays near
until it is done, the map keeps its channels last, and one product makes queries, keys and values. Sums run in another
order than torch's: equal to 1e-5, not to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perfed.nets import compiler

SOURCE = Path(__file__).with_name("attend.c")
TOKENS, CHANNELS = 256, 128
"""The most positions of a map and channels of a head that a kernel is made for."""


def takes(tokens: int, channels: int) -> bool:
    """Whether there is a kernel for heads with so many tokens and channels."""
    return channels % 8 == 0 and tokens <= TOKENS and channels <= CHANNELS


def attend(
    maps: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor, Tensor], position: Tensor | None, heads: int
) -> Tensor:
    """What attention makes of two maps of one shape, the queries' and that of keys and values, with filters of 1x1."""
    q_from, kv_from = maps
    sources = [(q_from, weights)] if q_from is kv_from else [(q_from, weights[:1]), (kv_from, weights[1:])]
    made = [_filtered(z, filters) for z, filters in sources]
    by_token = None if position is None else position.flatten(1).t()
    o: Tensor = _Heads.apply(heads, by_token, *made)  # type: ignore[no-untyped-call]
    return o.view(len(o), *q_from.shape[2:], o.shape[-1]).permute(0, 3, 1, 2)


def _filtered(z: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """What several filters make of a map, side by side in the rows of its tokens: one product instead of several."""
    found = F.conv2d(z.contiguous(memory_format=torch.channels_last), torch.cat(list(weights)))
    return found.permute(0, 2, 3, 1).flatten(1, 2)


@cache
def kernel(tokens: int, channels: int) -> ctypes.CDLL:
    """What computes heads with so many tokens and channels; compiled, if it never was."""
    library = compiler.load(SOURCE, T=tokens, D=channels)
    library.weights_size.restype = ctypes.c_long
    return library


class _Heads(torch.autograd.Function):
    """All heads of all samples, and their gradients; there is no second derivative.

    Takes one tensor with queries, keys and values side by side, or one of queries and one of keys and values; their
    gradients come in the same form, so that the product that made them goes back in one piece too.
    """

    @staticmethod
    def forward(ctx: Any, heads: int, position: Tensor | None, *made: Tensor) -> Tensor:
        n, tokens, width = made[-1].shape
        channels = width // (4 - len(made))
        widths = [3 * channels] if len(made) == 1 else [channels, 2 * channels]
        fit = [tuple(z.shape) for z in made] == [(n, tokens, wide) for wide in widths] and compiler.single(*made)
        fit = fit and channels % heads == 0 and takes(tokens, channels // heads)
        if position is not None:
            fit = fit and position.shape == (tokens, channels) and compiler.single(position)
        if not fit:
            raise ValueError("Queries, keys and values of one shape, as single floats, are what the kernel reads.")
        library = kernel(tokens, channels // heads)
        made = tuple(z.contiguous() for z in made)
        position = None if position is None else position.contiguous()
        o, weights = made[0].new_empty(n, tokens, channels), made[0].new_empty(n * heads, library.weights_size())
        ctx.library, ctx.positioned = library, position is not None
        ctx.sizes = (*map(ctypes.c_long, (n, heads, widths[0], widths[-1])), ctypes.c_float(1 / sqrt(tokens)))
        q, k, v = _parts(made)
        library.forward(*map(_address, (q, k, v, position, o, weights)), *ctx.sizes)
        ctx.save_for_backward(weights, *made, *(() if position is None else (position,)))
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        compiler.once()
        weights, *made = ctx.saved_tensors
        position = made.pop() if ctx.positioned else None
        d_o, found = d_o.resolve_neg().contiguous(), [torch.empty_like(z) for z in made]
        q, k, v = _parts(made)
        dq, dk, dv = _parts(found)
        ctx.library.backward(*map(_address, (d_o, q, k, v, position, weights, dq, dk, dv)), *ctx.sizes)
        return None, None if position is None else dk.sum(0), *found


def _parts(made: Sequence[Tensor]) -> list[Tensor]:
    """Views of queries, keys and values in what was made of the maps."""
    return [*made[0].chunk(3, -1)] if len(made) == 1 else [made[0], *made[1].chunk(2, -1)]


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p() if tensor is None else compiler.address(tensor)
