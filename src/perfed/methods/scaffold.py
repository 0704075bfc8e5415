"""SCAFFOLD: control variates correct each client's steps for the drift towards its own optimum.

    y_i <- y_i - eta (g_i(y_i) - c_i + c), K times from x,    c_i+ <- c_i - c + (x - y_i) / (K eta),
    x   <- x + eta_g * mean over S of (y_i - x),              c    <- c + 1/N * sum over S of (c_i+ - c_i)

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.
ICML 2020. The variate is the paper's option II; the mean is uniform, as its objective is, so that c is always the mean
of all N clients' c_i, also of those that were not drawn.

Differences from the paper: with momentum, K is replaced by the sum of the factors with which the gradients entered
y_i (see `steps`), so that c_i stays a mean of gradients; without momentum that sum is K.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perfed.core.client import Batch, Client, Update
from perfed.core.combine import stride
from perfed.core.fit import Phase
from perfed.core.method import Method
from perfed.core.plan import Round
from perfed.core.proximal import parameters
from perfed.core.registry import register
from perfed.core.server import Peer, Server
from perfed.core.state import State, under, within
from perfed.nets.net import Net


@register("scaffold")
@dataclass(frozen=True, kw_only=True)
class Scaffold(Method):
    """Client and server control variates."""

    eta_g: float = 1.0
    """the server's step size; 1 takes the mean of the clients' models"""

    title = "SCAFFOLD"
    cites = "Karimireddy et al.: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning. ICML 2020"
    keeps = "its control variate, which no prediction uses"
    sends = "the whole network and, as much again, control variates"

    def start(self, net: Net, clients: int, initial: State) -> State:
        """The model and c = 0."""
        return super().start(net, clients, initial) | under("c", _zeros(net))

    def send(self, server: Server, peer: Peer, round: Round) -> State:
        """x and c."""
        return super().send(server, peer, round) | under("c", within("c", server.state))

    def schema(self, server: Server, round: Round) -> State:
        """y_i and the change of c_i."""
        return super().schema(server, round) | under("dc", within("c", server.state))

    def train(self, client: Client) -> Update:
        """K corrected steps, then the new variate."""
        x, taken = parameters(client.net), client.meter.batches
        c = _zeros(client.net) | within("c", client.received)
        c_i = _zeros(client.net) | within("c_i", client.memory)
        drift = {name: c[name] - c_i[name] for name in x}

        def corrected(client: Client, batch: Batch) -> Tensor:
            """The gradient of <c - c_i, y> is the correction."""
            terms = [(drift[name] * y).sum() for name, y in client.net.module.named_parameters()]
            return self.loss(client, batch) + torch.stack(terms).sum()

        self.fit(client, [Phase(self.epochs, trains=client.net.layers, loss=corrected)])
        y, distance = parameters(client.net), self.steps(client.meter.batches - taken) * self.optimiser(client.round).lr
        new = {name: (x[name] - y[name]) / distance - drift[name] for name in x} if distance else c_i
        client.memory.update(under("c_i", new))
        return client.update(under("dc", {name: new[name] - c_i[name] for name in x}), weight=1.0)

    def steps(self, K: int) -> float:
        """sum_k of the factors with which the K gradients enter x - y_i, in units of eta: K without momentum."""
        m, ahead = self.momentum, 1 if self.nesterov else 0
        return sum((1 - m ** (k + ahead)) / (1 - m) for k in range(1, K + 1)) if m else float(K)

    def combine(self, server: Server, updates: Sequence[Update], round: Round) -> State:
        """A step of eta_g towards the mean model, and c moved by the changes' sum over all N clients."""
        models = [replace(u, state={n: t for n, t in u.state.items() if n in server.plan.parts}) for u in updates]
        weights = [name for name, part in server.plan.parts.items() if not part.is_buffer]
        state = stride(server.state, super().combine(server, models, round), self.eta_g, weights)
        for name, c in within("c", server.state).items():
            changes = torch.stack([update.state[f"dc/{name}"] for update in updates])
            state[f"c/{name}"] = c + changes.sum(dim=0) / server.participants
        return state


def _zeros(net: Net) -> State:
    return {name: torch.zeros_like(w, memory_format=torch.contiguous_format) for name, w in parameters(net).items()}
