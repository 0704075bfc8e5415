"""FedROD: balanced softmax without the log of nothing, a shared and a private head, and their sum scored."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from perfed.core.plan import Plan
from perfed.core.registry import make
from perfed.data import Federation, federate
from perfed.methods.fedrod import FedROD, TwoHeads
from tests.conftest import small_net
from tests.runs import at_work, personal, stepped, whole


def test_on_balanced_data_it_is_plain_softmax_to_the_bit() -> None:
    torch.manual_seed(0)
    logits, y = torch.randn(40, 10), torch.randint(10, (40,))
    for n in (1, 7, 600):
        prior = FedROD().prior(torch.full((10,), n))
        assert torch.equal(F.cross_entropy(logits + prior, y), F.cross_entropy(logits, y))


def test_balanced_softmax_by_hand_with_classes_that_are_missing() -> None:
    torch.manual_seed(0)
    counts = torch.tensor([30, 0, 10, 0, 1])
    logits, y = torch.randn(20, 5, requires_grad=True), torch.tensor([0, 2, 4, 0] * 5)
    loss = F.cross_entropy(logits + FedROD().prior(counts), y)
    loss.backward()
    weighted = counts * logits.detach().exp()
    by_hand = -(weighted[torch.arange(20), y] / weighted.sum(dim=1)).log().mean()
    torch.testing.assert_close(loss.detach(), by_hand)
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())
    assert bool((logits.grad[:, [1, 3]] == 0).all()), "the generic head forgets no class that a client lacks"


def test_gamma_is_the_power_of_the_counts() -> None:
    prior = FedROD(gamma=0.5).prior(torch.tensor([16, 4, 0]))
    torch.testing.assert_close(prior[:2].exp(), torch.tensor([1.0, 0.5]))
    assert float(prior[2]) == -torch.inf


@pytest.mark.parametrize(("net", "head"), [("mlp", "fc3"), ("conv3attn", "classifier"), ("batchnorm", "head")])
def test_the_private_head_is_private_and_the_generic_one_shared(net: str, head: str, digits: Federation) -> None:
    plain = small_net(digits, net)
    built = FedROD().build(small_net(digits, net))
    private = Plan(FedROD(), built, 3).private(1)
    own = {n.removeprefix(f"{head}.") for n in plain.names(plain.head)}
    assert {n for n, which in private.items() if which} == {f"{head}.personal.{n}" for n in own}
    assert {n for n, which in private.items() if not which} == set(plain.names(*plain.body)) | {
        f"{head}.generic.{n}" for n in own
    }
    x = torch.rand(3, *digits.input_shape)
    plain.module.eval()
    built.module.eval()
    assert torch.equal(built(x), plain(x)), "the private head begins at zero"


def test_one_step_by_hand(digits: Federation) -> None:
    """The body and the generic head feel the balanced loss alone, the private head the other alone."""
    method = make("fedrod", lr=0.1, batch_size=10_000)
    client = at_work(method, digits)
    with torch.no_grad():
        for parameter in client.net.module.get_submodule("fc3.personal").parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    start, batch = client.weights(), whole(client)
    counts = torch.bincount(batch.y, minlength=10)
    generic_net = small_net(digits)
    logits = generic_net(batch.x)
    held = counts > 0
    weighted = torch.where(held, counts * logits.exp(), torch.zeros(()))
    (-(weighted[torch.arange(len(batch.y)), batch.y] / weighted.sum(dim=1)).log().mean()).backward()
    z = generic_net.features(batch.x).detach()
    W, b = (start[f"fc3.personal.{n}"].clone().requires_grad_() for n in ("weight", "bias"))
    F.cross_entropy(logits.detach() + z @ W.T + b, batch.y).backward()
    method.train(client)
    after = client.weights()
    for name, p in generic_net.module.named_parameters():
        ours = name.replace("fc3.", "fc3.generic.")
        assert p.grad is not None
        torch.testing.assert_close(after[ours], start[ours] - 0.1 * p.grad, rtol=0, atol=1e-6)
    for name, p in (("weight", W), ("bias", b)):
        assert p.grad is not None
        torch.testing.assert_close(after[f"fc3.personal.{name}"], p.detach() - 0.1 * p.grad, rtol=0, atol=1e-6)


def test_the_sum_of_both_heads_is_scored(digits: Federation) -> None:
    simulation = stepped(make("fedrod", lr=0.05), digits, fraction=1.0)
    for i in range(digits.num_clients):
        client = simulation.scored(i)
        head = client.net.module.get_submodule("fc3")
        assert isinstance(head, TwoHeads)
        x = client.data.test.x
        z = client.net.features(x)
        scores = simulation.method.predict(client, x)
        torch.testing.assert_close(scores, head.generic(z) + head.personal(z), rtol=0, atol=1e-6)
        assert not torch.equal(scores.argmax(1), head.generic(z).argmax(1)) or float(head.personal(z).abs().max()) > 0
    confusion = simulation.history[-1]["clients"]["confusion"]
    predicted = torch.bincount(scores.argmax(1), minlength=10)
    assert torch.equal(torch.tensor(confusion[i]).sum(dim=0), predicted)


def test_a_client_that_lacks_classes_never_makes_anything_infinite(digits: Federation) -> None:
    assert int((digits.counts() == 0).sum()) > 0
    simulation = stepped(make("fedrod", lr=0.5, momentum=0.9), digits, fraction=1.0)
    states = [simulation.server.state, *(simulation.store.client(i)[1] for i in range(digits.num_clients))]
    assert all(bool(torch.isfinite(t).all()) for state in states for t in state.values())


def test_a_new_client_learns_a_private_head_and_nothing_else() -> None:
    federation = federate("digits", clients=7, split="classes:2", seed=0, unseen=1)
    simulation = stepped(make("fedrod", lr=0.05, weight_decay=0.1, momentum=0.9), federation)
    found = personal(simulation, 6)
    for name, value in simulation.server.state.items():
        assert torch.equal(found[name], value) == ("personal" not in name)
