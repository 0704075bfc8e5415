"""APFL: the personal model is a mixture of a private and the global one, and the share of each is learnt.

    w_i <- w_i - eta grad f_i(w_i),    v_i <- v_i - eta grad_v f_i(m_i),    m_i = alpha_i v_i + (1 - alpha_i) w_i,
    alpha_i <- alpha_i - eta <v_i - w_i, grad f_i(m_i)> once a round, within [0, 1],    w: as FedAvg

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. arXiv 2003.13461, 2020.

Differences from the paper: the mean is weighted by data size. A client predicts with its v_i mixed with the newest
global w, so alpha = 0 is FedAvg; BatchNorm statistics are mixed like weights.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from perfed.core.client import Batch, Client, Update
from perfed.core.fit import Phase
from perfed.core.method import Method
from perfed.core.proximal import parameters
from perfed.core.registry import register
from perfed.core.state import State, under, within
from perfed.core.twin import twin

ALPHA = "apfl/alpha"


@register("apfl")
@dataclass(frozen=True, kw_only=True)
class APFL(Method):
    """An adaptive mixture of a private and the global model."""

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """the private model's share in the mixture at the start; fixed, 1 is Local and 0 is FedAvg"""
    adaptive: bool = True
    """whether each client learns its own alpha"""

    title = "APFL"
    cites = "Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. arXiv 2003.13461, 2020"
    family = "two models"
    keeps = "a private copy of the whole network and its share alpha"
    sends = "the whole global network"

    def train(self, client: Client) -> Update:
        """Every batch makes one step of v_i and one of w_i, both from where the last batch left them."""
        mixed, alpha, learns = twin(client, self.own(client)), self.share(client), self.adaptive
        v = {name: nn.Parameter(tensor) for name, tensor in parameters(mixed.net).items()}
        optimiser = self.optimiser(client.round)
        sgd = optimiser.over(list(v.values()))

        def both(client: Client, batch: Batch) -> Tensor:
            """Step v_i, and with the round's first batch alpha_i, on the mixture's loss; return the loss of w_i."""
            nonlocal alpha, learns
            w = parameters(client.net)
            mixed.load({name: alpha * v[name] + (1 - alpha) * w[name] for name in v})
            mixed.net.module.zero_grad()
            self.loss(mixed, batch).backward()  # type: ignore[no-untyped-call]
            g = {name: m.grad for name, m in mixed.net.module.named_parameters() if m.grad is not None}
            slope = torch.stack([((v[name] - w[name]) * g[name]).sum() for name in g]).sum().detach()
            for name, gradient in g.items():
                v[name].grad = alpha * gradient
            sgd.step()
            if learns:
                alpha, learns = (alpha - optimiser.lr * slope).clamp(0, 1), False
            client.meter.count(len(batch.y), sum(tensor.numel() for tensor in v.values()))
            return self.loss(client, batch)

        self.fit(client, [Phase(self.epochs, trains=client.net.layers, loss=both)])
        mixed.load(v)
        client.memory.update(under("v", mixed.weights()) | {ALPHA: alpha})
        return client.update()

    def own(self, client: Client) -> State:
        """v_i: what the last round left, or the common start."""
        return within("v", client.memory) or client.plan.initial

    def share(self, client: Client) -> Tensor:
        """alpha_i."""
        return client.memory.get(ALPHA, torch.tensor(self.alpha))

    def personal(self, client: Client) -> None:
        """Predict with alpha_i v_i + (1 - alpha_i) w."""
        v, alpha = self.own(client), self.share(client)
        w = client.weights()
        client.load({n: alpha * v[n] + (1 - alpha) * w[n] for n in w if w[n].is_floating_point()})

    def join(self, client: Client) -> None:
        """A new client trains the global model on its own data."""
        client.load({name: tensor for name, tensor in client.received.items() if name in client.plan.parts})
        super().join(client)
