"""A run among sites in this process: who takes part, what is remembered of them, and who gets a last model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from perfed import rundir
from perfed.errors import ConfigError, NetError, PerfedError, UpdateError
from perfed.flower import coordinate as coordinating
from perfed.flower import deployment
from perfed.flower.answering import answer
from perfed.flower.coordinate import SITES as SITES_FILE
from perfed.flower.coordinate import UNSERVED, coordinate
from perfed.flower.nodes import StoppedError
from perfed.flower.rollcall import MOST, PROTOCOL, Present
from perfed.flower.site import KEYS, Site
from perfed.privacy.ckks import Keyring
from perfed.result import Result
from tests.e2e.cluster import SITES, pictures
from tests.postbox import Postbox

pytestmark = pytest.mark.usefixtures("flower_server")
NAMES = sorted(SITES)
FLAT = {"method.name": "fedrep", "method.lr": 0.05, "net.name": "mlp", "net.hidden": "[8]", "rounds": 2, "sites": 3}


class Grid(Postbox):
    """Sites in this process, and strangers: what a node answers may be changed. Those that are down say nothing."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place
        self.kinds: list[tuple[str, str, bool]] = []
        self.down: set[str] = set()
        self.down_at_the_end: set[str] = set()
        self.strangers: dict[str, RecordDict] = {}
        self.presents: dict[str, dict[str, Any]] = {}

    @property
    def names(self) -> list[str]:
        return [*self.strangers, *NAMES]

    def get_nodes(self) -> list[SimpleNamespace]:
        there = [(100 + number, name) for number, name in enumerate(self.names) if name not in self.down]
        return [SimpleNamespace(node_id=number, last_activated_at="", name=name) for number, name in there]

    def answers_to(self, message: Message) -> list[Message]:
        found = self.answer(self.names[message.metadata.dst_node_id - 100], message)
        return [] if found is None else [Message(found, reply_to=message)]

    def answer(self, name: str, message: Message) -> RecordDict | None:
        kind = message.metadata.message_type
        last = kind == "evaluate" and bool(message.content["task"]["last"])  # type: ignore[index, call-overload]
        self.kinds.append((name, kind, last))
        if name in self.strangers:
            return self.strangers[name] if kind == "query" else None
        if name in self.down or (last and name in self.down_at_the_end):
            return None
        found = answer(kind, message.content, str(self.place / name), None)
        if kind == "query" and name in self.presents:
            found["present"].update(self.presents[name])  # type: ignore[union-attr]
        return found


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    pictures(tmp_path / "data", each=40)
    for name in NAMES:
        deployment.init_site(tmp_path / name, name, str(tmp_path / "data" / name), "host:8100")
    return Grid(tmp_path)


def run(grid: Grid, out: str = "run", **words: Any) -> Result:
    given = {**FLAT, "out": str(grid.place / out), "wait": 2.0, "deadline": 20.0, **words}
    return coordinate(grid, given)  # type: ignore[arg-type]


