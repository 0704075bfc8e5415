"""FedRep: the private head is fitted first, then the shared body is trained below it.

    h_i <- tau_h epochs on D_i with b frozen,    b_i <- tau_b epochs with h_i frozen,    b <- mean of b_i

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning.
ICML 2021.

Differences from the paper: the mean is weighted by data size, as the other methods' here (the paper's clients are of
equal size).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perfed.core.client import Client
from perfed.core.fit import Phase
from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection


@register("fedrep")
@dataclass(frozen=True, kw_only=True)
class FedRep(Method):
    """Head first, then body."""

    head_epochs: int = 10
    """epochs on the head with the body frozen (tau_h)"""
    epochs: int = 1
    """epochs on the body with the head frozen (tau_b)"""

    title = "FedRep"
    cites = "Collins et al.: Exploiting Shared Representations for Personalized Federated Learning. ICML 2021"
    family = "split by layer"
    keeps = "the head"
    sends = "the body"

    def private(self, part: Part, round: Round) -> Selection:
        """Keep the head."""
        return part.is_head

    def phases(self, client: Client) -> Sequence[Phase]:
        """The head to convergence, then a step of the representation."""
        net = client.net
        return [Phase(self.head_epochs, trains=(net.head,)), Phase(self.epochs, trains=net.body)]
