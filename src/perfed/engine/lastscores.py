"""Every client's last score, for as long as nothing that it follows from has changed.

A score before adaptation follows from what the client keeps (which is as old as its last round) and from what it would
receive. Both are compared by identity: a client that did not take part keeps its state, and a server whose state did
not change, or which sends nothing, leaves the score as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from perfed.core.method import Method
from perfed.core.state import State
from perfed.engine.stacking import members
from perfed.engine.worker import Task


class _Known(NamedTuple):
    since: int
    members: list[int]
    received: State
    found: State


class LastScores:
    """Scores by the first client of their task. Only the server's own tensors are held, of which all have the same."""

    def __init__(self, method: Method, server: Callable[[], State]) -> None:
        self._server, self._lasts = server, method.buffers != "reset"
        self._known: dict[int, _Known] = {}
        self.reused = 0
        """how many clients' scores were not computed again"""

    def recall(self, task: Task) -> State | None:
        """What was found for the same task before, if it is known to be the same."""
        known = self._known.get(task.client)
        if known is None or known.since != task.since or known.members != members(task):
            return None
        if not _same(known.received, task.received):
            return None
        self.reused += len(known.members)
        return known.found

    def keep(self, task: Task, found: State) -> None:
        """Remember what was found."""
        server = self._server()
        if self._lasts and all(server.get(name) is tensor for name, tensor in task.received.items()):
            self._known[task.client] = _Known(task.since, members(task), dict(task.received), found)
        else:
            self._known.pop(task.client, None)


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)
