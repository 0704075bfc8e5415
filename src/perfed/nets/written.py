"""Gradients of the mean cross-entropy through plain layers in a row, written out: no graph is built where all is known.

    z = W x + b:      dL/dW = dL/dz^T x,    dL/db = sum of dL/dz,    dL/dx = dL/dz W
    p = softmax(z):   dL/dz = (p - onehot(y)) / n

Convolutions, max pooling, ReLU, flattening and linear layers are known here. The kernels are those that autograd would
call, in the same order, so the result is the same to the bit; what is saved is the graph, which costs as much as the
arithmetic where networks are small. With compiled kernels a small network goes through `perfed.nets.straight` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from perfed.nets import fused, tiled
from perfed.nets.net import Net
from perfed.nets.straight import Straight, straight

Back = Callable[[Tensor, bool], "Given"]
"""Takes the gradient of what a step gave, and whether that of what it took is wanted."""
Given = tuple[Tensor | None, list[Tensor]]
"""The gradient of what a step took, and those of the step's parameters that are trained."""
Step = Callable[[Tensor], tuple[Tensor, Back]]
_aten = torch.ops.aten


def written(net: Net, cut: int, trained: Sequence[Tensor]) -> Written | None:
    """The gradients of these parameters after the cut, if all that follows it is known here and nothing watches it."""
    around = cut or fused.is_plain(net.module, nn.Sequential)
    if net.precision is not None or not around or _has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    groups = net.groups_from(cut)
    modules = [module for group in groups for module in group]
    if any([*dict(module.named_parameters())] not in ([], ["weight"], ["weight", "bias"]) for module in modules):
        return None  # or in another order, as what is pruned may have
    held = [parameter for module in modules for parameter in module.parameters()]
    order = [id(parameter) for parameter in held if parameter.requires_grad]
    if not trained or order != [id(parameter) for parameter in trained] or len({*order}) < len(order):
        return None
    steps = [step_of(group, net.compiled) for group in groups]
    if None in steps or any(map(watched, trained)):
        return None
    learns = [any(parameter.requires_grad for module in group for parameter in module.parameters()) for group in groups]
    kinds = map(type, modules)
    first = next((kind for kind in kinds if kind in (nn.Linear, nn.Flatten)), None)
    quick = straight(groups) if net.compiled else None
    return Written([step for step in steps if step], learns, trained, flat=first is nn.Linear, quick=quick)


def watched(parameter: Tensor) -> bool:
    """Whether something waits for a parameter's gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


class Written:
    """A forward and a backward pass."""

    def __init__(
        self,
        steps: Sequence[Step],
        learns: Sequence[bool],
        trained: Sequence[Tensor],
        *,
        flat: bool,
        quick: Straight | None = None,
    ) -> None:
        first = list(learns).index(True)
        self.before, self.learning = steps[:first], _in_turn(steps[first:])
        self.trained = trained
        self.quick = quick
        """what computes the whole by compiled code, if anything does"""
        self.flat = flat
        """whether samples come in as rows: a linear layer is the first to care"""

    def takes(self, x: Tensor) -> bool:
        """Whether samples like these are what is known here."""
        return not self.flat or x.dim() == 2

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """The gradients of the trained parameters at these samples, in the layout of the parameters."""
        if self.quick and self.quick.takes(x, y) and (found := self.quick(x, y)):
            return found
        for step in self.before:
            x, _ = step(x)
        z, back = self.learning(x)
        _, gradients = back(slope_of(z, y), False)
        return alike(gradients, self.trained)


def alike(gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the layout of their parameters: an optimiser goes through both as they lie in memory."""
    pairs = zip(gradients, parameters, strict=True)
    return [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for g, p in pairs]


