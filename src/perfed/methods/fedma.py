"""FedMA: before networks are averaged their neurons are matched, layer after layer.

    P_j = argmin over permutations of sum_j |D_j| * || theta_n - P_j W_j,n ||^2   (Hungarian assignment)
    W_n = sum_j |D_j| / |D| * P_j W_j,n,    W_j,n+1 <- W_j,n+1 P_j';    head: row k is averaged by counts of class k

Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni: Federated Learning with Matched Averaging. ICLR 2020.

Differences from the paper: the global network has the clients' size; the paper's prior lets it grow. In every round
all layers are matched at once, one upon the other, and clients go on from the result; the paper sends back one layer
at a time, frozen, and each client goes on with its own layers above it. Hidden layers are weighted by data size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from perfed.core.client import Client, Update
from perfed.core.method import Method
from perfed.core.plan import Round
from perfed.core.registry import register
from perfed.core.server import Server
from perfed.core.state import State
from perfed.nets.net import Net
from perfed.nets.neurons import Neurons, hidden_neurons

COUNTS = "ma/counts"


@register("fedma")
@dataclass(frozen=True, kw_only=True)
class FedMA(Method):
    """Matched averaging."""

    sweeps: int = 5
    """how many times every client is matched again to the mean of the others"""

    title = "FedMA"
    cites = "Wang et al.: Federated Learning with Matched Averaging. ICLR 2020"
    sends = "the whole network and its class counts"

    def train(self, client: Client) -> Update:
        """A local round, and how many samples of each class it saw."""
        self.fit(client, self.phases(client))
        return client.update(extra={COUNTS: client.data.class_counts})

    def start(self, net: Net, clients: int, initial: State) -> State:
        """Refuse a network whose neurons cannot be told."""
        hidden_neurons(net)
        return dict(initial)

    def schema(self, server: Server, round: Round) -> State:
        """The network and the class counts."""
        return super().schema(server, round) | {COUNTS: torch.zeros(server.plan.net.num_classes, dtype=torch.int64)}

    def combine(self, server: Server, updates: Sequence[Update], round: Round) -> State:
        """Match the neurons, average, and average the head's rows by class."""
        sizes, net = [update.weight for update in updates], server.plan.net
        networks = [{name: u.state[name] for name in u.state if name in server.plan.parts} for u in updates]
        aligned = align(networks, sizes, net, self.sweeps)
        state = super().combine(server, [replace(u, state=a) for u, a in zip(updates, aligned, strict=True)], round)
        counts = torch.stack([u.state[COUNTS] for u in updates]).double().clamp(min=0)
        counts[:, counts.sum(dim=0) == 0] = torch.tensor(sizes, dtype=torch.float64).unsqueeze(1)
        share = counts / counts.sum(dim=0)
        for name in sorted(net.names(net.head) & aligned[0].keys()):
            rows = torch.stack([network[name] for network in aligned])
            if rows.is_floating_point() and rows.dim() > 1 and rows.shape[1] == net.num_classes:
                state[name] = (rows * share.view(*share.shape, *(1,) * (rows.dim() - 2))).sum(dim=0).to(rows.dtype)
        return state


def align(networks: Sequence[State], sizes: Sequence[float], net: Net, sweeps: int) -> list[State]:
    """The same networks, their neurons in matching order."""
    aligned, known = list(networks), set[Neurons | None]([None])
    parameters = {name for name, _ in net.module.named_parameters()}
    for neurons in hidden_neurons(net):
        told = [
            n for n in neurons.rows if n in parameters and (n not in neurons.sources or neurons.sources[n] in known)
        ]
        features = [torch.cat([state[n].reshape(neurons.count, -1) for n in told], dim=1).double() for state in aligned]
        orders = match(features, sizes, sweeps)
        aligned = [neurons.reorder(state, order) for state, order in zip(aligned, orders, strict=True)]
        known.add(neurons)
    return aligned


def match(features: Sequence[Tensor], sizes: Sequence[float], sweeps: int) -> list[Tensor]:
    """For each client the order in which its neurons (rows) lie nearest to the weighted mean of all clients'."""
    everyone = range(len(features))
    first = max(everyone, key=lambda j: (sizes[j], -j))
    orders = [torch.arange(len(f)) for f in features]
    total = sizes[first] * features[first]
    for j in everyone:
        if j != first:
            orders[j] = nearest(total, features[j])
            total = total + sizes[j] * features[j][orders[j]]
    for _ in range(sweeps if len(features) > 1 else 0):
        before = [order.tolist() for order in orders]
        for j in everyone:
            rest = total - sizes[j] * features[j][orders[j]]
            orders[j] = nearest(rest, features[j])
            total = rest + sizes[j] * features[j][orders[j]]
        if [order.tolist() for order in orders] == before:
            break
    return orders


def nearest(places: Tensor, neurons: Tensor) -> Tensor:
    """Which neuron goes to each place so that the summed squared distance is least."""
    _, order = linear_sum_assignment((places @ neurons.T).numpy(), maximize=True)
    return torch.from_numpy(order)
