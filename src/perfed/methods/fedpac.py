"""FedPAC: features of all clients are drawn to common class centroids, and every client's head is a mix of all heads.

    h_i <- 1 epoch on D_i with b frozen;   b_i <- loss + lambda * mean (f(x) - c_y)^2 with h_i frozen
    server    b <- sum_i |D_i| / |D| * b_i,   c_y <- mean of the clients' centroids by class counts
              h_i <- sum_j alpha_ij h_j,   alpha_i = argmin over the simplex of
              sum_j alpha_j^2 V_j + || sum_j alpha_j (mu_i - mu_j) ||^2
    with mu_i[y] = p_i(y) E_i[f | y] and V_i = (E_i |f|^2 - |mu_i|^2) / |D_i|, both under the received body

Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration. ICLR 2023.

Differences from the paper: a class that no participant of a round holds keeps its last centroid; a class without one is
not aligned yet. The quadratic programme is solved exactly by non-negative least squares. A client that never took part
starts from the mean head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.optimize import nnls
from torch import Tensor
from torch.nn import functional as F

from perfed.core.client import Batch, Client, Update
from perfed.core.combine import weighted_mean
from perfed.core.fit import Phase, frozen_output
from perfed.core.method import Method
from perfed.core.plan import Round
from perfed.core.registry import register
from perfed.core.server import Peer, Server
from perfed.core.state import State
from perfed.errors import NetError
from perfed.nets.net import Net

Numbers = NDArray[np.float64]
CENTROIDS, COUNTS, MEANS, VARIANCE = "pac/centroids", "pac/counts", "pac/means", "pac/variance"


@register("fedpac")
@dataclass(frozen=True, kw_only=True)
class FedPAC(Method):
    """Feature alignment and classifier collaboration."""

    lam: Annotated[float, Field(ge=0)] = 1.0
    """strength of the feature alignment (lambda), on the mean over features"""
    head_epochs: int = 1
    """epochs on the head with the body frozen"""
    head_lr: float = 0.1
    """learning rate of the head"""

    title = "FedPAC"
    cites = "Xu, Tong, Huang: Personalized FL with Feature Alignment and Classifier Collaboration. ICLR 2023"
    family = "mixed heads"
    keeps = "nothing; the server keeps a head for each client"
    sends = "the whole network and class statistics of its features"

    def phases(self, client: Client) -> Sequence[Phase]:
        """The head, then the body with its features drawn to the global centroids."""
        net, cut = client.net, _cut(client.net)
        centroids, counts = client.received.get(CENTROIDS), client.received.get(COUNTS)

        def aligned(client: Client, batch: Batch) -> Tensor:
            features = net.run_prefix(batch.x, cut)
            loss = F.cross_entropy(net.run_suffix(features, cut), batch.y)
            if centroids is None or counts is None:
                return loss
            known = (counts[batch.y] > 0).unsqueeze(1)
            apart = (features.flatten(1) - centroids[batch.y]) * known
            return loss + self.lam * apart.square().mean()

        return [
            Phase(self.head_epochs, trains=(net.head,), lr=self.head_lr * self.lr_decay ** (client.round.t - 1)),
            Phase(self.epochs, trains=net.body, loss=aligned, reuse=False),
        ]

    def train(self, client: Client) -> Update:
        """Statistics of the received body's features, both phases, then the centroids of the trained body's."""
        centroids, counts, length = features_by_class(client)
        means = centroids * (counts / counts.sum()).unsqueeze(1)
        variance = (length - means.square().sum()).clamp(min=0) / client.size
        self.fit(client, self.phases(client))
        centroids, _, _ = features_by_class(client)
        return client.update(extra={CENTROIDS: centroids, COUNTS: counts, MEANS: means, VARIANCE: variance})

    def start(self, net: Net, clients: int, initial: State) -> State:
        """No class has a centroid yet."""
        net.module.eval()
        width = frozen_output(net, torch.zeros(1, *net.input_shape), _cut(net)).numel()
        blank = {CENTROIDS: torch.zeros(net.num_classes, width), COUNTS: torch.zeros(net.num_classes)}
        return dict(initial) | blank

    def send(self, server: Server, peer: Peer, round: Round) -> State:
        """The body, the client's own head and the centroids."""
        common = {name: server.state[name] for name in (CENTROIDS, COUNTS)}
        return super().send(server, peer, round) | common | server.slots[peer.id]

    def offers(self, server: Server, round: Round) -> State:
        """A head, which is the client's own."""
        return {name: server.plan.initial[name] for name, part in server.plan.parts.items() if part.is_head}

    def schema(self, server: Server, round: Round) -> State:
        """The network and the statistics."""
        centroids, counts = server.state[CENTROIDS], server.state[COUNTS]
        own = {CENTROIDS: centroids, COUNTS: counts, MEANS: centroids.clone(), VARIANCE: counts.new_zeros(())}
        return super().schema(server, round) | own

    def combine(self, server: Server, updates: Sequence[Update], round: Round) -> State:
        """Average the network and the centroids; mix a head for every participant."""
        parts = server.plan.parts
        networks = [{name: tensor for name, tensor in u.state.items() if name in parts} for u in updates]
        state = super().combine(server, [replace(u, state=n) for u, n in zip(updates, networks, strict=True)], round)
        counts = torch.stack([u.state[COUNTS] for u in updates]).sum(dim=0)
        sums = torch.stack([u.state[CENTROIDS] * u.state[COUNTS].unsqueeze(1) for u in updates]).sum(dim=0)
        held = counts > 0
        state[CENTROIDS] = state[CENTROIDS].where(~held.unsqueeze(1), sums / counts.clamp(min=1).unsqueeze(1))
        state[COUNTS] = state[COUNTS].where(~held, counts)
        means = torch.stack([u.state[MEANS].flatten() for u in updates])
        variances = torch.stack([u.state[VARIANCE] for u in updates])
        heads = [{name: tensor for name, tensor in net.items() if parts[name].is_head} for net in networks]
        for update, alpha in zip(updates, collaboration(means, variances), strict=True):
            server.slots[update.client] = weighted_mean(heads, alpha)
        return state


