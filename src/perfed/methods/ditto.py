"""Ditto: beside FedAvg's global model, every client trains a personal one that is held near it.

    v_i <- SGD on f_i(v_i) + lambda/2 ||v_i - w||^2 from v_i, with w as received,    w: as FedAvg

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021.

Differences from the paper: both models run the same number of epochs on the same batches, as in the authors' code; the
paper lets the two solvers differ. v_i begins at the common initial weights.
"""

from dataclasses import dataclass

from torch import Tensor

from perfed.core.client import Batch, Client, Update
from perfed.core.fit import Loss, Phase
from perfed.core.method import Method
from perfed.core.proximal import parameters, proximal
from perfed.core.registry import register
from perfed.core.state import State, under, within
from perfed.core.twin import twin


@register("ditto")
@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """A personal model regularised towards the received global one."""

    lam: float = 1.0
    """pull of the personal model towards the global one (lambda); 0 is Local"""

    title = "Ditto"
    cites = "Li et al.: Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021"
    family = "two models"
    keeps = "a personal copy of the whole network"
    sends = "the whole global network"

    def train(self, client: Client) -> Update:
        """The personal model first, as the global one must still be what was received; then FedAvg's round."""
        mine = twin(client, self.own(client))
        self.fit(mine, [Phase(self.epochs, trains=mine.net.layers, loss=self.near(parameters(client.net)))])
        client.memory.update(under("v", mine.weights()))
        return super().train(client)

    def near(self, w: State) -> Loss:
        """f_i + lambda/2 ||v - w||^2."""

        def loss(client: Client, batch: Batch) -> Tensor:
            return self.loss(client, batch) + self.lam * proximal(client.net, w)

        return loss

    def own(self, client: Client) -> State:
        """v_i: what the last round left, or the common start."""
        return within("v", client.memory) or client.plan.initial

    def personal(self, client: Client) -> None:
        """Predict with v_i."""
        client.load(self.own(client))

    def join(self, client: Client) -> None:
        """A new client makes its v from the global model."""
        client.load({name: tensor for name, tensor in client.received.items() if name in client.plan.parts})
        near = self.near(parameters(client.net))
        self.fit(client, [Phase(self.join_epochs, trains=client.net.layers, loss=near)], "join")
