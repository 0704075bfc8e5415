"""What a run costs: bytes from the real serialised payload, samples, parameters times batches, true FLOPs, seconds."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from perfed.core.client import Client, Meter
from perfed.core.plan import Round
from perfed.core.state import SEALED, State, serialised_bytes
from perfed.data.federation import Split
from perfed.engine.executors import one_thread
from perfed.engine.flopcount import CountFlops
from perfed.engine.worker import Reply, Task, Worker
from perfed.nets.net import Net

PROBE_SAMPLES = 4
Work = Callable[[Worker, Client], object]


class LastSizes:
    """Bytes of states, in all and per layer; not counted again while they are the same tensors as the last ones."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of the last state's tensors."""
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._found: tuple[int, Counter[str]] = 0, Counter()

    def of(self, state: State, net: Net) -> tuple[int, Counter[str]]:
        """The bytes of a state as it is sent, and those of each layer's tensors."""
        names, tensors = list(state), list(state.values())
        if not self._names or names != self._names or not all(map(operator.is_, tensors, self._tensors)):
            self._names, self._tensors = names, tensors
            self._found = serialised_bytes(state), by_layer(state, net)
        return self._found


@dataclass
class Ledger:
    """Running totals, and the entry of the round that is being counted."""

    bytes_up: int = 0
    bytes_down: int = 0
    bytes_scored: int = 0
    """sent to other machines only to be scored or kept as their last model; nothing in one process"""
    samples: int = 0
    param_batches: int = 0
    flops: int = 0
    adapt_flops: int = 0
    """of adapting every scored client once, after the last round"""
    seconds: float = 0.0
    layers: Counter[str] = field(default_factory=Counter)
    extra: Counter[str] = field(default_factory=Counter)
    """what methods count themselves: scalars of an update whose name starts with `cost.`"""
    _down: LastSizes = field(default_factory=LastSizes, init=False, repr=False, compare=False)
    _up: LastSizes = field(default_factory=LastSizes, init=False, repr=False, compare=False)

    @classmethod
    def restore(cls, totals: Mapping[str, Any]) -> Ledger:
        """The ledger as a round's record has it."""
        values = dict(totals)
        counters = {name: Counter(values.get(name, {})) for name in ("layers", "extra")}
        return cls(**values | counters)

    def forget(self) -> None:
        """Let go of the last client's tensors."""
        self._down.forget()
        self._up.forget()

    def totals(self) -> dict[str, Any]:
        """The totals as plain numbers."""
        return {
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "bytes_scored": self.bytes_scored,
            "samples": self.samples,
            "param_batches": self.param_batches,
            "flops": self.flops,
            "adapt_flops": self.adapt_flops,
            "seconds": self.seconds,
            "layers": dict(sorted(self.layers.items())),
            "extra": dict(sorted(self.extra.items())),
        }

    def send(self, tasks: Iterable[Task]) -> None:
        """Count what is sent to clients that do not train on it."""
        self.bytes_scored += sum(serialised_bytes(task.received) for task in tasks)

    def enter(self, task: Task, reply: Reply, sent: State, flops: int, net: Net) -> dict[str, Any]:
        """Count one client's round, in which it sent tensors like these; returns its own entry."""
        meter = Meter(**reply.scalars["meter"])
        (down, down_by), (up, up_by) = self._down.of(task.received, net), self._up.of(sent, net)
        self.bytes_down += down
        self.bytes_up += up
        self.samples += meter.samples
        self.param_batches += meter.param_batches
        self.flops += flops
        for name, value in reply.scalars["extra"].items():
            if name.startswith("cost."):
                self.extra[name.removeprefix("cost.")] += value
        for name, size in up_by.items():
            self.layers[f"up/{name}"] += size
        for name, size in down_by.items():
            self.layers[f"down/{name}"] += size
        return {
            "up": up,
            "down": down,
            "samples": meter.samples,
            "param_batches": meter.param_batches,
            "flops": flops,
            "seconds": round(reply.scalars["seconds"], 4),
        }


