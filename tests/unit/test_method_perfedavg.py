"""Per-FedAvg: its gradient against the exact one, BatchNorm as before the inner step, adaptation before scoring."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from perfed import nets
from perfed.core.client import Batch, Client
from perfed.core.registry import make
from perfed.core.state import State
from perfed.data import Federation, federate
from perfed.engine.settings import Outcome
from perfed.methods.perfedavg import PerFedAvg
from perfed.nets.net import Net
from tests.conftest import small_net
from tests.runs import at_work, personal, shaken, stepped, whole

Run = Callable[..., Outcome]


@dataclass(frozen=True, kw_only=True)
class Regression(PerFedAvg):
    """Least squares onto the one-hot label: a quadratic in the weights of a linear network."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return (client.logits(batch) - F.one_hot(batch.y, 10)).square().sum(dim=1).mean() / 2


def three_batches(client: Client) -> tuple[Batch, Batch, Batch]:
    data = client.data.train
    a, b, c = (
        Batch(data.x[i], data.y[i], i) for i in (torch.arange(0, 20), torch.arange(20, 40), torch.arange(40, 60))
    )
    return a, b, c


def slopes(client: Client, w: State, batch: Batch) -> State:
    """The least squares' gradient in closed form, in double precision."""
    x = torch.cat([batch.x.flatten(1), torch.ones(len(batch.y), 1)], dim=1).double()
    both = torch.cat([w["fc1.weight"], w["fc1.bias"][:, None]], dim=1).double()
    g = (x @ both.T - F.one_hot(batch.y, 10)).T @ x / len(x)
    return {"fc1.weight": g[:, :-1], "fc1.bias": g[:, -1]}


def hessian_times(client: Client, g: State, batch: Batch) -> State:
    x = torch.cat([batch.x.flatten(1), torch.ones(len(batch.y), 1)], dim=1).double()
    both = torch.cat([g["fc1.weight"], g["fc1.bias"][:, None]], dim=1).double() @ (x.T @ x / len(x))
    return {"fc1.weight": both[:, :-1], "fc1.bias": both[:, -1]}


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_the_gradient_on_a_quadratic_is_the_exact_one(variant: str, digits: Federation) -> None:
    """With three batches: (I - alpha H(D'')) grad f(w - alpha grad f(w; D); D'), without the Hessian in `fo`."""
    torch.manual_seed(0)
    net = nets.build("mlp", digits.input_shape, digits.num_classes, hidden=[])
    method = Regression(alpha=0.05, variant=variant)  # type: ignore[arg-type]
    client = at_work(method, digits, net=net)
    w = {n: p.detach().clone() for n, p in net.module.named_parameters()}
    first, second, third = three_batches(client)
    theta = {n: w[n].double() - 0.05 * g for n, g in slopes(client, w, first).items()}
    exact = slopes(client, theta, second)
    product = hessian_times(client, exact, third)
    if variant == "hf":
        exact = {n: g - 0.05 * product[n] for n, g in exact.items()}
    found = method.meta_gradient(client, first, second, third)
    for n, g in exact.items():
        torch.testing.assert_close(found[n].double(), g, rtol=0, atol=1e-4)
        assert float((0.05 * product[n]).abs().max()) > 1e-2, "the Hessian's part would not be missed"


def test_hessian_free_is_nearer_to_the_true_meta_gradient_of_a_network(digits: Federation) -> None:
    """F(w) = f(w - alpha grad f(w)) differentiated through the inner step; a smooth network, as ReLU has kinks."""
    torch.manual_seed(0)
    module = nn.Sequential(OrderedDict(flat=nn.Flatten(), one=nn.Linear(64, 16), tanh=nn.Tanh(), two=nn.Linear(16, 10)))
    net = Net(module, {"one": ["one"], "two": ["two"]}, digits.input_shape, digits.num_classes)
    client = at_work(PerFedAvg(), digits, net=net)
    batch = whole(client)
    w = {n: p.detach().clone().requires_grad_() for n, p in net.module.named_parameters()}
    inner = F.cross_entropy(functional_call(net.module, w, (batch.x,)), batch.y)
    g = torch.autograd.grad(inner, list(w.values()), create_graph=True)
    theta = {n: t - 0.2 * s for (n, t), s in zip(w.items(), g, strict=True)}
    F.cross_entropy(functional_call(net.module, theta, (batch.x,)), batch.y).backward()

    def error(variant: str) -> float:
        method = make("perfedavg", alpha=0.2, variant=variant)
        found = method.meta_gradient(client, batch, batch, batch)  # type: ignore[attr-defined]
        return max(float((found[n] - t.grad).abs().max()) for n, t in w.items() if t.grad is not None)

    assert error("hf") < 1e-4
    assert error("fo") > 20 * error("hf")


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_weights_and_batchnorm_are_as_if_only_theta_had_seen_data(variant: str, digits: Federation) -> None:
    method = PerFedAvg(alpha=0.1, variant=variant)  # type: ignore[arg-type]
    client = at_work(method, digits, net="batchnorm")
    client.net.module.train()
    before = client.weights()
    first, second, third = three_batches(client)
    method.meta_gradient(client, first, second, third)
    after = client.weights()
    twin = small_net(digits, "batchnorm")
    twin.module.train()
    F.cross_entropy(twin(first.x), first.y).backward()
    buffers = {n for n, _ in twin.module.named_buffers()}
    twin.module.load_state_dict(
        {n: before[n] - 0.1 * p.grad for n, p in twin.module.named_parameters() if p.grad is not None}
        | {n: before[n] for n in buffers}
    )
    twin(second.x)
    for name, value in twin.module.state_dict().items():
        expected = value if name in buffers else before[name]
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6)
        assert name not in buffers or not torch.equal(after[name], before[name])
    assert all(torch.equal(after[n], before[n]) for n in before if n not in buffers)


