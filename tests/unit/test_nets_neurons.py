"""Hidden neurons can change places without a change of the function, in every network that is accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed import nets
from perfed.errors import NetError
from perfed.nets.net import Net
from perfed.nets.neurons import hidden_neurons

NETS: list[tuple[str, tuple[int, ...], dict[str, Any], int]] = [
    ("mlp", (1, 8, 8), {"hidden": [16, 12]}, 2),
    ("lenet5", (1, 28, 28), {}, 4),
    ("cnn", (1, 28, 28), {"channels": [4, 6], "hidden": [10]}, 3),
    ("digitsnet", (1, 12, 12), {"hidden": [10, 8]}, 5),
    ("resnet18", (1, 8, 8), {"width": 0.0625}, 12),
    ("resnet32", (1, 8, 8), {"width": 0.25}, 18),
]


def built(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> Net:
    """A network with running statistics of its own."""
    torch.manual_seed(0)
    net = nets.build(name, shape, 10, **options)
    with torch.no_grad():
        net(torch.randn(8, *shape))
    net.module.eval()
    return net


@pytest.mark.parametrize(("name", "shape", "options", "groups"), NETS)
def test_neurons_change_places_and_nothing_else_changes(
    name: str, shape: tuple[int, ...], options: dict[str, Any], groups: int
) -> None:
    net = built(name, shape, options)
    found = hidden_neurons(net)
    assert len(found) == groups
    state = {key: tensor.clone() for key, tensor in net.module.state_dict().items()}
    moved = dict(state)
    for neurons in found:
        order = torch.arange(neurons.count).flip(0)
        moved = neurons.reorder(moved, order)
        back = neurons.reorder(moved, order)
        assert neurons.count == len(order)
        assert all(tensor.shape == state[key].shape for key, tensor in back.items())
    assert any(not torch.equal(moved[key], state[key]) for key in state)
    x = torch.randn(3, *shape)
    with torch.no_grad():
        before = net(x)
        net.module.load_state_dict(moved)
        assert torch.allclose(net(x), before, atol=1e-5)


def test_a_channel_owns_its_block_after_a_flatten() -> None:
    found = hidden_neurons(built("cnn", (1, 28, 28), {"channels": [4, 6], "hidden": [10]}))
    assert [neurons.count for neurons in found] == [4, 6, 10]
    assert found[0].columns == {"conv2.weight": 1}
    assert found[1].columns == {"fc1.weight": 16}, "4 x 4 pixels of each channel"
    assert found[1].rows == {"conv2.weight": 1, "conv2.bias": 1}
    assert found[1].sources == {"conv2.weight": found[0]}
    assert found[0].sources == {"conv1.weight": None}


def test_batchnorm_follows_its_channel() -> None:
    first = hidden_neurons(built("digitsnet", (1, 12, 12), {"hidden": [10, 8]}))[0]
    norms = {f"bn1.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")}
    assert set(first.rows) == {"conv1.weight", "conv1.bias"} | norms


def test_layers_that_are_added_share_their_neurons() -> None:
    found = hidden_neurons(built("resnet18", (1, 8, 8), {"width": 0.0625}))
    makers = {"conv1.weight", "block1.conv2.weight", "block2.conv2.weight"}
    assert makers <= set(found[0].rows)
    assert set(found[0].sources) == makers
    assert {"block1.conv1.weight", "block3.shortcut.0.weight"} <= set(found[0].columns)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.paired = nn.Conv2d(4, 4, 3, groups=2)
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.paired(self.stem(x))).mean((2, 3)))


def test_what_cannot_be_followed_is_refused_by_name() -> None:
    with pytest.raises(NetError, match="paired"):
        hidden_neurons(nets.wrap(Grouped(), "head", (1, 8, 8)))
    with pytest.raises(NetError, match="norm3"):
        hidden_neurons(nets.build("conv3attn", (1, 16, 16), 10))
