"""What the page shows of a setting, as plain values: series by round, by client and by layer, hashes and commands."""

from __future__ import annotations

import math
import sqlite3
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from perfed import rundir
from perfed.config import GIVEN
from perfed.core import registry
from perfed.errors import PerfedError, StoreError
from perfed.report import command
from perfed.report.collect import Setting, cut
from perfed.result import Result

BASELINES = ("local", "fedavg")
"""Methods that others are compared with, client by client."""
BESIDES = ("kept", "up", "down", "bytes_kept", "bytes_up", "bytes_down")
"""What is recorded of each thing that a client has besides its network."""
CONFUSIONS = 250_000
"""Numbers of confusion matrices in a page; the clients of the last methods go without beyond it."""


def of(setting: Setting) -> dict[str, Any]:
    """A setting, its methods best first."""
    partitions = {result.config.seed: partition(result) for results in setting.runs.values() for result in results}
    rows = setting.rows
    places = _places(setting)
    budget = CONFUSIONS
    methods = []
    for row in rows:
        results = setting.runs[row["method"]]
        matrices, used = confusions(results[0], budget)
        budget -= used
        methods.append(
            {
                "name": cut(row["method"]),
                "row": _rounded({key: value for key, value in row.items() if key not in ("method", "state_sha256")}),
                "places": places[row["method"]],
                **about(results[0]),
                **curves(results),
                "clients": {str(r.config.seed): [_share(a) for a in r.clients["accuracy"]] for r in results},
                "gains": {base: _gains(results, setting.runs[base]) for base in BASELINES if base in setting.runs},
                "confusion": matrices,
                "layers": layers(results[0]),
                "adapt_flops": _adapting(results),
                "faults": [
                    [r.config.seed, f["t"], f["client"], cut(f["reason"], 300)] for r in results for f in r.faults[:50]
                ],
                "refused": sum(len(r.faults) for r in results),
                "runs": [_run(result) for result in results],
            }
        )
    config = setting.first.config
    words = {key: value for key, value in config.identity().items() if key not in ("method", "seed")}
    if any("net" in row for row in rows):
        words["net"] = "not the same for all methods: see their configurations"
    return {
        "title": setting.title,
        "words": [[key, _words(value)] for key, value in words.items()],
        "rounds": config.rounds,
        "seeds": setting.seeds,
        "ids": setting.first.clients["ids"],
        "unfinished": [cut(name) for name in setting.unfinished],
        "partitions": {str(seed): found for seed, found in partitions.items() if found},
        "methods": methods,
        "divided": _divided(setting),
        "commands": [cut(text, 20_000) for text in command.commands(setting)],
        "given": command.given(setting),
    }


def about(result: Result) -> dict[str, Any]:
    """The method in words, and its hyper-parameters."""
    table = {key: _words(value) for key, value in result.config.method.items() if key != "name"}
    name = result.config.method["name"]
    if name.startswith(GIVEN):
        return {"title": cut(name.removeprefix(GIVEN)), "keeps": "", "sends": "", "cites": "", "hyper": table}
    cls = registry.method_class(name)
    tuned = " + fine-tuning" if name.endswith(registry.FINETUNED) else ""
    facts = {"title": (cls.title or name) + tuned, "keeps": cls.keeps, "sends": cls.sends, "cites": cls.cites}
    return facts | {"hyper": table, "toml": cut(result.config.toml(), 20_000)}


def partition(result: Result) -> dict[str, Any] | None:
    """Who has how much of which class."""
    try:
        found = rundir.read_json(result.directory / rundir.COUNTS)
        names, classes = found["names"], found["classes"]
        return {
            "clients": found["clients"],
            "unseen": found["unseen"],
            "classes": [cut(str(name)) for name in classes],
            "names": [cut(str(name)) for name in names] if names else None,
            "train": found["train"],
            "test": found["test"],
        }
    except (StoreError, KeyError, TypeError):  # a run of before these were kept
        return None


def curves(results: Sequence[Result]) -> dict[str, Any]:
    """Accuracy and loss by round and seed, and what had been spent by then.

    Where clients adapt after the last round only, the curve ends with the score before, and `after` has the jump.
    """
    history = results[0].history
    alike = [r for r in results if [entry["t"] for entry in r.history] == [entry["t"] for entry in history]]
    last = history[-1]
    jump = len(history) > 1 and "local.before.mean" in last and "local.before.mean" not in history[0]
    found: dict[str, Any] = {"t": [entry["t"] for entry in history], "after": {} if jump else None}
    for name, key in (("accuracy", "mean"), ("loss", "loss")):
        lines = [[entry.get(f"local.{key}") for entry in result.history] for result in alike]
        if jump:
            found["after"][name] = [_share(line[-1]) for line in lines]
            lines = [[*ln[:-1], r.history[-1].get(f"local.before.{key}")] for ln, r in zip(lines, alike, strict=True)]
        found[name] = [[_share(value) for value in line] for line in lines]
    spent = [_spent(result, found["t"]) for result in alike]
    for key in ("bytes", "flops"):
        sums = [[at[key] for at in run] for run in spent if run]
        found[key] = [round(statistics.fmean(at)) for at in zip(*sums, strict=True)] if sums else None
    return found


def _spent(result: Result, at: Sequence[int]) -> list[dict[str, float]] | None:
    """Bytes both ways and FLOPs up to each evaluation."""
    try:
        wanted = set(at)
        ledgers = {r["t"]: r["ledger"] for r in rundir.records(result.directory) if r["t"] in wanted}
        return [{"bytes": ledgers[t]["bytes_up"] + ledgers[t]["bytes_down"], "flops": ledgers[t]["flops"]} for t in at]
    except (PerfedError, KeyError, TypeError):
        return None


