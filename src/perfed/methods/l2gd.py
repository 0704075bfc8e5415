"""L2GD: every client has its own model, and now and then takes a step towards the mean of all models.

    min 1/n sum_i f_i(x_i) + lambda/(2n) sum_i ||x_i - m||^2,    m = 1/n sum_i x_i,    by coin flips of probability p:
    tails:  x_i <- x_i - eta/(1 - p) grad f_i(x_i),        heads:  x_i <- x_i - eta lambda/p (x_i - m)

Hanzely, Richtárik: Federated Learning of a Mixture of Global and Local Models. arXiv 2002.05516, 2020. The learning
rate eta is the paper's alpha / n.

Differences from the paper: a round is as many local steps as there are batches, with heads in between; m is brought up
to date once a round instead of at every change from tails to heads. Only participants move; m is always the mean of
all clients' models, as the server adds what each one moved by. The paper gives the best p as lambda / (L + lambda) for
L-smooth losses and no other default.
"""

from collections.abc import Sequence
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
from perfed.core.server import Peer, Server
from perfed.core.state import Selection, State, under, within


@register("l2gd")
@dataclass(frozen=True, kw_only=True)
class L2GD(Method):
    """Loopless local gradient descent: local steps and steps towards the mean model, in random order."""

    lam: float = 1.0
    """how much models are drawn to their mean (lambda); 0 is Local with eta / (1 - p)"""
    p: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """probability that a step goes towards the mean instead of down the gradient; 0 is Local"""

    title = "L2GD"
    cites = "Hanzely, Richtárik: Federated Learning of a Mixture of Global and Local Models. arXiv 2002.05516, 2020"
    family = "two models"
    keeps = "the whole network"
    sends = "how far it moved; receives the mean of all networks"

    def private(self, part: Part, round: Round) -> Selection:
        """Keep x_i."""
        return True

    def send(self, server: Server, peer: Peer, round: Round) -> State:
        """The mean of all clients' models, if anybody steps towards it."""
        return under("mean", self.weights(server)) if self.p else {}

    def schema(self, server: Server, round: Round) -> State:
        """The change of x_i."""
        return under("moved", self.weights(server)) if self.p else {}

    def weights(self, server: Server) -> State:
        """The mean model as the server has it."""
        return {name: server.state[name] for name, part in server.plan.parts.items() if not part.is_buffer}

    def mixing(self, client: Client) -> Loss:
        """Some steps towards the mean, as coins fall, then the loss of a local step."""
        mean = within("mean", client.received) or client.plan.initial
        coin, rate = client.generator("coin"), min(1.0, self.optimiser(client.round).lr * self.lam / (self.p or 1.0))

        def loss(client: Client, batch: Batch) -> Tensor:
            while float(torch.rand((), generator=coin)) < self.p:
                with torch.no_grad():
                    for name, x in client.net.module.named_parameters():
                        x.lerp_(mean[name], rate)
            return self.loss(client, batch) / (1 - self.p)

        return loss

    def phases(self, client: Client) -> Sequence[Phase]:
        """As many local steps as there are batches."""
        return [Phase(self.epochs, trains=client.net.layers, loss=self.mixing(client))]

    def train(self, client: Client) -> Update:
        """Local steps and steps towards the mean; report by how much x_i moved."""
        before = parameters(client.net)
        self.fit(client, self.phases(client))
        after = client.weights()
        return client.update(under("moved", {n: after[n] - x for n, x in before.items()}) if self.p else {})

    def combine(self, server: Server, updates: Sequence[Update], round: Round) -> State:
        """Keep the mean the mean of all clients' models."""
        state = dict(server.state)
        for name in self.weights(server) if self.p else ():
            moved = torch.stack([update.state[f"moved/{name}"] for update in updates])
            state[name] = state[name] + moved.sum(dim=0) / server.participants
        return state

    def join(self, client: Client) -> None:
        """A new client begins at the mean model."""
        client.load(within("mean", client.received))
        self.fit(client, [Phase(self.join_epochs, trains=client.net.layers, loss=self.mixing(client))], "join")