def predicts(grid: Grid, name: str) -> bool:
    try:
        Site.load(grid.place / name).predict(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    except ConfigError:
        return False
    return True


def test_every_site_has_its_model_and_nothing_is_left_to_do(grid: Grid) -> None:
    result = run(grid)
    assert result.faults == []
    assert all(predicts(grid, name) for name in NAMES)
    assert not (result.directory / UNSERVED).exists()
    trained = [name for name, kind, _ in grid.kinds if kind == "train"]
    looked = [name for name, kind, _ in grid.kinds if kind == "evaluate"]
    assert result.cost["bytes_scored"] * len(trained) == result.cost["bytes_down"] * len(looked) > 0
    before = len(grid.kinds)
    assert run(grid).state_sha256 == result.state_sha256
    assert len(grid.kinds) == before  # the result is there: nobody is asked for anything


@pytest.mark.parametrize("method", ["pfedc", "privacypfedc"])
def test_scores_of_its_own_and_secrets_are_no_hindrance(
    method: str, grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has no key and makes none; whoever gets its last model may answer with all that is measured."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    Keyring.make(tmp_path / KEYS)
    for name in NAMES:
        (tmp_path / name / KEYS).write_bytes((tmp_path / KEYS).read_bytes())
    result = run(grid, **{"method.name": method, "method.finetune-epochs": 1, "rounds": 3})
    assert result.faults == []
    assert result.cost["adapt_flops"] > 0
    assert all(predicts(grid, name) for name in NAMES)
    assert not (tmp_path / "home").exists()


def test_a_site_that_was_down_at_the_end_gets_its_model_when_the_same_command_is_given_again(grid: Grid) -> None:
    grid.down_at_the_end = {"berta", "carla"}
    first = run(grid, deadline=3.0)
    assert [fault["client"] for fault in first.faults] == [1, 2]
    assert all("last model" in fault["reason"] for fault in first.faults)
    assert [predicts(grid, name) for name in NAMES] == [True, False, False]
    grid.down_at_the_end, grid.down, grid.kinds = set(), {"anna", "carla"}, []
    second = run(grid)  # neither who has its model nor who is still away is needed
    assert [predicts(grid, name) for name in NAMES] == [True, True, False]
    assert [fault["client"] for fault in second.faults] == [2]
    assert {name for name, _, last in grid.kinds if last} == {"berta"}
    assert second.cost["bytes_scored"] > first.cost["bytes_scored"]
    assert "train" not in {kind for _, kind, _ in grid.kinds}
    grid.down, grid.kinds = set(), []
    third = run(grid)
    assert all(predicts(grid, name) for name in NAMES)
    assert {name for name, _, last in grid.kinds if last} == {"carla"}
    assert Result.load(third.directory).faults == []
    assert first.state_sha256 == second.state_sha256 == third.state_sha256
    assert not (third.directory / UNSERVED).exists()


def test_a_server_that_is_killed_after_the_result_still_serves_everybody(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is written before the result, so at no moment is there a result without those who lack their model."""
    write = Result.write

    def killed(result: Result) -> None:
        write(result)
        raise KeyboardInterrupt

    grid.down_at_the_end = {"anna"}
    with monkeypatch.context() as patch:
        patch.setattr(Result, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            run(grid, deadline=3.0)
    assert rundir.is_finished(grid.place / "run")
    grid.down_at_the_end = set()
    assert run(grid).faults == []
    assert predicts(grid, "anna")


def test_simulated_nodes_are_no_part_of_a_run_among_sites_and_are_named(
    grid: Grid, capsys: pytest.CaptureFixture[str]
) -> None:
    grid.strangers = {"first": Present(partition=0).write()}  # it answers before any site does
    result = run(grid)
    assert result.faults == []
    assert all(predicts(grid, name) for name in NAMES)
    assert "first does not take part" in capsys.readouterr().out
    assert ("first", "train", False) not in grid.kinds


def test_without_a_number_of_sites_there_is_no_run_among_them(grid: Grid) -> None:
    with pytest.raises(ConfigError, match="how many sites"):
        run(grid, sites=0)


def test_a_number_of_images_that_cannot_be_is_refused_and_the_run_can_be_submitted_again(grid: Grid) -> None:
    grid.presents = {"berta": {"train": 10**12}}
    with pytest.raises(StoppedError, match=f"anna, carla.*berta.*{MOST}"):
        run(grid)
    assert not (grid.place / "run").exists()
    grid.presents = {}
    assert run(grid).faults == []


def test_sites_of_which_no_run_can_be_made_are_not_remembered(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(coordinating, "MOST_IMAGES", 50)
        with pytest.raises(ConfigError, match=r"images: anna \d+, berta \d+, carla \d+"):
            run(grid)
        assert not (grid.place / "run" / SITES_FILE).exists()

    def refuse(*_: Any, **__: Any) -> None:
        raise NetError("The network does not fit.")

    with monkeypatch.context() as patch:
        patch.setattr(coordinating, "prepare", refuse)
        with pytest.raises(PerfedError):
            run(grid)
    assert not (grid.place / "run" / SITES_FILE).exists()
    assert run(grid).faults == []


def test_a_node_of_an_unknown_kind_is_no_site(grid: Grid) -> None:
    site = dict(answered(grid, "anna"))
    with pytest.raises(UpdateError, match="'relay'"):
        Present.read(RecordDict({"present": ConfigRecord({**site, "kind": "relay"})}), "anna")
    assert Present.read(RecordDict({"present": ConfigRecord(site)}), "anna").name == "anna"


def answered(grid: Grid, name: str) -> dict[str, Any]:
    question = RecordDict({"call": ConfigRecord({"protocol": PROTOCOL, "words": 'net = "mlp"'})})
    return answer("query", question, str(grid.place / name), None)["present"]  # type: ignore[return-value]
