"""Many independent runs, a directory each: kept, continued or started, one after another or side by side.

Side by side each run is a process of its own that knows nothing but its directory, so that a grid that is killed leaves
runs that can be continued and nothing else.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from perfed import config as configuration
from perfed import rundir
from perfed.comparison import same_run
from perfed.config import Config
from perfed.engine.settings import Progress
from perfed.errors import StoreError
from perfed.experiment import finish
from perfed.prepare import Prepared, prepare
from perfed.result import Result

PAUSE = 0.25
"""seconds between two looks at processes that run side by side"""
LONG = 60.0
"""seconds that a run must still need for being started again with more workers"""


@dataclass
class Job:
    """A run of the grid and where it stands."""

    name: str
    config: Config
    place: Path
    weight: float = 1.0
    """how much work it is, in any unit that all jobs share"""
    adapting: float = 0.0
    """the share of that work which is the adaptation of all clients"""
    adapts: Sequence[int] = ()
    """the rounds that end with an adaptation"""
    rounds: int = 0
    """the last round that is committed"""
    before: int = 0
    """the round at which this call found it"""
    seconds: float = 0.0
    """how long it has taken in this call, or in all if it was finished before"""
    accuracy: float | None = None
    refused: int = 0
    """updates that were refused so far"""
    doing: str = "waits"
    cure: str = "Give another --out."
    """what to do if its place holds a run of another configuration"""
    result: Result | None = field(default=None, repr=False)

    @property
    def share(self) -> float:
        """How much of it is done."""
        return 1.0 if self.result else self._until(self.rounds)

    @property
    def worked(self) -> float:
        """How much of it was done in `seconds`."""
        return self.share - self._until(self.before)

    @property
    def left(self) -> float:
        """Seconds until its end at its own pace; endless before it has one."""
        return self.seconds * (1 - self.share) / self.worked if self.worked > 0 else math.inf

    def _until(self, rounds: int) -> float:
        trained = rounds / self.config.rounds
        adapted = sum(t <= rounds for t in self.adapts) / len(self.adapts) if self.adapts else trained
        return (1 - self.adapting) * trained + self.adapting * adapted


Look = Callable[[Sequence[Job]], None]
"""Told whenever something has changed."""


def run(jobs: Sequence[Job], *, cores: int = 1, side_by_side: bool = True, look: Look | None = None) -> None:
    """Bring every job to its end; `side_by_side` runs as many at once as there are cores, else one on all of them."""
    tell = look or (lambda _: None)
    for job in jobs:
        _take_up(job)
    tell(jobs)
    waiting = [job for job in jobs if job.result is None]
    if side_by_side and cores > 1 and len(waiting) > 1:
        _side_by_side(jobs, waiting, cores, tell)
    else:
        _in_turn(jobs, waiting, cores, tell)


def _take_up(job: Job) -> None:
    """Find what is there already, or claim the place by writing the configuration."""
    if not rundir.is_run(job.place):
        rundir.claim(job.place, job.config.toml())
        return
    same_run(configuration.load(job.place / rundir.CONFIG), job.config, job.place, job.cure)
    job.rounds = job.before = rundir.committed(job.place)
    job.refused = rundir.refused(job.place, 0, job.rounds)
    if rundir.is_finished(job.place):
        _finished(job, Result.load(job.place))
        job.before, job.seconds = 0, float(result_seconds(job.result))


def result_seconds(result: Result | None) -> float:
    """How long a finished run took."""
    return float(result.cost["seconds"]) if result else 0.0


def _finished(job: Job, result: Result) -> None:
    job.result, job.rounds, job.doing = result, job.config.rounds, "done"
    job.accuracy = result.metrics.get("local.last")  # of the last rounds, if the run has several that count
    result.prepared = None  # memory must not grow with the grid


def _in_turn(jobs: Sequence[Job], waiting: Sequence[Job], cores: int, tell: Look) -> None:
    """One after another in this process; neighbours with the same data share it."""
    alike: Prepared | None = None
    words: dict[str, object] = {}
    for job in waiting:
        started = time.monotonic()
        own = {key: value for key, value in job.config.words().items() if key not in ("method", "out", "workers")}

        def watch(now: Progress, job: Job = job, started: float = started) -> None:
            if now.doing == "done":
                job.rounds, job.refused, job.seconds = now.t, now.refused, time.monotonic() - started
                job.accuracy = now.metrics.get("local.mean", job.accuracy)
                tell(jobs)

        job.doing = "runs"
        config = job.config.changed(workers=cores)
        prepared = prepare(config, directory=job.place, alike=alike if own == words else None)
        _finished(job, finish(prepared, job.place, watch=watch))
        job.seconds, alike, words = time.monotonic() - started, prepared, own
        tell(jobs)


@dataclass
class _Running:
    job: Job
    workers: int
    process: subprocess.Popen[bytes]
    started: float
    said: IO[bytes]
    """what it writes to standard error: a file, as nobody reads a pipe before its end"""

    def look(self) -> bool:
        """See how far it is; whether a round has been committed just now."""
        known = self.job.rounds
        self.job.seconds = time.monotonic() - self.started
        self.job.rounds = max(known, rundir.committed(self.job.place))
        if self.job.rounds > known:
            self.job.refused += rundir.refused(self.job.place, known, self.job.rounds)
        return self.job.rounds > known

    def again(self, workers: int) -> None:
        """Go on with more workers from the round that was committed."""
        _stop(self.process)
        self.workers, self.process = workers, _start(self.job, workers, self.said)


def _side_by_side(jobs: Sequence[Job], waiting: Sequence[Job], cores: int, tell: Look) -> None:
    """As many at once as there are cores; the last ones share the cores that nobody needs any more."""
    queue, running = list(waiting), list[_Running]()
    try:
        while queue or running:
            while queue and len(running) < cores:
                job = queue.pop(0)
                alone = max(1, cores // (1 + len(queue) + len(running)))
                said = tempfile.TemporaryFile()  # noqa: SIM115  closed with its process
                running.append(_Running(job, alone, _start(job, alone, said), time.monotonic(), said))
                job.doing = "runs"
            time.sleep(PAUSE)
            for one in list(running):
                at_commit = one.look()
                if one.process.poll() is not None:
                    running.remove(one)
                    _ended(one)
                elif at_commit and not queue and one.job.left > LONG and cores // len(running) > one.workers:
                    one.again(cores // len(running))
            tell(jobs)
    finally:
        for one in running:
            _stop(one.process)
            one.said.close()


def _start(job: Job, workers: int, said: IO[bytes]) -> subprocess.Popen[bytes]:
    """A process for one run. It ends when its standard input does, so that it never outlives this one."""
    command = [sys.executable, "-m", "perfed.gridrun", str(job.place), str(workers), job.config.data_dir or ""]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=said)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too: who goes on with the run finds it free
        process.kill()
        process.wait()
    if process.stdin:
        process.stdin.close()


def _ended(one: _Running) -> None:
    _stop(one.process)
    with one.said as file:
        file.seek(0)
        lines = file.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"it ended with {one.process.returncode}")
    if one.process.returncode or not rundir.is_finished(one.job.place):
        raise StoreError(
            f"The run in {one.job.place} failed: {last.removesuffix('.')}.",
            "The same command again continues it and all others; --only leaves methods out.",
        )
    _finished(one.job, Result.load(one.job.place))


def time_left(jobs: Sequence[Job], at_once: int) -> float | None:
    """Seconds until all is done, from the pace of what is done; None while nothing is.

    A job goes at the pace of jobs of its own name if there are any, else at that of all: seconds per weight.
    """
    pace: dict[str, list[float]] = {}
    for job in jobs:
        if job.worked > 0 and job.seconds > 0:
            for name in (job.name, ""):
                held = pace.setdefault(name, [0.0, 0.0])
                held[0] += job.seconds
                held[1] += job.weight * job.worked
    if "" not in pace:
        return None
    left = [
        job.weight * (1 - job.share) * held[0] / held[1]
        for job in jobs
        if job.result is None and (held := pace.get(job.name, pace[""]))
    ]
    return max(sum(left) / at_once, *left) if left else 0.0