def slope_of(z: Tensor, y: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy of logits."""
    scores = _aten._log_softmax(z, 1, False)
    _, total = _aten.nll_loss_forward(scores, y, None, 1, -100)
    slope = _aten.nll_loss_backward(scores.new_ones(()), scores, y, None, 1, -100, total)
    found: Tensor = _aten._log_softmax_backward_data(slope, scores, 1, scores.dtype)
    return found


def step_of(group: Sequence[nn.Module], compiled: bool = False) -> Step | None:
    """How a module is computed, or three that are computed as one; None if it is not known here."""
    if len(group) > 1:
        return _fused(group)
    module = group[0]
    maker = _MAKERS.get(type(module))
    if compiled and maker is _convolution and tiled.known(module):
        maker = _tiled
    return maker(module) if maker and fused.is_plain(module, type(module)) else None


def _in_turn(steps: Sequence[Step]) -> Step:
    """Several steps as one."""

    def step(x: Tensor) -> tuple[Tensor, Back]:
        backs: list[Back] = []
        for one in steps:
            x, back = one(x)
            backs.append(back)

        def all_back(dy: Tensor, onward: bool) -> Given:
            found: list[Tensor] = []
            slope: Tensor | None = dy
            while backs:  # what a step kept goes with it
                assert slope is not None
                back = backs.pop()
                slope, gradients = back(slope, onward or bool(backs))
                found = [*gradients, *found]
            return slope, found

        return x, all_back

    return step


def _chosen(wanted: Sequence[bool], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [g for g, want in zip(gradients, wanted, strict=True) if want and g is not None]


def _linear(layer: Any) -> Step | None:
    weight, bias = layer.weight, layer.bias
    if bias is None or not weight.is_contiguous():
        return None
    wanted = weight.requires_grad, bias.requires_grad

    def step(x: Tensor) -> tuple[Tensor, Back]:
        def back(dy: Tensor, onward: bool) -> Given:
            gradients = [dy.t().mm(x)] if wanted[0] else []
            if wanted[1]:
                gradients.append(dy.sum(0))
            return dy.mm(weight) if onward else None, gradients

        return torch.addmm(bias, x, weight.t()), back

    return step


def _convolution(layer: Any) -> Step | None:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str) or layer.groups > 1:
        return None
    weight, bias = layer.weight, layer.bias
    ways = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)
    parameters = [weight] if bias is None else [weight, bias]
    wanted = [parameter.requires_grad for parameter in parameters]
    mask = [*wanted, *[False] * (2 - len(wanted))]

    def step(x: Tensor) -> tuple[Tensor, Back]:
        def back(dy: Tensor, onward: bool) -> Given:
            sizes = None if bias is None else list(bias.shape)
            dx, *gradients = _aten.convolution_backward(dy, x, weight, sizes, *ways, [onward, *mask])
            return dx, _chosen(wanted, gradients[: len(wanted)])

        return _aten.convolution(x, weight, bias, *ways), back

    return step


def _tiled(conv: Any) -> Step | None:
    wanted = conv.weight.requires_grad, conv.bias is not None and conv.bias.requires_grad
    by_torch = _convolution(conv)

    def step(x: Tensor) -> tuple[Tensor, Back]:
        assert by_torch
        if not tiled.takes(x, conv.weight, conv.bias, int(conv.padding[0])):
            return by_torch(x)
        y, back = tiled.by_hand(conv, x)
        return y, _handing_on(back, wanted)

    return step


def _handing_on(back: Callable[[Tensor, Sequence[bool]], tuple[Tensor | None, ...]], wanted: Sequence[bool]) -> Back:
    def both(dy: Tensor, onward: bool) -> Given:
        dx, *gradients = back(dy, (onward, *wanted))
        return dx, _chosen(wanted, gradients)

    return both


def _pooling(layer: Any) -> Step | None:
    if layer.return_indices:
        return None
    size, stride, padding, dilation = (
        (way, way) if isinstance(way, int) else way
        for way in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    )
    ways = size, stride, padding, dilation, layer.ceil_mode

    def step(x: Tensor) -> tuple[Tensor, Back]:
        y, chosen = _aten.max_pool2d_with_indices(x, *ways)

        def back(dy: Tensor, onward: bool) -> Given:
            return _aten.max_pool2d_with_indices_backward(dy, x, *ways, chosen) if onward else None, []

        return y, back

    return step


def _relu(layer: Any) -> Step:
    def step(x: Tensor) -> tuple[Tensor, Back]:
        y = x.relu()
        return y, lambda dy, onward: (_aten.threshold_backward(dy, y, 0) if onward else None, [])

    return step


def _flatten(layer: Any) -> Step | None:
    if (layer.start_dim, layer.end_dim) != (1, -1):
        return None

    def step(x: Tensor) -> tuple[Tensor, Back]:
        shape = x.shape
        return x.flatten(1), lambda dy, onward: (dy.reshape(shape) if onward else None, [])

    return step


def _identity(layer: Any) -> Step:
    return lambda x: (x, lambda dy, onward: (dy, []))


def _fused(group: Sequence[Any]) -> Step | None:
    conv, wanted = group[0], (group[0].weight.requires_grad, group[0].bias.requires_grad)
    single = [step_of([module]) for module in group]
    by_torch = _in_turn([step for step in single if step])

    def step(x: Tensor) -> tuple[Tensor, Back]:
        if not fused.takes(conv, x):
            return by_torch(x)
        y, back = fused.by_hand(conv, x)
        return y, _handing_on(back, wanted)

    return step if all(single) else None


_MAKERS: dict[type[nn.Module], Callable[[Any], Step | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.MaxPool2d: _pooling,
    nn.ReLU: _relu,
    nn.Flatten: _flatten,
    nn.Identity: _identity,
}
