"""A federation in one process: rounds, their checks, their commit, and what is measured along the way."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from perfed.core import rng
from perfed.core.client import Client, Update
from perfed.core.method import Method
from perfed.core.plan import Round
from perfed.core.server import Peer, Server, Slots
from perfed.core.state import State, check, digest, finite, largest
from perfed.data.federation import Federation
from perfed.engine import evaluate, executors
from perfed.engine.cohort import REVISION, CohortWorker
from perfed.engine.executors import Executor
from perfed.engine.lastscores import LastScores
from perfed.engine.ledger import Besides, Flops, Ledger
from perfed.engine.scoring import Scoring
from perfed.engine.settings import Outcome, Progress, Settings, Watcher, check_settings
from perfed.engine.stacking import pieces
from perfed.engine.store import Store
from perfed.engine.worker import Operation, Reply, Task, Worker
from perfed.errors import QuorumError, UpdateError
from perfed.nets import compiler
from perfed.nets.net import Net

HEAVIEST = 1e12
"""Weights from here on are refused: no client has so many samples."""
HEAVIER = 2.0
"""How many times its training samples the weight of a client may be where each answers for itself."""
NEAR = 1e-3
"""Who has values of at least this share of the largest one is left out with it, if they cannot be combined."""
HUGE = 1e15
"""Values from here on are what makes a combination fail; below, the failure is the method's own."""


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
        sites: bool = False,
        quorum: float = 0.0,
        cache_bytes: int = 256 << 20,
        numerics: Literal["plain", "cohort"] = "plain",
    ) -> None:
        check_settings(settings)
        method.optimiser(Round(1, settings.rounds))  # refuses what no step can be made with
        self.settings, self.federation, self.method = settings, federation, method
        self.numerics = numerics
        kind = {"plain": Worker, "cohort": CohortWorker}[numerics]
        self.worker = kind(federation, net, method, settings.rounds, settings.seed)
        self.worker.folds &= tamper is None  # whoever looks at single updates gets them
        self.plan = self.worker.plan
        self._watch, self._tamper = watch or (lambda _: None), tamper
        self._sites = sites  # private states stay with the clients; the store has their sums
        self._quorum = quorum  # the share of a round's clients without whose updates there is no round
        self.store = Store(directory, self._fingerprint(), cache_bytes)
        self.flops = Flops(self.worker)
        last = LastScores(method, lambda: self.server.state)
        self.scoring = Scoring(
            *(federation, method, settings, self.plan, last, self._task, self._compute, self._blame),
            together=lambda: not self._apart,
            labels=not (sites and method.labels_stay),
            room=self.store.room,
        )
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
            if self.store.round < last:
                self.worker.net.ready()
            for t in range(self.store.round + 1, last + 1):
                self.step(t)
            return self.outcome() if self.store.round == self.settings.rounds else None
        finally:
            self.close()

    def step(self, t: int) -> None:
        """One round: sample, train, check, combine, measure, commit.

        On one thread: those that torch keeps ready in this process would take the cores from the workers.
        """
        with executors.one_thread():
            self._step(t)

    def _step(self, t: int) -> None:
        started = time.perf_counter()
        self.store.discard()
        cohort = rng.sample(self.settings.seed, t, self.federation.participants, self.settings.fraction)
        round = Round(t, self.settings.rounds)
        updates, accepted, entries, before = [], [], {}, len(self.faults)
        alike = self.method.schema(self.server, round) if self.worker.folds else {}
        besides = Besides(self.worker.net)
        for task, reply in self._trained(cohort, t):
            try:
                update = self._accept(reply, task.client, round)
            except UpdateError as error:
                self._blame(t, task.client, str(error))
                continue
            if "within" not in reply.scalars:
                updates.append(update)
            self.store.put_client(task.client, t, reply.private, reply.kept)
            shapes = {name: tensor.to("meta") for name, tensor in reply.private.items()}
            accepted.append((replace(task, private={}), replace(reply, private=shapes), self.flops.of(task)))
        state, lost = self._combined(updates, round)
        for task, reply, flops in accepted:
            if reply.scalars.get("within", task.client) in lost:
                sender = self._sender(task.client)
                refusal = UpdateError(f"{sender} sent values with which the server's state would not be finite.")
                self._blame(t, task.client, str(refusal))
                self.store.forget_client(task.client)
                continue
            sent = alike if self.worker.folds else reply.state
            entries[str(task.client)] = self.ledger.enter(task, reply, sent, flops, self.worker.net)
            besides.enter(self.flops.memory if self._sites else reply.private, sent, task.received)
        self.ledger.forget()
        if len(entries) < self._quorum * len(cohort):
            raise QuorumError(t, len(entries), len(cohort), self.faults[before:])
        if len(lost) < len(updates):
            self.server.state = state
            self.store.put_server(t, self.server.state)
            for client, slot in self.server.slots.written.items():
                self.store.put_slot(client, t, slot)
        record: dict[str, Any] = {"cohort": cohort, "clients": entries, "layers": self.plan.shares(t)}
        record["besides"] = besides.entries()
        if self.settings.due(t):
            record["metrics"] = self.scoring.evaluate(t)
            self.history.append(record["metrics"])
            self._metrics = {k: v for k, v in record["metrics"].items() if isinstance(v, float)}
            if t == self.settings.rounds and record["metrics"]["adapted"]:
                self.ledger.adapt_flops = self._adapting(t)
        self.ledger.seconds += time.perf_counter() - started
        record |= {"ledger": self.ledger.totals(), "faults": self.faults[before:]}
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
            self.worker.personal(found)
            if not seen or self.settings.adapt != "never":
                self.worker.prepare(found, seen=seen)
        found.net.module.eval()
        found.net.plain()  # who looks at a model, or takes it along, has it in full
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
        held = self.store.server() or self.method.start(self.worker.net, self.federation.num_clients, self.plan.initial)
        return {name: tensor.clone() for name, tensor in held.items()}  # which lies in memory as if it were computed

    def _task(self, op: Operation, client: int, t: int, **options: Any) -> Task:
        since, private = self.store.client(client)
        peer = Peer(client, since, learns=op == "train" or not options.get("seen", True))
        received = self.method.send(self.server, peer, Round(t, self.settings.rounds))
        return Task(op, client, t, since, received, private, options, self.store.kept(client) if self._sites else None)

    def _trained(self, cohort: Sequence[int], t: int) -> Iterator[tuple[Task, Reply]]:
        """What the clients of a round answer, in their order; so many at a time as have room, newcomers too."""
        tasks, done = (self._task("train", client, t) for client in cohort), 0
        kept = self.plan.pick(self.plan.initial, self.plan.private(t)) if not self._sites else {}
        size = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
        for some in pieces(tasks, max(1, self.store.room // size) if size else len(cohort), self.store.room):
            replies = self._compute(some, t, "training", done, len(cohort))
            yield from zip(some, [self._tamper(one, t) for one in replies] if self._tamper else replies, strict=True)
            done += len(some)

    def _adapting(self, t: int) -> int:
        """FLOPs of the adaptation after the last round, all clients together."""
        clients = self.federation.participants
        task = self._task("evaluate", clients[0], t, seen=True)
        if self._sites:  # the client has it: anything of the same shape costs as much
            private = self.plan.pick(self.plan.initial, self.plan.private(task.since)) | self.flops.memory
            task = replace(task, private=private)
        return self.flops.adapting(task, clients)

    def _compute(
        self, tasks: Sequence[Task], t: int, doing: str, finished: int = 0, of: int | None = None
    ) -> list[Reply]:
        def done() -> None:
            nonlocal finished
            finished += 1
            self._tell(t, doing, finished, of or len(tasks))

        if self._apart:
            self.ledger.send(task for task in tasks if task.op != "train")
        return self.executor.run(tasks, done)

    def _accept(self, reply: Reply, client: int, round: Round) -> Update:
        """A client's update if it is what its method declares; otherwise an error that names the client."""
        sender = self._sender(client)
        if reply.error:
            raise UpdateError(f"{sender} failed: {reply.error}")
        if reply.client != client:
            raise UpdateError(f"{sender} answered as client {reply.client}.")
        weight = reply.scalars.get("weight")
        if not isinstance(weight, int | float) or not math.isfinite(weight) or not 0 < weight < HEAVIEST:
            raise UpdateError(f"{sender} sent the weight {weight!r}; a positive number of samples is accepted.")
        if self._apart and weight > HEAVIER * (size := self.federation.size(client)):
            raise UpdateError(f"{sender} sent the weight {weight:g}; it has {size} training samples.")
        if "within" not in reply.scalars:  # otherwise it is a part of the mean that another client of its group brings
            self.method.verify(self.server, reply.state, sender, round)
        check(reply.private, reply.private, f"{sender} (in what it keeps)")
        if (reply.kept is None) == self._sites:
            raise UpdateError(f"{sender} {'kept no' if self._sites else 'did not send its'} private state.")
        return Update(client, reply.state, float(weight), reply.scalars.get("extra", {}))

    def _combined(self, updates: Sequence[Update], round: Round) -> tuple[State, set[int]]:
        """The server's state after a round, and whose updates were left out so that it is finite."""
        lost: set[int] = set()
        while left := [update for update in updates if update.client not in lost]:
            try:
                state = self.method.combine(self.server, left, round)
                slots = self.server.slots.written.values()
                fresh = [tensor for name, tensor in state.items() if tensor is not self.server.state.get(name)]
                if all(map(finite, chain(fresh, *(slot.values() for slot in slots)))):
                    return state, lost
            except (ArithmeticError, ValueError, RuntimeError):
                if max(largest(update.state) for update in left) < HUGE:
                    raise
            self.server.slots.written.clear()
            peaks = {update.client: largest(update.state) for update in left}
            lost |= {client for client, peak in peaks.items() if peak >= NEAR * max(peaks.values())}
        return self.server.state, lost

    @property
    def _apart(self) -> bool:
        """Whether each client is a machine of its own."""
        return getattr(self.executor, "apart", False)

    def _sender(self, client: int) -> str:
        names = self.federation.client_names
        return f"Client {client} ({names[client]})" if names else f"Client {client}"

    def _blame(self, t: int, client: int, reason: str) -> None:
        self.faults.append({"t": t, "client": client, "reason": reason})

    def _fingerprint(self) -> str:
        """What must be the same for a run to be continued: every setting, the partition and the first weights."""
        facts = {
            "settings": asdict(self.settings),
            "method": type(self.method).__name__,
            "hyper-parameters": asdict(self.method),
            "partition": self.federation.sha256,
            "initial": digest(self.plan.initial),
        }
        if self.numerics != "plain":
            facts["numerics"] = f"{self.numerics}/{REVISION}"
        if precision := self.worker.net.precision:
            facts["precision"] = str(precision)
        if self.worker.net.compiled:
            facts["kernels"] = f"compiled/{compiler.REVISION}"
        return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def _tell(self, t: int, doing: str, done: int, of: int) -> None:
        total, ledger, refused = self.settings.rounds, self.ledger, len(self.faults)
        self._watch(Progress(t, total, doing, done, of, self._metrics, ledger.bytes_up, ledger.bytes_down, refused))
