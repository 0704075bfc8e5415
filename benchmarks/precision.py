"""What bfloat16 is worth and what it costs: a training step of each network in float32 and in bfloat16.

    python benchmarks/precision.py

CPU seconds of the same steps in one process, the two in turn, the least of several; and by how much of its norm the
gradient of all weights differs, at the first weights and on digits. Writes results/precision.json;
docs/benchmarks.md is filled from it by docs/tables.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from perfed import nets
from perfed.core.sgd import Sgd
from perfed.nets import Net

ROOT = Path(__file__).parents[1]
CASES = [
    ("lenet5", (1, 28, 28), 32),
    ("cnn", (1, 28, 28), 10),
    ("cnn", (3, 32, 32), 10),
    ("cifarnet", (3, 32, 32), 10),
    ("conv3attn", (1, 28, 28), 32),
    ("resnet18", (3, 32, 32), 16),
]
REPEATS, LEAST = 7, 0.3


KINDS = {"float32": None, "bfloat16": torch.bfloat16}


def samples(net: Net, batch: int) -> tuple[Tensor, Tensor]:
    """The first digits, in the size that the network takes."""
    channels, *size = net.input_shape
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[:batch]).float().view(-1, 1, 8, 8) / 16
    x = F.interpolate(small, size, mode="bilinear").expand(-1, channels, -1, -1)
    return x.contiguous(memory_format=torch.channels_last), torch.tensor(labels[:batch])


def error(net: Net, batch: int) -> float:
    """The norm of the difference of both gradients, as a part of the norm."""
    found, (x, y) = [], samples(net, batch)
    for net.precision in KINDS.values():
        net.module.zero_grad()
        F.cross_entropy(net(x), y).backward()
        found.append(torch.cat([p.grad.flatten() for p in net.module.parameters() if p.grad is not None]))
    return float((found[1] - found[0]).norm() / found[0].norm())


def step_of(net: Net, batch: int) -> float:
    """CPU seconds of a step, the mean over some of them."""
    sgd, steps, (x, y) = Sgd(list(net.module.parameters()), lr=0.01), 0, samples(net, batch)
    start = time.process_time()
    while time.process_time() - start < LEAST:
        sgd.zero_grad()
        F.cross_entropy(net(x), y).backward()
        sgd.step()
        steps += 1
    return (time.process_time() - start) / steps


def measure(name: str, shape: tuple[int, int, int], batch: int) -> dict[str, object]:
    """Both kinds of step, and how their gradients differ."""
    torch.manual_seed(0)
    net = nets.build(name, shape, 10)
    net.module.to(memory_format=torch.channels_last)
    off = error(net, batch)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(REPEATS):
        for kind, seconds in found.items():
            net.precision = KINDS[kind]
            seconds.append(step_of(net, batch))
    times = {kind: 1e3 * min(seconds) for kind, seconds in found.items()}
    return {"net": name, "input": list(shape), "batch": batch, "gradient_error": off, "ms": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(ROOT / "results" / "precision.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "bfloat16": torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "steps": [measure(*case) for case in CASES],
    }
    print(json.dumps(facts["steps"], indent=1))
    Path(given.out).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
