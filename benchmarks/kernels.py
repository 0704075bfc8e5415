"""How much of a round is spent inside torch's kernels, and not in Python around them.

    python benchmarks/kernels.py --data-dir DIR

The same round of W1 and of W2 in one process, once by the clock and once under torch's profiler. Profiling makes every
call dearer, inside operators and more so around them: the time that operators take of the profiled round is a lower
bound, and that over the time of the same round without the profiler an upper one. Writes results/kernels.json;
docs/benchmarks.md is filled from it by docs/tables.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from bench import TITLES, WORKLOADS
from torch.profiler import ProfilerActivity, profile

from perfed import nets
from perfed.core import registry
from perfed.data import federate
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings

ROOT = Path(__file__).parents[1]


def third_round(name: str, data_dir: str, profiled: bool) -> tuple[float, float]:
    """CPU seconds of a run's third round, and of the operators in it."""
    facts = WORKLOADS[name]
    clients = facts["clients"]
    federation = federate("mnist", data_dir=data_dir, clients=clients, split=facts["split"], val_fraction=0.0)
    torch.manual_seed(0)
    net = nets.build(facts["net"], federation.input_shape, federation.num_classes)
    method = registry.make(facts["method"], lr=0.01, batch_size=facts["batch"])
    settings = Settings(rounds=9, fraction=facts["cohort"] / clients, eval_every=10**6, new=False)
    simulation = Simulation(federation, net, method, settings)
    simulation.step(1)
    simulation.step(2)
    with profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext() as seen:
        start = time.process_time()
        simulation.step(3)
        took = time.process_time() - start
    simulation.close()
    events = seen.key_averages() if seen else []
    return took, sum(event.self_cpu_time_total for event in events if event.key.startswith("aten::")) / 1e6


def share(name: str, data_dir: str) -> dict[str, float]:
    """Seconds of the round, and the operators' part of it; the least of three."""
    plain = min(third_round(name, data_dir, False)[0] for _ in range(3))
    profiled, inside = min(third_round(name, data_dir, True) for _ in range(3))
    return {"seconds": plain, "profiled_seconds": profiled, "inside": inside, "share": inside / profiled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--out", default=str(ROOT / "results" / "kernels.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "workloads": {name: {"title": TITLES[name], **share(name, given.data_dir)} for name in ("W1", "W2")},
    }
    print(json.dumps(facts["workloads"], indent=1))
    Path(given.out).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
