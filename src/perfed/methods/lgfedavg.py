"""LG-FedAvg: a private body below a shared head, trained together.

    (b_i, h_i) <- SGD on D_i from (b_i, h),    h <- sum_i |D_i| / |D| * h_i

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning with
Local and Global Representations. arXiv 2001.01523, 2020.

Differences from the paper: the federation starts from common initial weights; the paper's image experiments start
from a FedAvg model. `global_layers` counts the shared layers from the output.
"""

from dataclasses import dataclass

from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection
from perfed.errors import NetError
from perfed.nets.net import Net


@register("lgfedavg")
@dataclass(frozen=True, kw_only=True)
class LGFedAvg(Method):
    """The first layers stay with the client, the top of the network is global."""

    global_layers: int = 1
    """how many layers are shared, counted from the output"""

    title = "LG-FedAvg"
    cites = "Liang et al.: Think Locally, Act Globally. arXiv 2001.01523, 2020"
    family = "split by layer"
    keeps = "the body"
    sends = "the head"

    def build(self, net: Net) -> Net:
        """Refuse to share more layers than there are."""
        if self.global_layers > len(net.layers):
            raise NetError(
                f"global_layers = {self.global_layers}, but the network has {len(net.layers)} layers.",
                "Share at most all of them.",
            )
        return net

    def private(self, part: Part, round: Round) -> Selection:
        """Keep all but the last layers."""
        layers = part.net.layers
        return part.layer in layers[: len(layers) - self.global_layers]
