"""Simulated clients as Flower nodes: client i is the node of partition i."""

from __future__ import annotations

from flwr.serverapp import Grid

from perfed.flower.messages import Job
from perfed.flower.nodes import Nodes, StoppedError
from perfed.flower.rollcall import Roll
from perfed.prepare import Prepared

SECONDS = 300.0
"""how long nodes have to appear"""
FOREVER = 86400.0
"""how long clients have to answer: simulated ones do not die, they compute"""


def nodes(grid: Grid, prepared: Prepared, roll: Roll) -> Nodes:
    """The executor of a run on simulated nodes, once all of them are there."""
    address, clients = Partitions(roll), prepared.federation.num_clients
    if not roll.call(lambda: len(address.found()) >= clients, SECONDS):
        raise StoppedError(
            f"{len(address.found())} of {clients} simulated nodes came.", f"Give Flower num-supernodes = {clients}."
        )
    job, classes = Job(prepared.config.toml()), prepared.federation.num_classes
    return Nodes(grid, job, address, classes, deadline=FOREVER, stop=roll.stop)


class Partitions:
    """Nodes by the partition they are."""

    def __init__(self, roll: Roll) -> None:
        self._roll = roll
        self._node: dict[int, int] = {}

    def found(self) -> dict[int, int]:
        """Every client's node."""
        if len(self._node) < len(self._roll.nodes):
            self._node = {p.partition: node for node, p in self._roll.nodes.items() if p.partition is not None}
        return self._node

    def node(self, client: int) -> int | None:
        """The node of a client."""
        return self.found().get(client)

    def refresh(self) -> dict[int, str]:
        """Simulated nodes neither come nor go."""
        return {}
