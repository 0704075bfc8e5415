"""Where runs stand, read from files that others write, leave half done or damage."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import perfed
from perfed import rundir
from perfed.errors import ConfigError
from perfed.experiment import describe
from perfed.prepare import prepare
from perfed.report.live import FRESH, Follower
from perfed.report.watch import serve

WORDS = {"net": {"name": "mlp", "hidden": [8]}, "clients": 5, "rounds": 4, "eval_every": 2}


def begun(place: Path, stop_after: int) -> Any:
    """A run that was left after some rounds; gives its simulation, open."""
    config, _ = describe("fedrep", "digits", WORDS["net"], {k: v for k, v in WORDS.items() if k != "net"})
    prepared = prepare(config)
    rundir.claim(place, prepared.config.toml())
    simulation = prepared.simulation(place)
    for t in range(1, stop_after + 1):
        simulation.step(t)
    return simulation


def only(follower: Follower) -> dict[str, Any]:
    (run,) = follower.look()["runs"]
    return run


def test_a_run_is_running_while_it_is_held_and_stopped_when_it_is_not(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.look()["runs"] == []
    simulation = begun(tmp_path / "one", 1)
    run = only(follower)
    assert (run["status"], run["round"], run["rounds"], run["curve"]) == ("running", 1, 4, [])
    simulation.step(2)
    run = only(follower)
    assert (run["round"], len(run["curve"]), len(run["clients"]), run["clients_round"]) == (2, 1, 5, 2)
    assert run["left"] > 0
    simulation.close()
    run = only(follower)
    assert (run["status"], run["round"], run["left"]) == ("stopped", 2, None)
    assert run["resume"] == f"perfed resume {tmp_path / 'one'}"
    perfed.resume(tmp_path / "one")
    run = only(follower)
    assert (run["status"], run["round"], [t for t, *_ in run["curve"]]) == ("finished", 4, [2, 4])


def test_looking_never_keeps_a_run_from_starting(tmp_path: Path) -> None:
    begun(tmp_path, 1).close()
    assert not rundir.in_use(tmp_path)
    with (tmp_path / rundir.LOCK).open() as handle:  # someone looks, for a moment, just as the run starts
        fcntl.flock(handle, fcntl.LOCK_SH)
        threading.Timer(0.1, lambda: fcntl.flock(handle, fcntl.LOCK_UN)).start()
        assert perfed.resume(tmp_path).metrics
        time.sleep(0.15)


def test_a_run_that_began_anew_is_read_anew(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    begun(tmp_path / "one", 3).close()
    assert only(follower)["round"] == 3
    for file in (tmp_path / "one").iterdir():
        file.unlink()
    begun(tmp_path / "one", 1).close()
    assert only(follower)["round"] == 1


def test_runs_of_a_comparison_wait_until_it_is_their_turn(tmp_path: Path) -> None:
    perfed.compare(["local", "fedavg"], [0], out=tmp_path / "c", **WORDS)
    (tmp_path / "c" / "fedavg" / "0" / rundir.RESULT).unlink()
    text = (tmp_path / "c" / rundir.COMPARE).read_text().replace('"fedavg",', '"fedavg",\n    "fedrep",')
    (tmp_path / "c" / rundir.COMPARE).write_text(text)
    found = {run["method"]: run for run in Follower(tmp_path).look()["runs"]}
    assert found["local"]["status"] == "finished"
    assert found["fedrep"]["status"] == "waiting"
    assert found["fedavg"]["status"] == "running"  # its last round was just committed, its result is being written
    database = tmp_path / "c" / "fedavg" / "0" / rundir.DATABASE
    old = time.time() - 2 * FRESH
    for file in database.parent.glob("run.db*"):
        os.utime(file, (old, old))
    found = {run["method"]: run for run in Follower(tmp_path).look()["runs"]}
    assert found["fedavg"]["status"] == "stopped"
    assert found["fedavg"]["resume"] == f"perfed resume {tmp_path / 'c'}"


def test_damage_is_told_and_harms_nobody_else(tmp_path: Path) -> None:
    begun(tmp_path / "good", 2).close()
    begun(tmp_path / "torn", 2).close()
    (tmp_path / "torn" / rundir.DATABASE).write_bytes(b"no database")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / rundir.CONFIG).write_bytes(b"\xff\xfe not toml")
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / rundir.CONFIG).write_text("rounds = 3\n")
    found = {run["id"]: run for run in Follower(tmp_path).look()["runs"]}
    assert {name: run["status"] for name, run in found.items()} == {
        "bad": "unreadable",
        "fresh": "starting",
        "good": "stopped",
        "torn": "stopped",
    }
    assert found["good"]["round"] == 2
    assert found["torn"]["round"] == 0


def test_records_are_read_from_where_one_left_off(tmp_path: Path) -> None:
    begun(tmp_path, 2).close()
    assert [record["t"] for record in rundir.records(tmp_path)] == [1, 2]
    assert [record["t"] for record in rundir.records(tmp_path, after=1)] == [2]


def test_a_port_in_use_and_a_missing_place_are_refused(tmp_path: Path) -> None:
    server = serve(tmp_path, 0)
    try:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match="port"):
            serve(tmp_path, server.server_port)
    finally:
        server.server_close()
    with pytest.raises(ConfigError, match="no directory"):
        serve(tmp_path / "none")
