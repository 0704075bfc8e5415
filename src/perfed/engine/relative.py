"""What a method costs beside FedAvg on the same network: FLOPs of local rounds, and bytes sent each way.

Six rounds spread evenly over 300 are run, in which all of six clients take part, with every hyper-parameter at its
default but the batch size. A round before them makes every client one that has taken part, with the memory that
it then has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import torch

from perfed import nets
from perfed.core import registry
from perfed.data import Federation, federate, from_tensors
from perfed.engine.executors import Executor, Serial
from perfed.engine.flopcount import CountFlops
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.worker import Reply, Task, Worker
from perfed.errors import NetError

FILE = "relative.json"
ROUNDS, LOOKED_AT = 300, (25, 75, 125, 175, 225, 275)
NETWORKS = ("cnn", "digitsnet", "conv3attn")
"""The first that a method can run on is the one it is compared on."""


@dataclass(frozen=True)
class Spent:
    """A method's cost, or its ratio to FedAvg's."""

    net: str
    flops: float
    up: float
    down: float


def relative(name: str) -> Spent:
    """A method's cost as multiples of FedAvg's on the same network."""
    for net in NETWORKS:
        try:
            own = spent(name, net)
        except NetError:
            continue
        base = spent("fedavg", net)
        return Spent(net, own.flops / base.flops, own.up / base.up, own.down / base.down)
    raise NetError(f"{name} runs on none of {', '.join(NETWORKS)}.")


@cache
def spent(name: str, net: str, rounds: tuple[int, ...] = LOOKED_AT, **hyper: float | bool) -> Spent:
    """FLOPs and bytes of some of the 300 rounds."""
    federation = _federation()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = registry.make(name, batch_size=10, **hyper)
        built = method.build(nets.build(net, federation.input_shape, federation.num_classes))
    simulation = Simulation(federation, built, method, Settings(rounds=ROUNDS, eval_every=ROUNDS), executor=Counting)
    try:
        simulation.step(rounds[0] - 1)
        counted, ledger = simulation.executor, simulation.ledger
        assert isinstance(counted, Counting)
        before = Spent(net, counted.flops, ledger.bytes_up, ledger.bytes_down)
        for t in rounds:
            simulation.step(t)
    finally:
        simulation.close()
    return Spent(net, counted.flops - before.flops, ledger.bytes_up - before.up, ledger.bytes_down - before.down)


class Counting(Executor):
    """Works serially and counts FLOPs."""

    def __init__(self, worker: Worker) -> None:
        self.serial, self.flops = Serial(worker), 0

    def run(self, tasks: Sequence[Task], done: Callable[[], None] | None = None) -> list[Reply]:
        """The replies, in the order of the tasks."""
        with CountFlops() as counter:
            replies = self.serial.run(tasks, done)
        self.flops += counter.total
        return replies

    def close(self) -> None:
        """Nothing to release."""


@cache
def _federation() -> Federation:
    """Six clients with 20 noisy training images each, of four classes."""
    noise = torch.randint(0, 256, (180, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    source = from_tensors(noise, torch.arange(180) % 4)
    return federate(source, clients=6, split="iid", test_fraction=0.2, val_fraction=1 / 6)


def known(name: str) -> Spent | None:
    """The ratio that comes with the package; None for a method of another package, or one that is new."""
    found = json.loads(resources.files("perfed.engine").joinpath(FILE).read_text(encoding="utf-8")).get(name)
    return None if found is None else Spent(**found)


def main() -> None:
    """Measure all methods anew: `python -m perfed.engine.relative`."""
    found = {name: asdict(relative(name)) for name in registry.methods()}
    rounded = {name: {k: round(v, 4) if k != "net" else v for k, v in row.items()} for name, row in found.items()}
    Path(__file__).with_name(FILE).write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
