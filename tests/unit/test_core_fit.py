"""The training loop: what it trains, what it leaves alone, and that its fast path is the plain one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from perfed.core import registry
from perfed.core.client import Batch, Client
from perfed.core.fit import Phase, batches, gradients_of
from perfed.core.method import Method
from perfed.core.softmax import regress
from perfed.core.state import State
from perfed.data import Federation, federate
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Outcome, Settings
from perfed.engine.worker import Task, Worker
from perfed.nets import wrap
from perfed.nets.net import Net
from tests.conftest import batchnorm_net, small_net


@pytest.fixture(scope="module")
def pictures() -> Federation:
    """Digits scaled up so that convolutional networks take them."""
    return federate("digits", clients=6, split="classes:2", seed=0, min_size=28)


def client_of(federation: Federation, net: Net, method: Method, client: int = 0) -> Client:
    worker = Worker(federation, net, method, rounds=2, seed=0)
    return worker.client(Task("train", client, 1, 0, dict(worker.plan.initial), {}))


def trained(federation: Federation, net: Net, method: Method) -> tuple[Client, State]:
    client = client_of(federation, net, method)
    method.train(client)
    return client, client.weights()


@dataclass(frozen=True, kw_only=True)
class Plain(Method):
    """Trains the layers it is told, with or without the stored output of the frozen ones."""

    layers: tuple[str, ...] = ()
    reuse: bool = True

    def phases(self, client: Client) -> Sequence[Phase]:
        return [Phase(self.epochs, trains=self.layers, reuse=self.reuse)]


def fresh(federation: Federation, name: str) -> Net:
    if name == "batchnorm":
        return batchnorm_net(federation)
    return small_net(federation, name, **({"width": 0.0625} if name == "resnet18" else {}))


@pytest.mark.parametrize("name", ["lenet5", "batchnorm", "resnet18"])
def test_the_frozen_prefix_gives_what_the_plain_pass_gives(name: str, pictures: Federation) -> None:
    layers = fresh(pictures, name).layers
    for first in range(1, len(layers)):
        method = Plain(layers=layers[first:], epochs=2, lr=0.02, momentum=0.5)
        fast, a = trained(pictures, fresh(pictures, name), method)
        slow, b = trained(pictures, fresh(pictures, name), replace(method, reuse=False))
        assert fast.meter.prefix_samples == len(fast.data.train)
        assert slow.meter.prefix_samples == 0
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-5, atol=1e-5)
        if name == "resnet18" and first > 2:
            break


def test_a_stochastic_layer_is_never_part_of_the_reused_prefix(digits: Federation) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10))
    net = wrap(module, head="3", input_shape=(1, 8, 8))
    client, _ = trained(digits, net, Plain(layers=(net.head,)))
    assert client.meter.prefix_samples == 0
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 10))
    net = wrap(module, head="4", input_shape=(1, 8, 8))
    assert net.reusable((net.head,)) == 1


class Hidden(nn.Module):
    """A layer whose dropout no module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.fc(x), 0.5, self.training)


@pytest.mark.parametrize("shape", [(1, 8, 8), None])
@pytest.mark.parametrize("beside", [nn.Identity(), nn.Dropout(0.5)])
def test_hidden_randomness_is_found_beside_that_which_shows(beside: nn.Module, shape: Any) -> None:
    module = nn.Sequential(nn.Flatten(), Hidden(), nn.Linear(8, 8), beside, nn.Linear(8, 10))
    net = wrap(module, head="4", input_shape=shape)
    assert net.reusable((net.head,)) == 0
    if shape is None:
        net.probe((1, 8, 8))
        assert net.reusable((net.head,)) == 0


def test_an_own_layer_without_randomness_is_reused_once_it_was_tried() -> None:
    class Own(nn.Linear):
        pass

    net = wrap(nn.Sequential(nn.Flatten(), Own(64, 8), nn.Linear(8, 10)), head="2")
    assert net.reusable((net.head,)) == 0
    net.probe((1, 8, 8))
    assert net.reusable((net.head,)) == 1


def test_batchnorm_without_running_statistics_depends_on_its_batch(digits: Federation) -> None:
    def net() -> Net:
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 10)
        return wrap(nn.Sequential(*layers), head="3", input_shape=(1, 8, 8))

    assert not net().stochastic(1)
    assert net().stochastic(2)
    method = Plain(layers=(net().head,), epochs=2, lr=0.05)
    _, a = trained(digits, net(), method)
    _, b = trained(digits, net(), replace(method, reuse=False))
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-5, atol=1e-5)


