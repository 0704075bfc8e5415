"""Time and memory as a federation grows, with more workers, and with many private states.

    python benchmarks/scaling.py [--small]

Every configuration is a process of its own, and each is measured several times in turn. Writes results/scaling.json;
docs/benchmarks.md is filled from it by docs/tables.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perfed import nets
from perfed.core import registry
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings

ROOT = Path(__file__).parents[1]
Case = dict[str, Any]


def federation(clients: int, each: int, shape: tuple[int, int, int]) -> Federation:
    """Every client has `each` random training images, and one to be tested on."""
    rows = clients * (each + 1)
    source = np.random.default_rng(0)
    x = torch.from_numpy(source.integers(0, 256, (rows, *shape), dtype=np.uint8))
    owner, tests = np.arange(rows) % clients, np.arange(rows) < clients
    owners = {"train": np.where(tests, -1, owner), "test": np.where(tests, owner, -1), "val": np.full(rows, -1)}
    return Federation(x, torch.from_numpy(source.integers(0, 10, rows)), owners, clients, [str(i) for i in range(10)])


def megabytes(kind: str) -> float:
    """What the process holds (VmRSS) or has held at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def measure(case: Case) -> None:
    """One configuration, in this process."""
    data = federation(case["clients"], case["each"], tuple(case["shape"]))
    torch.manual_seed(0)
    net = nets.build(case["net"], data.input_shape, 10, **case.get("options", {}))
    method = registry.make(case["method"], lr=0.01, batch_size=20)
    settings = Settings(
        rounds=case["rounds"] + 1, fraction=case["participants"] / case["clients"], eval_every=10**6, new=False
    )
    with tempfile.TemporaryDirectory() as place:
        simulation = Simulation(data, net, method, settings, directory=Path(place), workers=case["workers"])
        simulation.step(1)
        before, walls, work = megabytes("VmRSS"), [], []
        for t in range(2, case["rounds"] + 1):
            wall, cpu = time.perf_counter(), time.process_time()
            simulation.step(t)
            walls.append(time.perf_counter() - wall)
            work.append(time.process_time() - cpu)
        scored = time.perf_counter()
        if case.get("score"):  # everybody, with a model of one's own
            simulation.scoring.evaluate(case["rounds"])
        scored = time.perf_counter() - scored
        held = simulation.store._cache.used / 2**20
        simulation.close()
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    found = {
        "seconds": min(walls), "cpu_seconds": min(work), "score_seconds": scored,
        "grown_mb": megabytes("VmHWM") - before, "peak_mb": megabytes("VmHWM"),
        "worker_peak_mb": children, "cache_mb": held,
    }  # fmt: skip
    print(json.dumps(found))


def cases(by: int) -> dict[str, list[Case]]:
    """What is measured; `by` makes everything smaller."""
    mlp = {"method": "fedavg", "net": "mlp", "options": {"hidden": [200]}, "shape": (1, 28, 28), "each": 20}
    growth = [
        {**mlp, "clients": clients // by, "participants": 100 // by, "rounds": 8, "workers": 1}
        for clients in (100, 1000, 10_000, 100_000)
    ]
    cnn = {"method": "fedavg", "net": "cnn", "shape": (1, 28, 28), "each": 200 // by, "clients": 100}
    workers = [{**cnn, "participants": 20 // min(by, 4), "rounds": 4, "workers": n} for n in (1, 2)]
    heads = {
        **mlp, "method": "fedper", "clients": 10_000 // by, "participants": 1000 // by, "rounds": 10, "workers": 1,
        "score": True,
    }  # fmt: skip
    whole = {
        "method": "local", "net": "resnet18", "shape": (3, 32, 32), "each": 2, "clients": 500 // by,
        "participants": max(1, 50 // by), "rounds": 6, "workers": 1, "score": True,
    }  # fmt: skip
    return {"growth": growth, "workers": workers, "private": [heads, whole]}


def best(runs: list[Case]) -> Case:
    """The least of each figure."""
    return {key: round(min(run[key] for run in runs), 4) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tenth of everything: does it work")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="growth, workers or private, with commas between")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", default=str(ROOT / "results" / "scaling.json"))
    given = parser.parse_args()
    if given.one:
        return measure(json.loads(given.one))
    out = Path(given.out)
    results: dict[str, Any] = json.loads(out.read_text())["groups"] if out.exists() and given.only else {}
    for group, several in cases(10 if given.small else 1).items():
        if given.only and group not in given.only.split(","):
            continue
        runs: list[list[Case]] = [[] for _ in several]
        for _ in range(1 if group == "private" else given.repeats):
            for case, found in zip(several, runs, strict=True):
                command = [sys.executable, __file__, "--one", json.dumps(case)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
                print(group, case["clients"], found[-1], flush=True)
        results[group] = [{"case": case, **best(found)} for case, found in zip(several, runs, strict=True)]
    facts = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "repeats": given.repeats,
        "small": given.small,
        "groups": results,
    }
    out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
