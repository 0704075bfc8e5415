"""Rounds: what is refused, what is counted, what is measured, and that cost follows the participants."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from perfed import nets
from perfed.core import registry
from perfed.core.client import Client
from perfed.core.fit import Phase
from perfed.core.method import Method, probabilities
from perfed.core.state import finite, to_bytes
from perfed.data import Federation, federate, from_tensors
from perfed.engine import evaluate
from perfed.engine.executors import Pool, Serial, WorkerError
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Outcome, Settings
from perfed.engine.worker import Reply, Task, Worker
from perfed.errors import ConfigError, NetError, SplitError
from perfed.methods.pfedc import PRESENCE
from tests.conftest import batchnorm_net, small_net
from tests.contract.rows import ROWS


def start(federation: Federation, method: Method | str = "fedavg", **more: Any) -> Simulation:
    settings = Settings(**{"rounds": 2, "fraction": 1.0, **more.pop("settings", {})})
    made = registry.make(method, lr=0.05) if isinstance(method, str) else method
    return Simulation(federation, made.build(small_net(federation)), made, settings, **more)


def renamed(reply: Reply) -> Reply:
    return dataclasses.replace(reply, state={f"x{k}": v for k, v in reply.state.items()})


def reshaped(reply: Reply) -> Reply:
    return dataclasses.replace(reply, state={k: v.reshape(1, *v.shape) for k, v in reply.state.items()})


def weighing(weight: object) -> Callable[[Reply], Reply]:
    return lambda reply: dataclasses.replace(reply, scalars=reply.scalars | {"weight": weight})


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (renamed, "other tensors"),
        (reshaped, "not as"),
        (weighing(float("nan")), "weight nan"),
        (weighing(0), "weight 0"),
        (weighing(-3.0), "weight -3.0"),
        (weighing(1e308), "weight 1e+308"),
        (weighing("10"), "weight '10'"),
        (weighing(None), "weight None"),
        (lambda reply: dataclasses.replace(reply, client=reply.client + 1), "answered as client"),
        (lambda reply: Reply(reply.client, {}, {}, {"error": "disk full"}), "disk full"),
    ],
)
def test_garbage_costs_only_its_sender(spoil: Callable[[Reply], Reply], word: str, digits: Federation) -> None:
    tampered = start(digits, tamper=lambda reply, t: spoil(reply) if reply.client == 2 and t == 1 else reply)
    outcome = tampered.run()
    assert outcome is not None
    [fault] = outcome.faults
    assert (fault["t"], fault["client"]) == (1, 2)
    assert "Client 2" in fault["reason"]
    assert word in fault["reason"]


def enormous(reply: Reply) -> Reply:
    """Finite in itself, and of the right names, shapes and types; where presence is told, of all classes."""
    huge = {
        name: torch.full_like(value, 1.0 if name == PRESENCE else 3e38) if value.is_floating_point() else value
        for name, value in reply.state.items()
    }
    return dataclasses.replace(reply, state=huge)


def test_values_that_overflow_together_cost_their_senders_and_not_the_others(digits: Federation) -> None:
    def without(reply: Reply) -> Reply:
        return Reply(reply.client, {}, {}, {"error": "left out"})

    states = []
    for change in (enormous, without):
        bad = start(digits, "pfedc", tamper=lambda reply, t, do=change: do(reply) if reply.client in (1, 4) else reply)
        bad.step(1)
        assert {(fault["t"], fault["client"]) for fault in bad.faults} == {(1, 1), (1, 4)}
        states.append((bad.store.state_sha256(), bad.ledger.samples, bad.ledger.bytes_up))
        if change is enormous:
            assert all(f"Client {fault['client']} sent" in fault["reason"] for fault in bad.faults)
            assert all("would not be finite" in fault["reason"] for fault in bad.faults)
        bad.close()
    assert states[0] == states[1]


def test_a_round_whose_updates_all_overflow_changes_nothing(digits: Federation) -> None:
    simulation = start(digits, "pfedc", tamper=lambda reply, t: enormous(reply))
    before = dict(simulation.server.state)
    simulation.step(1)
    assert len(simulation.faults) == digits.num_clients
    assert all(torch.equal(simulation.server.state[name], tensor) for name, tensor in before.items())
    simulation.close()


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.travels])
def test_no_method_commits_what_is_not_finite_or_falls_over(name: str, digits: Federation) -> None:
    """Whatever a method computes from enormous values of two clients."""
    row = ROWS[name]
    method = registry.make(name, **{"lr": 0.05, **row.hyper})
    net = method.build(small_net(digits, row.net))
    made = Simulation(
        *(digits, net, method, Settings(rounds=20, eval_every=10)),
        tamper=lambda reply, t: enormous(reply) if reply.client in (2, 3) else reply,
    )
    made.step(1)
    slots = [made.server.slots[client] for client in made.server.slots.known()]
    assert all(finite(tensor) for state in (made.server.state, *slots) for tensor in state.values())
    assert {fault["client"] for fault in made.faults} <= {2, 3}
    made.close()


def test_a_method_that_falls_over_by_itself_is_not_blamed_on_clients(digits: Federation) -> None:
    class Broken(registry.method_class("fedavg")):  # type: ignore[misc]
        def combine(self, *_: object) -> dict[str, torch.Tensor]:
            raise ValueError("a mistake")

    simulation = start(digits, Broken(lr=0.05))
    with pytest.raises(ValueError, match="a mistake"):
        simulation.step(1)
    simulation.close()


def test_a_weight_beyond_a_clients_samples_is_refused_where_clients_answer_for_themselves(digits: Federation) -> None:
    class Apart(Serial):
        apart = True

    limit = 2 * digits.size(2)
    for weight, fine in ((limit, True), (limit + 1, False), (9e11, False)):
        simulation = start(
            digits,
            executor=Apart,
            tamper=lambda reply, t, weight=weight: weighing(weight)(reply) if reply.client == 2 else reply,
        )
        simulation.step(1)
        reasons = [fault["reason"] for fault in simulation.faults]
        simulation.close()
        refused = [f"[E500] Client 2 sent the weight {weight:g}; it has {limit // 2} training samples."]
        assert reasons == ([] if fine else refused)


def test_a_round_in_which_all_updates_are_bad_changes_nothing(digits: Federation) -> None:
    simulation = start(digits, tamper=lambda reply, t: renamed(reply) if t == 1 else reply)
    before = dict(simulation.server.state)
    simulation.step(1)
    assert all(torch.equal(simulation.server.state[k], v) for k, v in before.items())
    simulation.step(2)
    assert not torch.equal(simulation.server.state["fc1.weight"], before["fc1.weight"])
    simulation.close()


def test_bytes_are_those_of_the_real_messages(digits: Federation) -> None:
    sent: list[int] = []
    simulation = start(digits, "fedper", tamper=lambda reply, t: sent.append(len(to_bytes(reply.state))) or reply)
    outcome = simulation.run()
    assert outcome is not None
    assert outcome.cost["bytes_up"] == sum(sent)
    layers = outcome.cost["layers"]
    assert set(layers) == {f"{way}/{layer}" for way in ("up", "down") for layer in simulation.worker.net.body}
    assert sum(v for k, v in layers.items() if k.startswith("up")) < outcome.cost["bytes_up"]


def test_flops_and_parameters_times_batches_by_hand(digits: Federation) -> None:
    simulation = start(digits, settings={"rounds": 1, "new": False})
    outcome = simulation.run()
    assert outcome is not None
    sizes = digits.sizes("train")
    weights = [(64, 16), (16, 12), (12, 10)]
    parameters = sum(a * b + b for a, b in weights)
    assert outcome.cost["param_batches"] == parameters * sum(math.ceil(n / 10) for n in sizes)
    assert outcome.cost["samples"] == sum(sizes)
    forward = sum(2 * a * b for a, b in weights)
    backward = 2 * forward - 2 * 64 * 16  # no gradient with respect to the images
    assert outcome.cost["flops"] == (forward + backward) * sum(sizes)


def test_the_final_adaptation_is_counted_by_hand_and_apart(digits: Federation) -> None:
    def cost(method: str, **settings: Any) -> dict[str, Any]:
        made = registry.make(method, **({"finetune_epochs": 3} if method.endswith("+ft") else {}))
        outcome = start(digits, made, settings={"rounds": 2, "eval_every": 1, "new": False} | settings).run()
        assert outcome is not None
        return outcome.cost

    plain, tuned = cost("fedavg"), cost("fedavg+ft")
    assert plain["adapt_flops"] == 0
    assert tuned["flops"] == plain["flops"]
    assert tuned["adapt_flops"] == 3 * plain["flops"] // 2  # two rounds of an epoch, three epochs of adapting
    assert cost("fedavg+ft", adapt="always")["adapt_flops"] == tuned["adapt_flops"]
    assert cost("fedavg+ft", adapt="never")["adapt_flops"] == 0


def test_what_clients_have_besides_their_network_is_recorded(digits: Federation) -> None:
    def besides(method: str) -> list[dict[str, dict[str, Any]]]:
        simulation = start(digits, method)
        for t in (1, 2):
            simulation.step(t)
        found = [{e["name"]: e for e in record["besides"]} for record in simulation.store.records()]
        simulation.close()
        return found

    net = small_net(digits)
    size = sum(tensor.numel() for tensor in net.module.state_dict().values())
    assert besides("fedavg") == [{}, {}]
    (own,) = besides("ditto")[-1].values()
    assert (own["layers"], own["kept"], own["up"], own["down"]) == (list(net.layers), size, 0, 0)
    assert own["bytes_kept"] == 4 * size
    variates = besides("scaffold")[-1].values()
    assert sorted((e["kept"], e["up"], e["down"]) for e in variates) == [(0, 0, size), (0, size, 0), (size, 0, 0)]
    scalars = [e for e in besides("apfl")[-1].values() if not e["layers"]]
    assert [e["kept"] for e in scalars] == [1]
    first, second = besides("fedfomo")
    assert sum(e["down"] for e in first.values()) < sum(e["down"] for e in second.values())
    assert all(e["down"] % size == 0 for e in second.values())  # several models under one name


def test_metrics_by_hand() -> None:
    truth, guess = torch.randint(4, (200,)), torch.randint(5, (200,))
    confusion = torch.bincount(truth * 5 + guess, minlength=25).view(5, 5)
    assert evaluate.accuracy(confusion) == pytest.approx(float((truth == guess).double().mean()))
    want = f1_score(truth, guess, labels=sorted(set(truth.tolist())), average="macro", zero_division=0)
    assert evaluate.macro_f1(confusion) == pytest.approx(want)
    assert math.isnan(evaluate.accuracy(torch.zeros(2, 2)))
    values = np.array([0.1, 0.2, 0.6, float("nan"), *[0.9] * 18])
    found = evaluate.summary(values, np.array([1.0, 2.0, 3.0, 50.0, *[1.0] * 18]))
    assert found["mean"] == pytest.approx((0.1 + 0.2 + 0.6 + 16.2) / 21)
    assert found["weighted"] == pytest.approx((0.1 + 0.4 + 1.8 + 16.2) / 24)
    assert found["worst10"] == pytest.approx(0.15)


def test_new_is_the_vote_of_all_clients(digits: Federation) -> None:
    simulation = start(digits, "local")
    outcome = simulation.run()
    assert outcome is not None
    pooled, total = digits.pooled_test(), torch.zeros(0)
    again = start(digits, "local")
    again.step(1)
    again.step(2)
    for number in digits.participants:
        since, private = again.store.client(number)
        client = again.worker.client(Task("evaluate", number, 2, since, {}, private))
        client.net.module.eval()
        votes = probabilities(again.method, client, pooled.x).double()
        total = votes if not len(total) else total + votes
    assert outcome.metrics["new"] == pytest.approx(float((total.argmax(1) == pooled.y).double().mean()))
    again.close()


def test_unseen_clients_never_train_and_join_by_adapting() -> None:
    federation = federate("digits", clients=8, split="classes:3", seed=0, unseen=3)
    simulation = start(federation, "fedrep", settings={"rounds": 12})
    outcome = simulation.run()
    assert outcome is not None
    assert set(outcome.clients["ids"]) == set(federation.participants)
    assert outcome.metrics["unseen.mean"] > 0.6
    joined = start(federation, "fedavg", settings={"rounds": 1})
    joined.step(1)
    assert all(joined.store.client(i)[0] == 0 for i in federation.unseen)
    joined.close()


def test_external_data_is_another_source() -> None:
    x, y = torch.randint(0, 255, (40, 1, 8, 8), dtype=torch.uint8), torch.arange(40) % 10
    federation = federate("digits", clients=5, split="classes:2", seed=0, external=from_tensors(x, y))
    outcome = start(federation).run()
    assert outcome is not None
    assert 0 <= outcome.metrics["external"] < 0.5


def test_the_last_rounds_are_averaged_and_the_best_is_chosen_by_validation(digits: Federation) -> None:
    outcome = start(digits, "fedrep", settings={"rounds": 8, "eval_every": 4, "last_k": 3}).run()
    assert outcome is not None
    assert [entry["t"] for entry in outcome.history] == [4, 6, 7, 8]
    last = [entry["local.mean"] for entry in outcome.history[-3:]]
    assert outcome.metrics["local.last"] == pytest.approx(sum(last) / 3)
    best = max(outcome.history, key=lambda entry: (entry["local.val"], -entry["t"]))
    assert outcome.metrics["local.best_val_round"] == best["t"]
    assert outcome.metrics["local.best_val"] == best["local.mean"]


def test_adaptation_follows_the_setting(digits: Federation) -> None:
    def run(adapt: str) -> Outcome:
        outcome = start(digits, "fedbabu", settings={"rounds": 4, "eval_every": 2, "adapt": adapt}).run()
        assert outcome is not None
        return outcome

    never, final, always = run("never"), run("final"), run("always")
    assert [entry["adapted"] for entry in always.history] == [True, True]
    assert [entry["adapted"] for entry in final.history] == [False, True]
    assert final.metrics["local.mean"] == always.metrics["local.mean"]
    assert never.metrics["local.mean"] == final.metrics["local.before.mean"]
    assert never.metrics["new"] != final.metrics["new"] == always.metrics["new"]
    assert len({never.state_sha256, final.state_sha256, always.state_sha256}) == 1


class Dying(Worker):
    """Kills its own process on client 1, once or always."""

    always = False
    parent = os.getpid()

    def run(self, task: Task) -> Reply:
        marker = os.environ["PERFED_TEST_MARKER"]
        if task.client == 1 and os.getpid() != self.parent and (self.always or not os.path.exists(marker)):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(task)


def tasks(worker: Worker) -> list[Task]:
    return [Task("train", i, 1, 0, dict(worker.plan.initial), {}) for i in range(4)]


def test_a_worker_that_dies_is_replaced_and_its_task_done(
    digits: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("PERFED_TEST_MARKER", str(tmp_path / "died"))
    worker = Dying(digits, small_net(digits), registry.make("fedavg"), 1, 0)
    worker.parent = os.getpid()
    pool = Pool(worker, 2)
    replies = pool.run(tasks(worker))
    pool.close()
    assert (tmp_path / "died").exists()
    expected = Serial(Worker(digits, small_net(digits), registry.make("fedavg"), 1, 0)).run(tasks(worker))
    for a, b in zip(replies, expected, strict=True):
        assert a.client == b.client
        assert all(torch.equal(a.state[k], b.state[k]) for k in b.state)


def test_a_worker_that_keeps_dying_is_named(digits: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PERFED_TEST_MARKER", str(tmp_path / "died"))
    worker = Dying(digits, small_net(digits), registry.make("fedavg"), 1, 0)
    worker.parent, worker.always = os.getpid(), True
    pool = Pool(worker, 2)
    with pytest.raises(WorkerError, match="client 1"):
        pool.run(tasks(worker))
    pool.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Broken(Method):
    def train(self, client: Client) -> Any:
        raise RuntimeError("no such luck")


def test_an_exception_in_a_method_reaches_the_user_from_a_worker_too(digits: Federation) -> None:
    with pytest.raises(RuntimeError, match="no such luck"):
        start(digits, Broken()).run()
    with pytest.raises(WorkerError, match="no such luck"):
        start(digits, Broken(), workers=2).run()


def federation_of(clients: int) -> Federation:
    """Every client has the same ten samples, so that only their number differs."""
    x = torch.randint(0, 255, (10, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(10) % 2
    source = from_tensors(x.repeat(clients, 1, 1, 1), y.repeat(clients))
    return federate(source, clients=clients, split="iid", seed=0)


def test_a_round_costs_what_its_participants_cost() -> None:
    """Ten participants of 100 or of 10,000 clients: the same samples, queries and memory, but for the data itself."""
    found = {}
    for clients in (100, 10_000):
        federation = federation_of(clients)
        simulation = start(federation, "fedper", settings={"rounds": 20, "fraction": 10 / clients, "eval_every": 99})
        queries: list[str] = []
        simulation.store._db.set_trace_callback(queries.append)
        simulation.step(1)
        tracemalloc.start()
        for t in range(2, 6):
            simulation.step(t)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        found[clients] = (len(queries), peak, simulation.ledger.bytes_up)
        simulation.close()
    few, many = found[100], found[10_000]
    assert many[0] <= few[0] + 5 * 10  # a client that comes again is in the cache
    assert many[2] == few[2]
    assert many[1] < 1.1 * few[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternating(Method):
    """Head and body take turns: what travels in a round is not what travelled in the round before."""

    def turn(self, layer: str, head: str, t: int) -> bool:
        return (layer == head) == (t % 2 == 0)

    def travels(self, part: Any, round: Any, shared: Any) -> Any:
        return shared if self.turn(part.layer, part.net.head, round.t) else False

    def phases(self, client: Client) -> Any:
        layers = [x for x in client.net.layers if self.turn(x, client.net.head, client.round.t)]
        return [Phase(1, trains=layers)]


def test_a_client_gets_all_that_ever_changed(digits: Federation) -> None:
    simulation = start(digits, Alternating(lr=0.05), settings={"rounds": 6, "fraction": 0.34})
    for t in range(1, 7):
        simulation.step(t)
    for number in range(6):
        client = simulation.scored(number)
        for name, tensor in client.weights().items():
            assert torch.equal(tensor, simulation.server.state[name]), f"client {number} has another {name}"
    simulation.close()


@pytest.mark.parametrize("policy", ["average", "private", "reset"])
def test_the_model_one_gets_is_the_model_that_was_scored(policy: str, digits: Federation) -> None:
    method = registry.make("fedavg", lr=0.05, buffers=policy)
    simulation = Simulation(digits, batchnorm_net(digits), method, Settings(rounds=3))
    for t in range(1, 4):
        simulation.step(t)
    scored = dict(zip(*(simulation.history[-1]["clients"][key] for key in ("ids", "accuracy")), strict=True))
    for number, accuracy in scored.items():
        client = simulation.scored(number)
        test = digits.split(number, "test")
        found = (probabilities(method, client, test.x).argmax(1) == test.y).double().mean()
        assert float(found) == pytest.approx(accuracy)
    simulation.close()


@pytest.mark.parametrize("name", [name for name in registry.methods() if name != "pse"])
def test_one_sample_and_batch_normalisation_go_together(name: str, tmp_path: Any) -> None:
    x = torch.randint(0, 255, (24, 1, 8, 8), dtype=torch.uint8)
    rows = [
        "index,client,part",
        "0,0,train",
        "1,0,test",
        *(f"{i},1,{'train' if i % 2 else 'test'}" for i in range(2, 24)),
    ]
    (tmp_path / "who.csv").write_text("\n".join(rows) + "\n")
    federation = federate(from_tensors(x, torch.arange(24) % 2), split=f"file:{tmp_path / 'who.csv'}")
    assert federation.size(0) == 1
    method = registry.make(name, lr=0.05, **({"unfreeze": (0,)} if name in ("vanilla", "anti") else {}))
    try:
        net = method.build(batchnorm_net(federation))
    except NetError:
        assert name == "fedma"  # cannot match through BatchNorm, and says so
        return
    outcome = Simulation(federation, net, method, Settings(rounds=2)).run()
    assert outcome is not None
    assert not outcome.faults


@pytest.mark.parametrize("name", [name for name in registry.methods() if name != "pse"])
def test_a_network_that_is_a_head_alone_runs_or_is_refused(name: str, digits: Federation) -> None:
    method = registry.make(name, lr=0.05)
    try:
        net = method.build(nets.build("mlp", digits.input_shape, digits.num_classes, hidden=[]))
        outcome = Simulation(digits, net, method, Settings(rounds=2, new=False)).run()
    except NetError:
        assert name in ("anti", "cd2pfed", "fedma", "fedpac", "vanilla")
        return
    assert outcome is not None
    assert not outcome.faults


def test_nesterov_without_momentum_is_refused_at_the_start(digits: Federation) -> None:
    with pytest.raises(ConfigError, match="momentum"):
        start(digits, registry.make("fedavg", nesterov=True))


def test_a_run_leaves_torchs_random_numbers_alone(digits: Federation) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    net = small_net(digits)
    torch.manual_seed(5)
    Simulation(digits, net, registry.make("fedavg"), Settings(rounds=1)).run()
    assert torch.equal(torch.rand(3), expected)


def test_external_classes_are_matched_by_name() -> None:
    x, y = torch.randint(0, 255, (40, 1, 8, 8), dtype=torch.uint8), torch.arange(40) % 2
    own = from_tensors(x, torch.arange(40) % 3, classes=["ant", "bee", "cat"])
    other = from_tensors(x, y, classes=["cat", "bee"])
    federation = federate(own, clients=2, split="iid", external=other)
    assert federation.external is not None
    assert federation.external.y.tolist() == [2 if v == 0 else 1 for v in y.tolist()]
    with pytest.raises(SplitError, match="dog"):
        federate(own, clients=2, split="iid", external=from_tensors(x, y, classes=["cat", "dog"]))
