"""Tasks and replies as the content of Flower messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast, get_args

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from perfed.core.client import Meter
from perfed.core.state import State
from perfed.engine.worker import Kept, Operation, Reply, Task
from perfed.errors import UpdateError
from perfed.flower.payload import LARGEST, Fields, only, read_state, record, write_state

PROTOCOL = 1
SHA = re.compile(r"[0-9a-f]{64}(/[0-9a-f]{64})?")
METER = tuple(Meter.__dataclass_fields__)
MOST_CLIENTS = 10**6
"""Clients of a run; a site that is told of more refuses."""
MOST_SAMPLES = 10**12
"""Samples of one client; more are refused."""
SECONDS = 1e9
"""The longest that a task can take."""
SCALAR = 1e15
"""Numbers of a method's own from here on are refused."""
TOTAL = 1e100
"""Sums over a client's samples from here on are refused: those of all clients must stay finite, and their squares."""


@dataclass(frozen=True)
class Job:
    """What a node must know of a run beside its task: the configuration, and its place among the sites."""

    words: str
    run: str = ""
    classes: tuple[str, ...] = ()
    clients: int = 0


@dataclass(frozen=True)
class Wanted:
    """What is known of a good reply before it comes."""

    classes: int
    arrays: int = LARGEST
    """bytes of arrays"""
    measures: tuple[str, ...] = ()
    """names of the method's own measures"""
    scalars: tuple[str, ...] = ()
    """names of the numbers that an update brings beside its weight"""
    samples: Mapping[str, int] = field(default_factory=dict)
    """how many samples are scored of each part, or voted on, as far as that is known"""


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
    clients = plain.whole("clients", 0, MOST_CLIENTS)
    job = Job(plain.text("words", 1 << 20), plain.text("run", 64), plain.texts("classes"), clients)
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


def read_reply(content: RecordDict, task: Task, wanted: Wanted) -> Reply:
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
    scalars: dict[str, object] = {"seconds": numbers.number("seconds", 0, SECONDS)}
    if task.op == "train":
        scalars["weight"] = numbers.number("weight")
        scalars["meter"] = {name: numbers.whole(f"meter.{name}") for name in METER}
        scalars["extra"] = {
            name: numbers.number(f"extra.{name}", 0 if name.startswith("cost.") else -SCALAR, SCALAR)
            for name in wanted.scalars
            if numbers.has(f"extra.{name}")
        }
    numbers.end()
    state = read_state(record(content, "state", ArrayRecord, sender), sender, wanted.arrays)
    if task.op == "evaluate":
        _check_scores(state, task, wanted, sender)
    elif task.op != "train":
        _check_votes(state, task, wanted, sender)
    private: State = {}
    if task.kept is None:
        private = read_state(record(content, "private", ArrayRecord, sender), sender)
    elif "private" in content:
        raise UpdateError(f"{sender} sent what it was to keep.")
    return Reply(task.client, state, private, dict(scalars), kept)


def _check_scores(state: State, task: Task, wanted: Wanted, sender: str) -> None:
    """Scores are those that were asked for, all of them: matrices of counts of the client's samples, and sums."""
    stages = ("before", "after") if task.options.get("adapt") or not task.options.get("seen", True) else ("before",)
    kinds = ("confusion", "loss", *(f"measure/{name}" for name in wanted.measures))
    names = [f"{stage}/{part}/{kind}" for stage in stages for part in ("test", "val") for kind in kinds]
    if strange := sorted(state.keys() - set(names)):
        raise UpdateError(f"{sender} sent the score {strange[0][:80]!r}, which nobody asked for.")
    for name in names:
        if name not in state:
            raise UpdateError(f"{sender} sent no score {name}.")
        _, part, kind = name.split("/", 2)
        if kind == "confusion":
            _check_counts(state[name], wanted.classes, wanted.samples.get(part), f"{sender} sent {name}")
        else:
            _check_sum(state[name], 0.0 if kind == "loss" else -TOTAL, f"{sender} sent {name}")


def _check_counts(counts: Tensor, classes: int, samples: int | None, what: str) -> None:
    """A confusion matrix has every sample once."""
    if counts.dtype != torch.int64 or counts.shape != (classes, classes) or bool((counts < 0).any()):
        raise UpdateError(f"{what} that is no matrix of counts of {classes} classes.")
    most = MOST_SAMPLES if samples is None else samples
    total = float(counts.sum(dtype=torch.float64))  # which does not overflow
    if total > most or (samples is not None and total != samples):
        raise UpdateError(f"{what} of {total:g} samples; it has {'at most ' if samples is None else ''}{most}.")


def _check_sum(value: Tensor, low: float, what: str) -> None:
    if value.dtype != torch.float64 or value.dim() or not low <= value.item() <= TOTAL:
        raise UpdateError(f"{what} that is no finite number from {low:g} to {TOTAL:g}.")


def _check_votes(state: State, task: Task, wanted: Wanted, sender: str) -> None:
    """Votes are probabilities of every class, for each sample that is voted on."""
    votes = state.get("probabilities", torch.zeros(0))
    rows = wanted.samples.get(task.op, len(votes) if votes.dim() else 0)
    good = len(state) == 1 and votes.is_floating_point() and votes.shape == (rows, wanted.classes)
    if not good or not bool(((votes >= 0) & (votes < 1.01)).all()):
        raise UpdateError(f"{sender} sent votes that are no probabilities of {wanted.classes} classes.")
