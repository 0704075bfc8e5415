"""What a client checks before it uses what it received: names, shapes, types and values, as its method declares."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from perfed.core.method import Method
from perfed.core.plan import Plan, Round
from perfed.core.server import Peer, Server
from perfed.core.state import check


def verify_download(
    method: Method, plan: Plan, state: Mapping[str, Tensor], peer: Peer, round: Round, clients: int
) -> None:
    """Refuse a download that is not like what the method sends from its first state, apart from what it may offer.

    The first state is made here, from the network alone: a client needs no word of the server's to know it.
    """
    server = Server(method.start(plan.net, clients, plan.initial), plan, clients)
    declared = method.send(server, peer, round)
    offered = method.offers(server, round)
    present = {name: tensor for name, tensor in offered.items() if name in state and name not in declared}
    check(state, declared | present, "The server")
