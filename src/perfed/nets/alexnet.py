"""AlexNet: five convolutions and three linear layers.

A. Krizhevsky, I. Sutskever, G. Hinton. ImageNet classification with deep convolutional neural networks.
NeurIPS 2012, in the one-column form of A. Krizhevsky, One weird trick for parallelizing convolutional
neural networks, 2014, without dropout. batchnorm = true puts BatchNorm after every layer but the head: the
DomainNet network of FedBN (Li et al., ICLR 2021), which FedBSD uses.

stem = "small" (for images from 32x32) has a 3x3 first convolution with stride 2, a 3x3 second one and 2x2
pooling; stem = "full" (for images from 64x64) is the published network with 11x11 stride 4, 5x5 and 3x3
pooling: 61,100,840 parameters on 3x224x224 with 1,000 classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import PositiveInt
from torch import nn

from perfed.errors import NetError
from perfed.nets.net import Net
from perfed.nets.stack import classifier, conv, stack


def alexnet(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    batchnorm: bool = False,
    stem: Literal["small", "full"] = "small",
    hidden: Sequence[PositiveInt] = (4096, 4096),
) -> Net:
    """Five convolutions, average pooling to a fixed size, two linear layers and the head."""
    full = stem == "full"
    channels, height, width = input_shape
    if full and min(height, width) < 64:
        raise NetError(
            f"alexnet with stem = 'full' needs images of 64x64 or more, not {height}x{width}.",
            "Take stem = 'small', or scale the images up.",
        )
    cells = 6 if full else 2
    stride = 4 if full else 2
    kernels, pads = ((11, 5), (2, 2)) if full else ((3, 3), (1, 1))

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2) if full else nn.MaxPool2d(2)

    return stack(
        {
            "conv1": conv(channels, 64, 1, kernel=kernels[0], pad=pads[0], stride=stride, norm=batchnorm, pool=pool()),
            "conv2": conv(64, 192, 2, kernel=kernels[1], pad=pads[1], norm=batchnorm, pool=pool()),
            "conv3": conv(192, 384, 3, kernel=3, pad=1, norm=batchnorm),
            "conv4": conv(384, 256, 4, kernel=3, pad=1, norm=batchnorm),
            "conv5": {
                **conv(256, 256, 5, kernel=3, pad=1, norm=batchnorm, pool=pool()),
                "avgpool": nn.AdaptiveAvgPool2d(cells),
                "flatten": nn.Flatten(),
            },
            **classifier(256 * cells * cells, hidden, num_classes, norm=batchnorm),
        },
        input_shape,
        num_classes,
    )
