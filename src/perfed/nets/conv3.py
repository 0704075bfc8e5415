"""Three 3x3 convolutions (32, 64, 128) and two linear layers; `conv3attn` has attention between them.

The network of PSE, Personalized semantics excitation for federated image classification: the three
convolutions are the extractor, the rest the classifier. The paper gives the channels, the order (attention,
max pooling, flatten, two linear layers) and the four heads; kernel size, the pooling after the first two
convolutions and the linear width are not in it and are chosen here.

In `conv3attn` the whole classifier is one layer, the head: an `nn.Sequential` that begins with the attention
block. So every method that parts a body from a head parts the extractor from the classifier, as the paper
does, and the head receives the last convolution's feature map. Its weights start from He's initialisation where a
ReLU follows (K. He et al., Delving deep into rectifiers, ICCV 2015) and from Glorot's elsewhere: from PyTorch's own
the signal fades before it has passed the attention, which has no residual connection, and at the paper's learning
rate training hardly sets in. The extractor's feature map is divided by its root mean square (B. Zhang, R. Sennrich,
Root mean square layer normalization, NeurIPS 2019). The paper has no normalisation; without one the maps of a shared
extractor grow from round to round, until private classifiers that start late diverge on them.
"""

from __future__ import annotations

from collections import OrderedDict

from pydantic import PositiveFloat, PositiveInt
from torch import nn

from perfed.nets.attention import CrossAttention
from perfed.nets.net import Net
from perfed.nets.stack import after, classifier, conv, stack

Layers = dict[str, dict[str, nn.Module]]


def conv3(
    input_shape: tuple[int, int, int], num_classes: int, *, hidden: PositiveInt = 256, width: PositiveFloat = 1.0
) -> Net:
    """The extractor, with `width` times the channels, and two linear layers."""
    widths = _widths(width)
    layers = {**_extractor(input_shape[0], widths), **_linear(input_shape, widths[-1], hidden, num_classes)}
    return stack(layers, input_shape, num_classes)


def conv3attn(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    hidden: PositiveInt = 256,
    width: PositiveFloat = 1.0,
    heads: PositiveInt = 4,
    position: bool = False,
) -> Net:
    """The extractor and the classifier: one attention block (`position` adds its position term), two linear layers."""
    rows, columns = after(input_shape[1:], (0, 2), (0, 2))
    widths = _widths(width)
    attention = CrossAttention(widths[-1], rows, columns, heads=heads, position=position)
    modules: dict[str, nn.Module] = {"attention": attention}
    for linear in _linear(input_shape, widths[-1], hidden, num_classes).values():
        modules |= linear
    head: Layers = {"classifier": {"classifier": nn.Sequential(OrderedDict(modules))}}
    extractor = _extractor(input_shape[0], widths)
    extractor["conv3"]["norm3"] = nn.RMSNorm([widths[-1], rows, columns], elementwise_affine=False, eps=1e-6)
    net = stack({**extractor, **head}, input_shape, num_classes)
    for name, module in net.module.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            before_relu = name.startswith("conv") or name.endswith("fc1")
            if before_relu:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            else:
                nn.init.xavier_uniform_(module.weight)
    return net


def _widths(factor: float) -> list[int]:
    return [max(1, round(factor * channels)) for channels in (32, 64, 128)]


def _extractor(channels: int, widths: list[int]) -> Layers:
    first, second, third = widths
    return {
        "conv1": conv(channels, first, 1, kernel=3, pad=1, pool=nn.MaxPool2d(2)),
        "conv2": conv(first, second, 2, kernel=3, pad=1, pool=nn.MaxPool2d(2)),
        "conv3": conv(second, third, 3, kernel=3, pad=1),
    }


def _linear(input_shape: tuple[int, int, int], channels: int, hidden: int, num_classes: int) -> Layers:
    rows, columns = after(input_shape[1:], (0, 2), (0, 2), (0, 2))
    layers = classifier(channels * rows * columns, [hidden], num_classes)
    layers["fc1"] = {"pool3": nn.MaxPool2d(2), "flatten": nn.Flatten(), **layers["fc1"]}
    return layers
