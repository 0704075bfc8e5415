"""Messages hold what was put into them, and what is not a message is refused, whatever was done to it."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from perfed import config as configuration
from perfed.core import registry
from perfed.core.client import Client, Update
from perfed.core.download import verify_download
from perfed.core.plan import Round
from perfed.core.server import Peer, Server
from perfed.core.state import State
from perfed.data import Federation
from perfed.engine import evaluate
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.worker import Kept, Reply, Task
from perfed.errors import ConfigError, PerfedError, UpdateError
from perfed.flower import deployment
from perfed.flower.answering import answer
from perfed.flower.computing import compute
from perfed.flower.limits import download_limit, upload_limit, wanted
from perfed.flower.messages import Job, Wanted, read_reply, read_task, write_reply, write_task
from perfed.flower.payload import HEADER, Fields, read_state, write_state
from perfed.flower.rollcall import Present
from perfed.flower.site import Site
from perfed.prepare import prepare
from tests.conftest import small_net
from tests.contract.rows import ROWS
from tests.e2e.cluster import pictures

MUTATIONS = int(os.environ.get("PERFED_MUTATIONS", "1000")) // 10
"""damaged messages, a tenth of them; each kind of message takes one or two tenths"""
JOB = Job("rounds = 3\n", "r", ("a", "b"), 6)


@pytest.fixture
def simulation(digits: Federation) -> Simulation:
    method = registry.make("fedrep", lr=0.05)
    return Simulation(digits, small_net(digits), method, Settings(rounds=3))


def trained(simulation: Simulation, client: int = 0) -> tuple[Task, Reply]:
    task = simulation._task("train", client, 1)
    return task, simulation.worker.run(task)


def alike(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_tensors_of_every_kind_come_back() -> None:
    state = {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "whole": torch.arange(4),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }
    assert alike(read_state(write_state(state), "x"), state)


def test_a_task_and_its_reply_come_back(simulation: Simulation) -> None:
    task, reply = trained(simulation)
    found, job, last = read_task(write_task(task, JOB))
    assert alike(found.received, task.received)
    assert (found.op, found.client, found.t, found.since, found.kept) == ("train", 0, 1, 0, None)
    assert (job, last) == (JOB, False)
    back = read_reply(write_reply(reply, simulated=True), task, Wanted(10))
    assert alike(back.state, reply.state)
    assert alike(back.private, reply.private)
    assert back.scalars == reply.scalars


def test_a_site_sends_the_sum_of_its_state_and_never_the_state(simulation: Simulation) -> None:
    task, reply = trained(simulation)
    away = Task(**{**task.__dict__, "kept": Kept()})
    kept = Reply(0, reply.state, reply.private, reply.scalars, "0" * 64)
    content = write_reply(kept)
    assert "private" not in content
    assert read_reply(content, away, Wanted(10)).kept == "0" * 64
    with pytest.raises(UpdateError, match="was to keep"):
        read_reply(write_reply(kept, simulated=True), away, Wanted(10))
    with pytest.raises(UpdateError, match="no sum"):
        read_reply(write_reply(Reply(0, reply.state, {}, reply.scalars)), away, Wanted(10))


def refused(simulation: Simulation, content: RecordDict, task: Task) -> bool:
    """Whether the content is refused with a PerfedError, and with nothing else, on its way into a round."""
    try:
        reply = read_reply(content, task, Wanted(10))
        simulation._accept(reply, task.client, Round(1, 3))
    except PerfedError:
        return True
    return False


@pytest.mark.parametrize(
    "damage",
    ["nan", "inf weight", "nan weight", "huge weight", "renamed", "scalar", "one", "wider", "double", "other client"],
)
def test_garbage_costs_its_sender_the_update(simulation: Simulation, damage: str) -> None:
    task, reply = trained(simulation)
    content = write_reply(reply, simulated=True)
    name = next(iter(reply.state))
    arrays, numbers = content["state"], content["numbers"]
    assert isinstance(arrays, ArrayRecord)
    assert isinstance(numbers, MetricRecord)
    tensor = reply.state[name]
    if damage == "nan":
        arrays[name] = Array(np.full(tensor.shape, np.nan, np.float32))
    elif damage.endswith("weight"):
        numbers["weight"] = {"inf": float("inf"), "nan": float("nan"), "huge": 1e308}[damage.split(maxsplit=1)[0]]
    elif damage == "renamed":
        arrays["other"] = arrays.pop(name)
    elif damage == "other client":
        content["reply"] = ConfigRecord({"client": 3})
    else:
        shape = {"scalar": (), "one": (1,), "wider": (*tensor.shape, 1), "double": tensor.shape}[damage]
        arrays[name] = Array(np.ones(shape, np.float64 if damage == "double" else np.float32))
    assert refused(simulation, content, task)
    assert not refused(simulation, write_reply(reply, simulated=True), task)


def test_a_message_larger_than_allowed_is_not_decoded() -> None:
    record = write_state({"x": torch.zeros(1000)})
    with pytest.raises(UpdateError, match="bytes are accepted"):
        read_state(record, "Client 1", limit=100)


def sent(state: State) -> int:
    return sum(len(array.data) for array in write_state(state).values())


def test_a_message_of_a_gigabyte_is_refused_by_its_size(simulation: Simulation) -> None:
    """A good name, shape and type do not help: nothing is decoded, on either side."""
    task, reply = trained(simulation)
    huge = Array("float32", (1,), "numpy.ndarray", bytes(1 << 20))
    content = write_reply(reply, simulated=True)
    cast(Any, content["state"])["more"] = huge
    with pytest.raises(UpdateError, match="bytes are accepted"):
        read_reply(content, task, wanted(simulation.worker, None, task))
    question = write_task(task, JOB)
    cast(Any, question["received"])["more"] = huge
    with pytest.raises(UpdateError, match="bytes are accepted"):
        read_task(question, lambda task, _: download_limit(simulation.worker, task))


@pytest.mark.parametrize("wrong", [{"t": 10**9}, {"t": 4}, {"t": 2, "since": 3}, {"since": 10**9}])
def test_a_round_that_the_run_does_not_have_is_refused_at_once(simulation: Simulation, wrong: dict[str, int]) -> None:
    """What travels follows from every round up to it, so that a far one would never be answered."""
    task = replace(simulation._task("train", 0, 1), **wrong)  # type: ignore[arg-type]
    with pytest.raises(UpdateError, match="of 3, after round"):
        read_task(write_task(task, JOB), lambda task, _: download_limit(simulation.worker, task))


def test_a_shape_that_its_bytes_do_not_have_is_refused() -> None:
    good = Array(np.zeros((2, 3), np.float32))
    for array in (
        Array("float32", (10**9, 10**9), good.stype, good.data),
        Array("float32", (3, 2), good.stype, good.data),
        Array("float32", (2, -3), good.stype, good.data),
        Array("int32", (2, 3), good.stype, good.data),
        Array("object", (2, 3), good.stype, good.data),
        Array("float32", (2, 3), "pickle", good.data),
        Array("float32", (2, 3), good.stype, good.data[:-1] + b""),
        Array("float32", (2, 3), good.stype, b"\x80\x04" + good.data[2:]),
    ):
        with pytest.raises(UpdateError):
            read_state(ArrayRecord({"x": array}), "Client 1")


def test_mutated_messages_neither_crash_nor_pass(simulation: Simulation) -> None:
    """Whatever is changed, the reply is refused with a message, or it is one that an honest client could send."""
    task, reply = trained(simulation)
    accepted = 0
    for seed in range(2 * MUTATIONS):
        chance = random.Random(seed)
        content = write_reply(reply, simulated=True)
        what = mutate(content, chance)
        if not refused(simulation, content, task):
            accepted += 1
            back = read_reply(content, task, Wanted(10))
            assert back.scalars["extra"] == {}, what
            assert back.scalars["seconds"] <= 1e9, what
            assert all(bool(torch.isfinite(t).all()) for t in back.state.values() if t.is_floating_point()), what
            assert 0 < back.scalars["weight"] < 1e12, what
            assert {n: t.shape for n, t in back.state.items()} == {n: t.shape for n, t in reply.state.items()}, what
    assert accepted < MUTATIONS  # what passes are bits of values that stay finite, and harmless numbers


def test_mutated_downloads_neither_crash_nor_pass(simulation: Simulation) -> None:
    """At the client's side too: what is not a task of this method is refused in words, naming the server."""
    task, job = simulation._task("train", 0, 1), Job("rounds = 3\n", "r", ("a", "b"), 6)
    accepted = 0
    for seed in range(2 * MUTATIONS):
        content = write_task(task, job)
        what = mutate(content, random.Random(seed), ["received", "private"], ["task", "task"])
        try:
            found, _, _ = read_task(content, lambda task, _: download_limit(simulation.worker, task))
            peer = Peer(found.client, found.since)
            check = (simulation.method, simulation.plan, found.received, peer, Round(found.t, 3), 6)
            verify_download(*check)
        except PerfedError:
            continue
        accepted += 1
        assert all(bool(torch.isfinite(t).all()) for t in found.received.values() if t.is_floating_point()), what
        assert {n: t.shape for n, t in found.received.items()} == {n: t.shape for n, t in task.received.items()}, what
    assert accepted < MUTATIONS


