"""LeNet-5: two 5x5 convolutions (6, 16), each with ReLU and 2x2 max pooling, linear 120, 84, and the head.

Y. LeCun, L. Bottou, Y. Bengio, P. Haffner. Gradient-based learning applied to document recognition.
Proceedings of the IEEE, 1998; with ReLU and max pooling as in the CIFAR-10 experiments of LG-FedAvg (Liang
et al., 2020, arXiv:2001.01523) and CD2-pFed (Shen et al., CVPR 2022). 62,006 parameters on 3x32x32 with 10
classes.

Images smaller than 32x32 get two pixels of padding in the first convolution, which is how 28x28 digits
became the 32x32 input of the original (61,706 parameters on 1x28x28). LG-FedAvg's published code has 100
units in place of 84: hidden = [120, 100]. batchnorm = true puts BatchNorm after every layer but the head, for methods
that are about it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import PositiveInt
from torch import nn

from perfed.nets.net import Net
from perfed.nets.stack import after, classifier, conv, stack


def lenet5(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    hidden: Sequence[PositiveInt] = (120, 84),
    batchnorm: bool = False,
) -> Net:
    """LeNet-5 with ReLU and max pooling."""
    channels, height, width = input_shape
    pad = 2 if min(height, width) < 32 else 0
    rows, columns = after((height, width), (4 - 2 * pad, 2), (4, 2))
    return stack(
        {
            "conv1": conv(channels, 6, 1, kernel=5, pad=pad, norm=batchnorm, pool=nn.MaxPool2d(2)),
            "conv2": {**conv(6, 16, 2, kernel=5, norm=batchnorm, pool=nn.MaxPool2d(2)), "flatten": nn.Flatten()},
            **classifier(16 * rows * columns, hidden, num_classes, norm=batchnorm),
        },
        input_shape,
        num_classes,
    )
