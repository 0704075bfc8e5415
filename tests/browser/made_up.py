"""Finished runs that nobody computed: directories of any size, to see how a page copes with them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from perfed import config as configuration
from perfed import rundir
from perfed.core import registry


def names(many: int) -> list[str]:
    known = list(registry.methods())
    return [*known, *(f"{name}+ft" for name in known)][:many]


def comparison(place: Path, methods: list[str], rounds: int, clients: int, seeds: int = 1, **words: Any) -> Path:
    """A comparison as `perfed compare` leaves it."""
    for seed in range(seeds):
        for number, name in enumerate(methods):
            run(place / name / str(seed), name, rounds, clients, seed, 0.3 + 0.6 * number / len(methods), **words)
    tables = {name: {} for name in methods}
    text = _toml({"methods": methods, "seeds": list(range(seeds)), "config": {}, "method": tables})
    (place / rundir.COMPARE).write_text(text)
    return place


def run(
    place: Path,
    method: str,
    rounds: int,
    clients: int,
    seed: int,
    level: float,
    *,
    names: list[str] | None = None,
    classes: list[str] | None = None,
    faults: list[dict[str, Any]] | None = None,
    **words: Any,
) -> Path:
    """A run in which every round was evaluated."""
    place.mkdir(parents=True)
    chance = np.random.default_rng([seed, rounds, clients, int(1000 * level)])
    labels = classes or [str(c) for c in range(10)]
    given = {
        "method": method,
        "rounds": rounds,
        "clients": clients,
        "split": "classes:2",
        "eval_every": 1,
        "seed": seed,
    }
    resolved = configuration.resolve(given | words)
    (place / rundir.CONFIG).write_text(resolved.toml())
    counts = [[c % len(labels), 20, (c + 1) % len(labels), 10 + c % 7] for c in range(clients)]
    partition = {"clients": clients, "unseen": 0, "classes": labels, "names": names, "train": counts, "test": counts}
    (place / rundir.COUNTS).write_text(json.dumps(partition))
    history, records, scores = [], [], np.zeros(clients)
    for t in range(1, rounds + 1):
        scores = np.clip(level * (1 - np.exp(-4 * t / rounds)) + chance.normal(0, 0.1, clients), 0, 1)
        entry = {"t": t, "adapted": False, "local.mean": float(scores.mean()), "local.loss": float(2.3 - scores.mean())}
        history.append(entry)
        layers = {f"{way}/conv{k}": 1000 * t * clients for way in ("up", "down") for k in range(6)}
        ledger = {
            "bytes_up": 6000 * t * clients,
            "bytes_down": 6000 * t * clients,
            "flops": 10**7 * t,
            "layers": layers,
        }
        shares = [[f"conv{k}", 1000, 10 * t if k < 3 else 0, 1000 - 10 * t if k < 3 else 1000] for k in range(6)]
        entries = {str(c): {"up": 6000, "down": 6000, "samples": 30, "flops": 10**5} for c in range(clients)}
        own = {"clients": {"ids": list(range(clients)), "accuracy": [round(float(v), 6) for v in scores]}}
        blamed = [fault for fault in faults or [] if fault["t"] == t]
        records.append(
            {"t": t, "cohort": list(range(clients)), "clients": entries, "faults": blamed, "ledger": ledger}
            | {"layers": shares, "metrics": entry | own, "states": {}}
        )
    matrices = []
    for _ in range(clients):
        matrix = np.zeros((len(labels), len(labels)), dtype=int)
        np.add.at(matrix, (chance.integers(0, len(labels), 60), chance.integers(0, len(labels), 60)), 1)
        matrices.append(matrix.tolist())
    last = {"local.std": float(scores.std()), "local.worst10": float(np.sort(scores)[: max(1, clients // 10)].mean())}
    cost = records[-1]["ledger"] | {"param_batches": 1, "samples": 1, "seconds": 1.0, "extra": {}}
    result = {
        "config": {},
        "state_sha256": "0" * 64,
        "partition_sha256": "1" * 64,
        "history": history,
        "faults": faults or [],
        "metrics": {k: v for k, v in history[-1].items() if isinstance(v, float)} | last,
        "cost": cost,
        "clients": {"ids": list(range(clients)), "accuracy": scores.tolist(), "confusion": matrices},
        "versions": {"perfed": "0"},
    }
    rundir.write_json(place / rundir.RESULT, result)
    with closing(sqlite3.connect(place / rundir.DATABASE)) as database:
        database.execute("create table rounds (t integer primary key, record text, chain text)")
        database.execute("create table states (kind text, id integer, since integer, sha text, blob blob)")
        database.executemany("insert into rounds values (?, ?, '')", [(r["t"], json.dumps(r)) for r in records])
        database.commit()
    return place


def _toml(value: dict[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(value)
