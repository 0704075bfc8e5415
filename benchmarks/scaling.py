"""Time and memory as a federation grows: 100 participants among 100 to 100,000 clients, and many private states.

python benchmarks/scaling.py [--small]
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from perfed import nets
from perfed.core import registry
from perfed.data import Federation
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings


def federation(clients: int, each: int = 20, shape: tuple[int, int, int] = (1, 28, 28)) -> Federation:
    """Random images; all clients draw on the same ones, so that the data itself does not grow."""
    rows = max(clients, 1000) * 2
    source = np.random.default_rng(0)
    x = torch.from_numpy(source.integers(0, 256, (rows, *shape), dtype=np.uint8)) if rows <= 10**5 else None
    if x is None:
        x = torch.zeros(rows, *shape, dtype=torch.uint8)
    y = torch.from_numpy(source.integers(0, 10, rows))
    owner = np.arange(rows) % clients
    half = np.arange(rows) < rows // 2
    owners = {"train": np.where(half, owner, -1), "test": np.where(half, -1, owner), "val": np.full(rows, -1)}
    return Federation(x, y, owners, clients, [str(i) for i in range(10)])


def measure(name: str, net: str, clients: int, participants: int, rounds: int, workers: int = 1, **options) -> None:
    data = federation(clients, shape=(3, 32, 32) if net == "resnet18" else (1, 28, 28))
    torch.manual_seed(0)
    made = nets.build(net, data.input_shape, 10, **options)
    method = registry.make(name, lr=0.01, batch_size=20)
    settings = Settings(rounds=rounds + 1, fraction=participants / clients, eval_every=10**6)
    with tempfile.TemporaryDirectory() as place:
        simulation = Simulation(data, made, method, settings, directory=Path(place), workers=workers)
        simulation.step(1)
        times = []
        for t in range(2, rounds + 1):
            start = time.perf_counter()
            simulation.step(t)
            times.append(time.perf_counter() - start)
        held = simulation.store._cache.used >> 20
        simulation.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{name} {net}, {clients} clients, {participants} per round, {workers} workers:"
        f" {min(times):.3f} s/round, {held} MB of states cached, {peak} MB peak so far",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="a tenth of everything: does it work")
    by = 10 if parser.parse_args().small else 1
    for clients in (100, 1000, 10_000, 100_000):
        measure("fedavg", "mlp", max(100, clients // by), 100 // by, 4, hidden=[200])
    for workers in (1, 2):
        measure("fedavg", "cnn", 100, 20 // min(by, 4), 3, workers)
    measure("fedper", "mlp", 10_000 // by, 1000 // by, 12, hidden=[200])
    measure("local", "resnet18", 500 // by, 100 // by, 6)


if __name__ == "__main__":
    main()
