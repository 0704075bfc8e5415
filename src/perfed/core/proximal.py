"""The pull towards given weights that several methods add to their loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from perfed.core.state import State
from perfed.nets.net import Net


def parameters(net: Net) -> State:
    """A copy of the weights as they are now, without buffers."""
    return {name: parameter.detach().clone() for name, parameter in net.module.named_parameters()}


def proximal(net: Net, anchor: Mapping[str, Tensor]) -> Tensor:
    """1/2 ||w - anchor||^2 over the weights w that are being trained; its gradient is w - anchor."""
    trained = ((name, w) for name, w in net.module.named_parameters() if w.requires_grad)
    return torch.stack([(w - anchor[name]).square().sum() for name, w in trained]).sum() / 2
