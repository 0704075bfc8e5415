"""What a node answers: content in, content out, for a simulated client or for the site in a directory.

What goes wrong at a site is written in full to the site's own log. Outside nobody learns the names of its files.
"""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict

from perfed import config as configuration
from perfed.engine.worker import Reply, Task
from perfed.errors import ConfigError, DataError, PerfedError
from perfed.flower.computing import compute, simulated
from perfed.flower.limits import download_limit
from perfed.flower.messages import Job, read_task, write_reply
from perfed.flower.rollcall import Present, read_question, refusal
from perfed.flower.site import Site

PATH = re.compile(r"(?<!\w)~?/\w")
"""where the path of a file begins"""
CODE = re.compile(r"\[E\d+\]")


def answer(kind: str, content: RecordDict, site: str | None, partition: int | None) -> RecordDict:
    """The answer to a message; what is wrong with it is said in the answer."""
    if site is None:
        return _present(content, partition) if kind == "query" else _computed(content, partition)
    return _site_present(content, site) if kind == "query" else _site_computed(content, site)


# A simulated client


def _present(content: RecordDict, partition: int | None) -> RecordDict:
    try:
        read_question(content)
        return Present(partition=_known(partition)).write()
    except PerfedError as error:
        return refusal(str(error))


def _computed(content: RecordDict, partition: int | None) -> RecordDict:
    def limit(task: Task, job: Job) -> int:
        """How large this task's download may be, once it is known that it is for this node."""
        if task.kept is not None or task.client != _known(partition):
            raise ConfigError(
                f"Client {task.client} is asked of the simulated client {partition}.",
                "A node of a deployment is started by perfed site start.",
            )
        return download_limit(simulated(job.words), task)

    try:
        task, job, _ = read_task(content, limit)
        return write_reply(compute(simulated(job.words), task), simulated=True)
    except PerfedError as error:
        return write_reply(_failed(content, str(error)))


# A site


def _site_present(content: RecordDict, site: str) -> RecordDict:
    try:
        words = read_question(content)
        return Site.load(Path(site)).present(configuration.resolve(configuration.parse(words))).write()
    except Exception as error:
        return refusal(_outward(error))


def _site_computed(content: RecordDict, site: str) -> RecordDict:
    def limit(task: Task, job: Job) -> int:
        if task.kept is None:
            raise ConfigError("A private state was sent to a site.", "A site keeps its own.")
        return download_limit(here.worker(job.words, task.client, job.clients, job.classes), task)

    try:
        here = Site.load(Path(site))
        task, job, last = read_task(content, limit)
        reply = here.answer(task, job, last=last)
        return write_reply(_failed(content, _outward(reply.error)) if reply.error else reply)
    except Exception as error:
        return write_reply(_failed(content, _outward(error)))


def _outward(error: Exception | str) -> str:
    """What is said outside of an error at a site; its log has it in full."""
    if isinstance(error, Exception) and not isinstance(error, PerfedError):
        traceback.print_exception(error)
        return f"The site failed with {type(error).__name__}; its own log says more."
    text = str(error)
    print(f"error {text}", file=sys.stderr, flush=True)
    if PATH.search(text) or text.startswith(f"[{DataError.code}]"):
        code = CODE.match(text)
        return f"{code[0] if code else ''} Something is wrong with the site's own files; its own log says what.".strip()
    return text


def _failed(content: RecordDict, reason: str) -> Reply:
    """The reply of whom a message is for, in place of the one that it asks for."""
    task = content.get("task")
    client = task.get("client") if isinstance(task, ConfigRecord) else None
    return Reply(client if type(client) is int else 0, {}, {}, {"error": reason})


def _known(partition: int | None) -> int:
    if partition is None:
        raise ConfigError(
            "This node is neither a site nor a simulated client.",
            "Start it by perfed site start DIR, where DIR was made by perfed site init.",
        )
    return partition
