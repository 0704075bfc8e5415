"""What a node answers: content in, content out, for a simulated client or for the site in a directory."""

from __future__ import annotations

from pathlib import Path

from flwr.app import RecordDict

from perfed import config as configuration
from perfed.engine.worker import Reply, Task
from perfed.errors import ConfigError, PerfedError
from perfed.flower.computing import compute, simulated
from perfed.flower.limits import download_limit
from perfed.flower.messages import Job, read_task, write_reply
from perfed.flower.rollcall import Present, read_question, refusal
from perfed.flower.site import Site


def answer(kind: str, content: RecordDict, site: str | None, partition: int | None) -> RecordDict:
    """The answer to a message; what is wrong with it is said in the answer."""
    return _present(content, site, partition) if kind == "query" else _computed(content, site, partition)


def _present(content: RecordDict, site: str | None, partition: int | None) -> RecordDict:
    try:
        words = read_question(content)
        if site is None:
            return Present(partition=_known(partition)).write()
        return Site.load(Path(site)).present(configuration.resolve(configuration.parse(words))).write()
    except PerfedError as error:
        return refusal(str(error))


def _computed(content: RecordDict, site: str | None, partition: int | None) -> RecordDict:
    here = None if site is None else Site.load(Path(site))
    client = 0

    def limit(task: Task, job: Job) -> int:
        """How large this task's download may be, once it is known that it is for this node."""
        nonlocal client
        client = task.client
        if here is not None:
            if task.kept is None:
                raise ConfigError("A private state was sent to a site.", "A site keeps its own.")
            return download_limit(here.worker(job.words, task.client, job.clients, job.classes), task)
        if task.kept is not None or task.client != _known(partition):
            raise ConfigError(
                f"Client {task.client} is asked of the simulated client {partition}.",
                "A node of a deployment is started by perfed site start.",
            )
        return download_limit(simulated(job.words), task)

    try:
        task, job, last = read_task(content, limit)
        if here is not None:
            return write_reply(here.answer(task, job, last=last))
        return write_reply(compute(simulated(job.words), task), simulated=True)
    except PerfedError as error:
        return write_reply(Reply(client, {}, {}, {"error": str(error)}))


def _known(partition: int | None) -> int:
    if partition is None:
        raise ConfigError(
            "This node is neither a site nor a simulated client.",
            "Start it by perfed site start DIR, where DIR was made by perfed site init.",
        )
    return partition
