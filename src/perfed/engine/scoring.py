"""Scoring the clients of a run: each on its own test data, all together on others', newcomers after joining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perfed.core.method import Method
from perfed.core.plan import Plan
from perfed.core.state import State
from perfed.data.federation import Federation
from perfed.engine import evaluate
from perfed.engine.lastscores import LastScores
from perfed.engine.settings import Settings
from perfed.engine.stacking import members, pieces, stackable, stacked, unstacked
from perfed.engine.worker import Operation, Reply, Task
from perfed.errors import UpdateError

NEW_BUDGET = 250_000
"""Forward passes up to which the New metric is measured unasked."""


@dataclass(frozen=True)
class Scoring:
    """Measures clients with the tasks and the executor of a run."""

    federation: Federation
    method: Method
    settings: Settings
    plan: Plan
    memory: LastScores
    task: Callable[..., Task]
    compute: Callable[[Sequence[Task], int, str], list[Reply]]
    blame: Callable[[int, int, str], None]
    together: Callable[[], bool] = lambda: True
    """whether one task may score several clients; not where each client is a machine of its own"""
    labels: bool = True
    """whether clients tell their scores by class"""
    room: int = 256 << 20
    """bytes of private states that are held at a time"""

    def evaluate(self, t: int) -> dict[str, Any]:
        """All that is reported after round t."""
        final = t == self.settings.rounds
        when = self.settings.adapt
        adapt = self.method.adapts and (when == "always" or (when == "final" and final))
        participants = list(self.federation.participants)
        measured = self._measure(participants, t, seen=True, adapt=adapt)
        participants, states = list(measured), list(measured.values())
        stage = "after" if adapt else "before"
        metrics: dict[str, Any] = {
            f"local.{k}": v for k, v in evaluate.scores(states, stage, labels=self.labels).items()
        }
        if adapt:
            before = evaluate.scores(states, "before", labels=self.labels)
            metrics |= {f"local.before.{k}": v for k, v in before.items()}
        metrics |= {
            "t": t,
            "adapted": adapt,
            "clients": {"ids": participants, "accuracy": evaluate.per_client(states, stage)},
        }
        if final:
            if self.labels:
                metrics["clients"]["confusion"] = [s[f"{stage}/test/confusion"].tolist() for s in states]
            metrics |= self._final(t)
        return metrics

    def _final(self, t: int) -> dict[str, float]:
        """What is measured once, after the last round: New, External and unseen clients."""
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
            found |= {
                f"unseen.{k}": v for k, v in evaluate.scores(list(states.values()), "after", labels=self.labels).items()
            }
        return found

    def _measure(self, clients: Sequence[int], t: int, *, seen: bool, adapt: bool) -> dict[int, State]:
        """Score clients, in pieces, so that only their scores add up in memory; who cannot be scored is named."""
        together = seen and not adapt and self.together() and stackable(self.method)
        tasks = (self.task("evaluate", client, t, seen=seen, adapt=adapt) for client in clients)
        states: dict[int, State] = {}
        for some in pieces(tasks, 1024 if together else 64, self.room):
            due = list(stacked(some, self.plan, self.federation)) if together else some
            states |= self._scores(due, t, lasting=seen and not adapt)
        if not states:
            raise UpdateError(f"No client could be scored in round {t}.", "Look at what the clients say.")
        return states

    def _scores(self, tasks: Sequence[Task], t: int, *, lasting: bool) -> dict[int, State]:
        """What the tasks find; those whose client is as it was when it was last scored are not computed again."""
        known = [self.memory.recall(task) if lasting else None for task in tasks]
        due = [task for task, state in zip(tasks, known, strict=True) if state is None]
        replies = iter(self.compute(due, t, "scoring") if due else [])
        states: dict[int, State] = {}
        for task, before in zip(tasks, known, strict=True):
            found = self._fresh(task, next(replies), lasting) if before is None else before
            if found is not None:
                states |= dict(zip(members(task), unstacked(task, found), strict=True))
        return states

    def _fresh(self, task: Task, reply: Reply, lasting: bool) -> State | None:
        if reply.error:
            for client in members(task):
                self.blame(task.t, client, f"Client {client} could not be scored: {reply.error}")
            return None
        if lasting:
            self.memory.keep(task, reply.state)
        return reply.state

    def _ensemble(self, op: Operation, clients: Sequence[int], t: int, y: torch.Tensor) -> float:
        """The accuracy of all clients' models voting together on samples whose client is unknown."""
        total = torch.zeros(0)
        adapt = self.method.adapts and self.settings.adapt != "never"
        for tasks in pieces((self.task(op, client, t, adapt=adapt) for client in clients), 8, self.room):
            for task, reply in zip(tasks, self.compute(tasks, t, "voting"), strict=True):
                if reply.error:
                    self.blame(t, task.client, f"Client {task.client} could not vote: {reply.error}")
                    continue
                votes = reply.state["probabilities"].double()
                total = votes if not len(total) else total + votes
        return evaluate.ensemble_accuracy(total, y)
