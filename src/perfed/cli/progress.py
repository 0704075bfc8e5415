"""Live progress: round, accuracy, bytes and time left; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from perfed import rundir
from perfed.cli.failures import STOPPED
from perfed.report.tables import duration, percent, size

if TYPE_CHECKING:
    from perfed.engine.settings import Progress


class Watch:
    """Shows where one run stands; all of it on stderr, so that stdout is for results."""

    def __init__(self, name: str, live: bool) -> None:
        self.name, self.live = name, live
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=28), TextColumn("{task.fields[facts]}"))
        self.bar = Bar(*columns, console=Console(stderr=True), transient=True, disable=not live)
        self.task = self.bar.add_task(name, total=None, facts="")
        self.bar.start()
        self.started, self.first, self.told = time.monotonic(), -1, -1

    def __call__(self, now: Progress) -> None:
        """Show one more step."""
        if self.first < 0:
            self.first = now.t - 1
        share = {"done": 1.0, "training": 0.85 * now.done / max(now.of, 1)}.get(now.doing, 0.9)
        rounds = now.t - 1 + share
        if self.live:
            self.bar.update(self.task, total=now.rounds, completed=rounds, facts=self._facts(now, rounds))
        elif now.doing == "done" and self._due(now):
            typer.echo(f"{self.name}: {self._facts(now, rounds)}", err=True)

    def _due(self, now: Progress) -> bool:
        """About ten lines per run."""
        step = now.t // max(1, now.rounds // 10)
        before, self.told = self.told, step
        return step != before or now.t == now.rounds

    def _facts(self, now: Progress, rounds: float) -> str:
        facts = [f"round {now.t}/{now.rounds}"]
        if "local.mean" in now.metrics:
            facts.append(f"accuracy {percent(now.metrics['local.mean'])}")
        facts.append(f"up {size(now.bytes_up)}, down {size(now.bytes_down)}")
        if now.refused:
            facts.append(f"updates refused: {now.refused}")
        if rounds > self.first and rounds < now.rounds:
            pace = (time.monotonic() - self.started) / (rounds - self.first)
            facts.append(f"{duration(pace * (now.rounds - rounds))} left")
        return ", ".join(facts)


class Watching:
    """Shows runs one after another; on Ctrl-C it says what is kept and how to go on."""

    def __init__(self, place: Path) -> None:
        self.place = self.run = place
        self.live = sys.stderr.isatty() and sys.stdout.isatty()
        self.current: Watch | None = None

    def watch(self, name: str, run: Path) -> Watch:
        """The display of the next run."""
        self.close()
        self.run, self.current = run, Watch(name, self.live)
        return self.current

    def close(self) -> None:
        """End the display."""
        if self.current:
            self.current.bar.stop()
            self.current = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            kept = rundir.committed(self.run)
            what = f"Everything up to round {kept} is kept in {self.run}." if kept else "No round was finished yet."
            begun = rundir.is_run(self.place) or rundir.is_comparison(self.place)
            cure = f"Continue with: perfed resume {self.place}" if begun else "Nothing was written."
            typer.echo(f"Stopped. {what}\n{cure}", err=True)
            raise typer.Exit(STOPPED) from None
