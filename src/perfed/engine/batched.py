"""Layers of many clients at once: a batched matrix product, which steps on the way back where steps are plain.

The first layer that trains can do so in its dual form, where clients have few samples:

    W_i = W_0 - lr A_i^T X_i        Z_i = X_i W_0^T - lr (X_i X_i^T) A_i + b_i

What that layer receives of a sample, a row of X_i, is the same in every step. So its weights are the first ones and a
combination of these rows; a step changes A_i, a row per sample, and needs the samples' products with each other in
place of the weights. They are written out once at the end or, where only the clients' mean is wanted, not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perfed.core.state import finite


class Layers(torch.autograd.Function):
    """A linear layer of every client. Its gradients lie in memory as the weights do, which the fused step relies on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x, weight)
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, weight = ctx.saved_tensors
        below, own, bias = ctx.needs_input_grad
        return (
            torch.bmm(slope, weight) if below else None,
            torch.bmm(slope.transpose(1, 2), x) if own else None,
            slope.sum(1) if bias else None,
        )


class Descents(torch.autograd.Function):
    """A linear layer of every client that steps while gradients pass: they are added to the weights and never stored.

    `anchor` is what autograd is asked about, so that it comes by here although the weights want no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lr: float, anchor: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.lr = weight, bias, lr
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        (x,) = ctx.saved_tensors
        below = torch.bmm(slope, ctx.weight) if ctx.needs_input_grad[0] else None
        ctx.weight.baddbmm_(slope.transpose(1, 2), x, alpha=-ctx.lr)
        if ctx.bias is not None:
            ctx.bias.add_(slope.sum(1), alpha=-ctx.lr)
        return below, None, None, None, None


def pays(samples: int, weight: Tensor) -> bool:
    """Whether clients with up to so many samples are better off so: their products are less than the weights."""
    return 0 < samples <= min(weight.shape[-2:]) // 2


class Dual:
    """A linear layer of a group of clients, which steps on the way back through it."""

    def __init__(self, x: Tensor, sizes: Sequence[int], start: Tensor, lr: float) -> None:
        """From all samples, client after client, and the first weights: of each client, or those that all have."""
        clients, most = len(sizes), max(sizes)
        self.start, self.lr, self.alike = start, lr, start.dim() == 2
        self.x = _padded(x, sizes, most)
        """(clients, samples, inputs), zero where a client has fewer samples than the largest one"""
        if self.alike:
            self._first = (self.x.flatten(0, 1) @ start.t()).view(clients, most, -1)
        else:
            self._first = torch.bmm(self.x, start.transpose(1, 2))
        self._products = torch.bmm(self.x, self.x.transpose(1, 2))
        self.moved = torch.zeros(clients, most, start.shape[-2])
        """A"""

    def __call__(self, places: Tensor, bias: Tensor | None, anchor: Tensor) -> Tensor:
        """The outputs for each of the first clients' samples at these places, counted over all clients' rows."""
        found: Tensor = _Step.apply(self, places, bias, anchor)  # type: ignore[no-untyped-call]
        return found

    def weights(self) -> Tensor:
        """Every client's weights as they are now."""
        start = self.start.expand(len(self.x), *self.start.shape[-2:])
        return torch.baddbmm(start, self.moved.transpose(1, 2), self.x, alpha=-self.lr)

    def mean(self, rows: Sequence[int], shares: Tensor) -> Tensor:
        """The mean of some clients' weights, which began with the same ones."""
        x, moved = (t if len(rows) == len(t) else t[list(rows)] for t in (self.x, self.moved))
        weighed = (moved * shares.view(-1, 1, 1)).flatten(0, 1)
        return torch.addmm(self.start, weighed.t(), x.flatten(0, 1), alpha=-self.lr)

    def outputs(self, places: Tensor, bias: Tensor | None) -> Tensor:
        """Z of the first clients."""
        count, flat = len(places), places.flatten()
        first = self._first.flatten(0, 1)[flat].view(*places.shape, -1)
        products = self._products.flatten(0, 1)[flat].view(*places.shape, -1)
        if bias is not None:
            first += bias.unsqueeze(1)
        return torch.baddbmm(first, products, self.moved[:count], alpha=-self.lr)  # no view: others may write into it

    def finite(self, row: int) -> bool:
        """Whether a client's weights are numbers, if those that all began with are."""
        return finite(self.moved[row])


class _Step(torch.autograd.Function):
    """`anchor` is what autograd is asked about, so that it comes by here."""

    @staticmethod
    def forward(ctx: Any, dual: Dual, places: Tensor, bias: Tensor | None, anchor: Tensor) -> Tensor:
        ctx.dual, ctx.places, ctx.bias = dual, places, bias
        return dual.outputs(places, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[None, ...]:
        ctx.dual.moved.flatten(0, 1).index_add_(0, ctx.places.flatten(), slope.flatten(0, 1))
        if ctx.bias is not None:
            ctx.bias.add_(slope.sum(1), alpha=-ctx.dual.lr)
        return None, None, None, None


def _padded(x: Tensor, sizes: Sequence[int], most: int) -> Tensor:
    """Samples that lie client after client as (clients, samples, values)."""
    if min(sizes) == most:
        return x.view(len(sizes), most, -1)
    padded = torch.zeros(len(sizes), most, x.shape[1])
    for own, part in zip(padded, torch.split(x, list(sizes)), strict=True):
        own[: len(part)] = part
    return padded
