"""FedBSD: FedRep without the distillation, the teacher as received and computed once, both starts of the student."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed import nets
from perfed.core.client import Batch, Client, Update
from perfed.core.fit import Phase
from perfed.core.registry import make
from perfed.core.state import State, under, within
from perfed.data import Federation, Source, federate, load
from perfed.engine.rounds import Outcome
from perfed.errors import NetError
from perfed.methods.fedbsd import FedBSD
from perfed.nets.net import Net
from tests.conftest import small_net
from tests.runs import alike, at_work, personal, shaken, stepped, whole


@pytest.fixture(scope="module")
def even() -> Federation:
    """Six clients with equally many samples."""
    source = load("digits")
    some = Source(source.name, source.x[:480], source.y[:480], source.classes)
    made = federate(some, clients=6, split="iid", seed=0)
    assert len(set(made.sizes("train").tolist())) == 1
    return made


@dataclass(frozen=True, kw_only=True)
class Plain(FedBSD):
    """The same round without any saving: a copy of the received body teaches batch by batch, on images."""

    def train(self, client: Client) -> Update:
        net, teacher = client.net, client.net.clone()
        body, head = len(net.body), net.module.get_submodule(net.head_path)

        def distil(client: Client, batch: Batch) -> Tensor:
            teacher.module.eval()
            with torch.no_grad():
                p = (teacher.features(batch.x) / self.tau).softmax(dim=1)
            features = net.run_prefix(batch.x, body)
            q = (features / self.tau).softmax(dim=1)
            kl = (p * (p / q).log()).sum(dim=1).mean()
            return F.cross_entropy(head(features), batch.y) + self.lam * self.tau**2 * kl

        self.fit(client, [Phase(self.head_epochs, (net.head,), reuse=False)])
        if self.student == "own":
            client.load(within("own", client.memory))
        self.fit(client, [Phase(0, ()), Phase(self.epochs, net.body, loss=distil)])
        return client.update(weight=1.0)


def initial(federation: Federation, net: str = "mlp") -> State:
    return {name: t.clone() for name, t in small_net(federation, net).module.state_dict().items()}


@pytest.mark.parametrize("net", ["mlp", "conv3"])
def test_without_distillation_it_is_fedrep_to_the_bit(net: str, even: Federation) -> None:
    hyper = {"lr": 0.05, "momentum": 0.5, "weight_decay": 1e-3, "head_epochs": 3, "epochs": 2}
    ours = stepped(make("fedbsd", lam=0.0, **hyper), even, net=net)
    theirs = stepped(make("fedrep", **hyper), even, net=net)
    assert alike(ours.server.state, theirs.server.state)
    for i in range(even.num_clients):
        assert alike(personal(ours, i), personal(theirs, i))
    default = stepped(make("fedbsd", **hyper), even, net=net)
    assert not alike(ours.server.state, default.server.state), "the default is not the limit"


def test_without_distillation_it_is_fedrep_with_dropout_too(even: Federation) -> None:
    def net() -> Net:
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 12), nn.Dropout(0.5), nn.Linear(12, 10)
        return nets.wrap(nn.Sequential(*layers), "5", even.input_shape)

    hyper = {"lr": 0.05, "head_epochs": 3, "epochs": 2}
    ours = stepped(make("fedbsd", lam=0.0, **hyper), even, net=net())
    theirs = stepped(make("fedrep", **hyper), even, net=net())
    assert alike(ours.server.state, theirs.server.state)
    for i in range(even.num_clients):
        assert alike(personal(ours, i), personal(theirs, i))


@pytest.mark.parametrize("student", ["received", "own"])
@pytest.mark.parametrize("net", ["mlp", "batchnorm", "conv3"])
def test_cached_features_give_what_a_teacher_gives_batch_by_batch(net: str, student: str, digits: Federation) -> None:
    # a rate at which no rounding decides what pooling chooses, on any processor
    hyper = {"lr": 0.02, "momentum": 0.5, "head_epochs": 2, "epochs": 2, "student": student}
    first = initial(digits, net)
    body = [n for n in first if not n.startswith(("fc3", "head", "fc2." if net == "conv3" else "-"))]
    private = under("own", shaken({n: first[n] for n in body}, 3))
    private = {n: t for n, t in private.items() if "scale" not in n and "shift" not in n}
    clients = [
        at_work(method, digits, net=net, received=first, private=dict(private), since=1, t=2)
        for method in (FedBSD(**hyper), Plain(**hyper))
    ]
    quick, plain = FedBSD(**hyper).train(clients[0]), Plain(**hyper).train(clients[1])
    assert quick.state.keys() == plain.state.keys()
    for name, value in clients[0].weights().items():
        torch.testing.assert_close(value, clients[1].weights()[name], rtol=1e-5, atol=1e-5)


def test_the_divergence_by_hand() -> None:
    method = FedBSD(tau=2.0)
    teacher, student = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    p = 1 / (1 + math.exp(-1))
    there = 4 * (p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p)))
    back = 4 * 0.5 * (math.log(0.5 / p) + math.log(0.5 / (1 - p)))
    distributions = method.distribution(teacher), method.distribution(student)
    assert float(method.divergence(*distributions)) == pytest.approx(there, rel=1e-5)
    assert there != pytest.approx(back, rel=1e-2), "the other direction is another number"
    pair = method.divergence(*(torch.cat([d, d]) for d in distributions))
    assert float(pair) == pytest.approx(there, rel=1e-5), "the mean over samples, the sum over features"


def test_a_body_step_by_hand(digits: Federation) -> None:
    method = make("fedbsd", lr=0.1, lam=0.7, tau=3.0, head_epochs=0, batch_size=10_000, student="own")
    w, own = shaken(initial(digits), 1), shaken(initial(digits), 2)
    kept = {n: t for n, t in own.items() if not n.startswith("fc3")}
    head = {n: w[n] for n in w if n.startswith("fc3")}
    client = at_work(method, digits, received=w, private=head | under("own", kept), since=1, t=2)
    teacher, student, batch = small_net(digits), small_net(digits), whole(client)
    teacher.module.load_state_dict(w)
    student.module.load_state_dict(kept | head)
    p = (teacher.features(batch.x) / 3).softmax(dim=1).detach()
    q = (student.features(batch.x) / 3).softmax(dim=1)
    (F.cross_entropy(student(batch.x), batch.y) + 0.7 * 9 * (p * (p / q).log()).sum(dim=1).mean()).backward()
    update = method.train(client)
    assert update.state.keys() == kept.keys()
    for name, parameter in student.module.named_parameters():
        if name in kept:
            assert parameter.grad is not None
            torch.testing.assert_close(update.state[name], own[name] - 0.1 * parameter.grad, rtol=0, atol=1e-5)
            assert torch.equal(client.memory[f"own/{name}"], update.state[name])
        else:
            assert torch.equal(client.weights()[name], w[name]), "the head is frozen"


def test_a_participant_counts_once_however_many_samples_it_has() -> None:
    uneven = federate("digits", clients=4, split="dirichlet:0.5", seed=0)
    assert len(set(uneven.sizes("train").tolist())) > 1
    method = make("fedbsd", lr=0.05, head_epochs=1)
    updates = []

    def watch(reply, t):  # type: ignore[no-untyped-def]
        updates.append(reply.state)
        return reply

    simulation = stepped(method, uneven, rounds=1, fraction=1.0, tamper=watch)
    assert len(updates) == 4
    for name in updates[0]:
        mean = torch.stack([u[name] for u in updates]).mean(dim=0)
        torch.testing.assert_close(simulation.server.state[name], mean, rtol=0, atol=1e-6)


def test_head_and_batchnorm_stay_home_and_the_teacher_has_the_clients_own_batchnorm(digits: Federation) -> None:
    method = make("fedbsd", lr=1e-12, head_epochs=0)
    first = initial(digits, "batchnorm")
    other = {n: t.abs() if n.endswith("running_var") else t for n, t in shaken(first, 5, 0.5).items()}
    home = {n: t for n, t in other.items() if n.startswith(("scale", "shift", "head"))}
    received = {n: t for n, t in first.items() if n not in home}
    client = at_work(method, digits, net="batchnorm", received=received, private=home, since=1, t=2)
    batch = whole(client)
    _, body = method.phases(client)
    assert body.loss is not None
    client.net.module.eval()
    assert alike(client.weights(), received | home), "the teacher's pass leaves the statistics alone"
    with torch.no_grad():
        expected = F.cross_entropy(client.net(batch.x), batch.y)
        torch.testing.assert_close(body.loss(client, batch), expected, rtol=0, atol=1e-5)
    assert method.train(client).state.keys() == received.keys()


def test_received_is_scored_with_the_new_body_and_own_with_the_clients(digits: Federation) -> None:
    for student in ("received", "own"):
        simulation = stepped(make("fedbsd", lr=0.05, head_epochs=1, student=student), digits)
        for i in range(digits.num_clients):
            since, kept = simulation.store.client(i)
            scored = personal(simulation, i)
            own = within("own", kept)
            assert bool(own) == (student == "own" and since > 0)
            body = own or {n: simulation.server.state[n] for n in scored if not n.startswith("fc3")}
            head = {n: kept.get(n, simulation.plan.initial[n]) for n in scored if n.startswith("fc3")}
            assert alike(scored, body | head)
        simulation.close()


def test_own_bodies_survive_a_pool_of_workers(simulate: Callable[..., Outcome]) -> None:
    """What is kept is the tensor that is sent: both must come out of a worker."""
    runs = [simulate("fedbsd", head_epochs=1, student="own", simulation={"workers": n}) for n in (1, 2)]
    assert runs[0].state_sha256 == runs[1].state_sha256
    assert runs[0].metrics == runs[1].metrics


def test_a_dropout_teacher_drops_nothing(digits: Federation) -> None:
    torch.manual_seed(0)
    net = nets.build("mlp", digits.input_shape, digits.num_classes, hidden=[16], dropout=0.5)
    method = make("fedbsd", head_epochs=0)
    client = at_work(method, digits, net=net)
    _, body = method.phases(client)
    client.net.module.eval()
    batch = whole(client)
    with torch.no_grad():
        assert body.loss is not None
        expected = F.cross_entropy(client.net(batch.x), batch.y)
        torch.testing.assert_close(body.loss(client, batch), expected, rtol=0, atol=1e-5)


def test_a_network_without_a_cut_before_its_head_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = nn.Linear(64, 8), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.fc(self.body(x.flatten(1)))

    with pytest.raises(NetError, match="cannot be cut before its head 'fc'"):
        FedBSD().build(nets.wrap(Scaled(), "fc", (1, 8, 8)))
