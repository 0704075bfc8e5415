"""Vanilla scheduling: FedBABU whose base layers are unfrozen one after another, from the input to the output.

    b_k is trained and sent in the rounds t > t_k,   t_1 <= ... <= t_K;   h = h_0 until the final fine-tuning

Jang, Choi: Personalized Federated Learning via Sequential Layer Expansion in Representation Learning. 2024.

Differences from the paper: its listing unfreezes at t >= t_k with t from 1, its text says "greater than" and its cost
table counts 100 rounds for each of the stages 0, 100, 200 of T = 300; that is t > t_k, built here. A list shorter than
the number of base layers unfreezes them in as many equal groups. Where none is given, the paper's 300 rounds are shared
equally among its three stages, or among the base layers where there are fewer: 0, 150 for two.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from perfed.core.client import Client
from perfed.core.fit import Phase
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection
from perfed.errors import ConfigError, NetError
from perfed.methods.fedbabu import FedBABU
from perfed.nets.net import Net

PUBLISHED = (300, 3)
"""The rounds of the paper's schedule, and the stages that share them equally."""


@register("vanilla")
@dataclass(frozen=True, kw_only=True)
class Vanilla(FedBABU):
    """The layer nearest to the input learns first."""

    unfreeze: tuple[int, ...] | None = None
    """after which rounds the next base layer is unfrozen (t_1, ..., t_K), the first being 0; all 0 is FedBABU; none:
    the paper's 0, 100, 200, or 0, 150 for two base layers"""

    title = "Vanilla scheduling"
    cites = (
        "Jang, Choi: Personalized Federated Learning via Sequential Layer Expansion in Representation Learning. 2024"
    )
    family = "split by layer"
    keeps = "nothing until the final fine-tuning"
    sends = "the base layers that are unfrozen"

    def __post_init__(self) -> None:
        if self.unfreeze is None:
            return
        if not self.unfreeze or self.unfreeze[0] != 0 or any(a > b for a, b in pairwise(self.unfreeze)):
            raise ConfigError(
                f"unfreeze = {list(self.unfreeze)} is no schedule.",
                "Give rounds in ascending order, the first of them 0: else the first rounds would train nothing.",
            )

    def order(self, body: tuple[str, ...]) -> tuple[str, ...]:
        """The base layers in the order in which they are unfrozen."""
        return body

    def schedule(self, layers: int) -> tuple[int, ...]:
        """The given rounds, or those of the paper for a network with so many base layers."""
        if self.unfreeze is not None:
            return self.unfreeze
        rounds, stages = PUBLISHED
        stages = min(stages, max(layers, 1))
        return tuple(rounds * k // stages for k in range(stages))

    def unfrozen(self, net: Net, round: Round) -> tuple[str, ...]:
        """The base layers that are trained in a round."""
        layers, due = self.order(net.body), self.schedule(len(net.body))
        return tuple(layer for k, layer in enumerate(layers) if round.t > due[k * len(due) // len(layers)])

    def build(self, net: Net) -> Net:
        """Refuse a network with fewer base layers than unfreeze rounds."""
        due = self.schedule(len(net.body))
        if len(due) > len(net.body):
            raise NetError(
                f"unfreeze = {list(due)} has {len(due)} rounds, but the network has"
                f" {len(net.body)} base layers: {', '.join(net.body) or 'none'}.",
                f"Give at most {len(net.body)} rounds, or none of them." if net.body else "Take a deeper network.",
            )
        return net

    def travels(self, part: Part, round: Round, shared: Selection) -> Selection:
        """What is frozen is the same everywhere and stays where it is."""
        return shared if part.layer in self.unfrozen(part.net, round) else False

    def phases(self, client: Client) -> Sequence[Phase]:
        """Train the unfrozen layers; all others are outside the optimiser and the backward pass."""
        return [Phase(self.epochs, trains=self.unfrozen(client.net, client.round))]

    def stage(self, round: Round) -> Hashable:
        """How many rounds of the schedule have passed; by default, of those for any number of layers."""
        due = {t_k for layers in range(1, PUBLISHED[1] + 1) for t_k in self.schedule(layers)}
        return sum(round.t > t_k for t_k in due)
