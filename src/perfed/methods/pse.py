"""PSE: beside the frozen global extractor, whose useful channels excite the local one and whose queries are exchanged.

    loss = CE(p~, y) + CE(p, y) + xi/2 * sum of |W~_k - W_k|^2 over the excited channels k of every convolution
    p~ = fc(softmax(Q (K~ + P)^T / sqrt(wh)) V~),    p = fc(softmax(Q~ (K + P)^T / sqrt(wh)) V)
    k is excited where d_k > 0 and d_k >= mean(d),    d = max(0, sigmoid(alpha) - sigmoid(alpha~))
    alpha_k = mean over the batch of sum over positions of dp^c / dF_k,    c the true class

with ~ on the local model and nothing on the global one, which is the received extractor with the local classifier.
F_k is the k-th map that a convolution gives. The extractor is averaged by data size, the classifier is private.

Personalized Semantics Excitation for Federated Image Classification. Anonymous submission, under review.

Differences from the paper: none known. Its lost equation 3 is read as Grad-CAM's weight averaged over the batch, with
the logit for p^c, as p is what the linear layers give. Without the exchange nothing is learnt from p: CE(p, y) belongs
to the exchange (its section 2.3).
"""

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
from perfed.errors import NetError
from perfed.nets.attention import CrossAttention
from perfed.nets.net import Net


@register("pse")
@dataclass(frozen=True, kw_only=True)
class PSE(Method):
    """Personalised semantics excitation."""

    xi: float = 0.01
    """how strongly excited filters are drawn to the global ones"""
    excitation: bool = True
    """channel excitation; without it, the paper's variant v1"""
    exchange: bool = True
    """attention across the two models; without it, the local model's self-attention alone, the paper's variant v2"""
    position: bool = True
    """the attention's learnable position term P; without it, the paper's variant v3"""

    title = "PSE"
    cites = "Personalized Semantics Excitation for Federated Image Classification. Anonymous submission, under review"
    family = "split by layer"
    keeps = "the classifier: attention and linear layers"
    sends = "the extractor: the convolutions"

    def build(self, net: Net) -> Net:
        """Give the attention its position term, or take it away."""
        net = net.clone()
        attention, _ = classifier(net)
        if self.position != (attention.position is not None):
            attention.set_position(self.position)
        convolutions(net)
        return Net(net.module, net.prefixes, net.input_shape, net.num_classes)

    def private(self, part: Part, round: Round) -> Selection:
        """Keep the classifier."""
        return part.is_head

    def phases(self, client: Client) -> Sequence[Phase]:
        """Extractor and classifier together, beside the received extractor as it came."""
        local, received = client.net, client.net.clone()
        received.module.eval().requires_grad_(False)
        attention, linear = classifier(local)
        ours, theirs = convolutions(local), convolutions(received)
        for bias in biases(theirs):
            bias.requires_grad_(self.excitation)  # alpha is a derivative; no optimiser has it

        def loss(client: Client, batch: Batch) -> Tensor:
            """The paper's equation 8."""
            f_local, f_global = local.features(batch.x), received.features(batch.x)
            q_local, q_global = (f_global, f_local) if self.exchange else (f_local, f_global)
            p_local, p_global = linear(attention(q_local, f_local)), linear(attention(q_global, f_global))
            total = F.cross_entropy(p_local, batch.y)
            if self.exchange:
                total = total + F.cross_entropy(p_global, batch.y)
            if self.excitation:
                scores = zip(alpha(p_local, batch.y, ours), alpha(p_global, batch.y, theirs), strict=True)
                for (a_local, a_global), w_local, w_global in zip(scores, ours, theirs, strict=True):
                    distances = (w_local.weight - w_global.weight).square().sum(dim=(1, 2, 3))
                    total = total + self.xi / 2 * (distances * excited(a_local, a_global)).sum()
            return total

        return [Phase(self.epochs, trains=local.layers, loss=loss, reuse=False)]


def classifier(net: Net) -> tuple[CrossAttention, nn.Module]:
    """The head's attention block, and what follows it."""
    head = net.module.get_submodule(net.head_path)
    if not isinstance(head, nn.Sequential) or not isinstance(head[0], CrossAttention):
        raise NetError("PSE needs a network whose head begins with an attention block.", "Take net = 'conv3attn'.")
    return head[0], head[1:]


def convolutions(net: Net) -> list[nn.Conv2d]:
    """The extractor's convolutions."""
    head = set(net.module.get_submodule(net.head_path).modules())
    found = [m for m in net.module.modules() if isinstance(m, nn.Conv2d) and m not in head]
    if not found or len(biases(found)) < len(found):
        raise NetError("PSE needs an extractor of convolutions that have a bias.", "Take net = 'conv3attn'.")
    return found


def biases(layers: Sequence[nn.Conv2d]) -> list[Tensor]:
    """Their biases."""
    return [layer.bias for layer in layers if layer.bias is not None]


def alpha(p: Tensor, y: Tensor, layers: Sequence[nn.Conv2d]) -> tuple[Tensor, ...]:
    """What each channel of these convolutions contributes to the true class (equation 3).

    A bias is added at every position of its map, so the derivative with respect to it is the sum over positions.
    """
    true_class = p.gather(1, y.unsqueeze(1)).mean()
    return torch.autograd.grad(true_class, biases(layers), retain_graph=True)


def excited(a_local: Tensor, a_global: Tensor) -> Tensor:
    """Channels that do more for the true class in the global model than in the local one, by the layer's mean or more."""
    delta = (a_global.sigmoid() - a_local.sigmoid()).clamp(min=0)
    return (delta > 0) & (delta >= delta.mean())
