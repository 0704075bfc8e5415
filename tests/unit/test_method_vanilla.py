"""Vanilla and Anti scheduling: what is unfrozen when, and that nothing else moves or travels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from perfed import hyperparameters, nets
from perfed.config import parse, resolve
from perfed.core.plan import Plan, Round
from perfed.core.registry import make
from perfed.core.state import digest
from perfed.data import Federation
from perfed.engine.cost import estimate
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Outcome, Settings
from perfed.engine.worker import Task, Worker
from perfed.errors import ConfigError, NetError
from perfed.methods.anti import Anti
from perfed.methods.vanilla import Vanilla
from perfed.nets.net import Net
from tests.conftest import small_net

both = pytest.mark.parametrize("name", ["vanilla", "anti"])
Run = Callable[..., Outcome]


def published_cnn() -> Net:
    torch.manual_seed(0)
    return nets.build("cnn", (1, 28, 28), 10)


@pytest.mark.parametrize(
    ("t", "shallow", "deep"),
    [
        (0, (), ()),
        (1, ("conv1",), ("fc1",)),
        (100, ("conv1",), ("fc1",)),
        (101, ("conv1", "conv2"), ("fc1", "conv2")),
        (200, ("conv1", "conv2"), ("fc1", "conv2")),
        (201, ("conv1", "conv2", "fc1"), ("fc1", "conv2", "conv1")),
        (300, ("conv1", "conv2", "fc1"), ("fc1", "conv2", "conv1")),
    ],
)
def test_the_published_schedule(t: int, shallow: tuple[str, ...], deep: tuple[str, ...]) -> None:
    net = published_cnn()
    assert Vanilla().unfrozen(net, Round(t, 300)) == shallow
    assert Anti().unfrozen(net, Round(t, 300)) == deep
    assert Vanilla(unfreeze=(0, 100, 200)).stage(Round(t, 300)) == len(shallow)
    for method, unfrozen in ((Vanilla(), shallow), (Anti(), deep)):
        travels = Plan(method, net, 300).travels(t)
        assert {name for name, which in travels.items() if which} == set(net.names(*unfrozen))


def test_the_published_cost_table_to_the_last_digit() -> None:
    """Trainable parameters x batches, for 50 batches, 100 clients and 300 rounds; beside it what torch counts."""
    net, sizes = published_cnn(), [500] * 100
    costs = {name: estimate(net, make(name), 300, sizes) for name in ("fedavg", "fedbabu", "vanilla", "anti")}
    assert {name: cost.param_batches for name, cost in costs.items()} == {
        "fedavg": 873_039_000_000,
        "fedbabu": 865_344_000_000,
        "vanilla": 314_912_000_000,
        "anti": 838_880_000_000,
    }
    flops = {name: cost.flops for name, cost in costs.items()}
    # By parameters Vanilla is the cheap one; by operations Anti is, which reuses the layers frozen below.
    assert {name: round(count / 1e12, 1) for name, count in flops.items()} == {
        "fedavg": 370.2,
        "fedbabu": 370.1,
        "vanilla": 326.8,
        "anti": 257.3,
    }


@both
def test_all_unfrozen_from_the_start_is_fedbabu_to_the_bit(name: str, simulate: Run) -> None:
    hyper = {"finetune_epochs": 2, "momentum": 0.9, "weight_decay": 1e-3}
    babu = simulate("fedbabu", **hyper)
    for unfreeze in ((0, 0), (0,)):
        ours = simulate(name, unfreeze=unfreeze, **hyper)
        assert ours.state_sha256 == babu.state_sha256
        assert ours.metrics == babu.metrics
        assert ours.cost["bytes_up"] == babu.cost["bytes_up"]
    assert simulate(name, unfreeze=(0, 2), **hyper).state_sha256 != babu.state_sha256


@both
def test_a_frozen_layer_is_not_moved_by_momentum_or_decay_and_does_not_travel(name: str, digits: Federation) -> None:
    net = small_net(digits, "digitsnet")
    method = make(name, unfreeze=(0, 2, 4), lr=0.1, momentum=0.9, weight_decay=0.1)
    worker = Worker(digits, method.build(net), method, rounds=6, seed=0)
    for t in range(1, 7):
        client = worker.client(Task("train", 0, t, 0, dict(worker.plan.initial), {}))
        update = method.train(client)
        unfrozen = net.names(*method.unfrozen(net, Round(t, 6)))  # type: ignore[attr-defined]
        after = client.weights()
        moved = {part for part in after if not torch.equal(after[part], worker.plan.initial[part])}
        assert moved == unfrozen, "BatchNorm statistics of frozen layers included"
        assert set(update.state) == unfrozen
        assert all(p.grad is None for n, p in net.module.named_parameters() if n not in unfrozen)


@both
def test_bytes_follow_the_schedule(name: str, simulate: Run, digits: Federation) -> None:
    found = simulate(name, unfreeze=(0, 2), settings={"rounds": 4, "fraction": 1.0})
    first, second = ("fc1", "fc2") if name == "vanilla" else ("fc2", "fc1")
    net, size = small_net(digits), digits.num_clients
    bytes_of = {layer: sum(4 * net.module.state_dict()[n].numel() for n in net.names(layer)) for layer in net.layers}
    for way in ("up", "down"):
        assert found.cost["layers"][f"{way}/{first}"] == 4 * size * bytes_of[first]
        assert found.cost["layers"][f"{way}/{second}"] == 2 * size * bytes_of[second]
        assert f"{way}/{net.head}" not in found.cost["layers"]


@both
def test_a_client_away_for_a_stage_catches_up(name: str, digits: Federation) -> None:
    """Whoever was last there when a layer was frozen downloads it once it travels."""
    method = make(name, unfreeze=(0, 2), lr=0.05)
    simulation = Simulation(digits, method.build(small_net(digits)), method, Settings(rounds=4, fraction=0.5))
    for t in range(1, 5):
        simulation.step(t)
    for client in range(digits.num_clients):
        weights = simulation.worker.client(simulation._task("evaluate", client, 4)).weights()
        assert digest(weights) == digest(simulation.server.state)
    simulation.close()


@both
def test_final_fine_tuning_trains_every_layer(name: str, digits: Federation) -> None:
    method = make(name, unfreeze=(0, 2), lr=0.05)
    assert method.adapts
    worker = Worker(digits, method.build(small_net(digits)), method, rounds=1, seed=0)
    client = worker.client(Task("evaluate", 0, 1, 0, dict(worker.plan.initial), {}))
    method.adapt(client)
    assert not any(torch.equal(tensor, worker.plan.initial[part]) for part, tensor in client.weights().items())


def test_a_shorter_list_unfreezes_groups_of_layers() -> None:
    net = nets.build("mlp", (1, 8, 8), 10, hidden=[8, 8, 8, 8, 8])
    assert Vanilla(unfreeze=(0, 5)).unfrozen(net, Round(5, 9)) == ("fc1", "fc2", "fc3")
    assert Anti(unfreeze=(0, 5)).unfrozen(net, Round(5, 9)) == ("fc5", "fc4", "fc3")
    assert Vanilla(unfreeze=(0, 5, 7)).unfrozen(net, Round(6, 9)) == ("fc1", "fc2", "fc3", "fc4")
    assert Vanilla(unfreeze=(0, 5, 7)).unfrozen(net, Round(8, 9)) == net.body


@pytest.mark.parametrize("unfreeze", [(), (1,), (5, 0), (0, 9, 3), (-1, 0)])
def test_impossible_schedules_are_refused(unfreeze: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="unfreeze"):
        Vanilla(unfreeze=unfreeze)


def test_more_rounds_than_layers_are_refused_naming_both() -> None:
    net = nets.build("mlp", (1, 8, 8), 10, hidden=[8, 8])
    with pytest.raises(NetError, match=r"\[0, 100, 200\] has 3 rounds.*2 base layers: fc1, fc2"):
        Anti(unfreeze=(0, 100, 200)).build(net)
    for unfreeze in ((0,), None):
        with pytest.raises(NetError, match="none"):
            Vanilla(unfreeze=unfreeze).build(nets.build("mlp", (1, 8, 8), 10, hidden=[]))


@pytest.mark.parametrize(("layers", "due"), [(1, (0,)), (2, (0, 150)), (3, (0, 100, 200)), (5, (0, 100, 200))])
def test_the_default_schedule_fits_any_number_of_layers(layers: int, due: tuple[int, ...]) -> None:
    net = nets.build("mlp", (1, 8, 8), 10, hidden=[8] * layers)
    for default, given in ((Vanilla(), Vanilla(unfreeze=due)), (Anti(), Anti(unfreeze=due))):
        assert default.build(net) is net
        stages: dict[object, tuple[str, ...]] = {}
        for t in range(1, 301):
            unfrozen = default.unfrozen(net, Round(t, 300))
            assert unfrozen == given.unfrozen(net, Round(t, 300))
            assert stages.setdefault(default.stage(Round(t, 300)), unfrozen) == unfrozen, "a stage is one of a kind"


def test_no_schedule_is_written_as_none() -> None:
    config = resolve({"method": "anti"})
    assert config.method["unfreeze"] is None
    again = resolve(parse(config.toml()))
    assert again == config
    assert hyperparameters.check("anti", {"unfreeze": "none"}) == Anti()


@both
def test_the_default_on_the_default_mlp_trains_its_first_stage(name: str, digits: Federation) -> None:
    """Both methods run on any network as they come."""
    net = nets.build("mlp", digits.input_shape, digits.num_classes)
    method = make(name)
    worker = Worker(digits, method.build(net), method, rounds=1, seed=0)
    update = method.train(worker.client(Task("train", 0, 1, 0, dict(worker.plan.initial), {})))
    assert set(update.state) == net.names("fc1" if name == "vanilla" else "fc2")
