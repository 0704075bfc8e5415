"""Tasks and replies as the content of Flower messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast, get_args

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from perfed.core.client import Meter
from perfed.core.state import State
from perfed.engine.worker import Kept, Operation, Reply, Task
from perfed.errors import UpdateError
from perfed.flower.payload import LARGEST, Fields, only, read_state, record, write_state

PROTOCOL = 1
SHA = re.compile(r"[0-9a-f]{64}(/[0-9a-f]{64})?")
METER = tuple(Meter.__dataclass_fields__)
PART = re.compile(r"(before|after)/(test|val)/(confusion|loss|measure/.{1,80})")


@dataclass(frozen=True)
class Job:
    """What a node must know of a run beside its task: the configuration, and its place among the sites."""

    words: str
    run: str = ""
    classes: tuple[str, ...] = ()
    clients: int = 0


def write_task(task: Task, job: Job, *, last: bool = False) -> RecordDict:
    """A task as a message; `last` asks the site to keep what it received as its final model."""
    kept = task.kept or Kept()
    plain = ConfigRecord(
        {
            "protocol": PROTOCOL,
            "op": task.op,
            "client": task.client,
            "t": task.t,
            "since": task.since,
            "seen": bool(task.options.get("seen", True)),
            "adapt": bool(task.options.get("adapt", False)),
            "last": last,
            "words": job.words,
            "run": job.run,
            "classes": list(job.classes),
            "clients": job.clients,
            "sha": kept.sha,
            "committed": kept.round,
            "committed_sha": kept.committed,
        }
    )
    content = RecordDict({"task": plain, "received": write_state(task.received)})
    if task.kept is None:
        content["private"] = write_state(task.private)
    return content


def read_task(content: RecordDict, limit: Callable[[Task, Job], int] = lambda _, __: LARGEST) -> tuple[Task, Job, bool]:
    """The task of a message, or an error; `limit` says how many bytes the arrays of such a task may have."""
    sender = "The server"
    only(content, {"task", "received", "private"}, sender)
    plain = Fields(record(content, "task", ConfigRecord, sender), sender)
    if (version := plain.whole("protocol")) != PROTOCOL:
        raise UpdateError(f"The server speaks version {version}, not {PROTOCOL}.", "Install the same perfed on both.")
    op = plain.text("op")
    if op not in get_args(Operation):
        raise UpdateError(f"The server asks for {op[:40]!r}.")
    client, t, since = plain.whole("client"), plain.whole("t", 1), plain.whole("since")
    options = {"seen": plain.flag("seen"), "adapt": plain.flag("adapt")}
    last = plain.flag("last")
    job = Job(plain.text("words", 1 << 20), plain.text("run", 64), plain.texts("classes"), plain.whole("clients"))
    kept = Kept(plain.text("sha", 129), plain.whole("committed"), plain.text("committed_sha", 129))
    plain.end()
    simulated = "private" in content
    task = Task(cast(Operation, op), client, t, since, {}, {}, options, None if simulated else kept)
    received = read_state(record(content, "received", ArrayRecord, sender), sender, limit(task, job))
    private: State = {}
    if simulated:
        private = read_state(record(content, "private", ArrayRecord, sender), sender)
    return replace(task, received=received, private=private), job, last


def write_reply(reply: Reply, *, simulated: bool = False) -> RecordDict:
    """A reply as a message; a simulated client's private state lies with the server."""
    scalars = reply.scalars
    plain: dict[str, str | int] = {"client": reply.client}
    if reply.error:
        plain["error"] = reply.error[:1000]
    if reply.kept is not None:
        plain["kept"] = reply.kept
    numbers: dict[str, int | float] = {"seconds": float(scalars.get("seconds", 0.0))}
    if "weight" in scalars:
        numbers["weight"] = float(scalars["weight"])
        numbers |= {f"meter.{name}": int(value) for name, value in scalars["meter"].items()}
        numbers |= {f"extra.{name}": value for name, value in scalars["extra"].items()}
    content = RecordDict({"reply": ConfigRecord(dict(plain)), "numbers": MetricRecord(dict(numbers))})
    content["state"] = write_state(reply.state)
    if simulated:
        content["private"] = write_state(reply.private)
    return content


def read_reply(content: RecordDict, task: Task, classes: int, limit: int = LARGEST) -> Reply:
    """The reply to a task; what is not one is an error that names its sender. Updates are verified by their method."""
    sender = f"Client {task.client}"
    only(content, {"reply", "numbers", "state", "private"}, sender)
    plain = Fields(record(content, "reply", ConfigRecord, sender), sender)
    if (claimed := plain.whole("client")) != task.client:
        raise UpdateError(f"{sender} answered as client {claimed}.")
    if plain.has("error"):
        return Reply(task.client, {}, {}, {"error": plain.text("error")})
    kept = plain.text("kept", 129) if plain.has("kept") else None
    if kept is not None and not SHA.fullmatch(kept):
        raise UpdateError(f"{sender} sent {kept!r}, which is no sum of a state.")
    plain.end()
    if (kept is not None) != (task.kept is not None and task.op == "train"):
        raise UpdateError(f"{sender} {'sent no' if kept is None else 'sent a'} sum of what it keeps.")
    numbers = Fields(record(content, "numbers", MetricRecord, sender), sender)
    scalars: dict[str, object] = {"seconds": numbers.number("seconds", 0)}
    if task.op == "train":
        scalars["weight"] = numbers.number("weight")
        scalars["meter"] = {name: numbers.whole(f"meter.{name}", 0, 2**62) for name in METER}
        scalars["extra"] = numbers.beginning("extra.")
    numbers.end()
    state = read_state(record(content, "state", ArrayRecord, sender), sender, limit)
    if task.op != "train":
        _check_measured(state, task, classes, sender)
    private: State = {}
    if task.kept is None:
        private = read_state(record(content, "private", ArrayRecord, sender), sender)
    elif "private" in content:
        raise UpdateError(f"{sender} sent what it was to keep.")
    return Reply(task.client, state, private, dict(scalars), kept)


def _check_measured(state: State, task: Task, classes: int, sender: str) -> None:
    """Scores are matrices of counts and sums; votes are probabilities."""
    if task.op in ("new", "external"):
        votes = state.get("probabilities", torch.zeros(0))
        good = len(state) == 1 and votes.dim() == 2 and votes.shape[1] == classes and bool(torch.isfinite(votes).all())
        if not good:
            raise UpdateError(f"{sender} sent votes that are no probabilities of {classes} classes.")
        return
    stages = {"before"} | ({"after"} if task.options.get("adapt") or not task.options.get("seen", True) else set())
    for name, tensor in state.items():
        if not PART.fullmatch(name) or name.partition("/")[0] not in stages:
            raise UpdateError(f"{sender} sent the score {name[:80]!r}, which nobody asked for.")
        counts = name.endswith("/confusion")
        if counts and (tensor.dtype != torch.int64 or tensor.shape != (classes, classes) or bool((tensor < 0).any())):
            raise UpdateError(f"{sender} sent {name} that is no matrix of counts of {classes} classes.")
        if not counts and (tensor.dtype != torch.float64 or tensor.dim()):
            raise UpdateError(f"{sender} sent {name} that is no number.")
    wanted = {
        f"{stage}/{part}/{kind}" for stage in stages for part in ("test", "val") for kind in ("confusion", "loss")
    }
    if missing := sorted(wanted - state.keys()):
        raise UpdateError(f"{sender} sent no score {missing[0]}.")
