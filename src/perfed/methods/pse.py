"""PSE: beside the frozen global extractor, whose useful channels excite the local one and whose queries are exchanged.

    loss = CE(p~, y) + CE(p, y) + xi/2 * sum of |W~_k - W_k|^2 over the excited channels k of every convolution
    p~ = fc(softmax(Q (K~ + P)^T / sqrt(wh)) V~),    p = fc(softmax(Q~ (K + P)^T / sqrt(wh)) V)
    k is excited where d_k > 0 and d_k >= mean(d),    d = max(0, sigmoid(alpha) - sigmoid(alpha~))
    alpha_k = mean over the batch of sum over positions of dp^c / dF_k,    c the true class

with ~ on the local model and nothing on the global one, which is the received extractor with the local classifier.
pull = "step" leaves xi's term out and makes the step of equation 4 after every batch: W~_k <- W~_k + xi (W_k - W~_k).
F_k is the k-th map that a convolution gives. The extractor is averaged by data size, the classifier is private.

Personalized Semantics Excitation for Federated Image Classification. Anonymous submission, under review.

Differences from the paper: it writes the pull as a step of xi (equation 4) and as a term of the loss (equation 8). They
differ by the learning rate: under SGD the term is a step of lr * xi, a hundredth of equation 4. The loss is the
default, `pull` chooses. Its lost equation 3 is read as Grad-CAM's weight averaged over the batch, with
the logit for p^c, as p is what the linear layers give. Without the exchange nothing is learnt from p: CE(p, y) belongs
to the exchange (its section 2.3).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.core.client import Batch, Client, Update
from perfed.core.fit import Phase
from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection, under, within
from perfed.errors import NetError
from perfed.nets.attention import CrossAttention
from perfed.nets.net import Net


@register("pse")
@dataclass(frozen=True, kw_only=True)
class PSE(Method):
    """Personalised semantics excitation."""

    xi: Annotated[float, Field(ge=0)] = 0.01
    """how strongly excited filters are drawn to the global ones"""
    excitation: bool = True
    """channel excitation; without it, the paper's variant v1"""
    pull: Literal["loss", "step"] = "loss"
    """excited filters are drawn by a term of the loss (equation 8), or by a step of xi after each batch (equation 4)"""
    exchange: bool = True
    """attention across the two models; without it, the local model's self-attention alone, the paper's variant v2"""
    position: bool = True
    """the attention's learnable position term P; without it, the paper's variant v3"""
    inference: Literal["local", "received"] = "local"
    """the extractor that a client predicts with: its own as it last trained it, or the received one"""

    title = "PSE"
    cites = "Personalized Semantics Excitation for Federated Image Classification. Anonymous submission, under review"
    family = "split by layer"
    keeps = "the classifier (attention and linear layers), and the extractor as it last trained it"
    sends = "the extractor (the convolutions)"

    def build(self, net: Net) -> Net:
        """Give the attention its position term, or take it away."""
        net = net.clone()
        _, attention, _ = divide(net)
        if self.position != (attention.position is not None):
            attention.set_position(self.position)
        return Net(net.module, net.prefixes, net.input_shape, net.num_classes)

    def private(self, part: Part, round: Round) -> Selection:
        """Keep the classifier."""
        return part.is_head

    def phases(self, client: Client) -> Sequence[Phase]:
        """Extractor and classifier together, beside the received extractor as it came."""
        local, attention, linear = divide(client.net)
        received = copy.deepcopy(local).eval().requires_grad_(self.excitation)  # for alpha; the loss never reaches it
        filters = [(ours, theirs.detach()) for ours, theirs in zip(weights(local), weights(received), strict=True)]
        chosen: list[Tensor] = []

        def loss(client: Client, batch: Batch) -> Tensor:
            """The paper's equation 8."""
            with client.net.computing():
                f_local, maps_local = extract(local, batch.x)
                f_global, maps_global = extract(received, batch.x)
                seen = f_global.detach().requires_grad_(self.excitation)
                seen = seen.view_as(seen)  # the loss's gradients end here
                q_local, q_global = (seen, f_local) if self.exchange else (f_local, seen)
                p_local = linear(attention(q_local, f_local)).float()
                p_global = linear(attention(q_global, seen)).float()
            total = F.cross_entropy(p_local, batch.y)
            if self.exchange:
                total = total + F.cross_entropy(p_global, batch.y)
            if self.excitation:
                a_local = alpha(p_local, batch.y, f_local, f_local, maps_local)
                a_global = alpha(p_global, batch.y, seen, f_global, maps_global)
                chosen[:] = map(excited, a_local, a_global)
                if self.pull == "loss":
                    for (ours, theirs), k in zip(filters, chosen, strict=True):
                        total = total + self.xi / 2 * (k * (ours - theirs).square().sum(dim=(1, 2, 3))).sum()
            return total

        @torch.no_grad()
        def step(client: Client) -> None:
            """The paper's equation 4."""
            for (ours, theirs), k in zip(filters, chosen, strict=True):
                ours.lerp_(theirs, self.xi * k.to(ours.dtype).view(-1, 1, 1, 1))

        after = step if self.excitation and self.pull == "step" else None
        return [Phase(self.epochs, trains=client.net.layers, loss=loss, reuse=False, after_step=after)]

    def train(self, client: Client) -> Update:
        """A round; the client keeps a copy of the extractor that it sends."""
        update = super().train(client)
        if self.inference == "local":
            client.memory.update(under("own", update.state))
        return update

    def personal(self, client: Client) -> None:
        """Predict by self-attention with the local model; a client that never took part has the received extractor."""
        client.load(within("own", client.memory))


def divide(net: Net) -> tuple[nn.Sequential, CrossAttention, nn.Module]:
    """The extractor, the classifier's attention block, and its linear layers with the pooling before them."""
    if isinstance(net.module, nn.Sequential):
        match list(net.module):
            case [*extractor, nn.Sequential() as head]:
                match list(head):
                    case [CrossAttention() as attention, *linear]:
                        return nn.Sequential(*extractor), attention, nn.Sequential(*linear)
    raise NetError("PSE needs convolutions in a row and a head that begins with attention.", "Take net = 'conv3attn'.")


def weights(extractor: nn.Sequential) -> list[Tensor]:
    """The filters of every convolution."""
    return [layer.weight for layer in extractor if isinstance(layer, nn.Conv2d)]


def extract(extractor: nn.Sequential, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The features, and the maps that the convolutions gave on the way."""
    maps = []
    for layer in extractor:
        x = layer(x)
        if isinstance(layer, nn.Conv2d):
            maps.append(x)
    return x, maps


def alpha(p: Tensor, y: Tensor, seen: Tensor, features: Tensor, maps: Sequence[Tensor]) -> list[Tensor]:
    """What each channel contributes to the true class: Grad-CAM's weights, the mean over the batch (equation 3).

    `seen` is the extractor's output as the classifier saw it.
    """
    true_class = p.gather(1, y.unsqueeze(1)).mean()
    arriving = torch.autograd.grad(true_class, seen, retain_graph=True)
    found = torch.autograd.grad(features, maps, arriving, retain_graph=True)
    return [g.float().sum(dim=(0, 2, 3)) for g in found]  # sigmoid(alpha) is near 1/2: few bits would make all equal


def excited(a_local: Tensor, a_global: Tensor) -> Tensor:
    """The channels whose lead in the global model is positive and not below the layer's mean."""
    delta = (a_global.sigmoid() - a_local.sigmoid()).clamp(min=0)
    return (delta > 0) & (delta >= delta.mean())
