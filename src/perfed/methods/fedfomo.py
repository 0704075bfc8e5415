"""FedFomo: every client mixes the models that help it most, judged on its own validation samples.

    w_n = max(0, (L_i(theta'_i) - L_i(theta_n)) / ||theta_n - theta'_i||),  normalised to sum 1
    theta_i <- theta'_i + sum_n w_n (theta_n - theta'_i) = sum_n w_n theta_n,   then SGD on D_i

theta'_i is the model from which client i began its last local training, L_i the loss on its validation samples; the
candidates n are its own trained model and those of M - 1 others. The server picks these epsilon-greedily by an
affinity that adds up the weights before they are cut at zero.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization. ICLR 2021.

Differences from the paper: if no candidate beats theta'_i the client goes on with its own trained model, so that a
client left to itself (M = 1) is Local; what is added to the affinity is scaled to absolute sum 1. A client without
validation samples holds out a fixed share of its training samples and does not train on them. Candidates are the last
models of all clients heard of, not only of the last round's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from perfed.core import rng
from perfed.core.client import Client, Update
from perfed.core.combine import weighted_mean
from perfed.core.fit import PREFIX_BATCH, pieces
from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.server import Peer, Server
from perfed.core.state import Selection, State, under, within
from perfed.data.federation import Split

GAIN, IDS, AFFINITY = "fomo/gain", "fomo/ids", "fomo/affinity"


@register("fedfomo")
@dataclass(frozen=True, kw_only=True)
class FedFomo(Method):
    """First-order model optimisation."""

    M: Annotated[int, Field(ge=1)] = 5
    """models that a client weighs in a round, its own and those it downloads; 1 is Local"""
    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.3
    """chance in the first round that a model is picked at random instead of by affinity"""
    epsilon_decay: Annotated[float, Field(ge=0, le=1)] = 0.05
    """what that chance loses every round"""
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """share of its training samples by which a client without validation samples judges models"""

    title = "FedFomo"
    cites = "Zhang et al.: Personalized Federated Learning with First Order Model Optimization. ICLR 2021"
    family = "mixed models"
    keeps = "a copy of its own model, and the one it began from"
    scalars = ("cost.judged_models",)
    sends = "its model up, M - 1 models down"

    def private(self, part: Part, round: Round) -> Selection:
        """Every client has a model of its own; what others get is a copy."""
        return True

    def train(self, client: Client) -> Update:
        """Mix, remember where the training begins, train, and send the result."""
        gain = torch.zeros(0)
        if self.M > 1:
            gain = self.mix(client)
            client.memory |= under("first", client.weights())
        self.fit(client, self.phases(client))
        update = client.update(extra=under("model", client.weights()) | {GAIN: gain})
        update.scalars["cost.judged_models"] = len(_candidates(client))
        return update

    def join(self, client: Client) -> None:
        """A new client picks from the models it is offered, then trains."""
        if self.M > 1:
            self.mix(client)
        super().join(client)

    @torch.no_grad()
    def mix(self, client: Client) -> Tensor:
        """Put the mixed model into the network; returns the gain from each downloaded model, zero if there was none."""
        judges, own = self.judges(client), client.weights()
        first = within("first", client.memory) or own
        models = [own, *_candidates(client)]
        base = _loss(client, first, judges)
        gains = torch.zeros(self.M, dtype=torch.float64)
        for n, model in enumerate(models):
            apart = _distance(client, model, first)
            gains[n] = (base - _loss(client, model, judges)) / apart if apart else 0.0
        gains.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        weights = gains.clamp(min=0)[: len(models)].tolist()
        client.load(weighted_mean(models, weights) if any(weights) else own)
        return (gains[1:] / gains.abs().sum().clamp(min=1e-30)).float()

    def judges(self, client: Client) -> Split:
        """The validation samples; a client that has none takes them out of its training samples, always the same."""
        data = client.data
        if len(data.val):
            return data.val
        count = min(max(1, round(self.holdout * len(data.train))), len(data.train) - 1)
        if count < 1:
            return data.train
        order = torch.randperm(len(data.train), generator=rng.generator(client.seed, "fomo/holdout", 0, client.id))
        out, rest = order[:count].sort().values, order[count:].sort().values
        held = Split(data.train.x[out], data.train.y[out])
        data.train = Split(data.train.x[rest], data.train.y[rest])
        return held

    # The server's side

    def send(self, server: Server, peer: Peer, round: Round) -> State:
        """The models of M - 1 other clients, without their names."""
        if not peer.learns:
            return {}
        offered: State = {}
        for number, other in enumerate(self.pick(server, peer.id, round)):
            offered |= under(f"model{number}", within("model", server.slots[other]))
        return offered

    def offers(self, server: Server, round: Round) -> State:
        """Up to M - 1 models."""
        models = [under(f"model{number}", server.plan.initial) for number in range(self.M - 1)]
        return {name: tensor for model in models for name, tensor in model.items()}

    def schema(self, server: Server, round: Round) -> State:
        """A model, and a gain for each that was offered."""
        return under("model", server.plan.initial) | {GAIN: torch.zeros(self.M - 1)}

    def combine(self, server: Server, updates: Sequence[Update], round: Round) -> State:
        """Keep every participant's model, and add up who helped whom."""
        offered = [self.pick(server, update.client, round) for update in updates]
        for update, others in zip(updates, offered, strict=True):
            affinity = _affinity(server, update.client)
            for other, gain in zip(others, update.state[GAIN].tolist(), strict=False):
                affinity[other] = affinity.get(other, 0.0) + gain
            known = {IDS: torch.tensor(list(affinity), dtype=torch.int64), AFFINITY: torch.tensor([*affinity.values()])}
            server.slots[update.client] = under("model", within("model", update.state)) | known
        return server.state

    def pick(self, server: Server, client: int, round: Round) -> list[int]:
        """The clients whose models are offered: the most helpful so far, or any with chance epsilon."""
        others = [other for other in server.slots.known() if other != client]
        source = server.generator(f"fomo/{client}", round)
        luck, tie = torch.rand(2, len(others), generator=source).tolist()
        affinity = _affinity(server, client)
        best = sorted(range(len(others)), key=lambda k: (-affinity.get(others[k], 0.0), tie[k]))
        anyone = sorted(range(len(others)), key=lambda k: luck[k])
        picked: list[int] = []
        for chance in torch.rand(min(self.M - 1, len(others)), generator=source).tolist():
            queue = anyone if chance < self.epsilon - self.epsilon_decay * (round.t - 1) else best
            picked.append(next(k for k in queue if k not in picked))
        return [others[k] for k in picked]


def _candidates(client: Client) -> list[State]:
    """The downloaded models."""
    count = sum(name.endswith(f"/{next(iter(client.plan.parts))}") for name in client.received)
    return [within(f"model{number}", client.received) for number in range(count)]


def _affinity(server: Server, client: int) -> dict[int, float]:
    known = server.slots[client]
    return dict(zip(known[IDS].tolist(), known[AFFINITY].tolist(), strict=True)) if known else {}


def _loss(client: Client, model: State, data: Split) -> float:
    client.load(model)
    client.net.module.eval()
    parts = zip(pieces(data.x, PREFIX_BATCH), pieces(data.y, PREFIX_BATCH), strict=True)
    return sum(float(F.cross_entropy(client.net(x), y, reduction="sum")) for x, y in parts) / len(data)


def _distance(client: Client, a: State, b: State) -> float:
    squares = [(a[name] - b[name]).square().sum() for name, _ in client.net.module.named_parameters()]
    return float(torch.stack(squares).sum().sqrt())
