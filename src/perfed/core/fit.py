"""The one training loop: minibatch steps on the layers that a phase trains, all others left alone.

Layers that a phase does not train are outside the optimiser and the backward pass, and their BatchNorm layers use
their stored statistics. The output of the leading layers that stay frozen is computed once and trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perfed.core.client import Batch, Client
from perfed.core.sgd import Sgd
from perfed.errors import ConfigError
from perfed.nets.net import Net

PREFIX_BATCH = 256
Loss = Callable[[Client, Batch], Tensor]


@dataclass(frozen=True)
class Phase:
    """Some epochs of training of some layers."""

    epochs: int
    trains: Sequence[str]
    lr: float | None = None
    loss: Loss | None = None
    after_epoch: Callable[[Client], None] | None = None
    after_step: Callable[[Client], None] | None = None
    reuse: bool = True
    """Whether the loss is content with the frozen layers' stored output in place of the images."""


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """Plain SGD and its settings."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    batch_size: int = 10

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov = true needs momentum.", "Give a momentum above 0, as in method.momentum=0.9.")

    def over(self, parameters: Sequence[nn.Parameter], lr: float | None = None) -> Sgd:
        """A fresh optimiser over these parameters."""
        return Sgd(
            parameters,
            lr=self.lr if lr is None else lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )


def set_trainable(net: Net, trains: Sequence[str]) -> list[nn.Parameter]:
    """Make these layers trainable and freeze the rest completely; return the trainable parameters."""
    chosen = net.names(*trains)
    trained = []
    net.module.train()
    for name, parameter in net.module.named_parameters():
        parameter.requires_grad_(name in chosen)
        if name in chosen:
            trained.append(parameter)
    for path, module in net.module.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train(any(f"{path}.{leaf}" in chosen for leaf in module.state_dict()))
    return trained


def batches(n: int, size: int, source: torch.Generator, *, whole: bool) -> Iterator[Tensor]:
    """Shuffled index batches over n samples; none is dropped.

    With `whole`, a last batch of a single sample joins the one before, as batch normalisation needs two.
    """
    order = torch.randperm(n, generator=source)
    starts = list(range(0, n, size))
    if whole and len(starts) > 1 and n - starts[-1] == 1:
        starts.pop()
    for start, stop in zip(starts, [*starts[1:], n], strict=True):
        yield order[start:stop]


def pieces(x: Tensor, size: int) -> list[Tensor]:
    """The tensor in consecutive parts of at most this many rows."""
    return [x[start : start + size] for start in range(0, len(x), size)]


@torch.no_grad()
def frozen_output(net: Net, x: Tensor, cut: int) -> Tensor:
    """The output of the first `cut` layers for all samples, in large batches."""
    return torch.cat([net.run_prefix(part, cut) for part in pieces(x, PREFIX_BATCH)])


@torch.enable_grad()
def fit(client: Client, phases: Sequence[Phase], loss: Loss, optimiser: Optimiser, purpose: str = "fit") -> None:
    """Run the phases one after another on the client's training data."""
    data, net = client.data.train, client.net
    for number, phase in enumerate(phases):
        if not phase.epochs or not len(data):
            continue
        parameters = set_trainable(net, phase.trains)
        if len(data) == 1:  # one sample has no statistics of its own
            for module in net.module.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        step = optimiser.over(parameters, phase.lr)
        cut = net.reusable(phase.trains) if phase.reuse else 0
        x = data.x
        if cut:
            x = frozen_output(net, x, cut)
            client.meter.prefix_samples += len(data)
        trainable = sum(parameter.numel() for parameter in parameters)
        objective = phase.loss or loss
        source = client.generator(f"{purpose}/{number}")
        for _ in range(phase.epochs):
            for index in batches(len(data), optimiser.batch_size, source, whole=net.has_batchnorm):
                step.zero_grad()
                objective(client, Batch(x[index], data.y[index], index, cut)).backward()  # type: ignore[no-untyped-call]
                step.step()
                if phase.after_step:
                    phase.after_step(client)
                client.meter.count(len(index), trainable)
            if phase.after_epoch:
                phase.after_epoch(client)
