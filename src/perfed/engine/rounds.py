"""A federation in one process: rounds, their checks, their commit, and what is measured along the way."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from perfed.core import rng
from perfed.core.client import Client, Update
from perfed.core.method import Method
from perfed.core.plan import Round
from perfed.core.server import Peer, Server, Slots
from perfed.core.state import State, check, digest
from perfed.data.federation import Federation
from perfed.engine import evaluate, executors
from perfed.engine.executors import Executor
from perfed.engine.ledger import Flops, Ledger
from perfed.engine.store import Store
from perfed.engine.worker import Operation, Reply, Task, Worker
from perfed.errors import ConfigError, UpdateError
from perfed.nets.net import Net

NEW_BUDGET = 250_000
"""Forward passes up to which the New metric is measured unasked."""

HEAVIEST = 1e12
"""Weights from here on are refused: no client has so many samples."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a federation is run, apart from its data, network and method."""

    rounds: int = 50
    fraction: float = 1.0
    seed: int = 0
    eval_every: int = 0
    """rounds between evaluations; 0 makes about ten of them"""
    last_k: int = 1
    """how many of the last rounds are all evaluated, and averaged as `local.last`"""
    adapt: str = "final"
    """when clients adapt before scoring: `final`, `always` or `never`"""
    new: bool | None = None
    """whether New is measured; None: when it takes less than 250,000 forward passes"""

    def due(self, t: int) -> bool:
        """Whether round t ends with an evaluation."""
        every = self.eval_every or max(1, self.rounds // 10)
        return t % every == 0 or t > self.rounds - self.last_k


@dataclass
class Outcome:
    """What a finished run found."""

    state_sha256: str
    partition_sha256: str
    metrics: dict[str, float]
    cost: dict[str, float]
    history: list[dict[str, Any]]
    clients: dict[str, Any]
    faults: list[dict[str, Any]]


@dataclass
class Progress:
    """Where a run stands; sent to whoever watches."""

    t: int
    rounds: int
    doing: str
    done: int
    of: int
    metrics: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0


Watcher = Callable[[Progress], None]


class Simulation:
    """One run, from its first round or from the last one that was committed."""

    def __init__(
        self,
        federation: Federation,
        net: Net,
        method: Method,
        settings: Settings,
        *,
        directory: Path | None = None,
        workers: int = 1,
        watch: Watcher | None = None,
        tamper: Callable[[Reply, int], Reply] | None = None,
        executor: Callable[[Worker], Executor] | None = None,
        cache_bytes: int = 256 << 20,
    ) -> None:
        self.settings, self.federation, self.method = settings, federation, method
        self.worker = Worker(federation, net, method, settings.rounds, settings.seed)
        self.plan = self.worker.plan
        self._watch, self._tamper = watch or (lambda _: None), tamper
        self.store = Store(directory, self._fingerprint(), cache_bytes)
        self.flops = Flops(self.worker)
        self.ledger = Ledger()
        self.history: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self._metrics: dict[str, float] = {}
        try:
            server = self._restore()
            slots = Slots(self.store.slot, self.store.slots)
            self.server = Server(
                server, self.plan, federation.num_clients, settings.seed, slots, len(federation.unseen)
            )
            make = executor or partial(executors.make, workers=workers, in_child=self.store.unlock)
            self.executor = make(self.worker)
        except BaseException:
            self.store.close()
            raise

    def run(self, stop_after: int | None = None) -> Outcome | None:
        """Run the remaining rounds, or those up to `stop_after`; the outcome if the last round is done."""
        try:
            last = min(self.settings.rounds, stop_after or self.settings.rounds)
            for t in range(self.store.round + 1, last + 1):
                self.step(t)
            return self.outcome() if self.store.round == self.settings.rounds else None
        finally:
            self.close()

    def step(self, t: int) -> None:
        """One round: sample, train, check, combine, measure, commit."""
        started = time.perf_counter()
        self.store.discard()
        cohort = rng.sample(self.settings.seed, t, self.federation.participants, self.settings.fraction)
        round = Round(t, self.settings.rounds)
        tasks = [self._task("train", client, t) for client in cohort]
        replies = self._compute(tasks, t, "training")
        if self._tamper:
            replies = [self._tamper(reply, t) for reply in replies]
        updates, faults, entries = [], [], {}
        for task, reply in zip(tasks, replies, strict=True):
            try:
                updates.append(self._accept(reply, task.client, round))
            except UpdateError as error:
                faults.append({"t": t, "client": task.client, "reason": str(error)})
                continue
            entries[str(task.client)] = self.ledger.enter(task, reply, self.flops.of(task.client, t), self.worker.net)
            self.store.put_client(task.client, t, reply.private)
        if updates:
            self.server.state = self.method.combine(self.server, updates, round)
            self.store.put_server(t, self.server.state)
            for client, state in self.server.slots.written.items():
                self.store.put_slot(client, t, state)
        self.faults += faults
        record: dict[str, Any] = {"cohort": cohort, "clients": entries, "faults": faults}
        if self.settings.due(t):
            record["metrics"] = self._evaluate(t)
        self.ledger.seconds += time.perf_counter() - started
        record["ledger"] = self.ledger.totals()
        self.store.commit(t, record)
        self.server.slots.written.clear()
        self._tell(t, "done", 1, 1)

    def outcome(self) -> Outcome:
        """The finished run's numbers."""
        final = dict(self.history[-1])
        clients = final.pop("clients")
        metrics = {key: value for key, value in final.items() if isinstance(value, float)}
        alike = [entry for entry in self.history if entry["adapted"] == final["adapted"]]
        recent = [entry["local.mean"] for entry in alike if entry["t"] > self.settings.rounds - self.settings.last_k]
        metrics["local.last"] = sum(recent) / len(recent)
        best = evaluate.best_validation(alike)
        if best:
            metrics |= {"local.best_val": best["local.mean"], "local.best_val_round": best["t"]}
        history = [{key: value for key, value in entry.items() if key != "clients"} for entry in self.history]
        return Outcome(
            state_sha256=self.store.state_sha256(),
            partition_sha256=self.federation.sha256,
            metrics=metrics,
            cost=self.ledger.totals(),
            history=history,
            clients=clients,
            faults=self.faults,
        )

    def scored(self, client: int) -> Client:
        """A client with the personal model that the last round's scores are those of."""
        seen = client in self.federation.participants
        task = self._task("evaluate", client, self.settings.rounds, seen=seen)
        with executors.one_thread():
            found = self.worker.client(task)
            self.method.personal(found)
            if not seen or self.settings.adapt != "never":
                self.worker._prepare(found, seen=seen)
        found.net.module.eval()
        return found

    def close(self) -> None:
        """Release workers and the run's directory."""
        self.executor.close()
        self.store.close()

    # Pieces

    def _restore(self) -> State:
        records = list(self.store.records())
        for record in records:
            self.faults += record["faults"]
            if "metrics" in record:
                self.history.append(record["metrics"])
        if not records:
            return self.method.start(self.worker.net, self.federation.num_clients, self.plan.initial)
        self.ledger = Ledger.restore(records[-1]["ledger"])
        return self.store.server() or self.method.start(self.worker.net, self.federation.num_clients, self.plan.initial)

    def _task(self, op: Operation, client: int, t: int, **options: Any) -> Task:
        since, private = self.store.client(client)
        peer = Peer(client, since, learns=op == "train" or not options.get("seen", True))
        received = self.method.send(self.server, peer, Round(t, self.settings.rounds))
        return Task(op, client, t, since, received, private, options)

    def _compute(self, tasks: Sequence[Task], t: int, doing: str) -> list[Reply]:
        finished = 0

        def done() -> None:
            nonlocal finished
            finished += 1
            self._tell(t, doing, finished, len(tasks))

        return self.executor.run(tasks, done)

    def _accept(self, reply: Reply, client: int, round: Round) -> Update:
        """A client's update if it is what its method declares; otherwise an error that names the client."""
        sender = f"Client {client}"
        if reply.error:
            raise UpdateError(f"{sender} failed: {reply.error}")
        if reply.client != client:
            raise UpdateError(f"{sender} answered as client {reply.client}.")
        weight = reply.scalars.get("weight")
        if not isinstance(weight, int | float) or not math.isfinite(weight) or not 0 < weight < HEAVIEST:
            raise UpdateError(f"{sender} sent the weight {weight!r}; a positive number of samples is accepted.")
        self.method.verify(self.server, reply.state, sender, round)
        check(reply.private, reply.private, f"{sender} (in what it keeps)")
        return Update(client, reply.state, float(weight), reply.scalars.get("extra", {}))

    def _evaluate(self, t: int) -> dict[str, Any]:
        final = t == self.settings.rounds
        when = self.settings.adapt
        adapt = self.method.adapts and (when == "always" or (when == "final" and final))
        participants = list(self.federation.participants)
        states = self._measure(participants, t, seen=True, adapt=adapt)
        stage = "after" if adapt else "before"
        metrics: dict[str, Any] = {f"local.{k}": v for k, v in evaluate.scores(states, stage).items()}
        if adapt:
            before = evaluate.scores(states, "before")
            metrics |= {f"local.before.{k}": v for k, v in before.items()}
        metrics |= {
            "t": t,
            "adapted": adapt,
            "clients": {"ids": participants, "accuracy": evaluate.per_client(states, stage)},
        }
        if final:
            metrics["clients"]["confusion"] = [s[f"{stage}/test/confusion"].tolist() for s in states]
            metrics |= self._final(t)
        self.history.append(metrics)
        self._metrics = {k: v for k, v in metrics.items() if isinstance(v, float)}
        return metrics

    def _final(self, t: int) -> dict[str, float]:
        found: dict[str, float] = {}
        participants = list(self.federation.participants)
        pooled = self.federation.pooled_test()
        wanted = self.settings.new
        if wanted is None:
            wanted = len(participants) * len(pooled) <= NEW_BUDGET
        if wanted and len(pooled):
            found["new"] = self._ensemble("new", participants, t, pooled.y)
        if self.federation.external is not None:
            found["external"] = self._ensemble("external", participants, t, self.federation.external.y)
        unseen = list(self.federation.unseen)
        if unseen:
            states = self._measure(unseen, t, seen=False, adapt=True)
            found |= {f"unseen.{k}": v for k, v in evaluate.scores(states, "after").items()}
        return found

    def _measure(self, clients: Sequence[int], t: int, *, seen: bool, adapt: bool) -> list[State]:
        """Score clients, in pieces, so that memory does not grow with the federation."""
        states: list[State] = []
        for start in range(0, len(clients), 64):
            some = clients[start : start + 64]
            tasks = [self._task("evaluate", client, t, seen=seen, adapt=adapt) for client in some]
            for reply in self._compute(tasks, t, "scoring"):
                if reply.error:
                    raise UpdateError(f"Client {reply.client} could not be scored: {reply.error}")
                states.append(reply.state)
        return states

    def _ensemble(self, op: Operation, clients: Sequence[int], t: int, y: torch.Tensor) -> float:
        total = torch.zeros(0)
        for start in range(0, len(clients), 8):
            adapt = self.method.adapts and self.settings.adapt != "never"
            tasks = [self._task(op, client, t, adapt=adapt) for client in clients[start : start + 8]]
            for reply in self._compute(tasks, t, "voting"):
                votes = reply.state["probabilities"].double()
                total = votes if not len(total) else total + votes
        return evaluate.ensemble_accuracy(total, y)

    def _fingerprint(self) -> str:
        """What must be the same for a run to be continued: every setting, the partition and the first weights."""
        facts = {
            "settings": asdict(self.settings),
            "method": type(self.method).__name__,
            "hyper-parameters": asdict(self.method),
            "partition": self.federation.sha256,
            "initial": digest(self.plan.initial),
        }
        return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def _tell(self, t: int, doing: str, done: int, of: int) -> None:
        ledger = self.ledger
        self._watch(
            Progress(t, self.settings.rounds, doing, done, of, self._metrics, ledger.bytes_up, ledger.bytes_down)
        )


def check_settings(settings: Settings) -> None:
    """Refuse settings that no run can have."""
    for key, ok, want in (
        ("rounds", settings.rounds >= 1, "at least 1"),
        ("fraction", 0 < settings.fraction <= 1, "above 0 and at most 1"),
        ("last_k", settings.last_k >= 1, "at least 1"),
        ("eval_every", settings.eval_every >= 0, "0 or more"),
        ("adapt", settings.adapt in ("final", "always", "never"), "'final', 'always' or 'never'"),
    ):
        if not ok:
            raise ConfigError(f"{key} = {getattr(settings, key)!r} cannot be.", f"It must be {want}.")
