"""pFedC: branches, who shares which, MGDA-UB's step, and what is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed import nets
from perfed.core.client import Batch, Client, Update
from perfed.core.method import Method
from perfed.core.minnorm import min_norm
from perfed.core.plan import Plan, Round
from perfed.core.registry import make
from perfed.core.server import Server
from perfed.core.state import State
from perfed.data import Federation, federate, load
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Outcome, Settings
from perfed.engine.worker import Task, Worker
from perfed.errors import ConfigError, NetError, UpdateError
from perfed.methods.pfedc import PRESENCE, PFedC
from perfed.nets.branches import Branches, linear_head
from perfed.nets.net import Net
from tests.conftest import small_net

HEAD = "fc3"


def worker_of(method: PFedC, federation: Federation) -> Worker:
    return Worker(federation, method.build(small_net(federation)), method, rounds=4, seed=0)


def client_of(worker: Worker, client: int = 0, received: State | None = None, private: State | None = None) -> Client:
    given = dict(worker.plan.initial) if received is None else received
    return worker.client(Task("train", client, 1, 0, given, private or {}))


# The server's rule


def tiny_server() -> tuple[PFedC, Server]:
    """Three classes, representation of one value: a body of one weight and bias, three branches."""
    torch.manual_seed(0)
    method = PFedC()
    net = method.build(nets.build("mlp", (1, 1, 1), 3, hidden=[1]))
    plan = Plan(method, net, 5)
    return method, Server(method.start(net, 3, plan.initial), plan, 3)


def tiny_update(client: int, weight: float, body: float, rows: list[float], presence: list[float]) -> Update:
    column = torch.tensor(rows).view(3, 1)
    state = {
        "fc1.weight": torch.full((1, 1), body),
        "fc1.bias": torch.full((1,), -body),
        "branch/fc2.weight": column,
        "branch/fc2.bias": 10 * column.view(3),
        PRESENCE: torch.tensor(presence),
    }
    return Update(client, state, weight)


def test_the_masked_branch_mean_of_three_clients_by_hand() -> None:
    method, server = tiny_server()
    initial = server.state["branch/fc2.weight"].clone()
    updates = [
        tiny_update(0, 10, 1.0, [1.0, 2.0, 0.0], [1, 1, 0]),
        tiny_update(1, 30, 2.0, [3.0, 0.0, 0.0], [1, 0, 0]),
        tiny_update(2, 60, 4.0, [8.0, 0.0, 0.0], [1, 0, 0]),
    ]
    server.state = method.combine(server, updates, Round(1, 5))
    assert server.state["fc1.weight"].item() == pytest.approx(0.1 * 1 + 0.3 * 2 + 0.6 * 4), "bodies by data size"
    assert server.state["branch/fc2.weight"][0].item() == pytest.approx(4), "uniform over the three holders"
    assert server.state["branch/fc2.weight"][1].item() == pytest.approx(2), "the only holder"
    assert server.state["branch/fc2.weight"][2].item() == initial[2].item(), "nobody holds it: as it was"
    assert server.state["branch/fc2.bias"][:2].tolist() == pytest.approx([40, 20])
    assert PRESENCE not in server.state

    later = [tiny_update(1, 30, 0.0, [5.0, 7.0, 9.0], [0, 0, 1])]
    server.state = method.combine(server, later, Round(2, 5))
    assert server.state["branch/fc2.weight"].flatten().tolist() == pytest.approx([4, 2, 9]), "the last means stay"


def test_presence_is_0_or_1() -> None:
    method, server = tiny_server()
    bad = tiny_update(1, 30, 2.0, [3.0, 0.0, 0.0], [0.5, 0, 0])
    with pytest.raises(UpdateError, match=r"Client 1 sent presence"):
        method.verify(server, bad.state, "Client 1", Round(1, 5))
    with pytest.raises(UpdateError, match="missing presence"):
        method.verify(server, {k: v for k, v in bad.state.items() if k != PRESENCE}, "Client 1", Round(1, 5))


# A client's branches


def test_a_client_takes_the_means_of_its_classes_and_keeps_its_own_others(digits: Federation) -> None:
    method = PFedC(lr=0.05)
    worker = worker_of(method, digits)
    held = digits.client(0).class_counts > 0
    assert 0 < int(held.sum()) < 10
    shape = worker.plan.initial[f"{HEAD}.weight"].shape
    received = dict(worker.plan.initial) | {
        f"branch/{HEAD}.weight": torch.full(shape, 7.0),
        f"branch/{HEAD}.bias": torch.full((10,), 7.0),
    }
    private = {f"{HEAD}.weight": torch.full(shape, 3.0), f"{HEAD}.bias": torch.full((10,), 3.0)}
    client = client_of(worker, 0, received, private)
    method.personal(client)
    for name, tensor in private.items():
        now = client.weights()[name]
        assert bool((now[held] == 7).all())
        assert bool((now[~held] == 3).all())
        assert bool((tensor == 3).all()), "what is stored is left alone"

    fresh = client_of(worker, 0, received)  # a client that never took part
    method.personal(fresh)
    assert bool((fresh.weights()[f"{HEAD}.weight"][held] == 7).all())
    assert torch.equal(fresh.weights()[f"{HEAD}.weight"][~held], worker.plan.initial[f"{HEAD}.weight"][~held])


def test_what_leaves_a_client(digits: Federation) -> None:
    method = PFedC(lr=0.05)
    worker = worker_of(method, digits)
    client = client_of(worker)
    update = method.train(client)
    held = client.data.class_counts > 0
    trained = client.weights()
    assert f"{HEAD}.weight" not in update.state
    assert update.state[PRESENCE].tolist() == held.float().tolist()
    for name in (f"{HEAD}.weight", f"{HEAD}.bias"):
        sent = update.state[f"branch/{name}"]
        assert torch.equal(sent[held], trained[name][held])
        assert bool((sent[~held] == 0).all())
        assert bool((trained[name] != worker.plan.initial[name]).any(dim=-1).all()), "every branch learns at home"


def test_scored_with_the_mean_of_the_last_holders_under_partial_participation(digits: Federation) -> None:
    method = PFedC(lr=0.05)
    simulation = Simulation(digits, method.build(small_net(digits)), method, Settings(rounds=4, fraction=0.34))
    last: dict[int, Tensor] = {c: simulation.plan.initial[f"{HEAD}.weight"][c] for c in range(10)}
    for t in range(1, 5):
        held_tasks: list[Any] = []
        simulation._tamper = lambda reply, _, seen=held_tasks: (seen.append(reply), reply)[1]  # type: ignore[misc]
        simulation.step(t)
        for c in range(10):
            holders = [r.state[f"branch/{HEAD}.weight"][c] for r in held_tasks if r.state[PRESENCE][c] == 1]
            if holders:
                last[c] = torch.stack(holders).mean(dim=0)
    for i in range(digits.num_clients):
        client = simulation.scored(i)
        since, private = simulation.store.client(i)
        own = private[f"{HEAD}.weight"] if since else simulation.plan.initial[f"{HEAD}.weight"]
        for c in range(10):
            want = last[c] if client.data.class_counts[c] > 0 else own[c]
            torch.testing.assert_close(client.weights()[f"{HEAD}.weight"][c], want)
    simulation.close()


# Every client has every class


@dataclass(frozen=True, kw_only=True)
class GlobalBranches(Method):
    """FedAvg of one model with one-vs-rest losses."""

    title = "one global model per branch"

    def loss(self, client: Client, batch: Batch) -> Tensor:
        labels = F.one_hot(batch.y, 10).float()
        return F.binary_cross_entropy_with_logits(client.logits(batch), labels, reduction="none").mean(dim=0).sum()


@dataclass(frozen=True, kw_only=True)
class GlobalMgda(Method):
    """FedAvg of one model, with MGDA-UB between its one-vs-rest losses."""

    title = "one global model per branch, by MGDA"

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return PFedC.loss(PFedC(), client, batch)


def alike() -> Federation:
    """Four clients of equal size, each with every digit."""
    source = load("digits")
    owner = {part: np.full(len(source.y), -1) for part in ("train", "val", "test")}
    for c in range(10):
        rows = np.flatnonzero(source.y.numpy() == c)
        for client in range(4):
            owner["train"][rows[client * 10 : client * 10 + 8]] = client
            owner["test"][rows[client * 10 + 8 : client * 10 + 10]] = client
    return Federation(source.x, source.y, owner, 4, source.classes)


@pytest.mark.parametrize(
    "pair",
    [(PFedC(lr=0.1, combine_losses="sum"), GlobalBranches(lr=0.1)), (PFedC(lr=0.1), GlobalMgda(lr=0.1))],
    ids=["sum", "mgda"],
)
def test_where_everyone_has_every_class_it_is_one_global_model_per_branch(pair: tuple[Method, Method]) -> None:
    federation, finals = alike(), []
    for method in pair:
        simulation = Simulation(federation, method.build(small_net(federation)), method, Settings(rounds=3))
        outcome = simulation.run()
        assert outcome is not None
        finals.append((simulation.server.state, outcome))
    (branched, ours), (whole, theirs) = finals
    for name in whole:
        torch.testing.assert_close(branched.get(f"branch/{name}", branched[name]), whole[name], atol=1e-6, rtol=1e-5)
    assert ours.metrics["local.mean"] == pytest.approx(theirs.metrics["local.mean"])
    assert ours.metrics["new"] == pytest.approx(theirs.metrics["new"])


# The local step


def by_hand(
    method: PFedC, client: Client, x: Tensor, y: Tensor
) -> tuple[Tensor, list[tuple[Tensor, ...]], list[tuple[Tensor, ...]], Tensor]:
    """Every branch's gradient: of the representation, the body and the head, by one backward pass each."""
    net, tasks = client.net, method.tasks(client.net)
    z = net.features(x)
    losses = tasks.losses(linear_head(net)(z), y)
    body = [p for n, p in net.module.named_parameters() if not n.startswith(HEAD)]
    head = list(linear_head(net).parameters())
    of_z, of_body, of_head = [], [], []
    for loss in losses:
        of_z.append(torch.autograd.grad(loss, z, retain_graph=True)[0].flatten())
        of_body.append(torch.autograd.grad(loss, body, retain_graph=True))
        of_head.append(torch.autograd.grad(loss, head, retain_graph=True))
    return torch.stack(of_z), of_body, of_head, losses.detach()


