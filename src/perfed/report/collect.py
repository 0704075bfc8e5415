"""Finished runs from directories, sorted into settings that can be compared: one table, one page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfed import rundir
from perfed.errors import StoreError
from perfed.leaderboard import Comparison, read_plan
from perfed.result import Result

TITLED = ("data.name", "split", "clients", "rounds")
"""words that every title has"""
LONGEST = 200
"""characters of a name that are shown"""


@dataclass
class Setting:
    """Runs that differ in method, network and seed alone, by label; what is compared in one table."""

    runs: dict[str, list[Result]]
    unfinished: list[str] = field(default_factory=list)
    """runs of the comparison that are not there yet"""
    apart: dict[str, Any] = field(default_factory=dict)
    """words that set it apart from the other settings of the page and are not in the title anyway"""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The leaderboard, best mean accuracy first."""
        return Comparison(self.runs, Path()).rows

    @property
    def first(self) -> Result:
        """Any run: the words that are no method's and no seed's are those of all."""
        return next(iter(self.runs.values()))[0]

    @property
    def seeds(self) -> list[int]:
        """All seeds, ascending."""
        return sorted({result.config.seed for results in self.runs.values() for result in results})

    @property
    def title(self) -> str:
        """What was run, in a line."""
        config = self.first.config
        seeds = f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else f"seed {config.seed}"
        words = (config.data["name"], config.split, f"{config.clients} clients", f"{config.rounds} rounds", seeds)
        told = [cut(str(word)) for word in words if word is not None]
        return ", ".join([*told, *(cut(f"{key} = {value}") for key, value in self.apart.items())])


def collect(directories: Iterable[Path | str]) -> list[Setting]:
    """The finished runs of these runs and comparisons, grouped by all words but method, network and seed."""
    held: dict[str, dict[tuple[str, str], dict[int, Result]]] = {}
    missing: dict[str, list[str]] = {}
    for directory in directories:
        results, unfinished = _read(Path(directory))
        for result in results:
            words = result.config.identity()
            seed, table = words.pop("seed"), [words.pop("method"), words.pop("net")]
            name = result.config.method["name"]
            where = json.dumps(words, sort_keys=True, default=str)
            series = held.setdefault(where, {}).setdefault((name, json.dumps(table, sort_keys=True)), {})
            series.setdefault(seed, result)
            missing.setdefault(where, []).extend(unfinished)
            unfinished = []
    found = [Setting(_labelled(series), missing[where]) for where, series in held.items()]
    choices = [_flat(setting.first) for setting in found]
    keys = [key for key in dict.fromkeys(key for one in choices for key in one) if key not in TITLED]
    for setting, own in zip(found, choices, strict=True):
        setting.apart = {key: own.get(key) for key in keys if any(one.get(key) != own.get(key) for one in choices)}
    return found


def _flat(result: Result) -> dict[str, Any]:
    """The words of a setting, those inside tables as `data.size`."""
    words: dict[str, Any] = {}
    for key, value in result.config.identity().items():
        if key in ("method", "net", "seed"):
            continue
        inside = value.items() if isinstance(value, dict) else [("", value)]
        words |= {f"{key}.{name}" if name else key: item for name, item in inside}
    return words


def _read(place: Path) -> tuple[list[Result], list[str]]:
    if not rundir.is_comparison(place):
        return [Result.load(place)], []
    plan = read_plan(place)
    planned = [(name, seed) for name in plan["methods"] for seed in plan["seeds"]]
    unfinished = [f"{name}, seed {seed}" for name, seed in planned if not rundir.is_finished(place / name / str(seed))]
    found = Comparison.load(place)
    return [result for results in found.runs.values() for result in results], unfinished


def _labelled(series: dict[tuple[str, str], dict[int, Result]]) -> dict[str, list[Result]]:
    """Labels: the method's name, with what sets it apart where several have it."""
    names = [name for name, _ in series]
    found: dict[str, list[Result]] = {}
    for (name, _), by_seed in series.items():
        results = [by_seed[seed] for seed in sorted(by_seed)]
        label = name
        if names.count(name) > 1:
            others = [_choices(next(iter(s.values()))) for (n, _), s in series.items() if n == name]
            own = _choices(results[0])
            apart = [key for key in own if any(other.get(key) != own[key] for other in others)]
            apart = apart or ["net"]
            label = f"{name} ({', '.join(f'{key}={own[key]}' for key in apart)})"
        if label in found:
            raise StoreError(f"Two different runs would both be called {label!r}.", "Report them apart.")
        found[label] = results
    return found


def _choices(result: Result) -> dict[str, Any]:
    """The method's hyper-parameters, and the network with its options."""
    net = {("net" if key == "name" else f"net.{key}"): value for key, value in result.config.net.items()}
    return result.config.method | net


def cut(text: str, longest: int = LONGEST) -> str:
    """A name that fits on a page."""
    return text if len(text) <= longest else text[: longest - 1] + "…"
