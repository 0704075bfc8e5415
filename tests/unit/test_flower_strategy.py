"""The Flower Strategy: Flower's own loop carries a run to the bits of one process, and a broken one goes on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MessageType

import perfed
from perfed import rundir
from perfed.errors import ConfigError
from perfed.flower.answering import answer
from perfed.flower.strategy import Strategy
from perfed.result import Result
from tests.postbox import Postbox

pytestmark = pytest.mark.usefixtures("flower_server")
CLIENTS, ROUNDS = 4, 3
WORDS: dict[str, Any] = {"net": {"name": "mlp", "hidden": [8]}, "clients": CLIENTS, "split": "iid", "rounds": ROUNDS}
FLAT = {"net.name": "mlp", "net.hidden": "[8]", "clients": CLIENTS, "split": "iid", "rounds": ROUNDS, "fraction": 0.5}


class Grid(Postbox):
    """Nodes in this process: client i is node 100 + i. Flower's loop falls over in round `breaks`."""

    def __init__(self, breaks: int = 0, silent: int | None = None) -> None:
        super().__init__()
        self.breaks, self.silent = breaks, silent
        self.rounds = set[int]()

    def get_nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(node_id=100 + i, last_activated_at="", name="") for i in range(CLIENTS)]

    def answers_to(self, message: Message) -> list[Message]:
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        if node == self.silent and kind != MessageType.QUERY:
            return []
        return [Message(answer(kind, message.content, None, node - 100), reply_to=message)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        if messages and messages[0].metadata.message_type == MessageType.TRAIN:
            self.rounds.add(t := int(messages[0].metadata.group_id))
            if t == self.breaks:
                raise ConnectionError("the loop fell over")
        return self.pull_messages(self.push_messages(messages))


def strategy(method: str, out: Path, **words: Any) -> Strategy:
    return Strategy({**FLAT, "method.name": method, "method.lr": 0.05, "out": str(out), **words})


def start(made: Strategy, grid: Grid, **others: Any) -> Any:
    return made.start(grid, **others)  # type: ignore[arg-type]


def in_process(method: str, **words: Any) -> Result:
    return perfed.run({"name": method, "lr": 0.05}, fraction=0.5, **{**WORDS, **words})


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "scaffold", "fedfomo", "local", "cd2pfed"])
def test_flowers_loop_ends_with_the_bits_of_one_process(method: str, tmp_path: Path) -> None:
    expected = in_process(method)
    made = strategy(method, tmp_path / "run")
    found = start(made, Grid())
    assert made.result.state_sha256 == expected.state_sha256
    assert made.result.metrics == pytest.approx(expected.metrics, abs=1e-6)
    assert made.result.faults == []
    assert list(found.evaluate_metrics_clientapp) == [1, 2, 3]
    assert found.evaluate_metrics_clientapp[3]["local.mean"] == expected.metrics["local.mean"]
    assert found.train_metrics_clientapp[1] == {"replies": 2, "failures": 0}
    if method == "fedavg":
        with expected.scored(0) as client:
            model = client.weights()
        assert found.arrays.keys() == model.keys()
        for name, array in found.arrays.items():
            np.testing.assert_array_equal(array.numpy(), model[name].numpy())


def test_a_loop_that_fell_over_goes_on_after_the_last_committed_round(tmp_path: Path) -> None:
    expected = in_process("fedrep", rounds=5)
    with pytest.raises(ConnectionError):
        start(strategy("fedrep", tmp_path / "run", rounds=5), Grid(breaks=3))
    assert rundir.committed(tmp_path / "run") == 2
    assert not rundir.in_use(tmp_path / "run")
    grid, made = Grid(), strategy("fedrep", tmp_path / "run", rounds=5)
    found = start(made, grid)
    assert grid.rounds == {3, 4, 5}
    assert made.result.state_sha256 == expected.state_sha256
    assert found.arrays
    again = strategy("fedrep", tmp_path / "run", rounds=5)
    start(again, idle := Grid())
    assert (again.result.state_sha256, idle.rounds) == (expected.state_sha256, set())


def test_a_node_that_is_silent_costs_its_update_and_is_named(tmp_path: Path) -> None:
    made = strategy("fedavg", tmp_path / "run", fraction=1.0)
    found = start(made, Grid(silent=102))
    assert found.train_metrics_clientapp[1] == {"replies": 3, "failures": 1}
    assert {fault["client"] for fault in made.result.faults} == {2}


def test_what_flower_says_about_a_node_is_told(tmp_path: Path) -> None:
    """Flower answers in a node's place as node 1, and only the message it answers tells for whom."""

    class Gone(Grid):
        def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
            found = super().pull_messages(numbers)
            for place, message in enumerate(found):
                if message.metadata.src_node_id == 102 and message.metadata.message_type == MessageType.TRAIN:
                    found[place] = made = Message(
                        Error(code=4, reason="Node Unavailable: no heartbeat"), reply_to=message
                    )
                    made.metadata.__dict__["_src_node_id"] = 1
                    made.metadata.__dict__["_reply_to_message_id"] = message.metadata.reply_to_message_id
            return found

    made = strategy("fedavg", tmp_path / "run", fraction=1.0)
    start(made, Gone())
    assert {fault["client"] for fault in made.result.faults} == {2}
    assert all("no heartbeat" in fault["reason"] for fault in made.result.faults)


def test_garbage_costs_its_sender_the_update(tmp_path: Path) -> None:
    class Garbage(Grid):
        def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
            found = super().pull_messages(numbers)
            for message in found:
                state: Any = message.content.get("state")
                if message.metadata.src_node_id == 101 and state:
                    for name in state:
                        state[name] = Array(np.full(tuple(state[name].shape), np.nan, np.float32))
            return found

    made = strategy("fedavg", tmp_path / "run", fraction=1.0)
    start(made, Garbage())
    assert {
        fault["client"] for fault in made.result.faults if "NaN" in fault["reason"] or "finite" in fault["reason"]
    } == {1}


def test_what_has_no_effect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="initial_arrays"):
        start(strategy("fedavg", tmp_path), Grid(), initial_arrays=ArrayRecord({"x": Array(np.zeros(1))}))
    with pytest.raises(ConfigError, match="num_rounds"):
        start(strategy("fedavg", tmp_path), Grid(), num_rounds=7)
    with pytest.raises(ConfigError, match="where the run is kept"):
        start(Strategy({**FLAT, "method.name": "fedavg"}), Grid())
