"""CD2-pFed: in every layer some channels are private and the rest are shared, and the two teach each other.

    p_t = p t / T,    w_i: the last floor(p_t C) channels of every hidden layer,    w_0: the rest
    L = CE(y, label) + lambda / 2 [KL(y^L || y^G) + KL(y^G || y^L)],    y, y^L, y^G by (w_i, w_0), w_i, w_0
    w_i <- beta_t w_i' + (1 - beta_t) w_i after each epoch,    w_0 <- sum_i |D_i| / |D| * w_0 of client i
    beta_t = beta exp(-5 (1 - t / t_0)^2) up to round t_0, then beta

Shen, Zhou, Yu: CD2-pFed: Cyclic Distillation-guided Channel Decoupling for Model Personalization in Federated Learning.
CVPR 2022.

Differences from the paper: none known. Where it is silent: the layer that makes the logits is divided by its input
channels and its bias is shared; both sub-networks see the whole input and add that bias; the temporal average is of
weights, not of BatchNorm statistics; beta = 1 leaves it out from the first round, without ramp-up; there is no
distillation while any hidden layer has no private channel, or no shared one (LeNet-5 of p = 0.5: rounds 1 to 16 of 50).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from perfed.core.client import Batch, Client
from perfed.core.fit import Loss, Phase
from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection
from perfed.nets.channels import channel_map
from perfed.nets.net import Net
from perfed.nets.subnets import Subnets

Fraction = Annotated[float, Field(ge=0, le=1)]


@register("cd2pfed")
@dataclass(frozen=True, kw_only=True)
class CD2pFed(Method):
    """Channel decoupling, cyclic distillation, temporal average."""

    p: Fraction = 0.5
    """the final fraction of private channels in every layer; 0 is FedAvg"""
    lam: Annotated[float, Field(ge=0)] = 1.0
    """weight of the cyclic distillation (lambda)"""
    beta: Fraction = 0.5
    """share of the new private weights in the temporal average; 1 is no average"""
    t0: Fraction = 0.1
    """fraction of the rounds over which beta ramps up"""
    average_every: Literal["epoch", "batch"] = "epoch"
    """when the private weights are averaged"""
    linear_increment: bool = True
    """LI: p grows linearly over the rounds; else it is p from the start"""
    temporal_average: bool = True
    """TA: private weights are averaged with those before"""
    cyclic_distillation: bool = True
    """CD: private and shared channels learn from each other's predictions"""

    title = "CD2-pFed"
    cites = "Shen, Zhou, Yu: CD2-pFed: Cyclic Distillation-guided Channel Decoupling. CVPR 2022"
    family = "split by channel"
    keeps = "the last channels of every layer, more of them from round to round"
    sends = "the other channels"

    def build(self, net: Net) -> Net:
        """The network as it is, if its channels can be split."""
        channel_map(net)
        return net

    def ratio(self, round: Round) -> float:
        """p_t, equation 3."""
        return self.p * round.t / round.T if self.linear_increment else self.p

    def smoothing(self, round: Round) -> float:
        """beta_t, equation 7."""
        t0 = self.t0 * round.T
        return self.beta * exp(-5 * (1 - round.t / t0) ** 2) if round.t <= t0 else self.beta

    def private(self, part: Part, round: Round) -> Selection:
        """Keep the last floor(p_t C) channels."""
        return channel_map(part.net).mask(part.name, part.tensor, self.ratio(round))

    def stage(self, round: Round) -> Hashable:
        """The sub-networks' size."""
        return self.ratio(round) if self.cyclic_distillation else 0

    def phases(self, client: Client) -> Sequence[Phase]:
        """All layers at once, by equation 5, with equation 6 in between."""
        average = self._averaging(client) if self.temporal_average and self.beta != 1 else None
        return [
            Phase(
                self.epochs,
                trains=client.net.layers,
                loss=self._distilling(client),
                after_epoch=average if self.average_every == "epoch" else None,
                after_step=average if self.average_every == "batch" else None,
            )
        ]

    def _distilling(self, client: Client) -> Loss:
        """The loss of equation 5; cross entropy alone while one of the sub-networks is empty."""
        p = self.ratio(client.round)
        if not (self.cyclic_distillation and channel_map(client.net).divides(p)):
            return self.loss
        predictions = Subnets(client.net, p)

        def loss(client: Client, batch: Batch) -> Tensor:
            y, y_L, y_G = predictions(batch.x)
            return F.cross_entropy(y, batch.y) + self.lam * cyclic(y_L, y_G)

        return loss

    def _averaging(self, client: Client) -> Callable[[Client], None]:
        """The temporal average of the private weights, equation 6."""
        p, beta = self.ratio(client.round), self.smoothing(client.round)
        channels = channel_map(client.net)
        found = [channels.private(name, w.detach(), p) for name, w in client.net.module.named_parameters()]
        private = [w for w in found if w is not None]
        before = [w.clone() for w in private]

        @torch.no_grad()
        def average(client: Client) -> None:
            for w, old in zip(private, before, strict=True):
                old.lerp_(w, beta)
                w.copy_(old)

        return average


def cyclic(y_L: Tensor, y_G: Tensor) -> Tensor:
    """The cyclic distillation, equation 4: 1/2 [KL(L || G) + KL(G || L)] = 1/2 sum (L - G) (log L - log G)."""
    log_L, log_G = y_L.log_softmax(dim=1), y_G.log_softmax(dim=1)
    return ((log_L.exp() - log_G.exp()) * (log_L - log_G)).sum(dim=1).mean() / 2
