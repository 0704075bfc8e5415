"""Who computes the tasks of a round: this process, or a pool of persistent single-thread workers.

The pool forks, so workers share the data without copying it. Tensors travel through shared memory, what several tasks
have in common only once; beside them goes plain JSON. The result of a job depends on the job alone, so executors agree
to the bit. A job is one client's task, or those of a cohort.
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

from perfed import allocator
from perfed.core.state import State, under, within
from perfed.engine.shared import Area
from perfed.engine.worker import Reply, Task, Worker
from perfed.errors import PerfedError

TINY = 64
"""Samples up to which the work on one client is done in this process."""
TINY_WORK = 1 << 25
"""Samples times parameters up to which any work is: sending it to others would take longer."""
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
        replies: dict[int, Reply] = {}
        with one_thread(), torch.random.fork_rng(devices=[]):
            for job in self.worker.jobs(tasks):
                replies |= zip(job, self.worker.run_all([tasks[number] for number in job]), strict=True)
                if done:
                    for _ in job:
                        done()
        return [replies[number] for number in range(len(tasks))]

    def close(self) -> None:
        """Nothing to release."""


class Pool:
    """Persistent worker processes, one thread each; the largest clients are dealt out first."""

    def __init__(self, worker: Worker, workers: int, in_child: Callable[[], None] | None = None) -> None:
        self.worker, self._in_child = worker, in_child or (lambda: None)
        self._links: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._here = Serial(worker)
        self._parameters = sum(tensor.numel() for tensor in worker.plan.initial.values())
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
        jobs = self.worker.jobs(tasks)
        sizes = [sum(self.worker.federation.size(tasks[number].client) for number in job) for job in jobs]
        if sum(sizes) <= (TINY if len(tasks) == 1 else TINY_WORK // max(1, self._parameters)):
            return self._here.run(tasks, done)
        common = self._publish(tasks)
        queue = sorted(range(len(jobs)), key=lambda i: sizes[i])
        replies: dict[int, Reply] = {}
        busy: dict[int, int] = {}
        tried: Counter[int] = Counter()
        idle = list(range(len(self._links)))
        while queue or busy:
            while queue and idle:
                place, job = idle.pop(0), queue.pop()
                tried[job] += 1
                busy[place] = job
                self._post(place, [tasks[number] for number in jobs[job]], common)
            ready = wait([self._links[place] for place in busy])
            for place in [place for place in busy if self._links[place] in ready]:
                job = busy.pop(place)
                try:
                    found = self._desks[place].read_replies(self._links[place].recv_bytes())
                    replies |= zip(jobs[job], found, strict=True)
                    if done:
                        for _ in jobs[job]:
                            done()
                except (EOFError, OSError):
                    self._start(place)
                    if tried[job] > 1:
                        task = tasks[jobs[job][0]]
                        raise WorkerError(
                            f"The worker process died twice on client {task.client} in round {task.t}.",
                            "It may have run out of memory: use fewer workers or a smaller batch.",
                        ) from None
                    queue.append(job)
                idle.append(place)
        return [replies[number] for number in range(len(tasks))]

    def _publish(self, tasks: Sequence[Task]) -> dict[int, Place]:
        """Lay out once what several tasks have in common, such as the server's tensors; where each tensor is."""
        given = [tensor for task in tasks for state in (task.received, task.private) for tensor in state.values()]
        often = {number for number, times in Counter(map(id, given)).items() if times > 1}
        shared = {str(id(tensor)): tensor for tensor in given if id(tensor) in often}
        return {int(name): (kind, shape, at) for name, kind, shape, at in self._common.write(shared)}

    def _post(self, place: int, tasks: Sequence[Task], common: dict[int, Place]) -> None:
        message = self._desks[place].write_tasks(tasks, common)
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
    allocator.keep()
    torch.set_num_threads(1)
    while True:
        try:
            tasks = desk.read_tasks(link.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        try:
            replies = worker.run_all(tasks)
        except Exception as error:
            crash = {"crash": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            replies = [Reply(task.client, {}, {}, crash) for task in tasks]
        try:
            link.send_bytes(desk.write_replies(replies))
        except OSError:
            os._exit(0)


@dataclass(frozen=True)
class Desk:
    """A worker's place: what all workers read, what it alone is given, and what it answers."""

    common: Area
    inbox: Area
    outbox: Area

    def write_tasks(self, tasks: Sequence[Task], common: Mapping[int, Place]) -> bytes:
        """Tasks as JSON; their tensors are in the common area or go into the inbox."""
        own: State = {}
        messages = []
        for number, task in enumerate(tasks):
            shared: dict[str, list[tuple[str, str, list[int], int]]] = {}
            for part, state in (("received", task.received), ("private", task.private)):
                shared[part] = [(name, *common[id(t)]) for name, t in state.items() if id(t) in common]
                own |= {f"{number}/{part}/{name}": t for name, t in state.items() if id(t) not in common}
            facts = {"op": task.op, "client": task.client, "t": task.t, "since": task.since, "options": task.options}
            messages.append({"task": facts, "common": shared})
        return json.dumps({"tasks": messages, "own": self.inbox.write(own)}).encode()

    def read_tasks(self, data: bytes) -> list[Task]:
        """The tasks of a message."""
        message = json.loads(data)
        own = _numbered(self.inbox.read(message["own"]), len(message["tasks"]))

        def state(number: int, part: str) -> State:
            return self.common.read(message["tasks"][number]["common"][part]) | within(part, own[number])

        return [
            Task(received=state(number, "received"), private=state(number, "private"), **one["task"])
            for number, one in enumerate(message["tasks"])
        ]

    def write_replies(self, replies: Sequence[Reply]) -> bytes:
        """Replies as JSON; their tensors go into the outbox."""
        tensors: State = {}
        for number, reply in enumerate(replies):
            tensors |= under(f"{number}/state", reply.state) | under(f"{number}/private", reply.private)
        facts = [{"client": reply.client, "scalars": reply.scalars} for reply in replies]
        return json.dumps({"replies": facts, "own": self.outbox.write(tensors)}).encode()

    def read_replies(self, data: bytes) -> list[Reply]:
        """The replies of a message, copied, so that the worker can go on."""
        message = json.loads(data)
        for reply in message["replies"]:
            if "crash" in reply["scalars"]:
                what = reply["scalars"]
                raise WorkerError(f"Client {reply['client']} failed: {what['crash']}.", f"\n{what['trace']}")
        copied = {name: view.clone() for name, view in self.outbox.read(message["own"]).items()}
        own = _numbered(copied, len(message["replies"]))
        return [
            Reply(reply["client"], within("state", own[number]), within("private", own[number]), reply["scalars"])
            for number, reply in enumerate(message["replies"])
        ]


def _numbered(state: State, count: int) -> list[State]:
    """The tensors of each of several messages, by the number before their names."""
    parts: list[State] = [{} for _ in range(count)]
    for name, tensor in state.items():
        number, _, rest = name.partition("/")
        parts[int(number)][rest] = tensor
    return parts
