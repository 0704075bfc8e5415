"""Nodes that die, come back, answer late, twice, for others or with garbage cost no more than their own update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Error, Message, RecordDict

from perfed import config as configuration
from perfed.engine.settings import Outcome
from perfed.flower.answering import answer
from perfed.flower.messages import Job
from perfed.flower.nodes import Nodes
from perfed.prepare import Prepared, prepare
from tests.postbox import Postbox

pytestmark = pytest.mark.usefixtures("flower_server")
Answers = Callable[[int, int, Message], list[Message]]


class Grid(Postbox):
    """Nodes in this process: client i is node 100 + i. `answers` may change what a client says, by round."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers
        self.started: dict[int, str] = {}

    def answers_to(self, message: Message) -> list[Message]:
        return self.answers(message.metadata.dst_node_id - 100, int(message.metadata.group_id), message)

    def node(self, client: int) -> int:
        return 100 + client

    def refresh(self) -> dict[int, str]:
        return self.started


def honest(message: Message) -> Message:
    node = message.metadata.dst_node_id
    content = answer(message.metadata.message_type, message.content, None, node - 100)
    return Message(content, reply_to=message)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    words: dict[str, Any] = {"method": {"name": "fedrep", "lr": 0.05}, "net": {"name": "mlp", "hidden": [8]}}
    return prepare(configuration.resolve(words | {"clients": 4, "split": "iid", "rounds": 2, "new": False}))


def run(prepared: Prepared, answers: Answers, tmp_path: Any, **others: Any) -> tuple[Outcome, Grid]:
    grid = Grid(answers)
    classes = prepared.federation.num_classes
    given = {"deadline": 60.0, "patient": True, **others}
    executor = Nodes(grid, Job(prepared.config.toml()), grid, classes, **given)  # type: ignore[arg-type]
    outcome = prepared.simulation(tmp_path, executor=lambda _: executor).run()
    assert outcome is not None
    return outcome, grid


