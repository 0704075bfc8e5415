"""The pull towards given weights that several methods add to their loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perfed.core.state import State
from perfed.nets.net import Net


def parameters(net: Net) -> State:
    """A copy of the weights as they are now, without buffers."""
    return {name: parameter.detach().clone() for name, parameter in net.module.named_parameters()}


def proximal(net: Net, anchor: Mapping[str, Tensor]) -> Tensor:
    """1/2 ||w - anchor||^2 over the weights w that are being trained; its gradient is w - anchor."""
    trained = {name: w for name, w in net.module.named_parameters() if w.requires_grad}
    half: Tensor = _HalfSquare.apply([anchor[name] for name in trained], *trained.values())  # type: ignore[no-untyped-call]
    return half


class _HalfSquare(torch.autograd.Function):
    """1/2 ||w - anchor||^2 as one node of autograd over all weights, in place of several for each."""

    @staticmethod
    def forward(ctx: Any, anchors: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.apart = torch._foreach_sub(weights, anchors)
        return torch.stack(torch._foreach_norm(ctx.apart)).square().sum() / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch._foreach_mul(ctx.apart, gradient)
