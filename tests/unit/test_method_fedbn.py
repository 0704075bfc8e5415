"""FedBN: BatchNorm is private by type, with its running statistics, and nothing else is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn

from perfed.core.plan import Plan
from perfed.core.registry import make
from perfed.data import Federation
from perfed.engine.settings import Outcome
from perfed.nets.net import Net
from tests.conftest import batchnorm_net
from tests.runs import stepped

Run = Callable[..., Outcome]


def misleading_net() -> Net:
    """BatchNorms nested and under other names, and other modules under the names of BatchNorms."""
    inner = nn.Sequential(OrderedDict(lift=nn.Linear(6, 6), squash=nn.BatchNorm1d(6), deep=nn.Sequential()))
    inner.deep.append(nn.BatchNorm1d(6, affine=False))
    module = nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            bn1=nn.Linear(64, 6),
            norm=nn.LayerNorm(6),
            block=inner,
            batchnorm=nn.Linear(6, 10),
        )
    )
    return Net(module, {"one": ["bn1", "norm"], "two": ["block"], "head": ["batchnorm"]}, (1, 8, 8), 10)


def test_private_is_every_batchnorm_and_nothing_else() -> None:
    private = Plan(make("fedbn"), misleading_net(), 3).private(1)
    squash = {f"block.squash.{s}" for s in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    deep = {f"block.deep.0.{s}" for s in ("running_mean", "running_var", "num_batches_tracked")}
    assert {name for name, which in private.items() if which} == squash | deep


def test_batchnorm_stays_with_each_client_and_the_rest_is_common(digits: Federation) -> None:
    simulation = stepped(make("fedbn", lr=0.05), digits, net=batchnorm_net(digits), fraction=1.0)
    own = simulation.worker.net.batchnorm_names
    for name in own:
        assert torch.equal(simulation.server.state[name], simulation.plan.initial[name]), "it reached the server"
    weights = [simulation.scored(i).weights() for i in range(digits.num_clients)]
    for name in weights[0]:
        same = [torch.equal(weights[0][name], other[name]) for other in weights[1:]]
        assert not any(same) if name in own and not name.endswith("tracked") else name in own or all(same)
    simulation.close()


def test_fedavg_averages_the_running_statistics(digits: Federation) -> None:
    """It is not FedBN by accident."""
    simulation = stepped(make("fedavg", lr=0.05), digits, net=batchnorm_net(digits), fraction=1.0)
    for name in simulation.worker.net.batchnorm_names:
        assert not torch.equal(simulation.server.state[name], simulation.plan.initial[name])
    simulation.close()


def test_without_batchnorm_it_is_fedavg(simulate: Run) -> None:
    assert simulate("fedbn").state_sha256 == simulate("fedavg").state_sha256
