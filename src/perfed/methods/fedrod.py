"""FedROD: a generic head that is trained for all classes alike, and a private one that adds what the client needs.

    b, h <- SGD on CE(h(z) + gamma log n, y),    z = b(x),    n the client's class counts (balanced softmax),
    p_i  <- SGD on CE(h(z) + p_i(z), y) with b, h held fixed,        (b, h) <- sum_i |D_i| / |D| * (b_i, h_i)

Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification. ICLR 2022.

Differences from the paper: the private head is the linear one (the paper also has one made by a hypernetwork). It
begins at zero, so that a client which never took part predicts with the generic head. A class of which a client has
no sample is left out of its balanced softmax, which is the limit of the formula.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.core.client import Batch, Client
from perfed.core.fit import Phase
from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection
from perfed.nets.net import Net


class TwoHeads(nn.Module):
    """A generic head and a private one on the same features; the scores are their sum."""

    def __init__(self, generic: nn.Module) -> None:
        super().__init__()
        self.generic, self.personal = generic, copy.deepcopy(generic)
        for parameter in _last(self.personal).parameters():
            nn.init.zeros_(parameter)

    def forward(self, z: Tensor) -> Tensor:
        """What the client predicts."""
        total: Tensor = self.generic(z) + self.personal(z)
        return total


@register("fedrod")
@dataclass(frozen=True, kw_only=True)
class FedROD(Method):
    """A generic and a personalised prediction from one body."""

    gamma: float = 1.0
    """strength of the balanced softmax; 0 is cross-entropy among the classes that the client holds"""

    title = "FedROD"
    cites = "Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification. ICLR 2022"
    family = "split by layer"
    keeps = "a second head"
    sends = "the body and the generic head"

    def build(self, net: Net) -> Net:
        """Put a second head beside the network's own."""
        return net.with_head(TwoHeads(copy.deepcopy(net.module.get_submodule(net.head_path))))

    def private(self, part: Part, round: Round) -> Selection:
        """Keep the second head."""
        return part.name.startswith(f"{part.net.head_path}.personal.")

    def phases(self, client: Client) -> Sequence[Phase]:
        """Both losses in one pass."""
        prior = self.prior(client.data.class_counts)

        def loss(client: Client, batch: Batch) -> Tensor:
            generic, total = self.predictions(client, batch)
            return F.cross_entropy(generic + prior, batch.y) + F.cross_entropy(total, batch.y)

        return [Phase(self.epochs, trains=client.net.layers, loss=loss)]

    def prior(self, counts: Tensor) -> Tensor:
        """gamma log n_c up to a constant, so that equal counts give exactly 0; -inf for a class without samples."""
        return torch.where(counts > 0, self.gamma * (counts.clamp(min=1) / counts.max()).log(), -torch.inf)

    def predictions(self, client: Client, batch: Batch) -> tuple[Tensor, Tensor]:
        """The generic scores, and the personal ones with gradients for the private head alone."""
        head = client.net.module.get_submodule(client.net.head_path)
        assert isinstance(head, TwoHeads)
        z = client.net.features(batch.x)
        with client.net.computing():
            generic, personal = head.generic(z).float(), head.personal(z.detach()).float()
        return generic, generic.detach() + personal

    def join(self, client: Client) -> None:
        """A new client learns a private head."""

        def loss(client: Client, batch: Batch) -> Tensor:
            return F.cross_entropy(self.predictions(client, batch)[1], batch.y)

        self.fit(client, [Phase(self.join_epochs, trains=(client.net.head,), loss=loss, reuse=False)], "join")


def _last(head: nn.Module) -> nn.Module:
    """The module that gives the scores: the last one with weights of its own."""
    return [module for module in head.modules() if list(module.parameters(recurse=False))][-1]
