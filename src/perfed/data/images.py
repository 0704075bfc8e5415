"""Image tensors (N, C, H, W), uint8 or float32 in [0, 1]: size, channels, and the scale that networks see."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 4096  # images handled at a time, so that a conversion costs little memory beyond its result


def normalise(x: Tensor) -> Tensor:
    """The values a network is given: [0, 255] or [0, 1] becomes [-1, 1] in float32."""
    return x.float().div_(255).sub_(0.5).div_(0.5) if x.dtype == torch.uint8 else (x - 0.5) / 0.5


def resize(x: Tensor, height: int, width: int) -> Tensor:
    """Scale every image to height x width, bilinear and without aliasing."""
    if x.shape[-2:] == (height, width):
        return x
    out = torch.empty((len(x), x.shape[1], height, width), dtype=x.dtype)
    for i in range(0, len(x), CHUNK):
        y = F.interpolate(
            x[i : i + CHUNK].float(), (height, width), mode="bilinear", align_corners=False, antialias=True
        )
        out[i : i + CHUNK] = y.round_().clamp_(0, 255).to(torch.uint8) if x.dtype == torch.uint8 else y
    return out


def with_channels(x: Tensor, channels: int) -> Tensor:
    """Gray images repeated to three channels, or colour images weighted to one (ITU-R 601 luma)."""
    have = x.shape[1]
    if have == channels:
        return x
    if have == 1:
        return x.repeat(1, channels, 1, 1)
    if have == 3 and channels == 1:
        out = torch.empty((len(x), 1, *x.shape[2:]), dtype=x.dtype)
        weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
        for i in range(0, len(x), CHUNK):
            y = (x[i : i + CHUNK].float() * weights).sum(1, keepdim=True)
            out[i : i + CHUNK] = y.round_().clamp_(0, 255).to(torch.uint8) if x.dtype == torch.uint8 else y
        return out
    raise ValueError(f"images of {have} channels cannot become images of {channels}")


def fit(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The images in another data set's shape (C, H, W)."""
    channels, height, width = shape
    return with_channels(resize(x, height, width), channels)
