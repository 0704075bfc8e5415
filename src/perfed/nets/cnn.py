"""Two 5x5 convolutions without padding, each with ReLU and 2x2 max pooling, then linear layers.

`cnn` (convolutions 32 and 64, linear 512, head) is the network of J. Jang, B. Choi, Personalized federated
learning via sequential layer expansion in representation learning (Vanilla and Anti scheduling): 582,026
parameters on 1x28x28 with 10 classes, 832 + 51,264 + 524,800 + 5,130 by layer. Its shape is that of B.
McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017,
less the padding.

`cifarnet` has two convolutions and three linear layers, which is all that FedBSD (P. Wang et al.,
Personalized federated learning via backbone self-distillation, ACM Multimedia Asia 2023) says of its CIFAR
network. The widths (64, 64; 120, 64) are those of L. Collins et al., Exploiting shared representations for
personalized federated learning (FedRep), ICML 2021, whose setting FedBSD follows. The wider one
commonly used with it for CIFAR-100 is channels = [64, 128], hidden = [256, 128], dropout = 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, PositiveInt
from torch import nn

from perfed.nets.net import Net
from perfed.nets.stack import after, classifier, conv, stack

Dropout = Annotated[float, Field(ge=0, lt=1)]


def cnn(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    channels: tuple[PositiveInt, PositiveInt] = (32, 64),
    hidden: Sequence[PositiveInt] = (512,),
    dropout: Dropout = 0.0,
) -> Net:
    """Two convolutions, one linear layer and the head; dropout, if any, comes right before the head."""
    first, second = channels
    rows, columns = after(input_shape[1:], (4, 2), (4, 2))
    return stack(
        {
            "conv1": conv(input_shape[0], first, 1, kernel=5, pool=nn.MaxPool2d(2)),
            "conv2": {**conv(first, second, 2, kernel=5, pool=nn.MaxPool2d(2)), "flatten": nn.Flatten()},
            **classifier(second * rows * columns, hidden, num_classes, drop=dropout),
        },
        input_shape,
        num_classes,
    )


def cifarnet(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    channels: tuple[PositiveInt, PositiveInt] = (64, 64),
    hidden: Sequence[PositiveInt] = (120, 64),
    dropout: Dropout = 0.0,
) -> Net:
    """Two convolutions, two linear layers and the head."""
    return cnn(input_shape, num_classes, channels=channels, hidden=hidden, dropout=dropout)
