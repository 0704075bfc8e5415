"""Runs that are killed at any moment, also inside a commit, end with the same bits once they are resumed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from perfed.core import registry
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from tests.conftest import small_net

ROUNDS = 12


def start(digits: Federation, directory: Path | None, workers: int = 1) -> Simulation:
    method = registry.make("fedrep", lr=0.05, head_epochs=2)
    settings = Settings(rounds=ROUNDS, fraction=0.5, eval_every=4)
    return Simulation(digits, small_net(digits), method, settings, directory=directory, workers=workers)


@pytest.fixture(scope="module")
def whole(digits: Federation) -> tuple[str, float]:
    """The hash of a run that nobody disturbs, and how long it takes."""
    started = time.perf_counter()
    outcome = start(digits, None).run()
    assert outcome is not None
    return outcome.state_sha256, time.perf_counter() - started


def in_a_child(digits: Federation, directory: Path, workers: int, statement: int | None) -> int:
    """Run in a forked process; with `statement`, it kills itself when SQLite begins its n-th statement."""
    child = os.fork()
    if child:
        return child
    try:
        simulation = start(digits, directory, workers)
        if statement is not None:
            left = statement

            def count(_: str) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            simulation.store._db.set_trace_callback(count)
        simulation.run()
    finally:
        os._exit(0)


@pytest.mark.parametrize("seed", range(50))
def test_a_killed_run_resumes_to_the_same_bits(
    seed: int, digits: Federation, whole: tuple[str, float], tmp_path: Path
) -> None:
    expected, seconds = whole
    chance = random.Random(seed)
    for _ in range(chance.choice([1, 1, 2])):
        inside_commit = seed % 2 == 0
        statement = chance.randrange(1, 60) if inside_commit else None
        child = in_a_child(digits, tmp_path, workers=1 + seed % 3, statement=statement)
        if not inside_commit:
            time.sleep(chance.uniform(0, 1.1) * seconds)
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    outcome = start(digits, tmp_path).run()
    assert outcome is not None
    assert outcome.state_sha256 == expected