def test_a_mutated_message_is_answered_whatever_it_is(tmp_path: Path) -> None:
    """The node's own entry, with a whole message: every answer is one, good or an error in words."""
    words = 'clients = 4\nrounds = 2\nsplit = "iid"\n[method]\nname = "fedrep"\n[net]\nname = "mlp"\nhidden = [8]\n'
    prepared = prepare(configuration.resolve(configuration.parse(words)))
    simulation = prepared.simulation(tmp_path)
    task, job, errors = simulation._task("train", 1, 1), Job(prepared.config.toml()), 0
    for seed in range(MUTATIONS):
        content = write_task(task, job)
        what = mutate(content, random.Random(seed), ["received", "private"], ["task", "task"])
        reply = answer("train", content, None, 1)
        plain: Any = reply["reply"]
        errors += "error" in plain
        assert "error" not in plain or len(plain["error"]) > 10, what
    assert errors > MUTATIONS / 3
    simulation.close()


@pytest.mark.parametrize("declared", [False, True])
def test_mutated_scores_neither_crash_nor_pass(by_class: Simulation, declared: bool) -> None:
    """Whatever is changed, what is accepted can be put together with the others' scores, and is finite."""
    task, reply = scored(by_class, seen=True, adapt=True)
    other = by_class.worker.run(by_class._task("evaluate", 1, 1, seen=True, adapt=True)).state
    tests = [len(by_class.federation.rows(0, "test"))] if declared else None
    known, accepted = wanted(by_class.worker, tests, task), 0
    for seed in range(MUTATIONS):
        content = write_reply(reply, simulated=True)
        what = mutate(content, random.Random(seed), ["state", "state", "state", "private"])
        try:
            found = read_reply(content, task, known).state
        except PerfedError:
            continue
        accepted += 1
        for name in ("before/test/confusion", "after/test/confusion"):
            assert found[name].sum() == reply.state[name].sum(), what
        for stage in ("before", "after"):
            for states in ([found, other], [other, found]):
                values = evaluate.scores(states, stage).values()
                assert all(math.isfinite(value) for value in values), what
    assert accepted < MUTATIONS / 2


