"""Convolutions of 3x3 by Winograd's minimal algorithm (`tiled.c`): a quarter of the products, between the same maps.

    Y = A^T [ (G g G^T) * (B^T d B) ] A    for every tile of 4x4 positions

S. Winograd, Arithmetic complexity of computations, SIAM 1980; as A. Lavin, S. Gray, Fast algorithms for convolutional
neural networks, CVPR 2016. torch's kernels for processors go by the definition. Where an `nn.Conv2d` that is known here
calls torch, `Tiles` answers instead; modules, hooks and parameters stay as they are. Sums are others than torch's, and
rounded more: equal to 1e-5 of the largest value, not to the bit. So what is exactly zero by the definition, as where
all inputs are zero and there is no bias, may be a millionth here.
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
FEW = 4
"""Fewer tiles of a map are not worth what the filters' transformation costs."""
GAIN = 2
"""By how much products must become fewer; parts of tiles behind a map's edge are computed for nothing."""
LAST = torch.channels_last
TILE, STEP, TAPS = 6, 4, 9


def known(module: nn.Module) -> bool:
    """Whether there is compiled code for this convolution."""
    return (
        isinstance(module, nn.Conv2d)
        and module.padding_mode == "zeros"
        and module.kernel_size == (3, 3)
        and _usual(module.stride, module.padding, module.dilation, module.groups)
        and _many(module.in_channels, module.out_channels)
    )


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> bool:
    """Whether these are maps and filters of such a convolution, as single floats, and tiles worth while for them."""
    if not compiler.single(x, weight, *(() if bias is None else (bias,))):
        return False
    if x.dim() != 4 or not len(x) or weight.dim() != 4 or weight.shape[2:] != (3, 3) or not _many(*weight.shape[:2]):
        return False
    if x.shape[1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return False
    height, width = (length + 2 * padding - 2 for length in x.shape[2:])
    tiles = -(-height // STEP) * -(-width // STEP)
    return min(height, width) > 0 and tiles >= FEW and height * width * TAPS >= GAIN * tiles * TILE * TILE


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
            if _usual(stride, padding, dilation, groups) and takes(x, weight, bias, padding[0]):
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


def _usual(stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Whether filters go over all positions."""
    return (stride, dilation, groups) == ((1, 1), (1, 1), 1) and padding in ((0, 0), (1, 1), (2, 2))


def _many(*channels: int) -> bool:
    """Whether these are as many channels as it is worth while for."""
    return all(LEAST <= number <= MOST and number % LANES == 0 for number in channels)


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
        # whatever saved them for autograd, or computed them again, may have laid them out anew
        x, weight, dy = (tensor.contiguous(memory_format=LAST) for tensor in (*ctx.saved_tensors, dy.resolve_neg()))
        dx = dw = db = None
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
