"""Progress over a grid of runs: what is done, what runs, how long it will take; plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from perfed.cli.failures import STOPPED
from perfed.grid import Job, time_left
from perfed.report.tables import duration, percent

SELDOM = 60.0
"""seconds between two lines where there is no terminal"""


class GridWatch:
    """Shows where a grid stands, on stderr; on Ctrl-C it says how to go on."""

    def __init__(self, again: str, at_once: int) -> None:
        self.again, self.at_once = again, at_once
        self.live = sys.stderr.isatty() and sys.stdout.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=28), TextColumn("{task.fields[facts]}"))
        self.bar = Bar(*columns, console=Console(stderr=True), transient=True, disable=not self.live)
        self.task = self.bar.add_task("runs", total=1.0, facts="")
        self.told: set[int] = set()
        self.last, self.first = time.monotonic(), True

    def __call__(self, jobs: Sequence[Job]) -> None:
        """Show one more step."""
        total = sum(job.weight for job in jobs) or 1.0
        done = sum(job.weight * job.share for job in jobs)
        line = self._line(jobs)
        if self.live:
            self.bar.update(self.task, total=total, completed=done, facts=line)
            return
        if self.first and (before := sum(job.result is not None for job in jobs)):
            self.told |= {id(job) for job in jobs if job.result}
            typer.echo(f"{before} of {len(jobs)} runs finished before", err=True)
        self.first = False
        for job in jobs:
            if job.result and id(job) not in self.told:
                self.told.add(id(job))
                typer.echo(f"{job.name}, seed {job.config.seed}: {percent(job.accuracy)}; {line}", err=True)
                self.last = time.monotonic()
        if time.monotonic() - self.last > SELDOM:
            self.last = time.monotonic()
            typer.echo(line, err=True)

    def _line(self, jobs: Sequence[Job]) -> str:
        ended = sum(job.result is not None for job in jobs)
        now = [_standing(job) for job in jobs if job.doing == "runs" and not job.result]
        left = time_left(jobs, self.at_once)
        when = "time left is not known yet" if left is None else f"about {duration(left)} left"
        return ", ".join([f"{ended} of {len(jobs)} runs", *now, *([] if ended == len(jobs) else [when])])

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            typer.echo(f"Stopped. Finished rounds are kept. Continue with: {self.again}", err=True)
            raise typer.Exit(STOPPED)


def _standing(job: Job) -> str:
    """How far a run is, and what went wrong in it."""
    lost = f" (updates refused: {job.refused})" if job.refused else ""
    return f"{job.name} {job.rounds}/{job.config.rounds}{lost}"