def test_output_that_is_too_large_is_not_stored(pictures: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    net = fresh(pictures, "lenet5")
    widths = {k: net.width(pictures.client(0).train.x, k) for k in net.cuts}
    last, size = max(widths), pictures.size(0)
    method = Plain(layers=(net.head,), epochs=1, lr=0.02)
    _, whole = trained(pictures, fresh(pictures, "lenet5"), replace(method, reuse=False))
    for room, stored in ((4 * size * widths[last], True), (4 * size * min(widths.values()) - 1, False)):
        monkeypatch.setattr("perfed.core.fit.PREFIX_BYTES", room)
        client, found = trained(pictures, fresh(pictures, "lenet5"), method)
        assert bool(client.meter.prefix_samples) is stored
        for key in found:
            torch.testing.assert_close(found[key], whole[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "batchnorm"])
def test_frozen_layers_do_not_move_under_momentum_and_weight_decay(name: str, pictures: Federation) -> None:
    net = fresh(pictures, name)
    method = Plain(layers=net.layers[1:2], lr=0.1, momentum=0.9, weight_decay=0.1, epochs=2)
    client = client_of(pictures, net, method)
    before = client.weights()
    method.train(client)
    after = client.weights()
    moved = {net.layer_of(key) for key in after if not torch.equal(before[key], after[key])}
    assert moved == {net.layers[1]}


def test_fedavg_of_one_client_with_full_batches_is_plain_sgd() -> None:
    federation = federate("digits", clients=1, split="iid", seed=0, val_fraction=0.0)
    net = small_net(federation)
    data = federation.client(0).train
    reference = small_net(federation).module
    optimiser = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.0)
    for _ in range(5):
        optimiser.zero_grad()
        F.cross_entropy(reference(data.x), data.y).backward()
        optimiser.step()
    method = registry.make("fedavg", lr=0.1, batch_size=len(data))
    simulation = Simulation(federation, net, method, Settings(rounds=5))
    simulation.run()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(simulation.server.state[name], value, rtol=0, atol=1e-6)


def test_two_clients_by_hand() -> None:
    """One full-batch step of each client, then the mean weighted by sizes 1 to 3."""
    x, y = torch.randn(8, 1, 1, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1] * 4)
    w = torch.tensor([[0.1, 0.2], [0.3, -0.1]])

    def step(rows: slice) -> torch.Tensor:
        own = w.clone().requires_grad_()
        F.cross_entropy(x[rows].flatten(1) @ own.T, y[rows]).backward()
        assert own.grad is not None
        return own.detach() - 0.5 * own.grad

    states = [{"w": step(slice(0, 2))}, {"w": step(slice(2, 8))}]
    expected = (2 * states[0]["w"] + 6 * states[1]["w"]) / 8
    from perfed.core.combine import weighted_mean

    torch.testing.assert_close(weighted_mean(states, [2, 6])["w"], expected)


@pytest.mark.parametrize(
    ("n", "size", "whole", "want"),
    [
        (10, 4, False, [4, 4, 2]),
        (9, 4, False, [4, 4, 1]),
        (9, 4, True, [4, 5]),
        (1, 4, True, [1]),
        (3, 10, True, [3]),
    ],
)
def test_no_sample_is_dropped(n: int, size: int, whole: bool, want: list[int]) -> None:
    parts = list(batches(n, size, torch.Generator().manual_seed(0), whole=whole))
    assert [len(part) for part in parts] == want
    assert sorted(torch.cat(parts).tolist()) == list(range(n))


def run(simulate: Any, method: str, **more: Any) -> Outcome:
    outcome = simulate(method, **more)
    assert isinstance(outcome, Outcome)
    return outcome


def test_fedper_with_nothing_private_is_fedavg(simulate: Any) -> None:
    assert run(simulate, "fedper", personal_layers=0).state_sha256 == run(simulate, "fedavg").state_sha256


def test_everything_private_is_local(simulate: Any) -> None:
    settings = {"rounds": 3}
    local = run(simulate, "local", settings=settings)
    assert run(simulate, "fedper", personal_layers=3, settings=settings).metrics == local.metrics
    assert run(simulate, "lgfedavg", global_layers=0, settings=settings).metrics == local.metrics


def test_lgfedavg_with_all_layers_global_is_fedavg(simulate: Any) -> None:
    assert run(simulate, "lgfedavg", global_layers=3).state_sha256 == run(simulate, "fedavg").state_sha256


def test_fedbabus_head_keeps_its_bits_under_momentum_and_weight_decay(digits: Federation) -> None:
    method = registry.make("fedbabu", lr=0.1, momentum=0.9, weight_decay=0.1)
    net = small_net(digits)
    head = {name: net.module.state_dict()[name].clone() for name in net.names(net.head)}
    simulation = Simulation(digits, net, method, Settings(rounds=3))
    simulation.run()
    for name, value in head.items():
        assert torch.equal(simulation.server.state[name], value)
    for name in net.names(*net.body):
        assert not torch.equal(simulation.server.state[name], simulation.plan.initial[name])


