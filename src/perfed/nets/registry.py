"""The networks by name, with the images they accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from pydantic import ValidationError, validate_call

from perfed.errors import ConfigError, NetError, unknown
from perfed.nets.alexnet import alexnet
from perfed.nets.cnn import cifarnet, cnn
from perfed.nets.conv3 import conv3, conv3attn
from perfed.nets.digitsnet import digitsnet
from perfed.nets.lenet import lenet5
from perfed.nets.mlp import mlp
from perfed.nets.net import Net
from perfed.nets.resnet import resnet18, resnet32, resnet34


@dataclass(frozen=True)
class _Entry:
    """A builder, the smallest side of an image that it accepts, and the smallest that suits it."""

    builder: Callable[..., Net]
    possible: int
    comfortable: int


_NETS = {
    "alexnet": _Entry(alexnet, 16, 32),
    "cifarnet": _Entry(cifarnet, 16, 28),
    "cnn": _Entry(cnn, 16, 28),
    "conv3": _Entry(conv3, 8, 16),
    "conv3attn": _Entry(conv3attn, 8, 16),
    "digitsnet": _Entry(digitsnet, 8, 28),
    "lenet5": _Entry(lenet5, 12, 28),
    "mlp": _Entry(mlp, 1, 8),
    "resnet18": _Entry(resnet18, 8, 16),
    "resnet32": _Entry(resnet32, 8, 16),
    "resnet34": _Entry(resnet34, 8, 16),
}


def names() -> tuple[str, ...]:
    """The networks that `build` knows."""
    return tuple(_NETS)


def min_size(name: str) -> int:
    """The smallest side of an image that suits the network; smaller images are best scaled up to it."""
    return _entry(name).comfortable


def options(name: str) -> tuple[str, ...]:
    """The options that `build` takes for this network."""
    parameters = signature(_entry(name).builder).parameters.values()
    return tuple(p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY)


def build(name: str, input_shape: Sequence[int], num_classes: int, **given: Any) -> Net:
    """The network of this name for samples of this shape; weights are drawn from torch's global generator."""
    entry = _entry(name)
    for option in given:
        if not options(name):
            raise ConfigError(f"Network {name!r} has no options, but {option!r} was given.", "Leave it out.")
        if option not in options(name):
            raise unknown(f"option of network {name!r}", option, options(name))
    shape = tuple(input_shape)
    _check_shape(name, entry, shape, num_classes)
    try:
        return validate_call(entry.builder)(shape, num_classes, **given)
    except ValidationError as failure:
        wrong = failure.errors()[0]
        where = ".".join(str(part) for part in wrong["loc"])
        raise ConfigError(
            f"Option {where!r} of network {name!r} cannot be {wrong['input']!r}.", f"{wrong['msg']}."
        ) from failure


def _entry(name: str) -> _Entry:
    if name not in _NETS:
        raise unknown("network", name, _NETS)
    return _NETS[name]


def _check_shape(name: str, entry: _Entry, shape: tuple[int, ...], num_classes: int) -> None:
    if num_classes < 1:
        raise NetError(f"Network {name!r} cannot tell {num_classes} classes apart.", "Give one or more.")
    if not shape or min(shape) < 1 or (len(shape) != 3 and entry.possible > 1):
        raise NetError(
            f"Network {name!r} cannot take samples of shape {list(shape)}.",
            "It takes images: (channels, height, width).",
        )
    if min(shape[1:], default=1) < entry.possible:
        least, side = entry.possible, entry.comfortable
        raise NetError(
            f"Network {name!r} needs images of {least}x{least} or more, not {shape[1]}x{shape[2]}.",
            f"Scale the images up, best to {side}x{side} or more, or take another network such as 'mlp'.",
        )
