"""Stochastic gradient descent with nothing around it: torch's fused step over all parameters in one call.

The arithmetic is that of `torch.optim.SGD(fused=True)`, to the bit. What is left out are its hooks, profiler marks and
checks, which cost as much as the step itself where networks are small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Sgd:
    """Steps on some parameters, with momentum that begins anew."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = list(parameters)
        self.lr, self.momentum, self.nesterov, self.weight_decay = lr, momentum, nesterov, weight_decay
        self._velocity: dict[int, Tensor] = {}

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        moved: list[Tensor] = []
        gradients: list[Tensor] = []
        for parameter in self.parameters:
            if parameter.grad is not None:
                moved.append(parameter)
                gradients.append(parameter.grad)
        self.move(moved, gradients)

    def move(self, moved: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Move these parameters along these gradients; to be called without autograd."""
        first = bool(self.momentum) and not self._velocity
        torch._fused_sgd_(
            list(moved),
            list(gradients),
            [self._moving(p, g, first) for p, g in zip(moved, gradients, strict=True)] if self.momentum else [],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=first,
        )

    def _moving(self, parameter: Tensor, gradient: Tensor, first: bool) -> Tensor:
        """A parameter's velocity; the very first step overwrites it, so that it may hold anything."""
        if id(parameter) not in self._velocity:
            self._velocity[id(parameter)] = torch.empty_like(gradient) if first else torch.zeros_like(gradient)
        return self._velocity[id(parameter)]

    def inherit(self, other: Sgd) -> None:
        """Take over the velocities of another's parameters, which begin with these ones' rows."""
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            if id(theirs) in other._velocity:
                self._velocity[id(mine)] = other._velocity[id(theirs)][: len(mine)]