def collaboration(means: Tensor, variances: Tensor) -> list[list[float]]:
    """Row i: how much client i takes of every head, so that its own expected loss is least."""
    gram = (means.double() @ means.double().T).numpy()
    spread = np.diag(variances.double().numpy())
    rows = []
    for i in range(len(gram)):
        bias = gram[i, i] - gram[i][:, None] - gram[i][None, :] + gram
        rows.append(simplex_minimum(spread + bias).tolist())
    return rows


def simplex_minimum(P: Numbers) -> Numbers:
    """argmin a'Pa with a >= 0, sum(a) = 1, for P positive semi-definite.

    The minimum of |A a|^2 + (sum(a) - 1)^2 over a >= 0, A'A = P, lies on the same ray: for a point s * a of the ray
    through a on the simplex the best s gives q / (q + 1), which grows with q = a'Pa.
    """
    values, vectors = np.linalg.eigh(P / max(np.trace(P), np.finfo(float).tiny))
    A = np.sqrt(values.clip(min=0))[:, None] * vectors.T
    ray, _ = nnls(np.vstack([A, np.ones(len(P))]), np.append(np.zeros(len(P)), 1.0))
    least: Numbers = ray / ray.sum()
    return least


def features_by_class(client: Client) -> tuple[Tensor, Tensor, Tensor]:
    """Every class's mean feature (zero without samples) and sample count, and the mean squared length of a feature."""
    data, classes = client.data.train, client.net.num_classes
    client.net.module.eval()
    features = frozen_output(client.net, data.x, _cut(client.net)).flatten(1)
    counts = torch.bincount(data.y, minlength=classes).float()
    sums = features.new_zeros(classes, features.shape[1]).index_add_(0, data.y, features)
    return sums / counts.clamp(min=1).unsqueeze(1), counts, features.square().sum(dim=1).mean()


def _cut(net: Net) -> int:
    """Where the features are: right before the head."""
    if not net.cut((net.head,)):
        raise NetError("FedPAC needs the features below the head, and this network cannot be cut there.")
    return len(net.body)
