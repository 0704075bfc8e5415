"""A site keeps what was committed until the server says otherwise."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

from perfed.core.state import State
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.store import fingerprint
from perfed.engine.worker import Kept, Reply
from perfed.errors import QuorumError, StoreError
from perfed.flower.personal import Model
from perfed.flower.sitestore import SiteStore
from tests.conftest import small_net


def state(value: float) -> State:
    return {"head": torch.full((3,), value)}


def test_a_state_is_pending_until_the_server_has_committed_its_round(tmp_path: Path) -> None:
    with closing(SiteStore(tmp_path)) as store:
        one = store.pend("r", 1, state(1))
        store.settle("r", Kept())  # the server knows of no round yet
        assert store.state("r", 1, one)["head"][0] == 1  # scored before the commit
        store.settle("r", Kept(one, 1, one))
        two = store.pend("r", 2, state(2))
        again = store.pend("r", 2, state(2))
        assert two == again == fingerprint(state(2))
        store.settle("r", Kept(one, 1, one))  # round 2 was not committed: it is repeated from round 1
        assert store.state("r", 1, one)["head"][0] == 1
        store.settle("r", Kept(two, 2, two))
        assert store.state("r", 2, two)["head"][0] == 2
        with pytest.raises(StoreError, match="does not have"):
            store.state("r", 1, one)


def test_a_server_that_knows_another_history_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    with closing(SiteStore(tmp_path)) as store:
        one = store.pend("r", 1, state(1))
        store.settle("r", Kept(one, 1, one))
        for other in (Kept(), Kept("0" * 64, 1, "0" * 64), Kept(one, 5, one)):
            with pytest.raises(StoreError, match="committed round 1"):
                store.settle("r", other)
        assert store.state("r", 1, one)["head"][0] == 1
        store.settle("another run", Kept())


@pytest.mark.parametrize("order", [(2, 3), (3, 2), (3, 2, 3), (3, 3, 2), (2, 3, 2, 2)])
def test_tasks_out_of_order_and_twice_lose_no_state_that_the_server_may_commit(
    order: tuple[int, ...], tmp_path: Path
) -> None:
    with closing(SiteStore(tmp_path)) as store, closing(SiteStore(tmp_path)) as other:
        one = store.pend("r", 1, state(1))
        store.settle("r", Kept(one, 1, one))
        for number, t in enumerate(order):
            by = (store, other)[number % 2]  # two processes, each with a task
            by.settle("r", Kept(one, 1, one))
            by.pend("r", t, state(t))
        three = fingerprint(state(3))
        store.settle("r", Kept(three, 3, three))
        assert store.state("r", 3, three)["head"][0] == 3
        with pytest.raises(StoreError, match="committed round 3"):  # a task of round 2 that comes after all
            other.settle("r", Kept(one, 1, one))
        assert store.state("r", 3, three)["head"][0] == 3


def test_of_two_answers_to_one_task_the_one_that_was_committed_stays(tmp_path: Path) -> None:
    """What is sealed differs each time, so two answers need not have the same sum."""
    with closing(SiteStore(tmp_path)) as store:
        first, second = store.pend("r", 1, state(1)), store.pend("r", 1, state(9))
        store.settle("r", Kept(first, 1, first))
        assert store.state("r", 1, first)["head"][0] == 1
        with pytest.raises(StoreError, match="does not have"):
            store.state("r", 1, second)


def test_states_of_rounds_that_went_on_without_the_site_do_not_pile_up(tmp_path: Path) -> None:
    with closing(SiteStore(tmp_path)) as store:
        for t in range(1, 9):
            store.settle("r", Kept())
            store.pend("r", t, state(t))
        last = fingerprint(state(8))
        store.settle("r", Kept(last, 8, last))
    with closing(sqlite3.connect(tmp_path / "site.db")) as database:
        assert database.execute("select t from states").fetchall() == [(8,)]


def test_what_was_kept_survives_the_process_and_damage_is_noticed(tmp_path: Path) -> None:
    with closing(SiteStore(tmp_path)) as store:
        one = store.pend("r", 1, state(1))
        store.keep(Model("r", 0, 1, "rounds = 1", ("a", "b"), 3, (1, 8, 8), state(5)))
    with closing(SiteStore(tmp_path)) as store:
        model = store.model("r")
        assert (model.classes, model.shape, model.state["head"][0]) == (("a", "b"), (1, 8, 8), 5)
        assert store.state("r", 1, one)["head"][0] == 1
    with closing(sqlite3.connect(tmp_path / "site.db")) as database, database:
        blob = bytearray(database.execute("select blob from states").fetchone()[0])
        blob[-1] ^= 1
        database.execute("update states set blob = ?", (bytes(blob),))
        database.execute("update personal set blob = ?", (bytes(blob),))
    with closing(SiteStore(tmp_path)) as store:
        with pytest.raises(StoreError, match="damaged"):
            store.state("r", 1, one)
        with pytest.raises(StoreError, match="damaged"):
            store.model("r")


class Keeping:
    """Clients that keep their private states, in this process."""

    apart = True

    def __init__(self, simulation_worker: object, lost: tuple[int, ...] = ()) -> None:
        self.worker, self.held, self.lost = simulation_worker, {}, lost

    def run(self, tasks, done=None):  # type: ignore[no-untyped-def]
        replies = []
        for task in tasks:
            private = self.held.get((task.client, task.since), {})
            if task.client in self.lost:
                replies.append(Reply(task.client, {}, {}, {"error": "gone"}))
                continue
            reply = self.worker.run(type(task)(**{**task.__dict__, "private": private}))
            if task.op == "train":
                self.held[task.client, task.t] = reply.private
                kept = fingerprint(reply.private)
                reply = Reply(reply.client, reply.state, {}, reply.scalars, kept)
            replies.append(reply)
        return replies

    def close(self) -> None:
        pass


def run(digits: Federation, **others: object) -> Simulation:
    from perfed.core import registry

    method = registry.make("fedrep", lr=0.05)
    return Simulation(digits, small_net(digits), method, Settings(rounds=3, fraction=0.5), **others)  # type: ignore[arg-type]


def test_the_sum_of_a_run_is_made_from_the_sums_of_states_kept_elsewhere(digits: Federation, tmp_path: Path) -> None:
    plain = run(digits).run()
    away = run(digits, directory=tmp_path, executor=Keeping, sites=True).run()
    assert plain is not None
    assert away is not None
    assert away.state_sha256 == plain.state_sha256
    assert away.metrics == plain.metrics
    with closing(sqlite3.connect(tmp_path / "run.db")) as database:
        rows = database.execute("select blob from states where kind = 'client'").fetchall()
    assert rows
    assert all(row[0] is None for row in rows)  # no private state is with the server


def test_too_few_updates_stop_the_run_before_the_round_counts(digits: Federation, tmp_path: Path) -> None:
    losing = run(digits, directory=tmp_path, quorum=0.9, executor=lambda w: Keeping(w, (0, 1, 2, 3)), sites=True)
    with pytest.raises(QuorumError, match="below the quorum"):
        losing.run()
    again = run(digits, directory=tmp_path, quorum=0.9, executor=Keeping, sites=True).run()
    plain = run(digits).run()
    assert again is not None
    assert plain is not None
    assert again.state_sha256 == plain.state_sha256


# Directories, keys, words
