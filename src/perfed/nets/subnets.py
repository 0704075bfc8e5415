"""Three predictions of one network: by all its channels, by its private channels alone, by its shared channels alone.

A sub-network is made of slices of the real weights: the rows of its own channels and, of these, the columns of its own
channels. It costs as much as a network with so many channels, about p^2 or (1 - p)^2 of the whole, and gradients reach
the real parameters. The first layer sees the whole input, so a sub-network's first feature map is a slice of the whole
network's and is not computed again. Both sub-networks add the logits' bias.

BatchNorm in a sub-network has its channels' scale and shift. In training it normalises by the batch, as the whole
network does; only the whole network's pass moves the running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from perfed.nets import steps
from perfed.nets.channels import channel_map
from perfed.nets.flow import Channels
from perfed.nets.net import Net

Run = Callable[..., Any]
Pair = tuple[Any, Any]
"""What the private and what the shared sub-network has in place of something."""


class Subnets:
    """A network and its two sub-networks at a ratio p of private channels."""

    def __init__(self, net: Net, p: float) -> None:
        self._net, self._flow, self._p = net, channel_map(net).flow, p
        self._constants = {
            node.name: steps.constant(node, net.module)
            for node in self._flow.nodes
            if node.op in ("placeholder", "get_attr")
        }
        self._steps: list[tuple[fx.Node, Run, tuple[Run, Run] | None]] = []
        for node in self._flow.nodes:
            if node.name not in self._constants:
                run = steps.runnable(node, steps.module_of(node, net.module))
                alike = node.name in self._flow.stem or node.name in self._flow.common
                self._steps.append((node, run, None if alike else self._sliced(node, run)))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logits of the whole, the private and the shared network."""
        if self._net.precision is None:
            return self._run(x)
        with self._net.computing():
            whole, private, shared = self._run(x)
        return whole.float(), private.float(), shared.float()

    def _run(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, last = self._flow.nodes[0], self._flow.nodes[-1]
        whole: dict[str, Any] = self._constants | {first.name: x}
        parts: dict[str, Pair] = {}

        def pair(source: fx.Node) -> Pair:
            if source.name not in parts:
                parts[source.name] = self._divide(source, whole[source.name])
            return parts[source.name]

        for node, run, sliced in self._steps:
            whole[node.name] = _call(run, node, lambda source: whole[source.name])
            if sliced:
                parts[node.name] = (
                    _call(sliced[0], node, lambda source: pair(source)[0]),
                    _call(sliced[1], node, lambda source: pair(source)[1]),
                )
        return whole[last.name], *pair(last)

    def _divide(self, source: fx.Node, value: Any) -> Pair:
        """The two parts of a value that the whole network computed for both."""
        channels = self._flow.channels.get(source.name)
        if channels is None:
            return value, value
        cut = channels.cut(self._p)
        shared, private = value.split([cut, channels.size - cut], dim=1)
        return private, shared

    def _sliced(self, node: fx.Node, run: Run) -> tuple[Run, Run]:
        """A step of the two sub-networks."""
        slice_of = _layer if steps.is_layer(run) else _norm if steps.is_norm(run) else None
        if slice_of is None:
            return run, run
        made = self._slices(self._flow.channels.get(node.name))
        given = self._slices(self._flow.channels.get(node.all_input_nodes[0].name))
        return slice_of(run, made[0], given[0]), slice_of(run, made[1], given[1])

    def _slices(self, channels: Channels | None) -> tuple[slice, slice]:
        if channels is None:
            return slice(None), slice(None)
        cut = channels.cut(self._p)
        return slice(cut, None), slice(None, cut)


def _call(run: Run, node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    return run(*args, **kwargs)


def _layer(module: Any, rows: slice, columns: slice) -> Run:
    """A convolution or linear layer with some of its output and input channels."""

    def run(x: Tensor) -> Tensor:
        weight = module.weight[rows, columns]
        bias = None if module.bias is None else module.bias[rows]
        if isinstance(module, nn.Linear):
            return F.linear(x, weight, bias)
        if is_sampling(module):
            across, down = module.stride
            return F.conv2d(x[:, :, ::across, ::down].contiguous(memory_format=torch.channels_last), weight, bias)
        made: Tensor = module._conv_forward(x, weight, bias)
        return made

    return run


def is_sampling(module: nn.Module) -> bool:
    """Whether this is a 1x1 convolution that skips positions.

    In the channels-last layout and with fewer than 16 input channels, the backward pass of such a one can end the
    process (oneDNN in torch 2.13, from 64x64 on). Sampling first and convolving then is the same computation.
    """
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and module.stride != (1, 1)
        and module.padding == (0, 0)
        and module.groups == 1
    )


def _norm(module: Any, rows: slice, columns: slice) -> Run:
    """A BatchNorm of some channels, which leaves the running statistics as they are."""

    def run(x: Tensor) -> Tensor:
        weight, bias = (None if t is None else t[rows] for t in (module.weight, module.bias))
        if module.training or module.running_mean is None:
            return F.batch_norm(x, None, None, weight, bias, True, eps=module.eps)
        mean, var = module.running_mean[rows], module.running_var[rows]
        return F.batch_norm(x, mean, var, weight, bias, False, eps=module.eps)

    return run
