"""FedEM: every client's data is a mixture of M distributions; components are shared, mixture weights are the client's.

    E-step    q_i(m) ~ pi_m * exp(-loss(h_m(x_i), y_i)),  sum over m = 1
    M-step    pi_m <- mean of q_i(m) over the client's samples,  theta_m <- SGD on mean_i q_i(m) * loss(h_m(x_i), y_i)
    server    theta_m <- sum_t |D_t| / |D| * theta_m,t
    predict   p(y | x) = sum_m pi_m * softmax(h_m(x))_y

Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of Distributions. NeurIPS 2021.

Differences from the paper: the M components step on the same minibatches (the authors shuffle once per component).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.core.client import Batch, Client
from perfed.core.fit import PREFIX_BATCH, Phase, pieces
from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection
from perfed.nets.net import Net

PI = "pi"


class Mixture(nn.Module):
    """M networks of one shape. The output is the log of their mixed probabilities."""

    pi: Tensor

    def __init__(self, components: Sequence[nn.Module]) -> None:
        super().__init__()
        self.components = nn.ModuleList(components)
        self.register_buffer(PI, torch.full((len(components),), 1 / len(components)))

    def each(self, x: Tensor) -> list[Tensor]:
        """Every component's logits."""
        return [component(x).float() for component in self.components]

    def forward(self, x: Tensor) -> Tensor:
        """log sum_m pi_m softmax(h_m(x))."""
        parts = [logits.log_softmax(dim=1) + log_pi for logits, log_pi in zip(self.each(x), self.pi.log(), strict=True)]
        return torch.stack(parts).logsumexp(dim=0)


@register("fedem")
@dataclass(frozen=True, kw_only=True)
class FedEM(Method):
    """Shared components, private mixture weights."""

    M: Annotated[int, Field(ge=1)] = 3
    """number of components; 1 is FedAvg"""

    title = "FedEM"
    cites = "Marfoq et al.: Federated Multi-Task Learning under a Mixture of Distributions. NeurIPS 2021"
    family = "mixture"
    keeps = "its mixture weights"
    sends = "M networks"

    def build(self, net: Net) -> Net:
        """M copies of the network in one, layer by layer; each further one starts from values of its own."""
        components = [net.module, *(_another(net.module) for _ in range(1, self.M))]
        layers = {
            layer: [f"components.{m}.{n}" for m in range(self.M) for n in _names(net, layer)] for layer in net.layers
        }
        layers[net.head] = [f"components.0.{net.head_path}", *layers[net.head], PI]
        return Net(Mixture(components), layers, net.input_shape, net.num_classes)

    def private(self, part: Part, round: Round) -> Selection:
        """Keep the mixture weights."""
        return part.name == PI

    def phases(self, client: Client) -> Sequence[Phase]:
        """Both EM steps: weigh samples and components as received, then fit every component to its share."""
        share = self.weigh(client)

        def weighted(client: Client, batch: Batch) -> Tensor:
            with client.net.computing():
                every = _mixture(client).each(batch.x)
            losses = [
                (q[batch.index] * F.cross_entropy(z, batch.y, reduction="none")).mean()
                for q, z in zip(share, every, strict=True)
            ]
            return torch.stack(losses).sum()

        return [Phase(self.epochs, trains=client.net.layers, loss=weighted, reuse=False)]

    @torch.no_grad()
    def weigh(self, client: Client, steps: int = 1) -> Tensor:
        """EM steps with the components held fixed: the client's new mixture weights, and q (M, samples)."""
        mixture, data = _mixture(client), client.data.train
        mixture.eval()
        with client.net.computing():
            losses = [
                torch.stack([F.cross_entropy(z, y, reduction="none") for z in mixture.each(x)])
                for x, y in zip(pieces(data.x, PREFIX_BATCH), pieces(data.y, PREFIX_BATCH), strict=True)
            ]
        likelihood = -torch.cat(losses, dim=1)
        for _ in range(steps):
            share = (mixture.pi.log().unsqueeze(1) + likelihood).softmax(dim=0)
            mixture.pi.copy_(share.mean(dim=1))
        return share

    def join(self, client: Client) -> None:
        """A new client learns nothing but its mixture weights."""
        self.weigh(client, max(1, self.join_epochs))


def _mixture(client: Client) -> Mixture:
    assert isinstance(client.net.module, Mixture)
    return client.net.module


def _names(net: Net, layer: str) -> list[str]:
    return sorted(net.names(layer))


@torch.no_grad()
def _another(module: nn.Module) -> nn.Module:
    """The same network with every tensor's first values in another order: a new draw, however they were drawn."""
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        flat = parameter.flatten()
        parameter.copy_(flat[torch.randperm(len(flat))].view_as(parameter))
    return other