def test_mutated_roll_call_answers_neither_crash_nor_pass() -> None:
    good, accepted = Present(None, "anna", 100, 20, ("a", "b"), (1, 8, 8), "0" * 64), 0
    strange = [-1, 0, 2**62, 10**13, 1.5, float("nan"), "", "x" * 81, b"x", True, [], [1, 2], [0, 8, 8], ["a", "a"]]
    strange += [["x" * 201], ["c"] * 10_001, [4097, 8, 8], ["a"], "simulated", "error", "1" * 64, "G" * 64]
    for seed in range(MUTATIONS):
        content, chance = good.write(), random.Random(seed)
        plain: Any = content["present"]
        key, how = chance.choice([*plain, "strange"]), chance.random()
        if how < 0.8:
            plain[key] = chance.choice(strange)
        elif how < 0.9:
            plain.pop(key, None)
        else:
            content[chance.choice(["present", "more"])] = chance.choice([ArrayRecord(), MetricRecord({"a": 1})])
        try:
            found = Present.read(content, "anna")
        except UpdateError:
            continue
        accepted += 1
        assert found.partition is None or found.partition >= 0, key
        assert found.partition is not None or 1 <= min(found.train, found.test) <= max(found.train, found.test) <= 1e12
        assert found.partition is not None or (len(found.shape) == 3 and 1 <= min(found.shape) <= max(found.shape))
        assert len(found.name) <= 80, key
        assert len(set(found.classes)) == len(found.classes), key
    assert accepted < MUTATIONS / 2


