"""Several methods and seeds on the same federations, and the leaderboard they make."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfed import config as configuration
from perfed import rundir
from perfed.config import Config
from perfed.core.method import Method
from perfed.engine.settings import Watcher
from perfed.errors import ConfigError, StoreError
from perfed.experiment import Algorithm, Data, Network, begin, describe, finish
from perfed.leaderboard import Comparison, read_plan
from perfed.prepare import Prepared, prepare
from perfed.result import Result

Announce = Callable[[Config, str], Watcher | None]
"""Told before each run: its configuration and `start`, `resume` or `skip`; answers who watches it."""


def compare(
    methods: Sequence[Algorithm],
    seeds: Iterable[int] = (0,),
    data: Data = "digits",
    net: Network = "cnn",
    *,
    out: Path | str | None = None,
    announce: Announce | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    method: Mapping[str, Any] | None = None,
    nets: Mapping[str, str | dict[str, Any]] | None = None,
    **words: Any,
) -> Comparison:
    """Run every method with every seed under `out`; what is finished there is kept, what is begun is continued.

    `method` has hyper-parameters for all methods, `settings` those of single methods by name, and `nets` names the
    network of single methods that cannot run on `net`.
    """
    place, tries = Path(out or tempfile.mkdtemp(prefix="perfed-")), list(seeds)
    if not methods or not tries or len(set(tries)) < len(tries):
        raise ConfigError("A comparison needs methods, and seeds that differ.", "Give --methods A,B and --seeds 0,1.")
    common = {key: value for key, value in (method or {}).items() if key != "name"}
    calls: dict[str, list[tuple[Config, dict[str, Any]]]] = {}
    for entry in methods:
        wanted = _with(entry, common, settings or {})
        used = net if isinstance(wanted, Method) else (nets or {}).get(wanted["name"], net)
        described = [describe(wanted, data, used, words | {"seed": seed}) for seed in tries]
        name = described[0][0].method["name"]
        if name in calls:
            raise ConfigError(f"The method {name!r} is named twice.", "Name it once.")
        calls[name] = described
    for what, given in (("settings", settings), ("a network", nets)):
        if unused := [name for name in (given or {}) if name not in calls]:
            raise ConfigError(
                f"There are {what} for {unused[0]!r}, which is not compared.".replace("are a", "is a"),
                f"Compared: {', '.join(calls)}.",
            )
    _claim(place, calls, tries, describe(methods[0], data, net, words | {"seed": tries[0]})[0])
    runs: dict[str, list[Result]] = {name: [] for name in calls}
    for number, seed in enumerate(tries):
        alike = None
        for name, described in calls.items():
            config, objects = described[number]
            result, alike = _one(config, objects, place / name / str(seed), alike, announce or _silent)
            runs[name].append(result)
    before = Comparison.load(place).runs  # what earlier calls finished here stays in the table
    more = {name: results for name, results in before.items() if len(results) > len(runs.get(name, []))}
    comparison = Comparison(runs | more, place)
    comparison.write()
    if out is None:
        weakref.finalize(comparison, shutil.rmtree, place, ignore_errors=True)
    return comparison


def resume_comparison(directory: Path | str, announce: Announce | None = None, **words: Any) -> Comparison:
    """Continue a comparison from the file that it saved."""
    place = Path(directory)
    plan = read_plan(place)
    tables, shared = plan["method"], plan["config"] | words
    settings = {name: {k: v for k, v in tables[name].items() if k != "name"} for name in plan["methods"]}
    own: dict[str, Any] = {"settings": settings, "nets": plan.get("nets")}
    return compare(plan["methods"], plan["seeds"], out=place, announce=announce, **own, **shared)


def _one(
    config: Config, objects: dict[str, Any], place: Path, alike: Prepared | None, tell: Announce
) -> tuple[Result, Prepared | None]:
    """One run of the comparison: kept, continued or started. Methods share the federation of a seed."""
    began = rundir.is_run(place)
    if began:
        same_run(configuration.load(place / rundir.CONFIG), config, place)
        if rundir.is_finished(place):
            tell(config, "skip")
            return Result.load(place), alike
    watch = tell(config, "resume" if began else "start")
    prepared = prepare(config.changed(out=str(place)), directory=place, alike=alike, **objects)
    result = finish(prepared, place, watch=watch) if began else begin(prepared, watch=watch)
    return result, prepared


def _silent(config: Config, what: str) -> None:
    """Nobody watches."""


def _with(
    entry: Algorithm, common: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]
) -> Method | dict[str, Any]:
    if isinstance(entry, Method):
        return entry
    table = {"name": entry} if isinstance(entry, str) else dict(entry)
    return dict(common) | table | dict(settings.get(table["name"], {}))


def same_run(old: Config, new: Config, place: Path, cure: str = "Give another --out.") -> None:
    """Refuse to mix runs of different configurations; what the data fills in may be missing in the new one."""
    had, want = old.identity(), new.identity()
    for key in had.keys() | want.keys():
        filled = key in ("split", "clients") and key not in want
        if not filled and had.get(key) != want.get(key):
            raise StoreError(f"{place} holds a run with {key} = {had.get(key)!r}, not {want.get(key)!r}.", cure)


def _same_method(name: str, had: Mapping[str, Any], want: Mapping[str, Any], place: Path) -> None:
    """Refuse another value of a hyper-parameter before anything is written."""
    for key in had.keys() | want.keys():
        if had.get(key) != want.get(key):
            raise StoreError(
                f"{place} holds {name} with {key} = {had.get(key)!r}, not {want.get(key)!r}.", "Give another --out."
            )


def _claim(place: Path, calls: Mapping[str, Sequence[tuple[Config, Any]]], seeds: Sequence[int], first: Config) -> None:
    """Write what is compared; a comparison that is already here may only grow. `first` has the common words."""
    import tomli_w

    tables = {name: described[0][0].words()["method"] for name, described in calls.items()}
    words = {name: described[0][0].words()["net"] for name, described in calls.items()}
    nets = {name: net for name, net in words.items() if net != first.words()["net"]}
    shared = {key: value for key, value in first.words().items() if key not in ("method", "seed", "out")}
    if rundir.is_run(place):
        raise StoreError(f"{place} already holds a run.", "Give another --out.")
    if rundir.is_comparison(place):
        before = read_plan(place)
        then = configuration.resolve(before["config"])
        same_run(then.changed(method=first.words()["method"], seed=first.seed), first, place)
        for name, table in tables.items():
            _same_method(name, before["method"].get(name, table), table, place)
        tables, nets = before["method"] | tables, before.get("nets", {}) | nets
        seeds = [*before["seeds"], *(seed for seed in seeds if seed not in before["seeds"])]
    try:
        place.mkdir(parents=True, exist_ok=True)
        plan = {"methods": list(tables), "seeds": list(seeds), "config": shared, "method": tables}
        rundir.write(place / rundir.COMPARE, tomli_w.dumps(plan | ({"nets": nets} if nets else {})).encode())
    except OSError as error:
        raise StoreError(f"{place} cannot be written: {error}.", "Give another --out.") from None