@pytest.mark.parametrize("normalise", ["none", "l2", "loss"])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize(
    "split",
    [{}, {"branches": 3}, {"branches": 3, "group_logits": True}, {"groups": ((1, 3, 5, 7, 9), (0, 2, 4), (6, 8))}],
)
def test_mgda_ub_step_equals_a_backward_pass_per_branch(
    normalise: Any, scale: bool, split: dict[str, Any], digits: Federation
) -> None:
    method = PFedC(combine_losses="mgda", normalise=normalise, scale=scale, **split)
    client = client_of(worker_of(method, digits))
    x, y = client.data.train.x[:12], client.data.train.y[:12]
    of_z, of_body, of_head, losses = by_hand(method, client, x, y)
    size = {"none": torch.ones_like(losses), "l2": of_z.norm(dim=1), "loss": losses}[normalise]
    unit = of_z / size[:, None]
    weights = min_norm(unit @ unit.T) * (len(losses) if scale else 1)

    client.net.module.zero_grad()
    method.loss(client, Batch(x, y, torch.arange(12))).backward()  # type: ignore[no-untyped-call]
    names = dict(client.net.module.named_parameters())
    body = [p for n, p in names.items() if not n.startswith(HEAD)]
    for k, parameter in enumerate(body):
        want = sum(w * some[k] for w, some in zip(weights, of_body, strict=True))
        torch.testing.assert_close(parameter.grad, want, atol=2e-6, rtol=1e-3)
    for k, parameter in enumerate(linear_head(client.net).parameters()):
        torch.testing.assert_close(parameter.grad, sum(some[k] for some in of_head), atol=1e-6, rtol=1e-4)


