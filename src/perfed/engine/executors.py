"""Who computes the tasks of a round: this process, or a pool of persistent single-thread workers.

The pool forks, so workers share the data without copying it. Tensors travel through shared memory, what several tasks
have in common only once; beside them goes plain JSON. The result of a task depends on the task alone, so executors agree
to the bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

import torch

from perfed.core.state import State, under, within
from perfed.engine.shared import Area
from perfed.engine.worker import Reply, Task, Worker
from perfed.errors import PerfedError

TINY = 64
"""Samples up to which a round of one client is computed in this process."""
Place = tuple[str, list[int], int]


class WorkerError(PerfedError):
    """A worker process ended, or its method raised an exception."""

    code = "E501"


class Executor(Protocol):
    """Anything that can compute tasks."""

    def run(self, tasks: Sequence[Task], done: Callable[[], None] | None = None) -> list[Reply]:
        """Compute the tasks and return their replies in the same order; `done` is called after each."""
        ...

    def close(self) -> None:
        """Release processes and memory."""
        ...


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on a single thread inside, as every worker does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Serial:
    """One client after another in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def run(self, tasks: Sequence[Task], done: Callable[[], None] | None = None) -> list[Reply]:
        """Compute the tasks here."""
        replies = []
        with one_thread(), torch.random.fork_rng(devices=[]):
            for task in tasks:
                replies.append(self.worker.run(task))
                if done:
                    done()
        return replies

    def close(self) -> None:
        """Nothing to release."""


class Pool:
    """Persistent worker processes, one thread each; the largest clients are dealt out first."""

    def __init__(self, worker: Worker, workers: int, in_child: Callable[[], None] | None = None) -> None:
        self.worker, self._in_child = worker, in_child or (lambda: None)
        self._links: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._here = Serial(worker)
        self._common = Area()
        self._desks = [Desk(self._common, Area(), Area()) for _ in range(workers)]
        for place in range(workers):
            self._start(place)

    def _start(self, place: int) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        inherited = [link for number, link in enumerate(self._links) if number != place]
        process = context.Process(
            target=_serve,
            args=(self.worker, theirs, self._desks[place], [ours, *inherited], self._in_child),
            daemon=True,
        )
        process.start()
        theirs.close()
        if place < len(self._links):
            self._links[place].close()
            self._links[place], self._processes[place] = ours, process
        else:
            self._links.append(ours)
            self._processes.append(process)

    def run(self, tasks: Sequence[Task], done: Callable[[], None] | None = None) -> list[Reply]:
        """Compute the tasks in the pool. A worker that dies is replaced and its task tried once more."""
        sizes = [self.worker.federation.size(task.client) for task in tasks]
        if len(tasks) == 1 and sizes[0] <= TINY:
            return self._here.run(tasks, done)
        common = self._publish(tasks)
        queue = sorted(range(len(tasks)), key=lambda i: sizes[i])
        replies: list[Reply | None] = [None] * len(tasks)
        busy: dict[int, int] = {}
        tried: dict[int, int] = {}
        idle = list(range(len(self._links)))
        while queue or busy:
            while queue and idle:
                place, number = idle.pop(0), queue.pop()
                tried[number] = tried.get(number, 0) + 1
                busy[place] = number
                self._post(place, tasks[number], common)
            ready = wait([self._links[place] for place in busy])
            for place in [place for place in busy if self._links[place] in ready]:
                number = busy.pop(place)
                try:
                    replies[number] = self._desks[place].read_reply(self._links[place].recv_bytes())
                    if done:
                        done()
                except (EOFError, OSError):
                    self._start(place)
                    if tried[number] > 1:
                        client = tasks[number].client
                        raise WorkerError(
                            f"The worker process died twice on client {client} in round {tasks[number].t}.",
                            "It may have run out of memory: use fewer workers or a smaller batch.",
                        ) from None
                    queue.append(number)
                idle.append(place)
        return [reply for reply in replies if reply is not None]

    def _publish(self, tasks: Sequence[Task]) -> dict[int, Place]:
        """Lay out once what several tasks have in common, such as the server's tensors; where each tensor is."""
        given = [tensor for task in tasks for state in (task.received, task.private) for tensor in state.values()]
        often = {number for number, times in Counter(map(id, given)).items() if times > 1}
        shared = {str(id(tensor)): tensor for tensor in given if id(tensor) in often}
        return {int(name): (kind, shape, at) for name, kind, shape, at in self._common.write(shared)}

    def _post(self, place: int, task: Task, common: dict[int, Place]) -> None:
        message = self._desks[place].write_task(task, common)
        with suppress(OSError):  # a worker that is gone says so when it is read from
            self._links[place].send_bytes(message)

    def close(self) -> None:
        """End the workers."""
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        for area in (self._common, *(area for desk in self._desks for area in (desk.inbox, desk.outbox))):
            area.close()
        self._desks.clear()


def make(worker: Worker, workers: int, in_child: Callable[[], None] | None = None) -> Executor:
    """The executor for a number of workers; without fork, one process does all.

    `in_child` runs first in every worker process, to let go of what only the parent may hold.
    """
    if workers <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        return Serial(worker)
    return Pool(worker, workers, in_child)


def _serve(
    worker: Worker, link: Connection, desk: Desk, inherited: Sequence[Connection], in_child: Callable[[], None]
) -> None:
    """A worker process: tasks in, replies out, until the other end closes."""
    in_child()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    while True:
        try:
            task = desk.read_task(link.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        try:
            reply = worker.run(task)
        except Exception as error:
            reply = Reply(
                task.client,
                {},
                {},
                {"crash": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()},
            )
        try:
            link.send_bytes(desk.write_reply(reply))
        except OSError:
            os._exit(0)


@dataclass(frozen=True)
class Desk:
    """A worker's place: what all workers read, what it alone is given, and what it answers."""

    common: Area
    inbox: Area
    outbox: Area

    def write_task(self, task: Task, common: Mapping[int, Place]) -> bytes:
        """A task as JSON; its tensors are in the common area or go into the inbox."""
        states = {"received": task.received, "private": task.private}
        own = {
            f"{part}/{name}": tensor
            for part, state in states.items()
            for name, tensor in state.items()
            if id(tensor) not in common
        }
        found = {
            part: [(name, *common[id(tensor)]) for name, tensor in state.items() if id(tensor) in common]
            for part, state in states.items()
        }
        facts = {"op": task.op, "client": task.client, "t": task.t, "since": task.since, "options": task.options}
        return json.dumps({"task": facts, "common": found, "own": self.inbox.write(own)}).encode()

    def read_task(self, data: bytes) -> Task:
        """The task of a message."""
        message = json.loads(data)
        own = self.inbox.read(message["own"])

        def state(part: str) -> State:
            return self.common.read(message["common"][part]) | within(part, own)

        return Task(received=state("received"), private=state("private"), **message["task"])

    def write_reply(self, reply: Reply) -> bytes:
        """A reply as JSON; its tensors go into the outbox."""
        tensors: State = under("state", reply.state) | under("private", reply.private)
        facts = {"client": reply.client, "scalars": reply.scalars, "own": self.outbox.write(tensors)}
        return json.dumps(facts).encode()

    def read_reply(self, data: bytes) -> Reply:
        """The reply of a message, copied, so that the worker can go on."""
        message = json.loads(data)
        found = message["scalars"]
        if "crash" in found:
            raise WorkerError(f"Client {message['client']} failed: {found['crash']}.", f"\n{found['trace']}")
        tensors = {name: view.clone() for name, view in self.outbox.read(message["own"]).items()}
        return Reply(message["client"], within("state", tensors), within("private", tensors), found)
