"""Per-FedAvg: FedAvg for the model from which one gradient step on a client's data leads furthest.

    min sum_i F_i(w),    F_i(w) = f_i(w - alpha grad f_i(w)),    theta = w - alpha grad f_i(w; D);    by steps beta = lr
    fo:  w_i <- w_i - beta grad f_i(theta; D')
    hf:  w_i <- w_i - beta [g - alpha (grad f_i(w + delta g; D'') - grad f_i(w - delta g; D'')) / (2 delta)],
         g = grad f_i(theta; D')

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach. NeurIPS 2020.

Differences from the paper: the epochs run over D'; D and D'' are drawn for each step, of the same size. The mean is
weighted by data size. A client's final step is on all its training data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from perfed.core.client import Batch, Client
from perfed.core.fit import Optimiser, Phase, Slopes, fit, gradients_of
from perfed.core.method import Method
from perfed.core.proximal import parameters
from perfed.core.registry import register
from perfed.core.state import State

PIECE = 64


@register("perfedavg")
@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Method):
    """Model-agnostic meta-learning of the start."""

    alpha: float = 0.01
    """learning rate of the inner step and of the final one"""
    variant: Literal["fo", "hf"] = "hf"
    """without the Hessian (first-order), or with its product by finite differences (Hessian-free)"""
    delta: float = 0.001
    """distance of the finite differences"""
    adapt_steps: Annotated[int, Field(ge=1)] = 1
    """gradient steps that a client takes before it is scored"""

    title = "Per-FedAvg"
    cites = "Fallah et al.: Personalized Federated Learning: A Model-Agnostic Meta-Learning Approach. NeurIPS 2020"
    family = "meta-learning"
    keeps = "nothing"

    def phases(self, client: Client) -> Sequence[Phase]:
        """Every batch is the D' of one meta-step."""
        source = client.generator("meta")
        slopes = gradients_of(client, self.loss, list(client.net.module.parameters()))

        def meta(batch: Batch) -> list[Tensor]:
            first, third = (self.draw(client, batch, source) for _ in range(2))
            return [*self.meta_gradient(client, first, batch, third, slopes).values()]

        return [Phase(self.epochs, trains=client.net.layers, slopes=meta)]

    def draw(self, client: Client, like: Batch, source: torch.Generator) -> Batch:
        """As many of the client's samples as another batch has, at random."""
        index = torch.randperm(client.size, generator=source)[: len(like.y)]
        return Batch(client.data.train.x[index], client.data.train.y[index], index)

    def meta_gradient(
        self, client: Client, first: Batch, second: Batch, third: Batch, slopes: Slopes | None = None
    ) -> State:
        """The (approximate) gradient of F_i at the network's weights, which are left as they are.

        BatchNorm statistics are those of the pass at theta alone, what a client will predict with.
        """
        w, statistics = parameters(client.net), self.statistics(client)
        slopes = slopes or gradients_of(client, self.loss, list(client.net.module.parameters()))
        g = dict(zip(w, slopes(first), strict=True))
        client.load({name: w[name] - self.alpha * g[name] for name in w} | statistics)
        g, statistics = dict(zip(w, slopes(second), strict=True)), self.statistics(client)
        if self.variant == "hf":
            with client.net.in_full():
                client.load({name: w[name] + self.delta * g[name] for name in w})
                ahead = dict(zip(w, slopes(third), strict=True))
                client.load({name: w[name] - self.delta * g[name] for name in w})
                behind = dict(zip(w, slopes(third), strict=True))
            g = {name: g[name] - self.alpha * (ahead[name] - behind[name]) / (2 * self.delta) for name in w}
        client.load(w | statistics)
        passes = {"fo": 1, "hf": 3}[self.variant]  # the phase counts one more
        client.meter.count(len(second.y), sum(tensor.numel() for tensor in w.values()), passes)
        return g

    def statistics(self, client: Client) -> State:
        """A copy of the buffers."""
        return {name: tensor.clone() for name, tensor in client.net.module.named_buffers() if name in client.plan.parts}

    def adapt(self, client: Client) -> None:
        """theta, by steps on all the client's training data; then fine-tuning, if asked."""

        def all_data(client: Client, batch: Batch) -> Tensor:
            """The mean loss, piece by piece, so that memory does not grow with the client."""
            parts = torch.arange(len(batch.y)).tensor_split(ceil(len(batch.y) / PIECE))
            losses = (
                self.loss(client, Batch(batch.x[part], batch.y[part], batch.index[part])) * (len(part) / len(batch.y))
                for part in parts
            )
            for _ in parts[1:]:
                next(losses).backward()  # type: ignore[no-untyped-call]
            return next(losses)

        step = Optimiser(lr=self.alpha, batch_size=client.size)
        fit(client, [Phase(self.adapt_steps, client.net.layers, loss=all_data)], self.loss, step, "adapt")
        super().adapt(client)

    def join(self, client: Client) -> None:
        """A new client adapts like all others."""