@pytest.fixture(scope="module")
def plain(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = prepared.simulation(tmp_path_factory.mktemp("plain")).run()
    assert outcome is not None
    return outcome


def test_honest_nodes_give_the_bits_of_one_process(prepared: Prepared, plain: Outcome, tmp_path: Any) -> None:
    outcome, _ = run(prepared, lambda client, t, message: [honest(message)], tmp_path)
    assert outcome.state_sha256 == plain.state_sha256
    assert outcome.metrics == plain.metrics
    assert outcome.faults == []


def test_a_node_that_fails_and_comes_back_loses_nothing(prepared: Prepared, plain: Outcome, tmp_path: Any) -> None:
    failed: set[tuple[int, int]] = set()

    def answers(client: int, t: int, message: Message) -> list[Message]:
        if client == 1 and (client, t) not in failed:
            failed.add((client, t))
            return [Message(Error(code=5, reason="node unavailable"), reply_to=message)]
        return [honest(message)]

    outcome, _ = run(prepared, answers, tmp_path)
    assert len(failed) == 2
    assert outcome.state_sha256 == plain.state_sha256
    assert outcome.faults == []


def test_a_node_that_is_started_anew_is_asked_again(prepared: Prepared, plain: Outcome, tmp_path: Any) -> None:
    """It forgot the task, and Flower says nothing but when it was started."""
    asked: list[Message] = []

    def answers(client: int, t: int, message: Message) -> list[Message]:
        if client == 2 and t == 1 and message.metadata.message_type == "train":
            asked.append(message)
            if len(asked) == 1:
                return []
        return [honest(message)]

    grid_started = iter(["a", "a", "b"])

    class Restarted(Grid):
        def refresh(self) -> dict[int, str]:
            return {102: next(grid_started, "b")}

    grid = Restarted(answers)
    executor = Nodes(grid, Job(prepared.config.toml()), grid, 10, deadline=60.0, patient=True)  # type: ignore[arg-type]
    outcome = prepared.simulation(tmp_path, executor=lambda _: executor).run()
    assert outcome is not None
    assert len(asked) == 2
    assert outcome.state_sha256 == plain.state_sha256


def test_the_second_answer_and_unasked_ones_are_not_used(prepared: Prepared, plain: Outcome, tmp_path: Any) -> None:
    def answers(client: int, t: int, message: Message) -> list[Message]:
        first, second = honest(message), honest(message)
        spoil(second.content)
        return [first, second]

    outcome, _ = run(prepared, answers, tmp_path)
    assert outcome.state_sha256 == plain.state_sha256
    assert outcome.faults == []


def spoil(content: RecordDict) -> None:
    arrays: Any = content["state"]
    for name in list(arrays):
        arrays[name] = Array(np.full(arrays[name].shape, np.nan, np.float32))


def renamed(content: RecordDict) -> None:
    arrays: Any = content["state"]
    arrays["x"] = arrays.pop(next(iter(arrays)))


def heavy(content: RecordDict) -> None:
    numbers: Any = content["numbers"]
    if "weight" in numbers:
        numbers["weight"] = 1e308


def test_an_answer_that_comes_a_round_late_costs_its_own_update_and_is_named(prepared: Prepared, tmp_path: Any) -> None:
    """What round 1 was asked for arrives in round 2, before the answer to round 2: it takes nobody's place."""
    late: list[Message] = []
    posted: list[str] = []

    def answers(client: int, t: int, message: Message) -> list[Message]:
        found = [honest(message)]
        if client == 3 and message.metadata.message_type == "train":
            if t == 1:
                late.extend(found)
                return []
            posted.extend(one.metadata.reply_to_message_id for one in late)
            return [*late, *found]
        return found

    outcome, grid = run(prepared, answers, tmp_path, deadline=3.0)
    assert len(posted) == 1
    assert [one.metadata.reply_to_message_id for one in grid.posted] == posted  # it lies there, and nobody takes it
    assert [(f["t"], f["client"]) for f in outcome.faults if "No answer" in f["reason"]] == [(1, 3)]
    assert len(outcome.faults) == 1
    without = prepared.simulation(
        tmp_path / "without",
        tamper=lambda reply, t: reply if (reply.client, t) != (3, 1) else type(reply)(3, {}, {}, {"error": "left out"}),
    ).run()
    assert without is not None
    assert outcome.state_sha256 == without.state_sha256


@pytest.mark.parametrize("fault", ["dead", "nan", "renamed", "heavy", "raises", "another node", "empty"])
def test_a_bad_node_costs_its_own_update_and_is_named(prepared: Prepared, fault: str, tmp_path: Any) -> None:
    def answers(client: int, t: int, message: Message) -> list[Message]:
        if client != 3 or message.metadata.message_type != "train":
            return [honest(message)]
        if fault == "dead":
            return []
        if fault == "raises":
            return [Message(Error(code=2, reason="ValueError: no"), reply_to=message)]
        reply = Message(RecordDict(), reply_to=message) if fault == "empty" else honest(message)
        if fault == "another node":
            reply.metadata.__dict__["_src_node_id"] = 101
        elif fault != "empty":
            {"nan": spoil, "renamed": renamed, "heavy": heavy}[fault](reply.content)
        return [reply]

    outcome, _ = run(prepared, answers, tmp_path, deadline=3.0 if fault == "dead" else 60.0)
    assert {(f["t"], f["client"]) for f in outcome.faults} == {(1, 3), (2, 3)}
    assert all(np.isfinite(v) for v in outcome.metrics.values())
    without = prepared.simulation(
        tmp_path / "without",
        tamper=lambda reply, t: reply if reply.client != 3 else type(reply)(3, {}, {}, {"error": "left out"}),
    ).run()
    assert without is not None
    assert outcome.state_sha256 == without.state_sha256  # the others' round is what it would be without it


@pytest.mark.parametrize("name", ["before/test/measure/bogus", "before/test/loss"])
def test_bad_scores_cost_their_sender_the_score_and_not_the_run(prepared: Prepared, name: str, tmp_path: Any) -> None:
    def answers(client: int, t: int, message: Message) -> list[Message]:
        reply = honest(message)
        if client == 0 and message.metadata.message_type == "evaluate":
            state: Any = reply.content["state"]
            state[name] = Array(np.array(np.nan))
        return [reply]

    grid = Grid(answers)
    executor = Nodes(grid, Job(prepared.config.toml()), grid, 10, deadline=60.0)  # type: ignore[arg-type]
    outcome = prepared.simulation(tmp_path, executor=executor.limited).run()
    assert outcome is not None
    assert {(fault["client"], name in fault["reason"]) for fault in outcome.faults} == {(0, True)}
    assert outcome.clients["ids"] == [1, 2, 3]
    assert all(np.isfinite(value) for value in outcome.metrics.values())
