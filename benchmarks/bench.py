"""Measure perfed and its peers side by side: same data, division, network, schedule; interleaved, best of several.

    python benchmarks/bench.py --data-dir DIR [--repeats 3] [--rounds 4] [--only perfed,reachable] [--small]

Every peer has an environment of its own under build/bench, made at the first run. Writes results/bench.json; the page
docs/benchmarks.md is filled from it by docs/tables.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import ttest_rel
from workload import load

from perfed import nets
from perfed.core.rng import sample
from perfed.data import Federation, federate

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "bench"
TORCH = f"torch=={torch.__version__}"
# What each environment is made of: requirements, and packages taken without their own requirements.
PEERS: dict[str, tuple[list[str], list[str]]] = {
    "flwr": (["flwr[simulation]==1.41.0"], []),
    "fluke-fl": (
        ["numpy", "pandas", "scikit-learn", "torchmetrics", "rich", "typer", "psutil", "pyyaml", "omegaconf",
         "diskcache", "cerberus", "hydra-core", "requests", "matplotlib", "seaborn", "tensorboard"],
        ["fluke-fl==0.8.1", "opacus"],
    ),
    "pfl": (["pfl[pytorch]==0.6.0"], []),
}  # fmt: skip
SCRIPTS = {"perfed": "run_perfed", "reachable": "run_reachable", "flwr": "run_flower", "fluke-fl": "run_fluke",
           "pfl": "run_pfl"}  # fmt: skip
WORKLOADS: dict[str, dict[str, Any]] = {
    "W1": {"method": "fedavg", "net": "cnn", "batch": 10, "clients": 100, "cohort": 10, "split": "dirichlet:0.1"},
    "W2": {"method": "fedrep", "net": "cnn", "batch": 10, "clients": 100, "cohort": 10, "split": "dirichlet:0.1"},
    "W3": {"method": "fedavg", "net": "mlp", "batch": 20, "clients": 1000, "cohort": 100, "split": "iid"},
}
TITLES = {
    "W1": "FedAvg, CNN with 582,026 parameters, MNIST, Dirichlet 0.1, 100 clients, 10 per round, batch 10",
    "W2": "FedRep on the same, 10 head epochs and 1 body epoch",
    "W3": "FedAvg, MLP 784-200-10, 1000 clients, 100 per round, batch 20",
}
ABSENT = {("W2", "pfl"): "has no FedRep"}


def environment(peer: str, python: str | None) -> Path:
    """The Python of a peer's environment, made if it is not there."""
    if python:
        return Path(python)
    place = BUILD / "envs" / peer
    ready = place / "ready"
    if not ready.exists():
        venv.create(place, with_pip=True, clear=True)
        pip = [str(place / "bin" / "pip"), "install", "--quiet"]
        needed, bare = PEERS[peer]
        subprocess.run([*pip, TORCH, *needed], check=True)
        if bare:
            subprocess.run([*pip, "--no-deps", *bare], check=True)
        ready.touch()
    return place / "bin" / "python"