def by_layer(state: State, net: Net) -> Counter[str]:
    """Bytes of tensor data per layer; what belongs to no layer is the method's own."""
    known = set(net.names(*net.layers))
    sizes: Counter[str] = Counter()
    for name, tensor in state.items():
        own = name if name in known else name.partition("/")[2]
        layer = net.layer_of(own) if own in known else "other"
        sizes[layer] += tensor.numel() * tensor.element_size()
    return sizes


class Besides:
    """What the clients of a round keep, send and receive that is no part of their network, by name.

    Second models and variates are named after the layers whose shapes they have: `v/conv1.weight` belongs to `v`.
    """

    def __init__(self, net: Net) -> None:
        self.net, self.known = net, set(net.names(*net.layers))
        self.clients = 0
        self._layers: dict[str, set[str]] = {}
        self._sums: Counter[tuple[str, str]] = Counter()

    def enter(self, kept: State, up: State, down: State) -> None:
        """Count one client's."""
        self.clients += 1
        for way, state in (("kept", kept), ("up", up), ("down", down)):
            for name, tensor in state.items():
                if name in self.known:
                    continue
                first, _, own = name.partition("/")
                whose = first.rstrip("0123456789") or first if own in self.known else name
                layers = self._layers.setdefault(whose, set())
                if own in self.known:
                    layers.add(self.net.layer_of(own))
                self._sums[whose, way] += tensor.numel()
                self._sums[whose, f"bytes_{way}"] += tensor.numel() * tensor.element_size()

    def entries(self) -> list[dict[str, Any]]:
        """For each name: the layers it is like, and elements and bytes per client."""
        ways = ("kept", "up", "down", "bytes_kept", "bytes_up", "bytes_down")
        return [
            {"name": name, "layers": [layer for layer in self.net.layers if layer in layers]}
            | {way: round(self._sums[name, way] / self.clients) for way in ways}
            for name, layers in sorted(self._layers.items())
        ]


class Flops:
    """FLOPs of one client's local round, by torch's counter on a few samples, scaled to the client's size.

    Work is proportional to samples within a stage of a method, so each stage is counted once, on a copy of the network,
    and apart for clients that take part for the first time: they have nothing yet to compare with or to learn from.
    """

    def __init__(self, worker: Worker) -> None:
        self.source = worker
        self.rehearsed: dict[Hashable, Meter] = {}
        """what the rehearsal of each stage counted"""
        self.memory: State = {}
        """what a client remembers beside its network after the last rehearsal"""
        self._per_sample: dict[tuple[Hashable, bool], float] = {}

    def of(self, task: Task) -> int:
        """FLOPs of this task's local round."""
        stage = self.source.method.stage(Round(task.t, self.source.rounds))
        kind = stage, task.since > 0
        if kind not in self._per_sample:
            self._per_sample[kind], probe = self._count(task, lambda worker, client: worker.method.rehearse(client))
            self.rehearsed[stage], self.memory = probe.meter, probe.memory
        return round(self._per_sample[kind] * self.source.federation.size(task.client))

    def adapting(self, task: Task, clients: Iterable[int]) -> int:
        """FLOPs of adapting each of these clients once, counted with the task's client."""
        per_sample, _ = self._count(task, lambda worker, client: worker.prepare(client, seen=True), Worker.personal)
        return round(per_sample * sum(map(self.source.federation.size, clients)))

    @torch.random.fork_rng(devices=[])  # leaves no trace in the global random state
    def _count(self, task: Task, work: Work, before: Work = lambda worker, client: None) -> tuple[float, Client]:
        """FLOPs per sample of some work on a client with few samples, after what is not counted; and the client."""
        origin = self.source
        worker = Worker(origin.federation, origin.net.clone().plain(), origin.method, origin.rounds, origin.seed)
        plain = {name: tensor for name, tensor in task.received.items() if not name.startswith(SEALED)}
        probe = worker.client(replace(task, received=plain))  # nobody here has the key
        data = probe.data.train
        picked = torch.arange(PROBE_SAMPLES) % len(data)
        few = Split(data.x[picked], data.y[picked])
        probe.data.train = probe.data.val = few
        with one_thread():
            before(worker, probe)
            with CountFlops() as counter:
                work(worker, probe)
        return float(counter.total) / len(few), probe
