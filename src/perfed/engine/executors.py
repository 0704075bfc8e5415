"""Who computes the tasks of a round: this process, or a pool of persistent single-thread workers.

The pool forks, so workers share the data without copying it; messages are named tensors and plain scalars in the
safetensors format. The result of a task depends on the task alone, so executors agree to the bit.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

import torch

from perfed.core.state import State, from_bytes, to_bytes, under, within
from perfed.engine.worker import Reply, Task, Worker
from perfed.errors import PerfedError


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
        torch.optim.SGD([torch.zeros(1)], lr=1.0)  # torch imports much at the first optimiser: once, before the fork
        for _ in range(workers):
            self._start(len(self._links))

    def _start(self, place: int) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        inherited = [link for number, link in enumerate(self._links) if number != place]
        process = context.Process(
            target=_serve, args=(self.worker, theirs, [ours, *inherited], self._in_child), daemon=True
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
                self._post(place, tasks[number])
            ready = wait([self._links[place] for place in busy])
            for place in [place for place in busy if self._links[place] in ready]:
                number = busy.pop(place)
                try:
                    replies[number] = _read_reply(self._links[place].recv_bytes())
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

    def _post(self, place: int, task: Task) -> None:
        with suppress(OSError):  # a worker that is gone says so when it is read from
            self._links[place].send_bytes(_write_task(task))

    def close(self) -> None:
        """End the workers."""
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def make(worker: Worker, workers: int, in_child: Callable[[], None] | None = None) -> Executor:
    """The executor for a number of workers; without fork, one process does all.

    `in_child` runs first in every worker process, to let go of what only the parent may hold.
    """
    if workers <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        return Serial(worker)
    return Pool(worker, workers, in_child)


def _serve(worker: Worker, link: Connection, inherited: Sequence[Connection], in_child: Callable[[], None]) -> None:
    """A worker process: tasks in, replies out, until the other end closes."""
    in_child()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    while True:
        try:
            task = _read_task(link.recv_bytes())
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
            link.send_bytes(_write_reply(reply))
        except OSError:
            os._exit(0)


def _write_task(task: Task) -> bytes:
    scalars = {
        "op": task.op,
        "client": task.client,
        "t": task.t,
        "since": task.since,
        "options": task.options,
    }
    return to_bytes(under("received", task.received) | under("private", task.private), scalars)


def _read_task(data: bytes) -> Task:
    state, scalars = from_bytes(data)
    return Task(received=within("received", state), private=within("private", state), **scalars)


def _write_reply(reply: Reply) -> bytes:
    tensors: State = under("state", reply.state) | under("private", reply.private)
    return to_bytes(tensors, {"client": reply.client, "scalars": reply.scalars})


def _read_reply(data: bytes) -> Reply:
    state, scalars = from_bytes(data)
    found = scalars["scalars"]
    if "crash" in found:
        raise WorkerError(f"Client {scalars['client']} failed: {found['crash']}.", f"\n{found['trace']}")
    return Reply(scalars["client"], within("state", state), within("private", state), found)