def test_the_gram_matrix_in_closed_form(digits: Federation) -> None:
    method = PFedC(combine_losses="mgda")
    client = client_of(worker_of(method, digits))
    x, y = client.data.train.x[:9], client.data.train.y[:9]
    of_z = by_hand(method, client, x, y)[0].double()
    z, weight = client.net.features(x), linear_head(client.net).weight
    residual = (linear_head(client.net)(z).sigmoid() - F.one_hot(y, 10)).detach().double()
    w = weight.detach().double()
    torch.testing.assert_close(residual.T @ residual * (w @ w.T) / 9**2, of_z @ of_z.T, atol=1e-9, rtol=1e-4)


def test_the_sum_is_the_sum(digits: Federation) -> None:
    method = PFedC(combine_losses="sum")
    client = client_of(worker_of(method, digits))
    x, y = client.data.train.x[:12], client.data.train.y[:12]
    _, of_body, _, losses = by_hand(method, client, x, y)
    loss = method.loss(client, Batch(x, y, torch.arange(12)))
    assert float(loss.detach()) == pytest.approx(float(losses.sum()), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    first = next(client.net.module.parameters())
    torch.testing.assert_close(first.grad, sum(some[0] for some in of_body), atol=1e-6, rtol=1e-4)


def test_fine_tuning_the_head_uses_stored_features(digits: Federation) -> None:
    method = PFedC(lr=0.05, finetune_epochs=2, finetune="head", combine_losses="mgda")
    client = client_of(worker_of(method, digits))
    before = client.weights()
    method.adapt(client)
    moved = {name for name, tensor in client.weights().items() if not torch.equal(tensor, before[name])}
    assert moved == {f"{HEAD}.weight", f"{HEAD}.bias"}


# Groups, and what is measured


def test_consecutive_and_given_groups() -> None:
    net = nets.build("mlp", (1, 8, 8), 10, hidden=[8])
    assert PFedC(branches=3).tasks(net).groups == ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))
    assert PFedC(branches=5).tasks(net).groups == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
    assert PFedC().tasks(net).groups == tuple((c,) for c in range(10))
    assert PFedC(branches=3).build(net).module.get_submodule("fc2").out_features == 3
    assert PFedC(branches=3, group_logits=True).build(net).module.get_submodule("fc2").out_features == 10
    assert PFedC().build(net) is net


