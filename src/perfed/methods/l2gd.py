"""L2GD: every client has its own model, and now and then takes a step towards the mean of the clients' models.

    min 1/n sum_i f_i(x_i) + lambda/(2n) sum_i ||x_i - m||^2,    m = 1/n sum_i x_i,    by coin flips of probability p:
    tails:  x_i <- x_i - eta/(1 - p) grad f_i(x_i),        heads:  x_i <- x_i - eta lambda/p (x_i - m)

Hanzely, Richtárik: Federated Learning of a Mixture of Global and Local Models. arXiv 2002.05516, 2020. The learning
rate eta is the paper's alpha / n.

Differences from the paper: a round has a tails for every batch, with the heads in between; m is brought up to date once
a round instead of at every change from tails to heads, and is the mean over the round's participants. The paper's
best p is lambda / (L + lambda) for L-smooth losses; it has no default, the values here were chosen on digits and MNIST.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from perfed.core.client import Batch, Client, Update
from perfed.core.fit import Loss, Phase
from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.proximal import parameters
from perfed.core.registry import register
from perfed.core.state import Selection, State, under, within


@register("l2gd")
@dataclass(frozen=True, kw_only=True)
class L2GD(Method):
    """Loopless local gradient descent: local steps and steps towards the mean model, in random order."""

    lam: float = 0.1
    """how much models are drawn to their mean (lambda); lr times it, over p, should stay below 1/2"""
    p: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """probability that a step goes towards the mean instead of down the gradient; 0 is Local"""

    title = "L2GD"
    cites = "Hanzely, Richtárik: Federated Learning of a Mixture of Global and Local Models. arXiv 2002.05516, 2020"
    family = "two models"
    keeps = "its own network"
    sends = "its whole network, for the mean of all"

    def travels(self, part: Part, round: Round, shared: Selection) -> Selection:
        """Everything, if anybody ever steps towards the mean."""
        return shared if self.p else False

    def train(self, client: Client) -> Update:
        """Local steps and steps towards the mean that was received; x_i counts the same as every other in the next."""
        mean = parameters(client.net)
        client.load(self.own(client))
        self.fit(client, [Phase(self.epochs, trains=client.net.layers, loss=self.mixing(client, mean))])
        client.memory.update(under("x", client.weights()))
        return client.update(weight=1.0)

    def mixing(self, client: Client, mean: State) -> Loss:
        """As coins fall, steps towards the mean; then the loss of a local step."""
        coin, eta = client.generator("coin"), self.optimiser(client.round).lr

        def loss(client: Client, batch: Batch) -> Tensor:
            while float(torch.rand((), generator=coin)) < self.p:
                with torch.no_grad():
                    for name, x in client.net.module.named_parameters():
                        x.lerp_(mean[name], min(1.0, eta * self.lam / self.p))
            return self.loss(client, batch) / (1 - self.p)

        return loss

    def own(self, client: Client) -> State:
        """x_i: what the last round left, or the common start."""
        return within("x", client.memory) or client.plan.initial

    def personal(self, client: Client) -> None:
        """Predict with x_i."""
        client.load(self.own(client))

    def join(self, client: Client) -> None:
        """A new client begins at the mean."""
        client.load({name: tensor for name, tensor in client.received.items() if name in client.plan.parts})
        mixing = self.mixing(client, parameters(client.net))
        self.fit(client, [Phase(self.join_epochs, trains=client.net.layers, loss=mixing)], "join")
