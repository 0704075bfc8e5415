"""The bare steps are torch's own, to the bit; so are the shortcuts around them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from perfed.core import rng
from perfed.core.sgd import Sgd
from perfed.core.state import finite
from perfed.nets.stack import conv


@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, {"weight_decay": 0.1}],
)
def test_the_bare_step_is_torchs_step(settings: dict[str, Any]) -> None:
    def run(kind: Any, **more: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        unused = nn.Parameter(torch.ones(2))
        sgd = kind([*net.parameters(), unused], lr=0.1, **settings, **more)
        for _ in range(4):
            sgd.zero_grad()
            F.cross_entropy(net(torch.randn(6, 5)), torch.arange(6) % 3).backward()
            sgd.step()
        return [*(parameter.detach() for parameter in net.parameters()), unused.detach()]

    for own, theirs in zip(run(Sgd), run(torch.optim.SGD, fused=True), strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2)])
def test_pooling_before_the_activation_changes_no_bit(pool: nn.Module) -> None:
    torch.manual_seed(0)
    pooled_first = nn.Sequential(OrderedDict(conv(2, 6, 1, kernel=3, pool=pool)))
    assert [name for name, _ in pooled_first.named_children()] == ["conv1", "pool1", "relu1"]
    relu_first = nn.Sequential(pooled_first.conv1, nn.ReLU(), pool)
    x = torch.randn(8, 2, 12, 12)
    x[0] = 0.0  # ties
    gradients = []
    for net in (pooled_first, relu_first):
        out = net(x)
        gradients.append(
            [out, *torch.autograd.grad((out * torch.arange(out.numel()).view_as(out)).sum(), net.parameters())]
        )
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_seeding_is_torchs_seeding() -> None:
    torch.manual_seed(7)
    a = torch.rand(3)
    rng.seed_torch(7)
    assert torch.equal(torch.rand(3), a)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found(bad: float) -> None:
    values = torch.randn(1000)
    assert finite(values)
    assert finite(torch.zeros(0))
    values[613] = bad
    assert not finite(values)