def test_a_mutated_task_is_answered_by_a_site_whatever_it_is(tmp_path: Path) -> None:
    """As the site's node reads it, from its directory: nothing but answers, and no private state in any."""
    pictures(tmp_path / "data", each=20)
    deployment.init_site(tmp_path / "anna", "anna", str(tmp_path / "data" / "anna"), "host:8100")
    config = configuration.resolve({"method": "fedrep", "net": {"name": "mlp", "hidden": [4]}, "rounds": 2})
    job = Job(config.toml(), "r", ("0", "1", "2"), 3)
    worker = Site.load(tmp_path / "anna").worker(job.words, 0, 3, job.classes)
    server = Server(worker.method.start(worker.net, 3, worker.plan.initial), worker.plan, 3)
    received, errors = worker.method.send(server, Peer(0), Round(1, 2)), 0
    shapes = {name: tensor.shape for name, tensor in worker.method.schema(server, Round(1, 2)).items()}
    for seed in range(2 * MUTATIONS):
        chance = random.Random(seed)
        op: Any = chance.choice(["train", "evaluate"])
        content = write_task(Task(op, 0, 1, 0, received, {}, {"seen": True}, Kept()), job)
        what = mutate(content, chance, ["received"], ["task"])
        reply = answer(op, content, str(tmp_path / "anna"), None)
        plain: Any = reply["reply"]
        errors += "error" in plain
        assert "error" not in plain or len(plain["error"]) > 10, what
        assert "private" not in reply, what
        if "error" not in plain and op == "train":
            state = read_state(cast(ArrayRecord, reply["state"]), "x")
            assert {name: tensor.shape for name, tensor in state.items()} == shapes, what
    assert errors > MUTATIONS


