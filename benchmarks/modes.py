"""What a numeric mode is worth and what it costs: a training step of each network, without and with it.

    python benchmarks/modes.py bfloat16
    python benchmarks/modes.py compiled

CPU seconds of the same steps, as runs make them, in one process, the two in turn, the least of several; and by how
much of its norm the gradient of all weights differs from torch's, and both of them from that of float64, at the first
weights and on digits. Networks for which there is no such mode are left out. Writes results/precision.json or
results/compiled.json; docs/benchmarks.md is filled from them by docs/tables.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from perfed import nets
from perfed.core.sgd import Sgd
from perfed.errors import NetError
from perfed.nets import Net
from perfed.nets.written import alike, written

ROOT = Path(__file__).parents[1]
CASES = [
    ("lenet5", (1, 28, 28), 32),
    ("lenet5", (3, 32, 32), 128),
    ("cnn", (1, 28, 28), 10),
    ("cnn", (3, 32, 32), 10),
    ("cifarnet", (3, 32, 32), 10),
    ("conv3attn", (1, 28, 28), 32),
    ("resnet18", (3, 32, 32), 16),
]
REPEATS, LEAST = 7, 0.3


FILES = {"bfloat16": "precision.json", "compiled": "compiled.json"}


def switch(net: Net, mode: str) -> None:
    """Let a network compute in this mode; float32 is torch's own way."""
    net.plain()
    if mode == "bfloat16":
        net.compute_in(torch.bfloat16)
    net.compiled = mode == "compiled"


def samples(net: Net, batch: int) -> tuple[Tensor, Tensor]:
    """The first digits, in the size that the network takes."""
    channels, *size = net.input_shape
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[:batch]).float().view(-1, 1, 8, 8) / 16
    x = F.interpolate(small, size, mode="bilinear").expand(-1, channels, -1, -1)
    return x.contiguous(memory_format=torch.channels_last), torch.tensor(labels[:batch])


def gradients(net: Net) -> Callable[[Tensor, Tensor], Sequence[Tensor]]:
    """What computes the gradients of all weights: as training does it, written out where all layers are known."""
    parameters = list(net.module.parameters())
    return written(net, 0, parameters) or (
        lambda x, y: alike(torch.autograd.grad(F.cross_entropy(net(x), y), parameters), parameters)
    )


def gradient(net: Net, batch: int) -> Tensor:
    """Of all weights, as one vector."""
    return torch.cat([part.flatten() for part in gradients(net)(*samples(net, batch))])


def exactly(net: Net, batch: int) -> Tensor:
    """The gradient in float64."""
    module = copy.deepcopy(net.module).double()
    x, y = samples(net, batch)
    found = torch.autograd.grad(F.cross_entropy(module(x.double()), y), list(module.parameters()))
    return torch.cat([part.flatten() for part in found])


def off(found: Tensor, right: Tensor) -> float:
    """By how much of its norm a gradient is another."""
    return float((found - right).norm() / right.norm())


def step_of(net: Net, batch: int) -> float:
    """CPU seconds of a step, the mean over some of them."""
    parameters, steps, (x, y) = list(net.module.parameters()), 0, samples(net, batch)
    sgd, compute = Sgd(parameters, lr=0.01), gradients(net)
    start = time.process_time()
    while time.process_time() - start < LEAST:
        sgd.move(parameters, compute(x, y))
        steps += 1
    return (time.process_time() - start) / steps


def measure(mode: str, name: str, shape: tuple[int, int, int], batch: int) -> dict[str, object] | None:
    """Both kinds of step, and how their gradients differ; None if the network has no such mode."""
    torch.manual_seed(0)
    net = nets.build(name, shape, 10)
    net.module.to(memory_format=torch.channels_last)
    exact, right = exactly(net, batch), gradient(net, batch)
    try:
        switch(net, mode)
    except NetError:
        return None
    mine = gradient(net, batch)
    from_float64 = {"float32": off(right, exact), mode: off(mine, exact)}
    found: dict[str, list[float]] = {"float32": [], mode: []}
    for _ in range(REPEATS):
        for kind, seconds in found.items():
            switch(net, kind)
            seconds.append(step_of(net, batch))
    times = {kind: 1e3 * min(seconds) for kind, seconds in found.items()}
    errors = {"gradient_error": off(mine, right), "from_float64": from_float64}
    return {"net": name, "input": list(shape), "batch": batch, **errors, "ms": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=list(FILES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "bfloat16": torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "steps": [found for case in CASES if (found := measure(given.mode, *case))],
    }
    print(json.dumps(facts["steps"], indent=1))
    (ROOT / "results" / FILES[given.mode]).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