def confusions(result: Result, budget: int) -> tuple[dict[str, list[int]], int]:
    """Each client's confusion matrix as label, prediction, samples, label, ...; and how many numbers these are."""
    found: dict[str, list[int]] = {}
    used = 0
    for client, matrix in zip(result.clients["ids"], result.clients.get("confusion", []), strict=False):
        flat = [v for i, row in enumerate(matrix) for j, n in enumerate(row) if n for v in (i, j, n)]
        used += len(flat)
        if used > budget:
            return found, budget
        found[str(client)] = flat
    return found, used


def layers(result: Result) -> dict[str, Any] | None:
    """For each layer: elements, and from which round on how many are private, how many travel, and bytes per client.

    Behind them, what a client keeps, sends and receives besides its network.
    """
    try:
        records = rundir.records(result.directory)
        names = [name for name, *_ in records[0]["layers"]]
        more = sorted({entry["name"]: entry["layers"] for record in records for entry in _besides(record)}.items())
        before: Mapping[str, int] = {}
        stages: list[list[Any]] = []
        others = False
        for record in records:
            now, senders = record["ledger"]["layers"], max(1, len(record["clients"]))
            ways = [
                [round((now.get(f"{way}/{n}", 0) - before.get(f"{way}/{n}", 0)) / senders) for n in (*names, "other")]
                for way in ("up", "down")
            ]
            others |= any(way[-1] for way in ways)
            stage = [[kept for _, _, kept, _ in record["layers"]], [sent for *_, sent in record["layers"]], *ways]
            own = {entry["name"]: [entry[way] for way in BESIDES] for entry in _besides(record)}
            stage.append([own.get(name, [0] * len(BESIDES)) for name, _ in more])
            if not stages or stages[-1][1:] != stage:
                stages.append([record["t"], *stage])
            before = now
        sizes = [size for _, size, *_ in records[0]["layers"]]
        return {
            "names": [cut(n) for n in names],
            "sizes": sizes,
            "other": others,
            "stages": stages,
            "besides": [[cut(name, 60), [cut(n) for n in like]] for name, like in more],
            "kept": _kept(result),
        }
    except (PerfedError, KeyError, TypeError, ValueError, IndexError):  # a run of before these were recorded
        return None


def _besides(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a round's clients had besides their network; nothing in runs of before this was recorded."""
    return list(record.get("besides", []))


def _adapting(results: Sequence[Result]) -> float | None:
    """FLOPs of the adaptation after the last round, mean over seeds; unknown in runs of before they were counted."""
    known = [result.cost.get("adapt_flops") for result in results]
    return None if None in known else statistics.fmean(v for v in known if v is not None)


def _kept(result: Result) -> float | None:
    """Bytes that a client keeps, mean over those that took part."""
    try:
        with closing(rundir.read_only(result.directory)) as database:
            found = database.execute("select avg(length(blob)) from states where kind = 'client'").fetchone()[0]
        return None if found is None else round(found)
    except (PerfedError, sqlite3.Error):
        return None


def _gains(results: Sequence[Result], base: Sequence[Result]) -> dict[str, float]:
    """How many clients are better off than by the baseline with the same seed, how many worse, and by how much."""
    by_seed = {result.config.seed: result for result in base}
    better = same = worse = 0
    total = 0.0
    for result in results:
        if result.config.seed not in by_seed:
            continue
        other = by_seed[result.config.seed].accuracy
        for client, accuracy in result.accuracy.items():
            if accuracy is None or other.get(client) is None or not math.isfinite(accuracy):
                continue
            difference = accuracy - other[client]
            total += difference
            better, same, worse = better + (difference > 0), same + (difference == 0), worse + (difference < 0)
    clients = max(1, better + same + worse)
    return {"better": better, "same": same, "worse": worse, "mean": round(total / clients, 5)}


def _places(setting: Setting) -> dict[str, list[int]]:
    """Each method's rank with each seed, equals sharing the better one."""
    found: dict[str, list[int]] = {label: [] for label in setting.runs}
    for seed in setting.seeds:
        scores = {
            label: result.metrics["local.mean"]
            for label, results in setting.runs.items()
            for result in results
            if result.config.seed == seed
        }
        for label, score in scores.items():
            found[label].append(1 + sum(other > score for other in scores.values()))
    return found


def _divided(setting: Setting) -> bool:
    """Whether methods saw different partitions with the same seed."""
    sums: dict[int, set[str]] = {}
    for results in setting.runs.values():
        for result in results:
            sums.setdefault(result.config.seed, set()).add(result.partition_sha256)
    return any(len(found) > 1 for found in sums.values())


def _run(result: Result) -> dict[str, Any]:
    try:
        versions = rundir.read_json(result.directory / rundir.RESULT).get("versions", {})
    except PerfedError:
        versions = {}
    return {
        "seed": result.config.seed,
        "state": result.state_sha256,
        "partition": result.partition_sha256,
        "directory": cut(result.directory.name),
        "versions": {cut(str(key), 40): cut(str(value), 40) for key, value in versions.items()},
    }


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return cut(", ".join(f"{key} = {item}" if key != "name" else str(item) for key, item in value.items()))
    return cut(str(value))


def _share(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 5)


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}


def everything(settings: Iterable[Setting]) -> list[dict[str, Any]]:
    """All settings."""
    return [of(setting) for setting in settings]
