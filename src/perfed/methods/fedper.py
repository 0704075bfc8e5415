"""FedPer: a shared body below a private head, trained together.

    (b_i, h_i) <- SGD on D_i from (b, h_i),    b <- sum_i |D_i| / |D| * b_i

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers. arXiv 1912.00818, 2019.

Differences from the paper: none; `personal_layers` counts the private layers from the output (the paper's K_P).
"""

from dataclasses import dataclass

from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection
from perfed.errors import NetError
from perfed.nets.net import Net


@register("fedper")
@dataclass(frozen=True, kw_only=True)
class FedPer(Method):
    """The last layers stay with the client."""

    personal_layers: int = 1
    """how many layers are private, counted from the output (K_P); 0 is FedAvg"""

    title = "FedPer"
    cites = "Arivazhagan et al.: Federated Learning with Personalization Layers. arXiv 1912.00818, 2019"
    family = "split by layer"
    keeps = "the head"
    sends = "the body"

    def build(self, net: Net) -> Net:
        """Refuse to keep more layers than there are."""
        if self.personal_layers > len(net.layers):
            raise NetError(
                f"personal_layers = {self.personal_layers}, but the network has {len(net.layers)} layers.",
                "Keep at most all of them.",
            )
        return net

    def private(self, part: Part, round: Round) -> Selection:
        """Keep the last layers."""
        layers = part.net.layers
        return part.layer in layers[len(layers) - self.personal_layers :]
