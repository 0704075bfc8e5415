"""pFedMe: the personal model solves a proximal problem around the client's copy of the global one.

    theta_i <- K gradient steps on f_i(theta) + lambda/2 ||theta - w_i||^2 for each batch,
    w_i     <- w_i - eta lambda (w_i - theta_i),        w <- (1 - beta) w + beta sum_i |D_i| / |D| * w_i

Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020.

Differences from the paper: the mean is weighted by data size, as in the authors' code; R, the number of local rounds,
is the number of batches in `epochs`. Within a round theta_i goes on from its last value, as in the authors' code. Both
steps are plain gradient steps: weight decay belongs to f_i, momentum is for fine-tuning alone. BatchNorm statistics
are theta's, as w_i itself sees no data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from perfed.core.client import Batch, Client, Update
from perfed.core.combine import stride
from perfed.core.fit import Optimiser, Phase, Slopes, fit, gradients_of
from perfed.core.method import Method
from perfed.core.plan import Round
from perfed.core.proximal import parameters, proximal
from perfed.core.registry import register
from perfed.core.server import Server
from perfed.core.state import State, under, within
from perfed.core.twin import twin


@register("pfedme")
@dataclass(frozen=True, kw_only=True)
class PFedMe(Method):
    """Moreau envelopes."""

    lam: float = 15.0
    """pull of the personal model towards w_i (lambda); the learning rate times it should stay below 1"""
    K: Annotated[int, Field(ge=1)] = 5
    """gradient steps on each batch's proximal problem"""
    personal_lr: float = 0.09
    """learning rate of those steps; times (lambda + f_i's curvature) it must stay below 2: less for convolutions"""
    beta: float = 1.0
    """the server's step towards the mean of the clients' w_i"""

    title = "pFedMe"
    cites = "Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020"
    family = "two models"
    keeps = "the personal network"
    sends = "the whole global network"

    def train(self, client: Client) -> Update:
        """A personal solution for each batch, and w_i a step towards it."""
        mine, plain = twin(client, client.weights()), self.plain(client.round)
        slopes = gradients_of(mine, self.loss, list(mine.net.module.parameters()))

        def envelope(batch: Batch) -> Sequence[Tensor]:
            """The Moreau envelope's gradient in w, lambda (w - theta)."""
            self.solve(mine, parameters(client.net), batch, slopes)
            with torch.no_grad():
                apart = torch._foreach_sub([*client.net.module.parameters()], [*mine.net.module.parameters()])
                return torch._foreach_mul(apart, self.lam)

        phase = Phase(self.epochs, client.net.layers, slopes=envelope)
        fit(client, [phase], self.loss, replace(plain, weight_decay=0.0))
        theta = mine.weights()
        client.load({name: theta[name] for name, part in client.plan.parts.items() if part.is_buffer})
        client.memory.update(under("theta", theta))
        return client.update()

    @torch.no_grad()
    def solve(self, mine: Client, w: State, batch: Batch, slopes: Slopes | None = None) -> None:
        """theta <- K steps towards argmin f_i(theta; batch) + lambda/2 ||theta - w||^2."""
        theta: list[Tensor] = list(mine.net.module.parameters())
        slopes = slopes or gradients_of(mine, self.loss, theta)
        sgd = self.plain(mine.round).over(theta, self.personal_lr * self.lr_decay ** (mine.round.t - 1))
        anchors = [w[name] for name, _ in mine.net.module.named_parameters()]
        for _ in range(self.K):
            pull = torch._foreach_mul(torch._foreach_sub(theta, anchors), self.lam)
            sgd.move(theta, torch._foreach_add([*slopes(batch)], pull))
        mine.meter.count(len(batch.y), sum(t.numel() for t in theta), self.K - 1)  # the step of w_i counts as one

    def plain(self, round: Round) -> Optimiser:
        """Gradient steps without momentum."""
        return replace(self.optimiser(round), momentum=0.0, nesterov=False)

    def combine(self, server: Server, updates: Sequence[Update], round: Round) -> State:
        """A step of beta towards the mean."""
        weights = [name for name, part in server.plan.parts.items() if not part.is_buffer]
        return stride(server.state, super().combine(server, updates, round), self.beta, weights)

    def personal(self, client: Client) -> None:
        """Predict with theta_i; a client that never took part has the global model."""
        client.load(within("theta", client.memory))

    def join(self, client: Client) -> None:
        """A new client solves its proximal problem around the global model."""
        w = parameters(client.net)

        def loss(client: Client, batch: Batch) -> Tensor:
            return self.loss(client, batch) + self.lam * proximal(client.net, w)

        phase = Phase(self.join_epochs, client.net.layers, lr=self.personal_lr, loss=loss)
        fit(client, [phase], self.loss, self.plain(client.round), "join")
