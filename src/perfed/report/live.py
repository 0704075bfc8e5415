"""Where runs stand, told from their files alone and without touching them."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfed import config as configuration
from perfed import rundir
from perfed.errors import PerfedError

MOST = 500
"""runs that are followed"""
DEEPEST = 5
FRESH = 30.0
"""seconds in which a run may be loading its data or writing its result without holding its lock"""
RECENT = 20
"""faults that are listed"""


@dataclass
class Known:
    """What was read of one run so far."""

    words: dict[str, Any]
    file: tuple[int, int] = (0, 0)
    """which database this was read from, and when its run began"""
    round: int = 0
    curve: list[list[float]] = field(default_factory=list)
    clients: list[float | None] = field(default_factory=list)
    clients_round: int = 0
    faults: list[list[Any]] = field(default_factory=list)
    refused: int = 0
    ledger: dict[str, Any] = field(default_factory=dict)

    def enter(self, record: dict[str, Any]) -> None:
        """Take in one more round."""
        self.round, self.ledger = record["t"], record["ledger"]
        self.refused += len(record["faults"])
        self.faults = (self.faults + [[f["t"], f["client"], f["reason"][:300]] for f in record["faults"]])[-RECENT:]
        metrics = record.get("metrics")
        if metrics and metrics.get("local.mean") is not None:
            self.curve.append([record["t"], metrics["local.mean"], metrics.get("local.loss")])
            self.clients, self.clients_round = metrics["clients"]["accuracy"], record["t"]


class Follower:
    """Follows all runs below a directory; remembers what it read, so that every look costs what is new."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[Path, Known] = {}

    def look(self) -> dict[str, Any]:
        """Where everything stands now."""
        found = [self._run(place, comparison) for place, comparison in self._places()]
        return {"directory": str(self.root), "runs": rundir.finite(found)}

    def _places(self) -> Iterator[tuple[Path, Path | None]]:
        """The runs that are begun or planned, each with the comparison that it belongs to."""
        seen = 0
        for folder, inside, files in os.walk(self.root):
            place = Path(folder)
            inside.sort()
            if len(place.relative_to(self.root).parts) >= DEEPEST:
                inside.clear()
            own: list[tuple[Path, Path | None]] = []
            if rundir.COMPARE in files:
                inside.clear()
                own = [(run, place) for run in _planned(place)]
            elif rundir.CONFIG in files:
                inside.clear()
                own = [(place, None)]
            for one in own:
                seen += 1
                if seen > MOST:
                    return
                yield one

    def _run(self, place: Path, comparison: Path | None) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "id": str(place.relative_to(self.root)) if place != self.root else place.resolve().name,
            "resume": f"perfed resume {shlex.quote(str(comparison or place))}",
            "method": place.parent.name if comparison else place.name,
            "seed": place.name if comparison else None,
            "round": 0,
        }
        if not rundir.is_run(place):
            return facts | {"status": "waiting"}
        try:
            known = self._read(place)
        except (PerfedError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            return facts | {"status": "unreadable", "error": str(error)[:300]}
        words, ledger = known.words, known.ledger
        method = words.get("method", "fedavg")
        rounds = words.get("rounds", 0)
        data = words.get("data", "")
        pace = ledger.get("seconds", 0.0) / known.round if known.round else None
        status = _status(place, known.round, rounds)
        return facts | {
            "status": status,
            "method": method["name"] if isinstance(method, dict) else method,
            "data": data["name"] if isinstance(data, dict) else data,
            "seed": words.get("seed"),
            "round": known.round,
            "rounds": rounds,
            "curve": known.curve,
            "clients": known.clients,
            "clients_round": known.clients_round,
            "faults": known.faults,
            "refused": known.refused,
            "bytes": ledger.get("bytes_up", 0) + ledger.get("bytes_down", 0),
            "seconds": ledger.get("seconds", 0.0),
            "left": pace * (rounds - known.round) if pace and status == "running" else None,
            "since": _age(place / rundir.DATABASE) if status == "running" else None,
        }

    def _read(self, place: Path) -> Known:
        """Read the rounds that were committed since the last look; from the start if the file is another one."""
        path = place / rundir.DATABASE
        there = path.is_file()
        file = path.stat().st_ino if there else 0, (place / rundir.CONFIG).stat().st_mtime_ns
        known = self._known.get(place)
        if known is None or known.file != file:
            known = Known(configuration.read(place / rundir.CONFIG), file)
        if there and not (known.round and known.round == known.words.get("rounds")):
            try:
                for record in rundir.records(place, known.round):
                    known.enter(record)
            except PerfedError:  # just being made, or busy: what was read before still holds
                pass
        self._known[place] = known
        return known


def _planned(place: Path) -> list[Path]:
    try:
        plan = configuration.read(place / rundir.COMPARE)
        return [place / str(name) / str(seed) for seed in plan["seeds"] for name in plan["methods"]]
    except (PerfedError, KeyError, TypeError):
        return []


def _status(place: Path, round: int, rounds: int) -> str:
    if rundir.is_finished(place):
        return "finished"
    if rundir.in_use(place):
        return "running"
    if round >= rounds:
        return "running" if _age(place / rundir.DATABASE) < FRESH else "stopped"
    if not round and _age(place / rundir.CONFIG) < FRESH and not (place / rundir.LOCK).exists():
        return "starting"
    return "stopped"


def _age(path: Path) -> float:
    """Seconds since a file, or its log of changes, was written."""
    times = [p.stat().st_mtime for p in (path, path.with_name(path.name + "-wal")) if p.exists()]
    return max(0.0, time.time() - max(times)) if times else float("inf")