def test_a_round_applies_the_meta_gradient_with_the_learning_rate(digits: Federation) -> None:
    method = make("perfedavg", lr=0.3, alpha=0.1, batch_size=10_000)
    client = at_work(method, digits)
    batch, source = whole(client), client.generator("meta")
    first, third = (method.draw(client, batch, source) for _ in range(2))  # type: ignore[attr-defined]
    g = method.meta_gradient(client, first, batch, third)  # type: ignore[attr-defined]
    start = client.weights()
    update = method.train(client)
    for name, w in start.items():
        torch.testing.assert_close(update.state[name], w - 0.3 * g[name], rtol=0, atol=1e-5)


def test_the_batches_of_a_step_are_drawn_apart(digits: Federation) -> None:
    method = PerFedAvg()
    client = at_work(method, digits)
    source, like = client.generator("meta"), three_batches(client)[0]
    first, second = (method.draw(client, like, source) for _ in range(2))
    assert len(first.index.unique()) == len(second.index.unique()) == 20
    assert not torch.equal(first.index, second.index)


def test_a_client_adapts_by_one_step_on_all_its_data_before_it_is_scored(digits: Federation) -> None:
    method = make("perfedavg", lr=0.05, alpha=0.1, momentum=0.9, weight_decay=0.5)
    simulation = stepped(method, digits)
    assert method.adapts
    for i in range(digits.num_clients):
        net, data = small_net(digits), digits.client(i).train
        net.module.load_state_dict(simulation.server.state)
        F.cross_entropy(net(data.x), data.y).backward()
        found = personal(simulation, i)
        for name, w in net.module.named_parameters():
            assert w.grad is not None
            torch.testing.assert_close(found[name], w.detach() - 0.1 * w.grad, rtol=0, atol=1e-6)
    history = simulation.history[-1]
    assert history["local.mean"] > history["local.before.mean"]


def test_several_steps_and_fine_tuning_follow_if_asked(digits: Federation) -> None:
    one, more = (stepped(make("perfedavg", lr=0.05, adapt_steps=k), digits, rounds=1) for k in (1, 5))
    tuned = stepped(make("perfedavg+ft", lr=0.05), digits, rounds=1)
    assert one.history[-1]["local.loss"] > more.history[-1]["local.loss"] > tuned.history[-1]["local.loss"]


def test_new_clients_adapt_like_the_others() -> None:
    federation = federate("digits", clients=7, split="classes:2", seed=0, unseen=1)
    simulation = stepped(make("perfedavg", lr=0.05), federation)
    client = at_work(make("perfedavg", lr=0.05), federation, client=6, received=dict(simulation.server.state))
    client.net.module.eval()
    simulation.method.adapt(client)
    for name, value in personal(simulation, 6).items():
        torch.testing.assert_close(value, client.weights()[name], rtol=0, atol=1e-6)
        assert not torch.equal(value, simulation.server.state[name])


@pytest.mark.parametrize(("variant", "passes"), [("fo", 2), ("hf", 4)])
def test_its_work_is_counted(variant: str, passes: int, digits: Federation) -> None:
    method = make("perfedavg", variant=variant)
    client = at_work(method, digits, received=shaken(dict(small_net(digits).module.state_dict())))
    method.train(client)
    assert client.meter.samples == passes * client.size
