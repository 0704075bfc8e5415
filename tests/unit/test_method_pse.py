"""PSE: Grad-CAM's weights, excited channels, swapped queries, a frozen global extractor; FedPer without all of them."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed import nets
from perfed.core.client import Batch, Client
from perfed.core.plan import Plan
from perfed.core.registry import make
from perfed.core.state import State, under, within
from perfed.data import Federation, Source, federate, load
from perfed.errors import NetError
from perfed.methods.pse import PSE, alpha, divide, excited, extract
from perfed.nets.net import Net
from tests.conftest import small_net
from tests.runs import alike, at_work, personal, shaken, stepped, whole


@pytest.fixture(scope="module")
def few() -> Federation:
    """Three clients with few samples."""
    source = load("digits")
    return federate(Source(source.name, source.x[:180], source.y[:180], source.classes), clients=3, split="iid")


def built(federation: Federation, **switches: Any) -> Net:
    return PSE(**switches).build(small_net(federation, "conv3attn"))


def ready(federation: Federation, **hyper: Any) -> tuple[Client, Tensor, Batch, State]:
    """A client whose extractor has moved away from the received one, its objective, a batch, and what it received."""
    method = PSE(**hyper)
    client = at_work(method, federation, net="conv3attn")
    received = client.weights()
    (phase,) = method.phases(client)
    assert phase.loss is not None
    client.net.module.train().requires_grad_()
    client.load(shaken({n: t for n, t in received.items() if n.startswith("conv")}, 4, 0.05))
    batch = whole(client)
    return client, phase.loss(client, batch), batch, received


def gradients(client: Client, loss: Tensor) -> State:
    named = dict(client.net.module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def straight(net: Net, received: State, batch: Batch, **switches: Any) -> Tensor:
    """Equation 8 as it is written: two whole networks, and alpha as the derivative by each filter's bias.

    A bias is added at every position of its map, so that derivative is the sum over positions.
    """
    method, other = PSE(**switches), net.clone()
    other.module.load_state_dict(received | {n: t for n, t in net.module.state_dict().items() if n[:4] != "conv"})
    head = net.module.get_submodule("classifier")
    f, g = net.features(batch.x), other.features(batch.x)
    queries = (g.detach(), f) if method.exchange else (f, g)
    p, p_other = head[1:](head[0](queries[0], f)), head[1:](head[0](queries[1], g))
    p_loss = head[1:](head[0](queries[1], g.detach()))
    loss = F.cross_entropy(p, batch.y) + (F.cross_entropy(p_loss, batch.y) if method.exchange else 0)
    if not method.excitation:
        return loss
    for layer in ("conv1", "conv2", "conv3"):
        ours, theirs = (n.module.get_submodule(layer) for n in (net, other))
        pick = torch.arange(len(batch.y)), batch.y
        a = torch.autograd.grad(p[pick].mean(), ours.bias, retain_graph=True)[0]
        b = torch.autograd.grad(p_other[pick].mean(), theirs.bias, retain_graph=True)[0]
        delta = (torch.sigmoid(b) - torch.sigmoid(a)).relu()
        for k in range(len(delta)):
            if delta[k] > 0 and delta[k] >= delta.mean():
                loss = loss + method.xi / 2 * (ours.weight[k] - theirs.weight[k].detach()).square().sum()
    return loss


# Equation 3


def test_alpha_is_captums_grad_cam_weight(few: Federation) -> None:
    captum = import_module("captum.attr")
    net = built(few)
    net.module.eval()
    client = at_work(PSE(), few, net="conv3attn")
    x, y = client.data.train.x[:5].double(), client.data.train.y[:5]
    net.module.double()
    extractor, _, _ = divide(net)
    features, maps = extract(extractor, x)
    p = net.run_suffix(features, 3)
    ours = alpha(p, y, features, features, maps)
    for number, layer in enumerate(("conv1", "conv2", "conv3")):
        cam = captum.LayerGradCam(net.module, net.module.get_submodule(layer))
        weighted = cam.attribute(x, target=y, attr_dim_summation=False)  # weight_k / positions * map_k
        cells = maps[number].shape[2] * maps[number].shape[3]
        weights = cells * weighted.sum(dim=(2, 3)) / maps[number].sum(dim=(2, 3))
        torch.testing.assert_close(ours[number], weights.mean(dim=0).to(ours[number].dtype), rtol=1e-6, atol=1e-9)


def test_alpha_is_what_raising_a_whole_map_does_to_the_true_classes_logit(few: Federation) -> None:
    net = built(few)
    net.module.double().eval()
    data = at_work(PSE(), few, net="conv3attn").data.train
    x, y = data.x[:4].double(), data.y[:4]
    extractor, _, _ = divide(net)
    features, maps = extract(extractor, x)
    found = alpha(net.run_suffix(features, 3), y, features, features, maps)
    pick, step = (torch.arange(4), y), 1e-6
    for layer, scores in zip(("conv1", "conv2", "conv3"), found, strict=True):
        bias = net.module.get_submodule(layer).bias
        for k in (0, 7, 31):
            with torch.no_grad():
                bias[k] += step
                above = net(x)[pick].mean()
                bias[k] -= 2 * step
                below = net(x)[pick].mean()
                bias[k] += step
            assert float(scores[k]) == pytest.approx(float(above - below) / (2 * step), rel=1e-4, abs=1e-7)


# Equation 4


def test_excited_channels_by_hand() -> None:
    def logit(p: list[float]) -> Tensor:
        return torch.tensor(p).logit()

    # differences 0.4, 0.1, -0.3 -> 0, 0; their mean is 0.125
    mask = excited(logit([0.2, 0.5, 0.8, 0.5]), logit([0.6, 0.6, 0.5, 0.5]))
    assert mask.tolist() == [True, False, False, False]
    assert not excited(logit([0.5, 0.6]), logit([0.5, 0.4])).any(), "none where the global model leads nowhere"
    assert not excited(torch.zeros(3), torch.zeros(3)).any(), "a mean of zero excites nobody"
    assert excited(logit([0.2, 0.2]), logit([0.5, 0.5])).all()
    saturated = excited(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 9.0]))
    assert saturated.tolist() == [True, False], "0.23 and 0.007 after the sigmoid"


def test_the_pull_is_xi_times_the_distance_on_excited_filters_alone(few: Federation) -> None:
    with_pull, without = ready(few, xi=0.5), ready(few, xi=0.0)
    client, received = with_pull[0], with_pull[3]
    pulled, free = gradients(*with_pull[:2]), gradients(*without[:2])
    change = {n: pulled[n] - free[n] for n in received}
    partly = 0
    for name, difference in change.items():
        moved = client.weights()[name] - received[name]
        if name.startswith("conv") and name.endswith("weight"):
            rows = difference.flatten(1).abs().sum(dim=1) > 1e-4
            partly += bool(rows.any()) and not bool(rows.all())
            torch.testing.assert_close(difference[rows], 0.5 * moved[rows], rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(difference[~rows], torch.zeros_like(moved[~rows]), rtol=0, atol=1e-5)
        else:
            torch.testing.assert_close(difference, torch.zeros_like(difference), rtol=0, atol=1e-5)
    assert partly == 3, "in every layer some filters are excited and some are not"


def test_the_step_of_equation_4_moves_excited_filters_by_xi_and_the_loss_has_no_pull(few: Federation) -> None:
    pulled, free = gradients(*ready(few, xi=0.5)[:2]), gradients(*ready(few, xi=0.0)[:2])
    method = PSE(xi=0.25, pull="step")
    client = at_work(method, few, net="conv3attn")
    received = client.weights()
    (phase,) = method.phases(client)
    assert phase.loss is not None
    assert phase.after_step is not None
    client.net.module.train().requires_grad_()
    client.load(shaken({n: t for n, t in received.items() if n.startswith("conv")}, 4, 0.05))
    before = {name: tensor.clone() for name, tensor in client.weights().items()}
    found = gradients(client, phase.loss(client, whole(client)))
    torch.testing.assert_close(found, free, rtol=1e-4, atol=1e-6)
    phase.after_step(client)
    for name, now in client.weights().items():
        expected = before[name].clone()
        if name.startswith("conv") and name.endswith("weight"):
            rows = (pulled[name] - free[name]).flatten(1).abs().sum(dim=1) > 1e-4
            assert rows.any()
            expected[rows] += 0.25 * (received[name] - expected)[rows]
        torch.testing.assert_close(now, expected, rtol=1e-5, atol=1e-6)


# Equations 7 and 8


@pytest.mark.parametrize("off", [(), ("excitation",), ("exchange",), ("position",), ("excitation", "exchange")])
def test_loss_and_gradients_are_the_papers(off: tuple[str, ...], few: Federation) -> None:
    switches = dict.fromkeys(off, False) | {"xi": 1.0}
    client, loss, batch, received = ready(few, **switches)
    expected = straight(client.net, received, batch, **switches)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    ours, theirs = gradients(client, loss), gradients(client, expected)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


def test_the_global_extractor_stays_as_it_was_received(few: Federation) -> None:
    """In a second batch the filters are drawn to what was received, not to where training has come."""
    method = PSE(lr=0.05, batch_size=12, xi=5.0)
    client, reference = (at_work(method, few, net="conv3attn") for _ in range(2))
    received = client.weights()
    method.train(client)
    source, data, net = reference.generator("fit/0"), reference.data.train, reference.net
    net.module.train().requires_grad_()
    step = torch.optim.SGD(net.module.parameters(), lr=0.05)
    for index in torch.randperm(len(data), generator=source).split(12):
        step.zero_grad()
        straight(net, received, Batch(data.x[index], data.y[index], index), xi=5.0).backward()
        step.step()
    for name, value in client.weights().items():
        torch.testing.assert_close(value, reference.weights()[name], rtol=1e-3, atol=1e-4)


def test_training_leaves_no_gradient_in_the_global_extractor(few: Federation) -> None:
    copies: list[nn.Module] = []
    original = copy.deepcopy

    def remember(module: Any) -> Any:
        copies.append(original(module))
        return copies[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perfed.methods.pse.copy.deepcopy", remember)
        client, loss, _, received = ready(few)
    loss.backward()  # type: ignore[no-untyped-call]
    (extractor,) = (m for m in copies if isinstance(m, nn.Sequential))
    assert all(p.grad is None for p in extractor.parameters())
    assert not extractor.training
    assert all(p.grad is not None for p in client.net.module.parameters())
    kept = [t for n, t in received.items() if n.startswith("conv")]
    assert all(torch.equal(a, b) for a, b in zip(extractor.state_dict().values(), kept, strict=True))


# Limits and switches


@pytest.mark.parametrize("limit", [{"xi": 0.0}, {"excitation": False}])
def test_without_pull_and_exchange_it_is_fedper_on_the_same_network_to_the_bit(
    limit: dict[str, Any], few: Federation
) -> None:
    hyper = {"lr": 0.05, "momentum": 0.5, "batch_size": 20, "inference": "received"}
    ours = stepped(PSE(exchange=False, **limit, **hyper), few, net="conv3attn")
    hyper.pop("inference")
    theirs = stepped(make("fedper", **hyper), few, net=built(few))
    assert alike(ours.server.state, theirs.server.state)
    for i in range(few.num_clients):
        assert alike(personal(ours, i), personal(theirs, i))
    default = stepped(PSE(**hyper), few, net="conv3attn")
    assert not alike(ours.server.state, default.server.state), "the default is not the limit"


def test_the_position_term_is_private_and_can_be_left_out(few: Federation) -> None:
    given = small_net(few, "conv3attn")
    name = "classifier.attention.position"
    assert name not in given.module.state_dict(), "baselines have the plain self-attention of equation 6"
    plan = Plan(PSE(), PSE().build(given), 2)
    assert plan.private(1)[name] is True
    assert {n for n, which in plan.travels(1).items() if which} == {
        f"conv{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")
    }
    placed = nets.build("conv3attn", few.input_shape, 10, position=True)
    assert name not in PSE(position=False).build(placed).names("classifier")
    assert torch.equal(PSE().build(placed).module.state_dict()[name], placed.module.state_dict()[name])
    assert name not in given.module.state_dict(), "the given network is not changed"


def test_a_client_predicts_by_self_attention_with_the_extractor_it_trained(few: Federation) -> None:
    for inference in ("local", "received"):
        simulation = stepped(PSE(lr=0.05, batch_size=20, inference=inference), few, net="conv3attn", rounds=2)
        for i in range(few.num_clients):
            since, kept = simulation.store.client(i)
            own = within("own", kept)
            assert bool(own) == (inference == "local" and since > 0)
            scored = simulation.scored(i)
            extractor = own or {n: t for n, t in simulation.server.state.items() if n.startswith("conv")}
            assert all(torch.equal(scored.weights()[n], t) for n, t in extractor.items())
            assert all(torch.equal(scored.weights()[n], t) for n, t in kept.items() if n.startswith("classifier"))
            x = scored.data.test.x[:3]
            features, head = scored.net.features(x), scored.net.module.get_submodule("classifier")
            assert torch.equal(simulation.method.predict(scored, x), head[1:](head[0](features, features)))
        simulation.close()


def test_a_round_starts_from_the_received_extractor(few: Federation) -> None:
    first = {n: t.clone() for n, t in built(few).module.state_dict().items()}
    own = under("own", shaken({n: t for n, t in first.items() if n.startswith("conv")}, 3))
    method = PSE(lr=0.05, batch_size=20)
    fresh, returning = (
        at_work(method, few, net="conv3attn", received=first, private=p, since=1, t=2) for p in ({}, own)
    )
    assert alike(method.train(fresh).state, method.train(returning).state)


@pytest.mark.parametrize("name", ["fedrep", "fedper"])
def test_baselines_keep_the_whole_classifier_of_this_network(name: str, few: Federation) -> None:
    plan = Plan(make(name), small_net(few, "conv3attn"), 2)
    kept = {n for n, which in plan.private(1).items() if which}
    assert kept == {n for n in plan.parts if n.startswith("classifier.")}


@pytest.mark.parametrize("name", ["conv3", "mlp"])
def test_a_network_without_attention_is_refused(name: str, few: Federation) -> None:
    with pytest.raises(NetError, match="conv3attn"):
        PSE().build(small_net(few, name))
