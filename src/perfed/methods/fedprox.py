"""FedProx: FedAvg whose clients are held near the model that they received.

    w_i <- SGD on f_i(w_i) + mu/2 ||w_i - w||^2 from w,    w <- sum_i |D_i| / |D| * w_i

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020.

Differences from the paper: every client runs all its epochs (the paper lets slow clients stop early), and clients are
drawn uniformly and averaged by data size (the paper draws them by data size and averages uniformly).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from perfed.core.client import Batch, Client
from perfed.core.fit import Phase
from perfed.core.method import Method
from perfed.core.proximal import parameters, proximal
from perfed.core.registry import register


@register("fedprox")
@dataclass(frozen=True, kw_only=True)
class FedProx(Method):
    """A proximal term towards the received model."""

    mu: float = 0.01
    """weight of the proximal term (the authors choose among 0.001, 0.01, 0.1 and 1); 0 is FedAvg"""

    title = "FedProx"
    cites = "Li et al.: Federated Optimization in Heterogeneous Networks. MLSys 2020"

    def phases(self, client: Client) -> Sequence[Phase]:
        """FedAvg's round with the pull towards where it started."""
        received = parameters(client.net)

        def loss(client: Client, batch: Batch) -> Tensor:
            return self.loss(client, batch) + self.mu * proximal(client.net, received)

        return [Phase(self.epochs, trains=client.net.layers, loss=loss)]
