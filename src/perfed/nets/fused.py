"""Convolution, 2x2 max pooling and ReLU as one compiled step, for convolutions with few channels (`convpool.c`).

    y = relu(max_pool(conv(x, w) + b))

torch runs the three one after another, with kernels made for many channels; where there are few, as in LeNet-5, most of
a step goes there. Going back, it computes every position, of which pooling has chosen one in four. Sums run in another
order than torch's, so this is a numeric mode of its own: equal to torch's to 1e-5, not to the bit. Any other step of a
network stays torch's, but for wider convolutions (`perfed.nets.tiled`), attention (`perfed.nets.attending`) and
networks that are small as a whole (`perfed.nets.straight`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perfed.nets import compiler

SOURCE = Path(__file__).with_name("convpool.c")
OUTPUTS, WIDTH = 64, 1600
"""The most output channels, and the most values of a filter with rows of full vectors, for which it is worth while."""
LAST = torch.channels_last
SLACK = 32
"""Floats behind a map that its last vectors may read."""


def fusible(modules: Sequence[nn.Module]) -> bool:
    """Whether these are a convolution with few channels, 2x2 max pooling and ReLU, the last two in either order."""
    if len(modules) != 3 or not _is_small(modules[0]):
        return False
    pool, relu = modules[1:] if isinstance(modules[1], nn.MaxPool2d) else modules[:0:-1]
    return _is_pooling(pool) and is_plain(relu, nn.ReLU)


def run(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """What a fusible convolution and the two modules behind it make of x; by torch, if it is none of our maps."""
    conv = modules[0]
    assert isinstance(conv, nn.Conv2d)
    assert conv.bias is not None
    if any(map(_hooked, modules)) or not takes(conv, x):
        for module in modules:
            x = module(x)
        return x
    return _ConvPoolRelu.apply(x, conv.weight, conv.bias, conv)  # type: ignore[no-any-return, no-untyped-call]


def by_hand(conv: nn.Conv2d, x: Tensor) -> tuple[Tensor, Callable[[Tensor, Sequence[bool]], tuple[Tensor | None, ...]]]:
    """What is made of x, and what gives the gradients of x, filters and biases, if each is wanted; without a graph."""
    kept = compiler.Kept()
    assert conv.bias is not None
    y = _ConvPoolRelu.forward(kept, x, conv.weight, conv.bias, conv)

    def back(dy: Tensor, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
        assert dy.shape == y.shape
        kept.needs_input_grad = wanted
        return _ConvPoolRelu.backward(kept, dy)[:3]

    return y, back


def takes(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether these are maps of the convolution's, as single floats, of which something is left after pooling."""
    assert conv.bias is not None
    return compiler.single(x, conv.weight, conv.bias) and passes(conv, x.shape)


def passes(conv: nn.Conv2d, shape: Sequence[int]) -> bool:
    """Whether these are the shape of some maps of the convolution's, of which something is left after pooling."""
    if len(shape) != 4 or shape[1] != conv.in_channels or not shape[0]:
        return False
    padded = [length + 2 * int(conv.padding[0]) for length in shape[2:]]
    places = shape[0] * (prod(padded) * conv.in_channels + SLACK)
    return min(padded) > conv.kernel_size[0] and places < 1 << 31


