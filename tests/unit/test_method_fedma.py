"""FedMA: permuted copies of a network give that network; the matching is the best one; heads are averaged by class."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from perfed import nets
from perfed.core import registry
from perfed.core.client import Update
from perfed.core.plan import Plan, Round
from perfed.core.server import Server
from perfed.core.state import State
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.errors import NetError
from perfed.methods.fedma import COUNTS, FedMA, match, nearest
from perfed.nets.net import Net
from perfed.nets.neurons import hidden_neurons
from tests.conftest import batchnorm_net, small_net
from tests.unit.test_nets_neurons import NETS, built


def server_for(net: Net) -> Server:
    plan = Plan(FedMA(), net, 5)
    return Server(dict(plan.initial), plan, 10)


def permuted(net: Net, state: State, seed: int) -> State:
    """The same function with the neurons of all hidden layers in another order."""
    source = torch.Generator().manual_seed(seed)
    for neurons in hidden_neurons(net):
        state = neurons.reorder(state, torch.randperm(neurons.count, generator=source))
    return state


def noisy(state: State, seed: int, scale: float) -> State:
    source = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * torch.randn(tensor.shape, generator=source) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


def update(client: int, state: State, weight: float = 10.0, counts: list[int] | None = None) -> Update:
    return Update(client, state | {COUNTS: torch.tensor(counts or [1] * 10)}, weight)


def copied(net: Net) -> State:
    return {name: tensor.clone() for name, tensor in net.module.state_dict().items()}


# Permuted copies


@pytest.mark.parametrize(("name", "shape", "options", "groups"), NETS)
def test_permuted_copies_give_the_network_back(
    name: str, shape: tuple[int, ...], options: dict[str, Any], groups: int
) -> None:
    net = built(name, shape, options)
    state = copied(net)
    updates = [update(0, state), *(update(i, permuted(net, state, i)) for i in (1, 2))]
    found = FedMA().combine(server_for(net), updates, Round(1, 5))
    for key, tensor in state.items():
        assert torch.allclose(found[key], tensor, atol=1e-6), key
    plain = registry.make("fedavg").combine(
        server_for(net), [Update(u.client, {k: u.state[k] for k in state}, 1.0) for u in updates], Round(1, 5)
    )
    assert any(not torch.allclose(plain[key], state[key], atol=1e-3) for key in state if state[key].is_floating_point())


def test_layers_above_do_not_mislead_the_matching_of_a_residual_stage() -> None:
    """A layer whose inputs are not in matching order yet says nothing about its neurons, however large it is."""
    net = built("resnet18", (1, 8, 8), {"width": 0.0625})
    state = copied(net)
    for name in ("block1.conv2.weight", "block2.conv2.weight"):
        state[name] = state[name] * 1000
    for seed in range(1, 6):
        updates = [update(0, state), update(1, permuted(net, state, seed))]
        found = FedMA().combine(server_for(net), updates, Round(1, 5))
        for key, tensor in state.items():
            assert torch.allclose(found[key], tensor, rtol=1e-4, atol=1e-6), key


def test_batchnorm_statistics_go_with_their_channel(digits: Federation) -> None:
    net = batchnorm_net(digits)
    net.module.train()
    with torch.no_grad():
        net(digits.client(0).train.x)
    state = copied(net)
    found = FedMA().combine(server_for(net), [update(0, state), update(1, permuted(net, state, 1))], Round(1, 5))
    for name in ("scale.running_mean", "scale.running_var", "shift.running_mean", "shift.weight"):
        assert torch.allclose(found[name], state[name], atol=1e-6), name


def test_the_order_is_found_under_noise_and_whoever_comes_first(digits: Federation) -> None:
    """What comes out is the mean of the networks in one order: that of the client with most data."""
    net = small_net(digits)
    state = copied(net)
    near = [noisy(state, seed, 0.01) for seed in range(3)]
    mean = {name: (near[0][name] * 20 + near[1][name] * 30 + near[2][name] * 10) / 60 for name in state}
    moved = [permuted(net, near[0], 8), near[1], permuted(net, near[2], 9)]
    updates = [update(i, s, w, [int(w)] * 10) for i, (s, w) in enumerate(zip(moved, (20.0, 30.0, 10.0), strict=True))]
    found = FedMA().combine(server_for(net), updates, Round(1, 5))
    assert all(torch.allclose(found[name], mean[name], atol=1e-6) for name in state)


def test_networks_that_need_no_matching_are_averaged_as_by_fedavg(digits: Federation) -> None:
    net = small_net(digits)
    states = [noisy(copied(net), seed, 0.01) for seed in range(3)]
    updates = [update(i, s, w, [int(w)] * 10) for i, (s, w) in enumerate(zip(states, (5.0, 15.0, 30.0), strict=True))]
    found = FedMA().combine(server_for(net), updates, Round(1, 5))
    plain = [Update(u.client, s, u.weight) for u, s in zip(updates, states, strict=True)]
    want = registry.make("fedavg").combine(server_for(net), plain, Round(1, 5))
    assert all(torch.allclose(found[name], want[name], atol=1e-6) for name in want)


def test_one_client_keeps_its_network(digits: Federation) -> None:
    net = small_net(digits)
    state = noisy(copied(net), 1, 1.0)
    found = FedMA().combine(server_for(net), [update(4, state, counts=[3] + [0] * 9)], Round(1, 5))
    assert all(torch.allclose(found[name], state[name]) for name in state)


# The assignment


def cost(features: list[Tensor], sizes: list[float], orders: list[Tensor]) -> float:
    """Weighted squared distance of every neuron to the mean in its place."""
    placed = [f[order] for f, order in zip(features, orders, strict=True)]
    mean = sum(w * p for w, p in zip(sizes, placed, strict=True)) / sum(sizes)
    return float(sum(w * (p - mean).square().sum() for w, p in zip(sizes, placed, strict=True)))


def test_the_assignment_is_the_best_of_all() -> None:
    source = torch.Generator().manual_seed(0)
    for _ in range(5):
        places, neurons = torch.randn(2, 5, 3, generator=source, dtype=torch.float64)
        found = float((neurons[nearest(places, neurons)] - places).square().sum())
        rivals = [float((neurons[list(order)] - places).square().sum()) for order in permutations(range(5))]
        assert found == pytest.approx(min(rivals))


def test_two_clients_are_matched_exactly_and_sweeps_never_hurt() -> None:
    source = torch.Generator().manual_seed(1)
    features = list(torch.randn(4, 5, 3, generator=source, dtype=torch.float64))
    sizes = [3.0, 1.0, 2.0, 2.0]
    pair = match(features[:2], sizes[:2], 0)
    rivals = [cost(features[:2], sizes[:2], [pair[0], torch.tensor(order)]) for order in permutations(range(5))]
    assert cost(features[:2], sizes[:2], pair) == pytest.approx(min(rivals))
    costs = [cost(features, sizes, match(features, sizes, sweeps)) for sweeps in (0, 1, 2, 5)]
    assert costs == sorted(costs, reverse=True)


# The head


def test_head_rows_are_averaged_by_class_counts(digits: Federation) -> None:
    net = small_net(digits)
    state = copied(net)
    a, b = ({**state, "fc3.bias": torch.full((10,), value)} for value in (1.0, 5.0))
    updates = [update(0, a, 30.0, [3, 1, 0, 0] + [1] * 6), update(1, b, 10.0, [1, 0, 4, 0] + [1] * 6)]
    found = FedMA().combine(server_for(net), updates, Round(1, 5))
    # class 0: 3 to 1; class 1 and 2: one client alone; class 3: nobody, so by data size; the rest: half and half
    assert found["fc3.bias"].tolist() == pytest.approx([2.0, 1.0, 5.0, 2.0] + [3.0] * 6)


def test_clients_send_their_class_counts(digits: Federation) -> None:
    run = Simulation(digits, small_net(digits), FedMA(lr=0.05), Settings(rounds=1))
    client = run.worker.newcomer(2, 1)
    sent = run.method.train(client)
    assert torch.equal(sent.state[COUNTS], client.data.class_counts)
    run.method.verify(run.server, sent.state, "Client 2", Round(1, 1))


def test_networks_whose_neurons_cannot_be_told_are_refused_at_the_start(digits: Federation) -> None:
    net = nets.build("conv3attn", digits.input_shape, 10)
    with pytest.raises(NetError, match="norm3"):
        Simulation(digits, net, FedMA(), Settings(rounds=1))


def test_fine_tuning_after_matching(digits: Federation) -> None:
    method = registry.make("fedma+ft", lr=0.1, finetune_epochs=2)
    outcome = Simulation(digits, small_net(digits), method, Settings(rounds=3, new=False)).run()
    assert outcome is not None
    assert outcome.metrics["local.mean"] > outcome.metrics["local.before.mean"] + 0.1
