"""The one training loop: minibatch steps on the layers that a phase trains, all others left alone.

Layers that a phase does not train are outside the optimiser and the backward pass, and their BatchNorm layers use
their stored statistics. The output of the leading layers that stay frozen is computed once and trained on. Gradients of
plain layers are computed without a graph, to the same bits unless compiled kernels are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from perfed.core import prefix
from perfed.core.client import Batch, Client
from perfed.core.sgd import Sgd
from perfed.core.softmax import linear_head, regress
from perfed.errors import ConfigError
from perfed.nets.net import Net
from perfed.nets.written import Written, alike, written

PREFIX_BATCH = 256
PREFIX_BYTES = 1 << 30
"""How large the stored output of one client's frozen layers may be."""
Loss_ = TypeVar("Loss_", bound=Callable[..., Tensor])
Loss = Callable[[Client, Batch], Tensor]
Slopes = Callable[[Batch], Sequence[Tensor]]
"""What gives the gradients at a batch."""


def plain(loss: Loss_) -> Loss_:
    """Mark a loss as the mean cross-entropy of the logits and nothing else, which may be computed in other ways."""
    loss.is_plain = loss  # type: ignore[attr-defined]
    return loss


def is_plain(loss: Callable[..., Tensor]) -> bool:
    """Whether a loss is the mean cross-entropy of the logits."""
    function = getattr(loss, "__func__", loss)
    return getattr(function, "is_plain", None) is function  # and not what wraps it and has taken over its marks


@dataclass(frozen=True)
class Phase:
    """Some epochs of training of some layers."""

    epochs: int
    trains: Sequence[str]
    lr: float | None = None
    loss: Loss | None = None
    slopes: Slopes | None = None
    """gives the gradients of all that the phase trains, in place of a loss"""
    after_epoch: Callable[[Client], None] | None = None
    after_step: Callable[[Client], None] | None = None
    """called after every step, when its gradients may be gone"""
    reuse: bool = True
    """Whether the loss is content with the frozen layers' stored output in place of the images."""
    features: Tensor | None = None
    """What the head receives for every sample, where the method has it already; the phase trains the head alone."""

    def __post_init__(self) -> None:
        if self.loss and self.slopes:
            raise ValueError("A phase has a loss or gives the gradients, not both.")


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

    def over(self, parameters: Sequence[Tensor], lr: float | None = None) -> Sgd:
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


def gradients_of(client: Client, loss: Loss, parameters: Sequence[Tensor]) -> Slopes:
    """A loss's gradients at a batch, laid out as the parameters are, which all are trained by then."""

    @cache
    def known() -> Written | None:
        return written(client.net, 0, parameters) if is_plain(loss) else None

    def gradients(batch: Batch) -> list[Tensor]:
        if not batch.cut and (short := known()) and short.takes(batch.x):
            return short(batch.x, batch.y)
        with torch.enable_grad():
            found = torch.autograd.grad(loss(client, batch), list(parameters), materialize_grads=True)
        return alike(found, parameters)

    return gradients


def keep_statistics(net: Net) -> None:
    """Let BatchNorm use what it has: one sample has no statistics of its own."""
    for module in net.module.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def batches(n: int, size: int, source: torch.Generator, *, whole: bool) -> Iterable[Tensor]:
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
        if not parameters:  # a body that is not there, or nothing unfrozen
            continue
        if len(data) == 1:
            keep_statistics(net)
        step = optimiser.over(parameters, phase.lr)
        x, cut = _input(client, phase)
        trainable = sum(parameter.numel() for parameter in parameters)
        objective = phase.loss or loss
        simple = not phase.slopes and is_plain(objective) and type(step) is Sgd
        head = linear_head(net, cut, parameters) if cut and simple and not phase.after_step else None
        known = written(net, cut, parameters) if simple else None
        known = known if known and known.takes(x) else None
        source = client.generator(f"{purpose}/{number}")
        for _ in range(phase.epochs):
            order = batches(len(data), optimiser.batch_size, source, whole=net.has_batchnorm)
            if head and x.dim() == 2:
                order = list(order)
                regress(head, x, data.y, order, step)
                client.meter.enter(len(data), len(order), trainable)
            else:
                for index in order:
                    if known:
                        step.move(parameters, known(x[index], data.y[index]))
                    else:
                        batch = Batch(x[index], data.y[index], index, cut)
                        step.zero_grad()
                        if phase.slopes:
                            found = alike(phase.slopes(batch), parameters)
                            for parameter, slope in zip(parameters, found, strict=True):
                                parameter.grad = slope
                        else:
                            objective(client, batch).backward()  # type: ignore[no-untyped-call]
                        step.step()
                    if phase.after_step:
                        phase.after_step(client)
                    client.meter.count(len(index), trainable)
            if phase.after_epoch:
                phase.after_epoch(client)


def fitting(net: Net, phase: Phase, x: Tensor, samples: int) -> int:
    """The last cut before which everything is frozen and not random, and whose output is not too large to be stored."""
    cuts = net.reusable_cuts(phase.trains)
    return next((k for k in cuts if samples * net.width(x, k) * x.element_size() <= PREFIX_BYTES), 0)


def _input(client: Client, phase: Phase) -> tuple[Tensor, int]:
    """What a phase trains on, and before which layer it comes in: the images, or the output of the frozen layers."""
    if phase.features is not None:
        return phase.features, len(client.net.body)
    x = client.data.train.x
    cut = fitting(client.net, phase, x, len(x)) if phase.reuse else 0
    if not cut:
        return x, 0
    lasting = prefix.key(client, x, cut) if client.prefixes is not None else None
    if client.prefixes is not None and lasting and (known := client.prefixes.get(lasting)) is not None:
        return known, cut
    client.meter.prefix_samples += len(x)
    found = frozen_output(client.net, x, cut)
    if client.prefixes is not None and lasting:
        client.prefixes.put(lasting, found)
    return found, cut