@pytest.mark.parametrize(
    "wrong",
    [
        {"branches": 11},
        {"groups": ((0, 1), (2,))},
        {"groups": (tuple(range(10)), (0,))},
        {"groups": ((), tuple(range(10)))},
    ],
)
def test_groups_that_do_not_divide_the_classes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="10 classes"):
        PFedC(**wrong).build(nets.build("mlp", (1, 8, 8), 10, hidden=[8]))


def test_a_head_that_is_not_linear_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Bilinear(4, 4, 2))
    net = Net(module, {"body": ["1"], "head": ["2"]}, (), 2)
    with pytest.raises(NetError, match="Bilinear"):
        PFedC().build(net)


class Normalised(nn.Module):
    """Returns log-probabilities, not its head's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x.flatten(1)).relu()).log_softmax(dim=1)


@pytest.mark.parametrize("name", ["pfedc", "privacypfedc"])
@pytest.mark.parametrize("method", [{}, {"combine_losses": "sum"}, {"branches": 5}])
def test_a_network_with_something_behind_its_head_is_refused(name: str, method: dict[str, Any]) -> None:
    """Its branches would be trained on other logits than they predict with."""
    chain = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10), nn.LogSoftmax(1))
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Sigmoid())
    for module, head in ((Normalised(), "out"), (chain, "2"), (bare, "1")):
        with pytest.raises(NetError, match=f"head '{head}'"):
            make(name, **method).build(nets.wrap(module, head, (1, 8, 8)))


def test_a_network_that_returns_what_its_head_gives_is_accepted() -> None:
    chain = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10), nn.Identity())
    for module, head in ((chain, "2"), (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "1")):
        net = nets.wrap(module, head, (1, 8, 8))
        assert PFedC().build(net) is net
        assert PFedC(branches=5).build(net)(torch.zeros(2, 1, 8, 8)).shape == (2, 5)


def test_scores_are_the_logits_where_every_class_has_a_branch() -> None:
    tasks = PFedC().tasks(nets.build("mlp", (1, 8, 8), 3, hidden=[8]))
    logits = torch.tensor([[0.3, -2.0, 1.0]])
    assert torch.equal(tasks.scores(logits, torch.tensor([5, 0, 9])), logits)
    odds = logits.exp()
    torch.testing.assert_close(tasks.scores(logits, torch.tensor([5, 0, 9])).softmax(dim=1), odds / odds.sum())


def test_one_logit_for_a_group_is_shared_as_the_client_s_classes_are() -> None:
    tasks = Branches(((0, 2), (1,)))
    logits, counts = torch.tensor([[2.0, -1.0], [-3.0, 0.5]]), torch.tensor([1, 7, 5])
    scores = tasks.scores(logits, counts)
    torch.testing.assert_close(scores[0], torch.tensor([2.0, -1.0, 2.0]) + torch.tensor([2 / 8, 1.0, 6 / 8]).log())
    assert scores.argmax(dim=1).tolist() == [2, 1], "the client's most frequent class of the group"
    torch.testing.assert_close(tasks.verdicts(scores), logits)
    assert tasks.held(torch.tensor([0, 0, 3])).tolist() == [True, False]


def test_task_and_group_accuracy_by_hand(digits: Federation) -> None:
    method = PFedC()
    client = client_of(worker_of(method, digits))
    scores = torch.full((2, 10), -1.0)
    scores[0, 3] = 2.0  # right, and right about the nine others
    scores[1, 4] = 2.0  # the label is 5: two of ten tasks wrong
    assert method.measures(client, scores, torch.tensor([3, 5]))["task"].tolist() == pytest.approx([1.0, 0.8])
    assert "group" not in method.measures(client, scores, torch.tensor([3, 5]))

    grouped = PFedC(branches=2, group_logits=True)
    found = grouped.measures(client_of(worker_of(grouped, digits)), scores, torch.tensor([3, 5]))
    assert found["task"].tolist() == pytest.approx([1.0, 0.0])
    assert found["group"].tolist() == [True, False]


@pytest.mark.parametrize("hyper", [{"branches": 4}, {"branches": 4, "group_logits": True}, {"combine_losses": "mgda"}])
def test_runs_with_every_kind_of_branch(hyper: dict[str, Any], simulate: Callable[..., Outcome]) -> None:
    found = simulate("pfedc", **hyper).metrics
    assert 0 <= found["local.mean"] <= 1
    assert 0 <= found["local.task.mean"] <= 1
    assert ("local.group.mean" in found) == ("branches" in hyper)


def test_an_unseen_client_joins(simulate: Callable[..., Outcome]) -> None:
    federation = federate("digits", clients=6, split="classes:2", seed=0, unseen=1)
    found = simulate("pfedc", federation=federation, settings={"rounds": 3, "fraction": 1.0}, lr=0.1)
    assert found.metrics["unseen.mean"] > 0.5
    assert "unseen.task.mean" in found.metrics


def test_it_learns_more_than_one_model_for_all(simulate: Callable[..., Outcome]) -> None:
    settings = {"rounds": 6, "fraction": 1.0, "eval_every": 6, "new": False}
    ours, fedavg = (simulate(name, settings=settings, lr=0.1, epochs=2) for name in ("pfedc", "fedavg"))
    assert ours.metrics["local.mean"] > fedavg.metrics["local.mean"] + 0.1
    assert ours.metrics["local.task.mean"] > 0.9
