"""Convolutions of 3x3 by Winograd's minimal algorithm (`tiled.c`): a quarter of the products, between the same maps.

    Y = A^T [ (G g G^T) * (B^T d B) ] A    for every tile of 4x4 positions

S. Winograd, Arithmetic complexity of computations, SIAM 1980; as A. Lavin, S. Gray, Fast algorithms for convolutional
neural networks, CVPR 2016. torch's kernels for processors go by the definition. Wherever a network's modules call torch
for such a convolution, `Tiles` answers instead; modules, hooks and parameters stay as they are. Sums are others than
torch's: equal to 1e-5 of the largest value, not to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from perfed.nets import compiler

SOURCE = Path(__file__).with_name("tiled.c")
LANES = 16
"""Channels come in so many."""
LEAST, MOST = 32, 256
"""The channels for which it is worth while."""
GAIN = 1.5
"""By how much the products must become fewer; parts of tiles behind a map's edge are computed for nothing."""
LAST = torch.channels_last
TILE, STEP, TAPS = 6, 4, 9


def known(module: nn.Module) -> bool:
    """Whether there is compiled code for this convolution."""
    return (
        isinstance(module, nn.Conv2d)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and _known(module.weight, (module.stride, module.padding, module.dilation), module.groups)
    )


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> bool:
    """Whether these are maps of such a convolution, as single floats, of a size for which tiles are worth while."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in tensors):
        return False
    if x.dim() != 4 or x.shape[1] != weight.shape[1] or not len(x) or (bias is not None and bias.dim() != 1):
        return False
    height, width = (length + 2 * padding - 2 for length in x.shape[2:])
    tiles = -(-height // STEP) * -(-width // STEP)
    return min(height, width) > 0 and height * width * TAPS >= GAIN * tiles * TILE * TILE


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """The convolution of maps that are taken."""
    return _Convolution.apply(x, weight, bias, padding)  # type: ignore[no-any-return, no-untyped-call]


def by_hand(conv: nn.Conv2d, x: Tensor) -> tuple[Tensor, Callable[[Tensor, Sequence[bool]], tuple[Tensor | None, ...]]]:
    """What is made of x, and what gives the gradients of x, filters and biases, if each is wanted; without a graph."""
    kept = compiler.Kept()
    y = _Convolution.forward(kept, x, conv.weight, conv.bias, int(conv.padding[0]))

    def back(dy: Tensor, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
        kept.needs_input_grad = wanted
        return _Convolution.backward(kept, dy)[:3]

    return y, back


class Tiles(TorchFunctionMode):
    """Inside, convolutions that are known are computed by tiles."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer in torch's place, or let it answer."""
        if func is F.conv2d and len(args) == 7 and not kwargs:  # as nn.Conv2d calls it
            x, weight, bias, stride, padding, dilation, groups = args
            if _known(weight, (stride, padding, dilation), groups) and takes(x, weight, bias, padding[0]):
                return convolve(x, weight, bias, padding[0])
        return func(*args, **kwargs or {})


@cache
def kernel(inputs: int, outputs: int, padding: int) -> ctypes.CDLL:
    """What computes these convolutions; compiled, if it never was."""
    library = compiler.load(SOURCE, CI=inputs, CO=outputs, PAD=padding)
    library.room_size.restype = ctypes.c_long
    for function, addresses in ((library.forward, 5), (library.inputs, 4), (library.filters, 5)):
        function.argtypes = [ctypes.c_void_p] * addresses + [ctypes.c_long] * 3
    return library


def _known(weight: Tensor, ways: tuple[Any, Any, Any], groups: int) -> bool:
    """Whether these are 3x3 filters that go over all positions, for as many channels as it is worth while."""
    stride, padding, dilation = ways
    outputs, inputs = weight.shape[:2]
    return (
        weight.shape[2:] == (3, 3)
        and (stride, dilation, groups) == ((1, 1), (1, 1), 1)
        and padding in ((0, 0), (1, 1), (2, 2))
        and all(LEAST <= channels <= MOST and channels % LANES == 0 for channels in (inputs, outputs))
    )


def _maps(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, memory_format=LAST)


class _Convolution(torch.autograd.Function):
    """The convolution and its gradients; there is no second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        x, weight = x.contiguous(memory_format=LAST), weight.contiguous(memory_format=LAST)
        bias = None if bias is None else bias.contiguous()
        (outputs, inputs), (n, _, *size) = weight.shape[:2], x.shape
        library, lengths = kernel(inputs, outputs, padding), (n, *size)
        room = torch.empty(library.room_size(), dtype=torch.float32)
        y = _maps(n, outputs, *(length + 2 * padding - 2 for length in size))
        library.forward(*map(_address, (x, weight, bias, room, y)), *lengths)
        ctx.library, ctx.lengths, ctx.biased = library, lengths, bias is not None
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        compiler.once()
        x, weight = ctx.saved_tensors
        dy, dx, dw, db = dy.contiguous(memory_format=LAST), None, None, None
        room = torch.empty(ctx.library.room_size(), dtype=torch.float32)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dw, db = torch.empty_like(weight), weight.new_empty(len(weight)) if ctx.biased else None
            ctx.library.filters(*map(_address, (dy, x, room, dw, db)), *ctx.lengths)
        if ctx.needs_input_grad[0]:
            dx = _maps(*x.shape)
            ctx.library.inputs(*map(_address, (dy, weight, room, dx)), *ctx.lengths)
        return dx, dw, db, None


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p() if tensor is None else compiler.address(tensor)
