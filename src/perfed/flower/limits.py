"""How large a message can be: what the method declares, and what numpy's format adds. More is refused undecoded."""

from __future__ import annotations

from perfed.core.download import declared
from perfed.core.plan import Round
from perfed.core.server import Peer, Server
from perfed.core.state import State
from perfed.engine.worker import Task, Worker
from perfed.flower.payload import HEADER, LARGEST

SCORES = 64
"""numbers beside the matrices of counts in a message with scores: losses, and the method's own measures"""


def download_limit(worker: Worker, task: Task) -> int:
    """The bytes of arrays that a client may be sent with this task."""
    peer = Peer(task.client, task.since, learns=task.op == "train" or not task.options.get("seen", True))
    round, clients = Round(task.t, worker.rounds), worker.federation.num_clients
    wanted, offered = declared(worker.method, worker.plan, peer, round, clients)
    return _bytes(wanted) + _bytes(offered)


def upload_limit(worker: Worker, task: Task) -> int:
    """The bytes of arrays that a client may answer with, apart from a simulated client's private state."""
    if task.op == "evaluate":
        classes = worker.federation.num_classes
        return 4 * (8 * classes**2 + HEADER) + SCORES * (8 + HEADER)
    if task.op != "train":
        return LARGEST  # votes of simulated clients on data that all of them have
    method, plan, clients = worker.method, worker.plan, worker.federation.num_clients
    server = Server(method.start(plan.net, clients, plan.initial), plan, clients)
    return _bytes(method.schema(server, Round(task.t, worker.rounds)))


def _bytes(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() + HEADER for tensor in state.values())