def write_workload(name: str, rounds: int, small: bool, data_dir: str, seed: int) -> Path:
    """The file that every tool reads."""
    facts = dict(WORKLOADS[name])
    if small:
        facts |= {"clients": facts["clients"] // 5, "cohort": max(2, facts["cohort"] // 5)}
    federation = federate(
        "mnist", data_dir=data_dir, clients=facts["clients"], split=facts["split"], seed=seed, val_fraction=0.0
    )
    torch.manual_seed(seed)
    options = {"hidden": [200]} if facts["net"] == "mlp" else {}
    net = nets.build(facts["net"], federation.input_shape, 10, **options)
    fraction = facts["cohort"] / facts["clients"]
    cohorts = [sample(seed, t + 1, federation.participants, fraction) for t in range(rounds)]
    facts |= {"name": name, "lr": 0.01, "head_epochs": 10, "cohorts": cohorts, "seed": seed}
    path = BUILD / f"{name}-{seed}{'-small' if small else ''}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    initial = {f"init/{key}": value.numpy() for key, value in net.module.state_dict().items()}
    owners = {f"owner/{part}": _owner(federation, part) for part in ("train", "test")}
    np.savez(path, facts=json.dumps(facts), x=federation._x.numpy(), y=federation._y.numpy(), **owners, **initial)
    return path


def _owner(federation: Federation, part: str) -> np.ndarray:
    owner = np.full(len(federation._y), -1, dtype=np.int64)
    for client in range(federation.num_clients):
        owner[federation.rows(client, part).numpy()] = client
    return owner


def measure(tool: str, python: Path, file: Path) -> dict[str, Any]:
    """One run of one tool."""
    command = [str(python), str(ROOT / "benchmarks" / f"{SCRIPTS[tool]}.py"), str(file)]
    threads = 1
    if tool == "pfl":  # a process per core
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={os.cpu_count()}"]
    if tool == "fluke-fl" and not file.name.startswith("W3"):  # one process: threads, where networks are large enough
        threads = os.cpu_count() or 1
    if tool in ("flwr", "pfl"):  # they listen on every interface: they get a network of their own
        command = ["unshare", "--map-root-user", "--net", str(python), str(ROOT / "benchmarks" / "alone.py"), *command]
    mark = f"PERFED_BENCH={tool}-{os.getpid()}-{time.monotonic_ns()}"
    more = {"PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT / "src") if tool == "perfed" else ""}
    more |= {"OMP_NUM_THREADS": str(threads), **dict([mark.split("=")])}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        running = subprocess.Popen(command, stdout=out, stderr=err, text=True, env=os.environ | more)
        peak = 0.0
        while running.poll() is None:
            peak = max(peak, held(mark))
            time.sleep(0.5)
        out.seek(0)
        err.seek(0)
        lines, trouble = [line for line in out.read().splitlines() if line.startswith('{"tool"')], err.read()
    if not lines:
        return {"tool": tool, "error": trouble.strip()[-2000:]}
    found: dict[str, Any] = json.loads(lines[-1])
    work = load(file)
    samples = sum(work.samples(t) for t in range(1, work.rounds)) / (work.rounds - 1)
    return found | {"samples": samples, "peak_mb": round(peak)}


def held(mark: str) -> float:
    """Megabytes of all processes that have this in their environment, what they share counted once."""
    total = 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                lines = (place / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total / 1024


def best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest of several runs, training by the sample, as divisions differ in size; the accuracies of all."""
    good = [run for run in runs if "error" not in run]
    if not good:
        return runs[0]
    usual = sum(run["samples"] for run in good) / len(good)
    return {
        "version": good[0]["version"],
        "train": min(run["train"] / run["samples"] for run in good) * usual,
        "trains": [run["train"] for run in good],
        "eval": min(run["eval"] for run in good),
        "accuracy": [run["accuracy"] for run in good],
        "peak_mb": max(run["peak_mb"] for run in good),
    }


def agree(tools: dict[str, Any]) -> bool:
    """Whether every tool is as accurate as perfed on the same divisions and first weights.

    Only the order of batches differs. A mean difference of more than a point counts if a paired t-test at one per cent
    finds it.
    """
    own = tools["perfed"].get("accuracy", [])
    if any("error" in found or len(found["accuracy"]) != len(own) for found in tools.values()):
        return False
    for found in tools.values():
        gap = abs(float(np.mean(found["accuracy"]) - np.mean(own)))
        if gap > 0.01 and (len(own) < 2 or ttest_rel(found["accuracy"], own).pvalue < 0.01):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--repeats", type=int, default=3, help="each with a division and first weights of its own")
    parser.add_argument("--rounds", type=int, default=4, help="the first is for warming up")
    parser.add_argument("--only", default="", help="tools, with commas between")
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--small", action="store_true", help="a fifth of the clients: does everything work")
    parser.add_argument("--python", action="append", default=[], help="PEER=PATH of an environment that is there")
    parser.add_argument("--out", default=str(ROOT / "results" / "bench.json"))
    given = parser.parse_args()
    there = dict(item.split("=", 1) for item in given.python)
    tools = [tool for tool in SCRIPTS if not given.only or tool in given.only.split(",")]
    pythons = {tool: environment(tool, there.get(tool)) if tool in PEERS else Path(sys.executable) for tool in tools}
    results: dict[str, Any] = {}
    for name in given.workloads.split(","):
        runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools if (name, tool) not in ABSENT}
        for seed in range(given.repeats):
            file = write_workload(name, given.rounds, given.small, given.data_dir, seed)
            for tool, several in runs.items():  # interleaved: what else the machine does strikes all alike
                several.append(measure(tool, pythons[tool], file))
                print(name, seed, json.dumps(several[-1])[:600], flush=True)
        found = {tool: best(several) for tool, several in runs.items()}
        results[name] = {"title": TITLES[name], "tools": found, "accuracies_agree": agree(found)}
    facts = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rounds": given.rounds - 1,
        "repeats": given.repeats,
        "small": given.small,
        "workloads": results,
    }
    Path(given.out).write_text(json.dumps(facts, indent=1) + "\n")
    if not all(work["accuracies_agree"] for work in results.values()):
        sys.exit("A tool failed, or is not as accurate as the others: look at what is printed above.")


if __name__ == "__main__":
    main()
