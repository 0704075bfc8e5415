"""The memory layout in which a worker keeps its network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed import nets
from perfed.core import registry
from perfed.data import Federation
from perfed.engine.worker import Worker
from perfed.nets.net import Net


class Flattening(nn.Module):
    """Flattens its feature map by a view, which the channels-last layout does not allow, or in a way that it does."""

    def __init__(self, *, by_view: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 6 * 6, 10)
        self.by_view = by_view

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.head(x.view(x.size(0), -1) if self.by_view else x.flatten(1))


def net(*, by_view: bool) -> Net:
    torch.manual_seed(0)
    return nets.wrap(Flattening(by_view=by_view), "head", (1, 8, 8))


@pytest.mark.parametrize("by_view", [True, False])
def test_channels_last_wherever_the_network_can_run_in_it(digits: Federation, by_view: bool) -> None:
    given = net(by_view=by_view)
    given.module.norm.eval()
    before = {name: tensor.clone() for name, tensor in given.module.state_dict().items()}
    worker = Worker(digits, given, registry.make("fedavg"), rounds=2, seed=0)
    assert worker._layout == (torch.contiguous_format if by_view else torch.channels_last)
    assert given.module.training
    assert not given.module.norm.training
    for name, tensor in given.module.state_dict().items():
        assert torch.equal(tensor, before[name]), "trying the network must not change it"


def test_both_layouts_learn_the_same(digits: Federation) -> None:
    found = []
    for by_view in (True, False):
        worker = Worker(digits, net(by_view=by_view), registry.make("fedavg", lr=0.1), rounds=2, seed=0)
        client = worker.newcomer(0, 1)
        worker.method.train(client)
        found.append(client.weights())
    for name in found[0]:
        assert torch.allclose(found[0][name], found[1][name], atol=1e-5), name
