"""LG-FedAvg: the top of the network is global, the rest stays with the client."""

import pytest

from perfed import nets
from perfed.core import registry
from perfed.core.plan import Plan


@pytest.mark.parametrize(("shared", "travels"), [(1, {"fc3"}), (2, {"fc2", "fc3"}), (3, {"fc1", "fc2", "fc3"})])
def test_the_global_part_is_counted_from_the_output(shared: int, travels: set[str]) -> None:
    net = nets.build("mlp", (1, 8, 8), 4, hidden=[6, 5])
    plan = Plan(registry.make("lgfedavg", global_layers=shared), net, 2)
    sent = {name for name, kept in plan.private(1).items() if kept is False}
    assert {net.layer_of(name) for name in sent} == travels
