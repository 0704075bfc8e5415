"""A multi-layer perceptron: linear layers with ReLU between them.

Two hidden layers of 200 by default, as B. McMahan et al., Communication-efficient learning of deep networks
from decentralized data, AISTATS 2017 (199,210 parameters on 1x28x28 with 10 classes). hidden = [200] is the
784-200-10 network, hidden = [] softmax regression.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from pydantic import PositiveInt
from torch import nn

from perfed.nets.cnn import Dropout
from perfed.nets.net import Net
from perfed.nets.stack import classifier, stack


def mlp(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    hidden: Sequence[PositiveInt] = (200, 200),
    dropout: Dropout = 0.0,
    batchnorm: bool = False,
) -> Net:
    """Linear layers on the flattened input, of any shape; dropout, if any, comes right before the head."""
    layers = classifier(prod(input_shape), hidden, num_classes, norm=batchnorm, drop=dropout)
    layers["fc1"] = {"flatten": nn.Flatten(), **layers["fc1"]}
    return stack(layers, input_shape, num_classes)
