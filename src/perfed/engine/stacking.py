"""Clients that predict with one and the same model are scored together, in large batches.

Which clients share a task follows from the configuration and the clients' order alone, so that every executor and a
resumed run make the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from perfed.core.method import Method
from perfed.core.plan import Plan
from perfed.core.state import State
from perfed.data.federation import Federation
from perfed.engine.worker import Task

STACK = 512
"""Samples up to which clients are put together."""


def pieces(tasks: Iterable[Task], most: int, room: int) -> Iterator[list[Task]]:
    """The tasks, so many at a time that their private states have room."""
    held: list[Task] = []
    size = 0
    for task in tasks:
        own = sum(tensor.numel() * tensor.element_size() for tensor in task.private.values())
        if held and (len(held) == most or size + own > room):
            yield held
            held, size = [], 0
        held.append(task)
        size += own
    if held:
        yield held


def stackable(method: Method) -> bool:
    """Whether what a client predicts with is its network as received, and its scores are nothing but the logits."""
    cls = type(method)
    return (
        cls.personal is Method.personal
        and cls.predict is Method.predict
        and cls.measures is Method.measures
        and method.buffers != "reset"
    )


def stacked(tasks: Sequence[Task], plan: Plan, federation: Federation) -> Iterator[Task]:
    """The same tasks, neighbours that score the same model put together."""
    held: list[Task] = []
    samples = 0
    for task in tasks:
        size = sum(len(federation.rows(task.client, part)) for part in ("test", "val"))
        if held and (samples + size > STACK or not _alike(held[-1], task, plan)):
            yield _together(held)
            held, samples = [], 0
        held.append(task)
        samples += size
    if held:
        yield _together(held)


def members(task: Task) -> list[int]:
    """The clients that a task scores."""
    return list(task.options.get("stack", [task.client]))


def unstacked(task: Task, state: State) -> Iterator[State]:
    """What was measured of each of the clients."""
    if "stack" not in task.options:
        yield state
        return
    for row in range(len(members(task))):
        yield {name: values[row] for name, values in state.items()}


def _alike(a: Task, b: Task, plan: Plan) -> bool:
    """Whether two clients have the same model: nothing of their own in it, and the very same tensors received."""
    if any(which is not False for task in (a, b) for which in plan.private(task.since).values()):
        return False
    return a.received.keys() == b.received.keys() and all(a.received[name] is b.received[name] for name in a.received)


def _together(tasks: Sequence[Task]) -> Task:
    if len(tasks) == 1:
        return tasks[0]
    first = tasks[0]
    return replace(first, private={}, options=first.options | {"stack": [task.client for task in tasks]})