def mutate(
    content: RecordDict,
    chance: random.Random,
    states: tuple[str, ...] | list[str] = ("state", "private"),
    records: tuple[str, ...] | list[str] = ("reply", "numbers"),
) -> str:
    kind = chance.choice(["bytes", "bytes", "shape", "dtype", "stype", "name", "drop", "scalar", "record", "number"])
    arrays: Any = content[chance.choice(states)]
    name = chance.choice(list(arrays)) if len(arrays) else None
    if name is None or kind in ("scalar", "record", "number"):
        if kind == "record":
            gone = chance.choice(list(content))
            content[gone + chance.choice(["", "x"])] = chance.choice(
                [ConfigRecord({"a": 1}), MetricRecord({"a": 1.0}), ArrayRecord()]
            )
            if chance.random() < 0.5:
                del content[gone]
            return f"record {gone}"
        target: Any = content[chance.choice(records)]
        key = chance.choice([*target, "strange"])
        if isinstance(target, MetricRecord):
            target[key] = chance.choice([-1, 0, 2**62, 1e308, float("nan"), float("inf"), -1e-9, [1, 2]])
        else:
            target[key] = chance.choice([-1, 10**9, "text", b"bytes", True, [1], 1.5])
        return f"{key} = {target[key]!r}"
    array = arrays[name]
    dtype, shape, stype, data = array.dtype, tuple(array.shape), array.stype, bytearray(array.data)
    if kind == "bytes":
        for _ in range(chance.randrange(1, 20)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.3:
            data = data[: chance.randrange(len(data))]
    elif kind == "shape":
        shape = tuple(chance.choice([0, 1, -1, 7, 2**40]) for _ in range(chance.randrange(0, 5)))
    elif kind == "dtype":
        dtype = chance.choice(["float64", "object", ">f4", "int8", "", "U5", "complex64"])
    elif kind == "stype":
        stype = chance.choice(["pickle", "", "torch"])
    elif kind == "name":
        del arrays[name]
        name = chance.choice(["", "a" * 1000, name + "/x", "sealed/x", "../x"])
    if kind == "drop":
        del arrays[name]
    else:
        arrays[name] = Array(dtype, shape, stype, bytes(data))
    return f"{kind} of {name}"


@pytest.mark.parametrize("name", ROWS)
def test_every_download_is_what_its_method_declares(name: str, digits: Federation) -> None:
    """The check at the site accepts all that the server sends, in every round, and refuses it renamed or not finite.

    Both sides' limits follow from what the method declares: a message cannot be a multiple of a good one.
    """
    row = ROWS[name]
    method = registry.make(name, **{"lr": 0.05, **row.hyper})
    start = small_net(digits, row.net)
    simulation = Simulation(digits, method.build(start), method, Settings(rounds=3, fraction=0.5))
    seen = 0
    for t in range(1, 4):
        simulation.step(t)
        for client in range(6):
            task = simulation._task("train", client, min(t + 1, 3))
            reply = compute(simulation.worker, task)
            assert reply.error is None, (name, t, client)
            assert sent(task.received) <= download_limit(simulation.worker, task), (name, t, client)
            up = upload_limit(simulation.worker, task)
            assert sent(reply.state) <= up <= sent(reply.state) + HEADER * len(reply.state), (name, t, client)
            for key in list(task.received)[:1]:
                seen += 1
                renamed = {("x" if n == key else n): v for n, v in task.received.items()}
                with pytest.raises(UpdateError):
                    compute(simulation.worker, Task(**{**task.__dict__, "received": renamed}))
    scored = simulation._task("evaluate", 0, 3, seen=True, adapt=True)
    assert sent(compute(simulation.worker, scored).state) <= upload_limit(simulation.worker, scored) < 100_000
    assert seen or not row.travels or name == "fedfomo"
    simulation.close()


# Scores


def scored(simulation: Simulation, **options: bool) -> tuple[Task, Reply]:
    task = simulation._task("evaluate", 0, 1, **options)
    return task, simulation.worker.run(task)


@pytest.fixture
def by_class(digits: Federation) -> Iterator[Simulation]:
    method = registry.make("pfedc", lr=0.05, branches=4)
    made = Simulation(digits, method.build(small_net(digits)), method, Settings(rounds=3))
    yield made
    made.close()


@pytest.mark.parametrize("adapt", [False, True])
def test_the_scores_of_an_honest_client_are_accepted(by_class: Simulation, adapt: bool) -> None:
    task, reply = scored(by_class, seen=True, adapt=adapt)
    found = read_reply(write_reply(reply, simulated=True), task, wanted(by_class.worker, None, task))
    assert alike(found.state, reply.state)
    assert {"before/test/measure/task", "before/test/measure/group", "before/val/measure/task"} <= found.state.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("before/test/measure/bogus", torch.tensor(1.0, dtype=torch.float64)),
        ("after/test/loss", torch.tensor(1.0, dtype=torch.float64)),
        ("before/test/measure/task", None),
        ("before/val/confusion", None),
        ("before/test/measure/task", torch.tensor(float("nan"), dtype=torch.float64)),
        ("before/test/measure/task", torch.tensor(1e300, dtype=torch.float64)),
        ("before/test/loss", torch.tensor(float("nan"), dtype=torch.float64)),
        ("before/test/loss", torch.tensor(float("inf"), dtype=torch.float64)),
        ("before/test/loss", torch.tensor(-1.0, dtype=torch.float64)),
        ("before/test/loss", torch.zeros(1, dtype=torch.float64)),
        ("before/test/confusion", torch.full((10, 10), 2**62)),
        ("before/test/confusion", torch.full((10, 10), -1)),
        ("before/test/confusion", torch.zeros((10, 10))),
        ("before/test/confusion", torch.eye(10, dtype=torch.int64)),
        ("before/val/confusion", torch.full((10, 10), 2**62)),
    ],
)
def test_scores_that_nobody_asked_for_or_that_cannot_be_are_refused(
    by_class: Simulation, name: str, value: torch.Tensor | None
) -> None:
    """A name that one client has and others lack would end the run where the scores are put together."""
    task, reply = scored(by_class, seen=True)
    state = {key: tensor for key, tensor in reply.state.items() if key != name}
    content = write_reply(replace(reply, state=state if value is None else state | {name: value}), simulated=True)
    for tests in (None, [len(by_class.federation.rows(0, "test"))]):
        with pytest.raises(UpdateError, match="Client 0"):
            read_reply(content, task, wanted(by_class.worker, tests, task))


