"""Residual networks of basic blocks for small images: a 3x3 stem without max pooling, and BatchNorm.

K. He, X. Zhang, S. Ren, J. Sun. Deep residual learning for image recognition. CVPR 2016. `resnet18` and
`resnet34` are its ImageNet networks with the stem for 32x32 images (11,173,962 and 21,282,122 parameters
with 10 classes); `resnet32` is its CIFAR network of three stages, 16-32-64 channels (466,906 parameters).

Where a block changes the shape its shortcut is a 1x1 convolution (the paper's option B) in all three, also in
`resnet32`, for which the paper pads with zeros: so that channels mean the same on both sides of the addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from perfed.nets.net import Net
from perfed.nets.stack import stack

Width = Annotated[float, Field(gt=0)]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut around them; one layer of the network."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        residual = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu2(residual + self.shortcut(x))
        return out


def resnet18(input_shape: tuple[int, int, int], num_classes: int, *, width: Width = 1.0) -> Net:
    """Eight blocks in four stages; `width` multiplies the channels."""
    return _resnet(input_shape, num_classes, (64, 128, 256, 512), (2, 2, 2, 2), width)


def resnet32(input_shape: tuple[int, int, int], num_classes: int, *, width: Width = 1.0) -> Net:
    """Fifteen blocks in three narrow stages; `width` multiplies the channels."""
    return _resnet(input_shape, num_classes, (16, 32, 64), (5, 5, 5), width)


def resnet34(input_shape: tuple[int, int, int], num_classes: int, *, width: Width = 1.0) -> Net:
    """Sixteen blocks in four stages; `width` multiplies the channels."""
    return _resnet(input_shape, num_classes, (64, 128, 256, 512), (3, 4, 6, 3), width)


def _resnet(
    input_shape: tuple[int, int, int],
    num_classes: int,
    channels: Sequence[int],
    depths: Sequence[int],
    width: float,
) -> Net:
    stages = [max(1, round(width * c)) for c in channels]
    stem = nn.Conv2d(input_shape[0], stages[0], 3, padding=1, bias=False)
    layers: dict[str, dict[str, nn.Module]] = {
        "conv1": {"conv1": stem, "bn1": nn.BatchNorm2d(stages[0]), "relu1": nn.ReLU()}
    }
    inputs = stages[0]
    for stage, (outputs, depth) in enumerate(zip(stages, depths, strict=True)):
        for i in range(depth):
            name = f"block{len(layers)}"
            layers[name] = {name: BasicBlock(inputs, outputs, stride=2 if stage and not i else 1)}
            inputs = outputs
    last = next(reversed(layers))
    layers[last] |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    layers["fc"] = {"fc": nn.Linear(inputs, num_classes)}
    net = stack(layers, input_shape, num_classes)
    for module in net.module.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net
