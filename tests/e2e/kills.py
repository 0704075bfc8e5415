"""A run among sites in which somebody is killed at a random moment and started again, and what became of it."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from perfed import rundir
from perfed.errors import PerfedError
from perfed.flower.coordinate import SITES as SITES_FILE
from perfed.flower.coordinate import Terms
from perfed.flower.site import Site
from perfed.flower.sitestore import SiteStore
from perfed.result import Result
from tests.e2e.cluster import SITES, Cluster, end, in_process, words

Kind = Literal["site", "link", "server"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""a SuperNode, the SuperLink, the ServerApp"""
ROUNDS = 3
PATIENCE = 1800
"""seconds that a run has to end after a kill"""
TERMS = Terms(sites=3, quorum=1.0, deadline=600, wait=600)


@dataclass(frozen=True)
class Kill:
    """What became of a run in which somebody was killed."""

    kind: Kind
    seed: int
    committed: int
    """rounds that were committed at that moment"""
    ended: bool
    """whether the run came to its end, submitted again as often as it took"""
    same: bool
    """the hash of the run that nobody disturbed"""
    faults: int
    lost: int
    """sites without the private state that the server knows of"""
    without_model: int
    """sites whose personal model does not predict as in one process"""
    seconds: float
    """from the kill to the end of the run"""


def kill(made: Cluster, kind: Kind, seed: int) -> Kill | None:
    """Kill and start again at a random moment; None if the run was over by then."""
    given = words("fedrep", rounds=ROUNDS)
    out = made.place / f"killed-{kind}-{seed}"
    chance = random.Random(f"{kind}{seed}")
    following = made.submit(out, given, TERMS)
    try:
        made.until(lambda: made.server_app() is not None, 300, "the ServerApp")
        after = chance.randrange(-1, ROUNDS + 1)  # while sites are gathered, in any round, while they get their models
        if after >= 0:
            made.until(lambda: (out / "run.db").is_file(), 600, "the first round")
            made.until(lambda: rundir.committed(out) >= after or following.poll() is not None, 600, f"round {after}")
        time.sleep(chance.uniform(0, 10))
        server = made.server_app()
        if server is None or (out / "result.json").is_file():
            return None
        committed, started = rundir.committed(out), time.monotonic()
        if kind == "site":
            victim = chance.choice(sorted(SITES))
            made.kill(victim)
            made.start_site(victim)
            made.until(lambda: (out / "result.json").is_file() or following.poll() is not None, 900, "the run")
        elif kind == "link":
            made.kill("link")
            made.start_link()
        else:
            os.kill(server, signal.SIGKILL)
    finally:
        end(following)
    try:
        result = made.finish(out, given, TERMS, PATIENCE)
    except AssertionError as late:
        print(late, flush=True)
        return Kill(kind, seed, committed, False, False, 0, 0, 0, round(time.monotonic() - started, 1))
    seconds = time.monotonic() - started
    expected = in_process(made, given)
    return Kill(
        kind,
        seed,
        committed,
        True,
        result.state_sha256 == expected.state_sha256,
        len([fault for fault in result.faults if "last model" not in fault["reason"]]),
        lost(made, result),
        without_model(made, result, expected),
        round(seconds, 1),
    )


def lost(made: Cluster, result: Result) -> int:
    """Sites that do not have the private state whose sum the server committed."""
    run, count = rundir.read_json(result.directory / SITES_FILE)["run"], 0
    with closing(rundir.read_only(result.directory)) as database:
        rows = database.execute("select id, since, sha from states where kind = 'client'").fetchall()
    assert len(rows) == len(SITES)
    for client, since, sha in rows:
        with closing(SiteStore(made.place / sorted(SITES)[client])) as store:
            try:
                store.state(run, since, sha)
            except PerfedError:
                count += 1
    return count


def without_model(made: Cluster, result: Result, expected: Result) -> int:
    """Sites that do not predict, without a server, as the run in one process does for them."""
    run, count = rundir.read_json(result.directory / SITES_FILE)["run"], 0
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for client, name in enumerate(sorted(SITES)):
        try:
            found, _ = Site.load(made.place / name).predict(images, run)
            count += not torch.allclose(found, expected.predict(client, images), atol=1e-5)
        except PerfedError:
            count += 1
    return count