def test_the_test_size_that_a_site_declared_is_held_against_its_scores(by_class: Simulation) -> None:
    task, reply = scored(by_class, seen=True)
    content = write_reply(reply, simulated=True)
    size = len(by_class.federation.rows(0, "test"))
    read_reply(content, task, wanted(by_class.worker, [size], task))
    with pytest.raises(UpdateError, match=f"Client 0 sent before/test/confusion of {size} samples; it has {size + 1}"):
        read_reply(content, task, wanted(by_class.worker, [size + 1], task))


@pytest.mark.parametrize("votes", [torch.rand(3, 10), torch.rand(10), torch.full((360, 10), 2.0), torch.eye(10).long()])
def test_votes_that_are_no_probabilities_are_refused(simulation: Simulation, votes: torch.Tensor) -> None:
    task = simulation._task("new", 0, 3)
    reply = simulation.worker.run(task)
    read_reply(write_reply(reply, simulated=True), task, wanted(simulation.worker, None, task))
    bad = write_reply(replace(reply, state={"probabilities": votes}), simulated=True)
    with pytest.raises(UpdateError, match="Client 0 sent votes"):
        read_reply(bad, task, wanted(simulation.worker, None, task))


# Numbers of a method's own


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf"), 1e308, "undeclared"])
def test_numbers_that_the_method_does_not_declare_or_that_cannot_be_are_refused(
    digits: Federation, number: float | str
) -> None:
    method = registry.make("fedfomo", lr=0.05, M=3)
    simulation = Simulation(digits, method.build(small_net(digits)), method, Settings(rounds=3))
    task, reply = trained(simulation)
    content = write_reply(reply, simulated=True)
    good = read_reply(content, task, wanted(simulation.worker, None, task))
    assert good.scalars["extra"] == reply.scalars["extra"]
    assert good.scalars["extra"].keys() == {"cost.judged_models"}
    numbers: Any = content["numbers"]
    if isinstance(number, str):
        numbers["extra.cost.bogus"] = 1.0
    else:
        numbers["extra.cost.judged_models"] = number
    with pytest.raises(UpdateError, match=r"Client 0 sent .*extra\.cost\."):
        read_reply(content, task, wanted(simulation.worker, None, task))
    simulation.close()


def test_a_method_that_does_not_declare_its_numbers_or_measures_is_told_at_once(digits: Federation) -> None:
    class Counting(registry.method_class("fedavg")):  # type: ignore[misc]
        def train(self, client: Client) -> Update:
            update = super().train(client)
            update.scalars["cost.steps"] = 1
            return cast(Update, update)

        def measures(self, client: Client, scores: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sure": scores.amax(dim=1)}

    simulation = Simulation(digits, small_net(digits), Counting(lr=0.05), Settings(rounds=3))
    with pytest.raises(ConfigError, match=r"cost\.steps.*unannounced"):
        trained(simulation)
    with pytest.raises(ConfigError, match=r"sure.*unannounced"):
        scored(simulation)
    simulation.close()


@pytest.mark.parametrize("classes", [["a" * 201], ["a"] * 10_001, ["a", 1], "a"])
def test_lists_of_texts_have_limits(classes: Any) -> None:
    assert Fields({"classes": ["a" * 200] * 10_000}, "x").texts("classes")
    with pytest.raises(UpdateError, match="at most 200 characters"):
        Fields({"classes": classes}, "x").texts("classes")
