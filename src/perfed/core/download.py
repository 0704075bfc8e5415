"""What a client checks before it uses what it received: names, shapes, types and values, as its method declares."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from perfed.core.method import Method
from perfed.core.plan import Plan, Round
from perfed.core.server import Peer, Server
from perfed.core.state import State, check


def verify_download(
    method: Method, plan: Plan, state: Mapping[str, Tensor], peer: Peer, round: Round, clients: int
) -> None:
    """Refuse a download that is not like what the method sends from its first state, apart from what it may offer."""
    wanted, offered = declared(method, plan, peer, round, clients)
    check(state, wanted | {name: tensor for name, tensor in offered.items() if name in state}, "The server")


def declared(method: Method, plan: Plan, peer: Peer, round: Round, clients: int) -> tuple[State, State]:
    """What a download has, and what it may have beside that: tensors of the right names, shapes and types.

    The first state is made here, from the network alone: a client needs no word of the server's to know it.
    """
    server = Server(method.start(plan.net, clients, plan.initial), plan, clients)
    wanted = method.send(server, peer, round)
    offered = method.offers(server, round)
    return wanted, {name: tensor for name, tensor in offered.items() if name not in wanted}
