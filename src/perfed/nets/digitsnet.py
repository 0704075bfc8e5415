"""Three 5x5 convolutions (64, 64, 128), three linear layers (2048, 512, head), with BatchNorm.

The Digits network of X. Li et al., FedBN: Federated learning on non-IID features via local batch
normalization, ICLR 2021, which FedBSD uses for Digits: 14,219,210 parameters on 3x28x28 with 10 classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import PositiveInt
from torch import nn

from perfed.nets.net import Net
from perfed.nets.stack import after, classifier, conv, stack


def digitsnet(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    hidden: Sequence[PositiveInt] = (2048, 512),
    batchnorm: bool = True,
) -> Net:
    """Three convolutions, the first two with 2x2 max pooling, two linear layers and the head."""
    rows, columns = after(input_shape[1:], (0, 2), (0, 2))
    return stack(
        {
            "conv1": conv(input_shape[0], 64, 1, kernel=5, pad=2, norm=batchnorm, pool=nn.MaxPool2d(2)),
            "conv2": conv(64, 64, 2, kernel=5, pad=2, norm=batchnorm, pool=nn.MaxPool2d(2)),
            "conv3": {**conv(64, 128, 3, kernel=5, pad=2, norm=batchnorm), "flatten": nn.Flatten()},
            **classifier(128 * rows * columns, hidden, num_classes, norm=batchnorm),
        },
        input_shape,
        num_classes,
    )
