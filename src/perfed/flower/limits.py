"""What a message can be: what the method declares, and what numpy's format adds. More is refused undecoded."""

from __future__ import annotations

from collections.abc import Sequence

from perfed.core.download import declared
from perfed.core.plan import Round
from perfed.core.server import Peer, Server
from perfed.core.state import State
from perfed.engine.worker import Task, Worker
from perfed.errors import UpdateError
from perfed.flower.messages import Wanted
from perfed.flower.payload import HEADER, LARGEST


def download_limit(worker: Worker, task: Task) -> int:
    """The bytes of arrays that a client may be sent with this task."""
    if not 0 <= task.since <= task.t <= worker.rounds:
        raise UpdateError(f"The server asks for round {task.t} of {worker.rounds}, after round {task.since}.")
    peer = Peer(task.client, task.since, learns=task.op == "train" or not task.options.get("seen", True))
    round, clients = Round(task.t, worker.rounds), worker.federation.num_clients
    wanted, offered = declared(worker.method, worker.plan, peer, round, clients)
    return _bytes(wanted) + _bytes(offered)


def upload_limit(worker: Worker, task: Task) -> int:
    """The bytes of arrays that a client may answer with, apart from a simulated client's private state."""
    if task.op == "evaluate":
        classes, sums = worker.federation.num_classes, 1 + len(worker.method.measured(worker.net))
        return 4 * (8 * classes**2 + HEADER + sums * (8 + HEADER))  # of two parts, before and after adaptation
    if task.op != "train":
        return LARGEST  # votes of simulated clients on data that all of them have
    method, plan, clients = worker.method, worker.plan, worker.federation.num_clients
    server = Server(method.start(plan.net, clients, plan.initial), plan, clients)
    return _bytes(method.schema(server, Round(task.t, worker.rounds)))


def wanted(worker: Worker, tests: Sequence[int] | None, task: Task) -> Wanted:
    """What a good answer to a task is; `tests` are the clients' test samples where only they have the data."""
    method, federation = worker.method, worker.federation
    samples = {}
    if tests is not None:
        samples["test"] = tests[task.client]
    elif task.op == "evaluate":
        samples = {part: len(federation.rows(task.client, part)) for part in ("test", "val")}
    elif task.op == "new":
        samples["new"] = len(federation.pooled_test())
    elif task.op == "external" and federation.external is not None:
        samples["external"] = len(federation.external)
    size, measures = upload_limit(worker, task), method.measured(worker.net)
    return Wanted(federation.num_classes, size, measures, method.scalars, samples)


def _bytes(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() + HEADER for tensor in state.values())
