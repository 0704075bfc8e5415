"""Build a network from its layers, written down as one reads them: layer name -> its modules in order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn

from perfed.nets.net import Net

Size = tuple[int, int]


def stack(layers: Mapping[str, Mapping[str, nn.Module]], input_shape: Sequence[int], num_classes: int) -> Net:
    """A plain `nn.Sequential` of all modules, under their own names, with the layers marked in it."""
    children = OrderedDict((name, module) for modules in layers.values() for name, module in modules.items())
    prefixes = {layer: list(modules) for layer, modules in layers.items()}
    return Net(nn.Sequential(children), prefixes, input_shape, num_classes)


def conv(
    inputs: int,
    outputs: int,
    index: int,
    *,
    kernel: int,
    pad: int = 0,
    stride: int = 1,
    norm: bool = False,
    pool: nn.Module | None = None,
) -> dict[str, nn.Module]:
    """A convolution with its activation and max pooling, and BatchNorm after the convolution if asked.

    Pooling comes before the activation: max and ReLU commute to the bit, in the gradient too, and ReLU then has only
    the pooled values to work on.
    """
    modules: dict[str, nn.Module] = {f"conv{index}": nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=pad)}
    if norm:
        modules[f"bn{index}"] = nn.BatchNorm2d(outputs)
    if pool is not None:
        modules[f"pool{index}"] = pool
    return {**modules, f"relu{index}": nn.ReLU()}


def dense(inputs: int, outputs: int, index: int, *, norm: bool = False, drop: float = 0.0) -> dict[str, nn.Module]:
    """A linear layer with its activation; BatchNorm before and dropout after the activation if asked."""
    modules: dict[str, nn.Module] = {f"fc{index}": nn.Linear(inputs, outputs)}
    if norm:
        modules[f"fcbn{index}"] = nn.BatchNorm1d(outputs)
    modules[f"fcrelu{index}"] = nn.ReLU()
    if drop:
        modules[f"drop{index}"] = nn.Dropout(drop)
    return modules


def classifier(
    inputs: int, hidden: Sequence[int], num_classes: int, *, norm: bool = False, drop: float = 0.0
) -> dict[str, dict[str, nn.Module]]:
    """Linear layers fc1, fc2, ... of these widths and the head after them; dropout before the head alone."""
    widths = [inputs, *hidden]
    layers = {
        f"fc{i}": dense(a, b, i, norm=norm, drop=drop if i == len(hidden) else 0.0)
        for i, (a, b) in enumerate(pairwise(widths), start=1)
    }
    last = f"fc{len(hidden) + 1}"
    return {**layers, last: {last: nn.Linear(widths[-1], num_classes)}}


def after(size: Size, *steps: tuple[int, int]) -> Size:
    """The height and width after each (loss, divisor) step: a convolution loses pixels, a pooling divides."""
    height, width = size
    for loss, divisor in steps:
        height, width = (height - loss) // divisor, (width - loss) // divisor
    return height, width