def after(conv: nn.Conv2d, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of what is made of maps of this one."""
    n, _, *size = shape
    grows = 2 * int(conv.padding[0]) - conv.kernel_size[0] + 1
    return n, conv.out_channels, *((length + grows) // 2 for length in size)


class Held:
    """The step for maps of one shape, in memory that is kept from batch to batch; maps are told by their addresses."""

    def __init__(self, conv: nn.Conv2d, shape: Sequence[int]) -> None:
        (n, _, *size) = shape
        self.library, self.lengths = kernel(conv), (n, *size)
        self.y = _maps(*after(conv, shape))
        self.slope = torch.empty_like(self.y)
        """the place for the gradient of y"""
        padded, filters = self.library.padded_size(*size), self.library.filter_size()
        sizes = (n, padded), (padded,), (conv.out_channels, filters)
        self._padded, self._room, self._made = (torch.empty(size, dtype=torch.float32) for size in sizes)
        self._tiles = torch.empty(self.library.room_size(*size), dtype=torch.float32)
        self._chosen, self._entries = _choices(self.y)

    def forward(self, x: int, weight: int, bias: int) -> int:
        """What is made of x; the filters have their channels last."""
        y = self.y.data_ptr()
        room = self._tiles.data_ptr()
        self.library.forward(x, weight, bias, self._padded.data_ptr(), room, y, self._chosen.data_ptr(), *self.lengths)
        return y

    def filters(self, dw: int, db: int) -> None:
        """The gradients of filters and biases at the slope of the last maps."""
        places = self.slope, self._chosen, self._padded, self._entries, self._made
        self.library.filters(*(place.data_ptr() for place in places), dw, db, *self.lengths)

    def inputs(self, weight: int, dx: int) -> None:
        """The gradient of the last maps."""
        places = self.slope.data_ptr(), self._chosen.data_ptr(), weight, self._room.data_ptr(), dx
        self.library.inputs(*places, *self.lengths)


def kernel(conv: nn.Module) -> ctypes.CDLL:
    """What computes this convolution; compiled, if it never was."""
    assert isinstance(conv, nn.Conv2d)
    return _kernel(conv.in_channels, conv.out_channels, conv.kernel_size[0], int(conv.padding[0]))


@cache
def _kernel(inputs: int, outputs: int, size: int, padding: int) -> ctypes.CDLL:
    library = compiler.load(SOURCE, CI=inputs, CO=outputs, K=size, PAD=padding, SLACK=SLACK)
    for length in (library.padded_size, library.filter_size, library.room_size):
        length.restype = ctypes.c_long
    for function, addresses in ((library.forward, 7), (library.filters, 7), (library.inputs, 5)):
        function.argtypes = [ctypes.c_void_p] * addresses + [ctypes.c_long] * 3
    library.padded_size.argtypes = library.room_size.argtypes = [ctypes.c_long] * 2
    return library


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of this kind, nothing is hooked to it, and its forward pass is its class's."""
    own = {"forward", "_conv_forward"} & vars(module).keys()
    return type(module) is kind and not _hooked(module) and not own


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _is_pooling(pool: nn.Module) -> bool:
    if not isinstance(pool, nn.MaxPool2d) or not is_plain(pool, nn.MaxPool2d):
        return False
    sizes = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode, pool.return_indices)
    return sizes in (((2, 2), (2, 2), 0, 1, False, False), (2, 2, 0, 1, False, False))


def _is_small(conv: nn.Module) -> bool:
    if not isinstance(conv, nn.Conv2d) or not is_plain(conv, nn.Conv2d):
        return False
    ways = (conv.stride, conv.dilation, conv.groups, conv.padding_mode)
    if ways != ((1, 1), (1, 1), 1, "zeros") or conv.bias is None or isinstance(conv.padding, str):
        return False
    if len({*conv.kernel_size}) > 1 or len({*conv.padding}) > 1 or conv.out_channels > OUTPUTS:
        return False
    size = conv.kernel_size[0]
    return 16 * ceil(size * conv.in_channels / 16) * size <= WIDTH


def _maps(n: int, channels: int, height: int, width: int) -> Tensor:
    strides = (channels * height * width, 1, width * channels, channels)
    return torch.empty_strided((n, channels, height, width), strides, dtype=torch.float32)


def _choices(y: Tensor) -> tuple[Tensor, Tensor]:
    """Room for what pooling chose for every value, and for a place and a number each of one map's."""
    return torch.empty(y.numel(), dtype=torch.uint8), torch.empty(y[0, 0].numel(), dtype=torch.int64)


class _ConvPoolRelu(torch.autograd.Function):
    """The step and its gradients; there is no second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, conv: nn.Conv2d) -> Tensor:
        x, weight, bias = x.contiguous(memory_format=LAST), weight.contiguous(memory_format=LAST), bias.contiguous()
        n, _, *size = x.shape
        library, lengths = kernel(conv), (n, *size)
        padded, y = x.new_empty(n, library.padded_size(*size)), _maps(*after(conv, x.shape))
        room = x.new_empty(library.room_size(*size))
        chosen, _ = _choices(y)
        library.forward(*map(compiler.address, (x, weight, bias, padded, room, y, chosen)), *lengths)
        ctx.library, ctx.lengths, ctx.shape = library, lengths, x.shape
        ctx.save_for_backward(padded, chosen, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        compiler.once()
        padded, chosen, weight = ctx.saved_tensors
        dy, weight = dy.resolve_neg().contiguous(memory_format=LAST), weight.contiguous(memory_format=LAST)
        dx = dw = db = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dw, db = torch.empty_like(weight), weight.new_empty(len(weight))
            _, entries = _choices(dy)
            made = weight.new_empty(len(weight), ctx.library.filter_size())
            ctx.library.filters(*map(compiler.address, (dy, chosen, padded, entries, made, dw, db)), *ctx.lengths)
        if ctx.needs_input_grad[0]:
            dx, room = _maps(*ctx.shape), torch.empty_like(padded[0])
            ctx.library.inputs(*map(compiler.address, (dy, chosen, weight, room, dx)), *ctx.lengths)
        return dx, dw, db, None
