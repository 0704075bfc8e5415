"""Gradients of the mean cross-entropy through small convolutions and linear layers, straight through compiled code.

Where networks are as small as LeNet-5, calling torch costs as much as its arithmetic. Here a step, from the images to
the gradients, is a few calls of compiled functions (`convpool.c`, `dense.c`), in memory that is kept from batch to
batch. Sums run in another order than torch's, each in one lane: equal to about 1e-5 of a gradient's largest value, not
to the bit, and less exact where large terms cancel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perfed.nets import compiler, fused

SOURCE = Path(__file__).with_name("dense.c")
WEIGHTS = 1 << 16
"""The most weights of a linear layer; where there are more, torch is as fast."""
ROOMS = 4
"""For how many shapes of a batch memory is kept."""
TAKES = {"enter": (3, 3), "leave": (2, 3), "forward": (5, 4), "slope": (3, 2), "weights": (5, 3), "inputs": (4, 3)}
"""How many addresses and whole numbers the functions take."""


@dataclass(frozen=True)
class Layer:
    """A convolution with the pooling and ReLU behind it, or a linear layer."""

    weight: Tensor
    bias: Tensor
    learns: bool
    """whether its gradients are wanted"""
    cut: bool = True
    """whether ReLU follows"""
    conv: nn.Conv2d | None = None

    @property
    def shapes(self) -> tuple[torch.Size, torch.Size]:
        """Of its weights and its biases."""
        return self.weight.shape, self.bias.shape

    @property
    def addresses(self) -> tuple[int, int]:
        """Where its weights and its biases begin."""
        return self.weight.data_ptr(), self.bias.data_ptr()

    @property
    def lying(self) -> tuple[Any, ...]:
        """All that tells whether the functions would read these weights and biases as they did before."""
        both = self.weight, self.bias
        return tuple((part.data_ptr(), part.shape, part.stride(), part.dtype) for part in both)

    @property
    def fits(self) -> bool:
        """Whether weights and biases are single floats that lie as the functions read them."""
        lying = torch.channels_last if self.conv else torch.contiguous_format
        single = all(part.dtype == torch.float32 and part.device.type == "cpu" for part in (self.weight, self.bias))
        return single and self.weight.is_contiguous(memory_format=lying) and self.bias.is_contiguous()


def straight(groups: Sequence[Sequence[nn.Module]]) -> Straight | None:
    """What computes the gradients of these modules, all plain ones, if there is compiled code for all of them."""
    left = [group for group in groups if not isinstance(group[0], nn.Identity)]
    convolutions: list[Layer] = []
    linears: list[Layer] = []
    while left and len(left[0]) > 1:
        conv = left.pop(0)[0]
        assert isinstance(conv, nn.Conv2d)
        assert conv.bias is not None
        convolutions.append(Layer(conv.weight, conv.bias, conv.weight.requires_grad, conv=conv))
    modules = [group[0] for group in left]
    flat = bool(modules) and isinstance(modules[0], nn.Flatten)
    del modules[:flat]
    while modules and isinstance(linear := modules.pop(0), nn.Linear):
        cut = bool(modules) and isinstance(modules[0], nn.ReLU)
        linears.append(Layer(linear.weight, linear.bias, linear.weight.requires_grad, cut))
        del modules[:cut]
    if modules or not linears or linears[-1].cut or (convolutions and not flat):
        return None
    layers = [*convolutions, *linears]
    alike = all(layer.fits and layer.weight.requires_grad == layer.bias.requires_grad for layer in layers)
    small = all(layer.weight.numel() <= WEIGHTS for layer in linears)
    return Straight(convolutions, linears) if alike and small else None


@cache
def library() -> ctypes.CDLL:
    """What computes linear layers; compiled, if it never was."""
    made = compiler.load(SOURCE)
    for name, (addresses, numbers) in TAKES.items():
        function = getattr(made, name)
        function.argtypes = [ctypes.c_void_p] * addresses + [ctypes.c_long] * numbers
        function.restype = ctypes.c_bool if name == "slope" else None
    made.padded.argtypes, made.padded.restype = [ctypes.c_long], ctypes.c_long
    return made


class Straight:
    """A forward and a backward pass; one thread's at a time, as memory is kept from call to call."""

    def __init__(self, convolutions: Sequence[Layer], linears: Sequence[Layer]) -> None:
        self.convolutions, self.linears, self.layers = convolutions, linears, [*convolutions, *linears]
        self.first = next(place for place, layer in enumerate(self.layers) if layer.learns)
        self.trained = [part for layer in self.layers if layer.learns for part in (layer.weight, layer.bias)]
        self._shapes = [layer.shapes for layer in self.layers]
        self._lying = [layer.lying for layer in self.layers]
        self._rooms: dict[torch.Size, _Room] = {}

    def takes(self, x: Tensor, y: Tensor) -> bool:
        """Whether these samples and labels, and the weights as they lie now, are what the functions read."""
        if (now := [layer.lying for layer in self.layers]) != self._lying:  # others have been put in the place of some
            same = [layer.shapes for layer in self.layers] == self._shapes
            if not same or not all(layer.fits for layer in self.layers):
                return False
            self._lying = now
        if not compiler.single(x):
            return False
        if y.dtype != torch.int64 or y.shape != x.shape[:1] or not y.is_contiguous() or y.device.type != "cpu":
            return False
        return x.shape in self._rooms or self._passes(x.shape)

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> list[Tensor] | None:
        """The gradients of what is trained, in its layout; None if a label is none of the classes."""
        if x.shape not in self._rooms:
            if len(self._rooms) == ROOMS:
                del self._rooms[next(iter(self._rooms))]
            self._rooms[x.shape] = _Room(self.convolutions, self.linears, x.shape)
        room, dense = self._rooms[x.shape], library()
        images = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()
        value = images.data_ptr()
        for layer, held in zip(self.convolutions, room.held, strict=True):
            value = held.forward(value, *layer.addresses)
        dense.enter(value, room.columns[0], room.rows[0], *room.entered)
        for layer, here, there, rows, sizes in zip(
            self.linears, room.columns, room.columns[1:], [*room.rows[1:], None], room.sizes, strict=False
        ):
            dense.forward(here, *layer.addresses, there, rows, *sizes, layer.cut)
        if dense.slope(room.columns[-1], y.data_ptr(), room.slopes[-1], len(x), room.sizes[-1][-1]):
            return None
        gradients = [torch.empty_like(part) for part in self.trained]
        self._back(room, dense, [part.data_ptr() for part in gradients])
        return gradients

    def _back(self, room: _Room, dense: ctypes.CDLL, wanted: list[int]) -> None:
        """Fill the places for gradients, the last layer's first."""
        deep = len(self.convolutions)
        for place in reversed(range(self.first, len(self.layers))):
            layer, k = self.layers[place], place - deep
            to = [wanted.pop(), wanted.pop()][::-1] if layer.learns else []
            if k >= 0:
                if to:
                    dense.weights(room.slopes[k + 1], room.rows[k], room.scratch, *to, *room.sizes[k])
                if place > self.first:
                    known = room.columns[k] if k and self.linears[k - 1].cut else None
                    dense.inputs(room.slopes[k + 1], layer.addresses[0], known, room.slopes[k], *room.sizes[k])
                if place > self.first and not k:
                    dense.leave(room.slopes[0], room.held[-1].slope.data_ptr(), *room.entered)
            else:
                if to:
                    room.held[place].filters(*to)
                if place > self.first:
                    room.held[place].inputs(layer.addresses[0], room.held[place - 1].slope.data_ptr())

    def _passes(self, shape: Sequence[int]) -> bool:
        """Whether samples of this shape pass through all layers."""
        if not shape or not shape[0]:
            return False
        for layer in self.convolutions:
            assert layer.conv is not None
            if not fused.passes(layer.conv, shape):
                return False
            shape = fused.after(layer.conv, shape)
        return len(shape) in (2, 4) and prod(shape[1:]) == self.linears[0].weight.shape[1]


