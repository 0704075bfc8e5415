"""An executor whose workers are Flower nodes: tasks go out as messages, replies come back until a deadline.

A reply is matched to its task by the message it answers. A node that died or came back is sent its task again while
there is time: a task's result depends on the task alone, so it does not matter which of two answers is taken. Who has
not answered by the deadline, or answered with something else than a reply, is named in place of the reply.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Protocol

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from perfed.engine.worker import Reply, Task, Worker
from perfed.errors import PerfedError, UpdateError
from perfed.flower.limits import wanted
from perfed.flower.messages import Job, Wanted, read_reply, write_task

RAISED = 2
"""Flower's code for an app that raised an exception: asking again would not help."""
PIECE = 16
"""messages that are handed to Flower at once"""
SHORTEST, LONGEST = 0.02, 1.0
"""seconds between two looks for replies"""
AGAIN = 5.0
"""seconds until a node that failed is asked again"""


class StoppedError(PerfedError):
    """The engine ended under a run."""

    code = "E503"


class Address(Protocol):
    """Where clients are."""

    def node(self, client: int) -> int | None:
        """The node of a client, if it was ever there."""
        ...

    def refresh(self) -> Mapping[int, str]:
        """Look again who is there; every node's last start, as far as Flower tells."""
        ...


@dataclass
class Sent:
    """A task on its way."""

    task: Task
    message: str | None = None
    since: str = ""
    due: float = 0.0
    """when to send it (again); 0 while an answer is awaited"""
    trouble: str = "it was not reached"


@dataclass
class Nodes:
    """Computes tasks on Flower nodes."""

    apart: ClassVar[bool] = True
    """a task is of one client, as each is a node of its own"""
    grid: Grid
    job: Job
    address: Address
    classes: int
    deadline: float = 600.0
    """seconds that the clients of a round have to answer"""
    wanted: Callable[[Task], Wanted] | None = None
    """what the answer to a task must be, where that is known"""
    tests: Sequence[int] | None = None
    """how many samples each site says it is tested on"""
    stop: threading.Event = field(default_factory=threading.Event)
    patient: bool = False
    """whether nodes come and go; simulated ones do not"""
    last: bool = False
    """whether sites are to keep what they receive as their final model"""
    carry: Callable[[Nodes, Sequence[Task]], list[Reply]] | None = None
    """who carries the messages instead, where Flower's own loop does"""

    def run(self, tasks: Sequence[Task], done: Callable[[], None] | None = None) -> list[Reply]:
        """Send the tasks, and wait for the replies; a client without a good one is named in its place."""
        if self.carry:
            return self.carry(self, tasks)
        open_ = [Sent(task, due=time.monotonic()) for task in tasks]
        asked: dict[str, Sent] = {}
        replies: dict[int, Reply] = {}
        ends, looked, pause = time.monotonic() + self.deadline, time.monotonic(), SHORTEST
        while len(replies) < len(open_) and (now := time.monotonic()) < ends:
            if self.stop.is_set():
                raise StoppedError("The engine stopped before the round's end.", "Resume the run.")
            if self.patient and now - looked > AGAIN:
                looked = now
                self._look_again(open_, replies)
            self._send([sent for sent in open_ if id(sent) not in replies and 0 < sent.due <= now], asked)
            got = 0
            for message in self.grid.pull_messages(list(asked)) if asked else ():
                sent = asked.pop(message.metadata.reply_to_message_id, None)
                if sent is None or id(sent) in replies:
                    continue  # nobody asked, or it answered before
                reply = self.read(message, sent)
                if reply:
                    replies[id(sent)] = reply
                    got += 1
                    if done:
                        done()
            pause = SHORTEST if got else min(pause * 1.5, LONGEST)
            if len(replies) < len(open_):
                self.stop.wait(min(pause, max(0.0, ends - time.monotonic())))
        return [replies.get(id(sent)) or self.missing(sent) for sent in open_]

    def limited(self, worker: Worker) -> Nodes:
        """The same, which accepts no other answers than the worker's method declares."""
        return replace(self, wanted=partial(wanted, worker, self.tests))

    def close(self) -> None:
        """Nothing to release."""

    def _send(self, due: Sequence[Sent], asked: dict[str, Sent]) -> None:
        for start in range(0, len(due), PIECE):
            some = [(sent, self.address.node(sent.task.client)) for sent in due[start : start + PIECE]]
            for sent, _ in some:
                sent.due = time.monotonic() + AGAIN
            ready = [(sent, node) for sent, node in some if node is not None]
            messages = [self.message(sent.task, node) for sent, node in ready]
            for (sent, _), number in zip(ready, self.grid.push_messages(messages), strict=False):
                if number:
                    asked[number], sent.message, sent.due = sent, number, 0.0
                    sent.trouble = f"it did not answer within {self.deadline:g} s"

    def message(self, task: Task, node: int) -> Message:
        """A task as a message to a node."""
        kind = MessageType.TRAIN if task.op == "train" else MessageType.EVALUATE
        content = write_task(task, self.job, last=self.last)
        return Message(content, node, kind, ttl=self.deadline + 60, group_id=str(task.t))

    def read(self, message: Message, sent: Sent) -> Reply | None:
        """The reply in a message, or None if the task is to be sent again."""
        client = sent.task.client
        if message.has_error():
            reason = " ".join(str(message.error.reason).split())[:500]
            if message.error.code != RAISED and self.patient:
                sent.due, sent.trouble = time.monotonic() + AGAIN, reason
                return None
            return Reply(client, {}, {}, {"error": reason})
        try:
            if message.metadata.src_node_id != self.address.node(client):
                raise UpdateError(f"Another node answered for client {client}.")
            known = self.wanted(sent.task) if self.wanted else Wanted(self.classes)
            return read_reply(message.content, sent.task, known)
        except UpdateError as error:
            return Reply(client, {}, {}, {"error": str(error)})

    def _look_again(self, open_: Sequence[Sent], replies: Mapping[int, Reply]) -> None:
        """A node that was started anew has forgotten what it was asked."""
        started = self.address.refresh()
        for sent in open_:
            node = self.address.node(sent.task.client)
            if id(sent) in replies or node is None:
                continue
            if sent.message and not sent.due and started.get(node, sent.since) != sent.since:
                if sent.since:
                    sent.due = time.monotonic()
                sent.since = started[node]

    def missing(self, sent: Sent) -> Reply:
        """What stands in place of a reply that did not come."""
        return Reply(sent.task.client, {}, {}, {"error": f"No answer: {sent.trouble}."})