def test_fedrep_trains_the_head_first_and_then_the_body(digits: Federation) -> None:
    method = registry.make("fedrep", lr=0.05, head_epochs=1)
    net = small_net(digits)
    head, body = method.phases(client_of(digits, net, method))
    assert (tuple(head.trains), tuple(body.trains)) == ((net.head,), net.body)


def test_fine_tuning_starts_from_the_federations_model(simulate: Any) -> None:
    plain, tuned = run(simulate, "fedavg"), run(simulate, "fedavg+ft")
    assert tuned.state_sha256 == plain.state_sha256, "fine-tuning must not reach the federation"
    assert tuned.metrics["local.before.mean"] == plain.metrics["local.mean"]
    assert tuned.metrics["local.mean"] > plain.metrics["local.mean"] + 0.2


def test_batchnorm_statistics_are_averaged_by_default(pictures: Federation) -> None:
    def statistics(**hyper: Any) -> tuple[State, Simulation]:
        method = registry.make("fedavg", lr=0.05, **hyper)
        simulation = Simulation(pictures, batchnorm_net(pictures), method, Settings(rounds=1, new=False))
        simulation.run()
        return simulation.server.state, simulation

    averaged, simulation = statistics()
    buffers = [name for name, part in simulation.plan.parts.items() if part.is_buffer and "mean" in name]
    assert buffers
    for name in buffers:
        assert not torch.equal(averaged[name], simulation.plan.initial[name])
    for policy in ("private", "reset"):
        state, other = statistics(buffers=policy)
        for name in buffers:
            assert torch.equal(state[name], other.plan.initial[name])


def test_learning_rate_decays_by_round(digits: Federation) -> None:
    from perfed.core.plan import Round

    method = registry.make("fedavg", lr=0.1, lr_decay=0.5)
    assert [method.optimiser(Round(t, 3)).lr for t in (1, 2, 3)] == [0.1, 0.05, 0.025]


@dataclass(frozen=True, kw_only=True)
class Unmarked(Plain):
    """The same loss, of which nothing is known."""

    def loss(self, client: Client, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(client.logits(batch), batch.y)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}])
@pytest.mark.parametrize("name", ["mlp", "lenet5", "batchnorm", "resnet18"])
def test_a_linear_head_is_trained_by_hand_to_the_same_bits(
    name: str, settings: dict[str, Any], pictures: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*given: Any) -> None:
        calls.append(1)
        regress(*given)

    monkeypatch.setattr("perfed.core.fit.regress", counted)
    method = Plain(layers=fresh(pictures, name).layers[-1:], epochs=3, batch_size=7, **settings)
    fast, a = trained(pictures, fresh(pictures, name), method)
    assert len(calls) == 3
    slow, b = trained(pictures, fresh(pictures, name), Unmarked(**asdict(method)))
    assert len(calls) == 3, "a loss that is not marked is differentiated"
    assert fast.meter == slow.meter
    assert all(torch.equal(a[key], b[key]) for key in a)


@dataclass(frozen=True, kw_only=True)
class Sloped(Plain):
    """Gives the gradients itself; its loss is none."""

    def loss(self, client: Client, batch: Batch) -> torch.Tensor:
        raise AssertionError("nobody asks for the loss")

    def phases(self, client: Client) -> Sequence[Phase]:
        inner = gradients_of(client, Plain().loss, [*client.net.module.parameters()])

        def otherwise_laid_out(batch: Batch) -> list[torch.Tensor]:
            return [slope.t().contiguous().t() if slope.dim() == 2 else slope for slope in inner(batch)]

        return [Phase(self.epochs, trains=client.net.layers, slopes=otherwise_laid_out)]


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}])
@pytest.mark.parametrize("name", ["mlp", "lenet5", "batchnorm"])
def test_gradients_that_a_method_gives_take_the_place_of_its_loss(
    name: str, settings: dict[str, Any], pictures: Federation
) -> None:
    method = Sloped(layers=tuple(fresh(pictures, name).layers), epochs=2, batch_size=7, **settings)
    given, a = trained(pictures, fresh(pictures, name), method)
    by_loss, b = trained(pictures, fresh(pictures, name), Plain(**asdict(method)))
    assert given.meter == by_loss.meter
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_phase_has_a_loss_or_gives_the_gradients() -> None:
    with pytest.raises(ValueError, match="not both"):
        Phase(1, trains=("fc",), loss=Plain().loss, slopes=lambda batch: [])