class _Room:
    """Memory for batches of one shape: what every layer takes, as columns and as rows, and the slopes of that."""

    def __init__(self, convolutions: Sequence[Layer], linears: Sequence[Layer], shape: Sequence[int]) -> None:
        n, padded = shape[0], library().padded
        self.held: list[fused.Held] = []
        for layer in convolutions:
            assert layer.conv is not None
            self.held.append(fused.Held(layer.conv, shape))
            shape = self.held[-1].y.shape
        self.entered = n, shape[1], prod(shape[2:])
        self.sizes = [(n, layer.weight.shape[1], layer.weight.shape[0]) for layer in linears]
        taken = [size[1] for size in self.sizes]
        self._kept: list[Tensor] = []
        self.columns = [self._place(length, padded(n)) for length in [*taken, self.sizes[-1][-1]]]
        self.slopes = [self._place(length, padded(n)) for length in [*taken, self.sizes[-1][-1]]]
        self.rows = [self._place(n, padded(length)) for length in taken]
        self.scratch = self._place(max(out * padded(length) for _, length, out in self.sizes))

    def _place(self, *size: int) -> int:
        """Zeros, as the lanes that nobody reads are computed too, and some numbers would take the processor long."""
        self._kept.append(torch.zeros(size, dtype=torch.float32))
        return self._kept[-1].data_ptr()
