"""Steps of a linear head on stored features, written out: no graph is built where the gradient is known.

    z = W x + b,    dL/dz = (softmax(z) - onehot(y)) / n,    dL/dW = dL/dz^T x,    dL/db = sum of dL/dz

The kernels are those that autograd would call, in the same order, so the result is the same to the bit (in float32,
whatever the network's precision).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from perfed.core.sgd import Sgd
from perfed.nets import fused
from perfed.nets.net import Net
from perfed.nets.written import slope_of, watched


def linear_head(net: Net, cut: int, trained: Sequence[Tensor]) -> nn.Linear | None:
    """The head, if it is one plain linear layer, all that follows the cut and all that is trained."""
    if cut != len(net.body) or len(modules := net.modules_from(cut)) != 1:
        return None
    head = modules[0]
    if not isinstance(head, nn.Linear) or not fused.is_plain(head, nn.Linear) or any(map(watched, head.parameters())):
        return None
    return head if [id(tensor) for tensor in trained] == [id(head.weight), id(head.bias)] else None


@torch.no_grad()
def regress(head: nn.Linear, x: Tensor, y: Tensor, indices: Iterable[Tensor], sgd: Sgd) -> None:
    """A step of cross-entropy for every batch of features."""
    weight, bias = head.weight, head.bias
    for index in indices:
        features, labels = x.index_select(0, index), y.index_select(0, index)
        slope = slope_of(torch.addmm(bias, features, weight.t()), labels)
        sgd.move([weight, bias], [slope.t().mm(features), slope.sum(0)])
