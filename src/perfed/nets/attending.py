"""The products of attention's heads and the softmax between them as one compiled step (`attend.c`).

    O = softmax(Q K^T / sqrt(w h)) V, head by head

torch goes through every head's small matrices several times and copies them into another order; here a head stays near
until it is done, and the map keeps its channels last. Sums run in another order than torch's: equal to 1e-5, not to
the bit.
"""

from __future__ import annotations

import ctypes
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from perfed.nets import compiler

SOURCE = Path(__file__).with_name("attend.c")
TOKENS, CHANNELS = 256, 128
"""The most positions of a map and channels of a head that a kernel is made for."""


def takes(tokens: int, channels: int) -> bool:
    """Whether there is a kernel for heads with so many tokens and channels."""
    return channels % 8 == 0 and tokens <= TOKENS and channels <= CHANNELS


def single(*tensors: Tensor) -> bool:
    """Whether all are single floats on a processor, and stay so in products."""
    return not torch.is_autocast_enabled("cpu") and all(
        tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors
    )


def attend(
    maps: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor, Tensor], position: Tensor | None, heads: int
) -> Tensor:
    """What attention makes of two maps of one shape, the queries' and that of keys and values, with filters of 1x1."""
    n, channels, *size = maps[0].shape
    q_from, kv_from = (z.permute(0, 2, 3, 1).reshape(n, -1, channels) for z in maps)
    tokens = zip((q_from, kv_from, kv_from), weights, strict=True)
    q, k, v = (F.linear(z, w.flatten(1)) for z, w in tokens)
    if position is not None:
        k = k + position.flatten(1).t()
    o: Tensor = _Heads.apply(q, k, v, heads)  # type: ignore[no-untyped-call]
    return o.view(n, *size, channels).permute(0, 3, 1, 2)


@cache
def kernel(tokens: int, channels: int) -> ctypes.CDLL:
    """What computes heads with so many tokens and channels; compiled, if it never was."""
    library = compiler.load(SOURCE, T=tokens, D=channels)
    library.weights_size.restype = ctypes.c_long
    return library


class _Heads(torch.autograd.Function):
    """All heads of all samples, and their gradients; there is no second derivative."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        if not (q.shape == k.shape == v.shape and single(q, k, v)):
            raise ValueError("Queries, keys and values of one shape, as single floats, are what the kernel reads.")
        n, tokens, channels = q.shape
        library = kernel(tokens, channels // heads)
        q, k, v = (z.contiguous() for z in (q, k, v))
        o, weights = torch.empty_like(q), q.new_empty(n * heads, library.weights_size())
        ctx.library, ctx.sizes = library, (ctypes.c_long(n), ctypes.c_long(heads), ctypes.c_float(1 / sqrt(tokens)))
        library.forward(*map(compiler.address, (q, k, v, o, weights)), *ctx.sizes)
        ctx.save_for_backward(q, k, v, weights)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        d_o, found = d_o.contiguous(), [torch.empty_like(z) for z in (q, k, v)]
        ctx.library.backward(*map(compiler.address, (d_o, q, k, v, weights, *found)), *ctx.sizes)
        return *found, None
