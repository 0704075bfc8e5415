"""Who is there: every node is asked once who it is. Flower's own number of a node says nothing about its client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from perfed.errors import UpdateError
from perfed.flower.messages import MOST_SAMPLES, PROTOCOL, SHA
from perfed.flower.payload import Fields, only, record

PATIENCE = 180.0
"""seconds after which a node that did not say who it is is asked again"""


@dataclass(frozen=True)
class Present:
    """What a node says about itself: the simulated client it is, or the site it runs at."""

    partition: int | None = None
    name: str = ""
    train: int = 0
    test: int = 0
    classes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    sha: str = ""

    def write(self) -> RecordDict:
        """The answer as a message."""
        if self.partition is not None:
            return RecordDict({"present": ConfigRecord({"kind": "simulated", "partition": self.partition})})
        facts: dict[str, Any] = {
            "kind": "site",
            "name": self.name,
            "train": self.train,
            "test": self.test,
            "classes": list(self.classes),
            "shape": list(self.shape),
            "sha": self.sha,
        }
        return RecordDict({"present": ConfigRecord(facts)})

    @classmethod
    def read(cls, content: RecordDict, sender: str) -> Present:
        """The answer in a message, or an error."""
        only(content, {"present"}, sender)
        plain = Fields(record(content, "present", ConfigRecord, sender), sender)
        if (kind := plain.text("kind")) == "error":
            raise UpdateError(f"{sender} cannot take part: {plain.text('reason')}")
        if kind == "simulated":
            found = cls(partition=plain.whole("partition"))
        else:
            found = cls(
                None,
                plain.text("name", 80),
                plain.whole("train", 1, MOST_SAMPLES),
                plain.whole("test", 1, MOST_SAMPLES),
                plain.texts("classes"),
                plain.wholes("shape", 3),
                plain.text("sha", 64),
            )
            if len(found.shape) != 3 or min(found.shape) < 1 or max(found.shape) > 4096 or not SHA.fullmatch(found.sha):
                raise UpdateError(f"{sender} describes its data in a way that cannot be: {found.shape}.")
            if not found.classes or len(set(found.classes)) < len(found.classes):
                raise UpdateError(f"{sender} names a class twice, or none.")
        plain.end()
        return found


def refusal(reason: str) -> RecordDict:
    """The answer of a site that cannot take part."""
    return RecordDict({"present": ConfigRecord({"kind": "error", "reason": reason[:1000]})})


def read_question(content: RecordDict) -> str:
    """The configuration that a roll call comes with."""
    only(content, {"call"}, "The server")
    plain = Fields(record(content, "call", ConfigRecord, "The server"), "The server")
    if (version := plain.whole("protocol")) != PROTOCOL:
        raise UpdateError(f"The server speaks version {version}, not {PROTOCOL}.", "Install the same perfed on both.")
    words = plain.text("words", 1 << 20)
    plain.end()
    return words


@dataclass
class Roll:
    """The nodes that were ever there, and what they said."""

    grid: Grid
    words: str
    stop: threading.Event = field(default_factory=threading.Event)
    nodes: dict[int, Present] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)
    _when: dict[int, float] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    def call(self, enough: Callable[[], bool], seconds: float) -> bool:
        """Ask whoever comes until there are enough, or the time is over."""
        ends, pause = time.monotonic() + seconds, 0.05
        while True:
            self.look()
            if enough():
                return True
            if time.monotonic() > ends or self.stop.is_set():
                return False
            self.stop.wait(pause)
            pause = min(1.0, pause * 1.5)

    def look(self) -> dict[int, str]:
        """Ask nodes that are new, read what was answered; every node's last start."""
        now, started = time.monotonic(), {}
        fresh = []
        for node in self.grid.get_nodes():
            started[node.node_id] = node.last_activated_at
            self._names[node.node_id] = node.name
            if node.node_id not in self.nodes and now - self._when.get(node.node_id, -PATIENCE) >= PATIENCE:
                fresh.append(node.node_id)
                self._when[node.node_id] = now
        question = {"call": ConfigRecord({"protocol": PROTOCOL, "words": self.words})}
        for start in range(0, len(fresh), 64):
            some = fresh[start : start + 64]
            messages = [Message(RecordDict(dict(question)), node, MessageType.QUERY, ttl=600.0) for node in some]
            sent = self.grid.push_messages(messages)
            self._asked |= {number: node for number, node in zip(sent, some, strict=False) if number}
        for message in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            node_id = self._asked.pop(message.metadata.reply_to_message_id, None)
            if node_id is not None:
                self._enter(node_id, message)
        return started

    def _enter(self, node: int, message: Message) -> None:
        name = self._names.get(node) or f"node {node}"
        if message.has_error():
            self.refused[name] = str(message.error.reason)[:500]
            return
        try:
            found = Present.read(message.content, name)
            if self._names.get(node) and found.name and found.name != self._names[node]:
                raise UpdateError(f"The site registered as {name!r} calls itself {found.name!r}.")
        except UpdateError as error:
            self.refused[name] = str(error)
            return
        self.refused.pop(name, None)
        self.nodes[node] = found
