"""The known networks: published sizes, layers that partition the state, cuts that change nothing, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from perfed import nets
from perfed.errors import ConfigError, NetError, UnknownNameError
from perfed.nets.attention import CrossAttention
from perfed.nets.net import Net

torch.set_num_threads(1)

# Options that keep the wide networks quick; the shapes of their layers stay as they are.
SLIM = {
    "alexnet": {"hidden": [16, 12], "batchnorm": True},
    "digitsnet": {"hidden": [16, 12]},
    "resnet18": {"width": 0.0625},
    "resnet34": {"width": 0.0625},
    "cifarnet": {"dropout": 0.5},
}


def small(name: str, channels: int = 3, side: int | None = None, classes: int = 7, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    side = side or nets.min_size(name)
    return nets.build(name, (channels, side, side), classes, **SLIM.get(name, {}))


def count(net: Net, *layers: str) -> int:
    owned = net.names(*(layers or net.layers))
    return sum(p.numel() for name, p in net.module.named_parameters() if name in owned)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "published"),
    [
        ("cnn", (1, 28, 28), 10, {}, 582_026),
        ("lenet5", (3, 32, 32), 10, {}, 62_006),
        ("lenet5", (1, 28, 28), 10, {}, 61_706),
        ("cifarnet", (3, 32, 32), 10, {}, 307_842),
        ("mlp", (1, 28, 28), 10, {}, 199_210),
        ("mlp", (1, 28, 28), 10, {"hidden": [200]}, 784 * 200 + 200 + 2010),
        ("digitsnet", (3, 28, 28), 10, {}, 14_219_210),
        ("resnet18", (3, 32, 32), 10, {}, 11_173_962),
        ("resnet34", (3, 32, 32), 10, {}, 21_282_122),
        ("resnet32", (3, 32, 32), 10, {}, 466_906),
        ("alexnet", (3, 224, 224), 1000, {"stem": "full"}, 61_100_840),
    ],
)
def test_published_parameter_counts(name, shape, classes, options, published):
    with torch.device("meta"):
        assert count(nets.build(name, shape, classes, **options)) == published


def test_cnn_counts_by_layer():
    net = nets.build("cnn", (1, 28, 28), 10)
    assert net.layers == ("conv1", "conv2", "fc1", "fc2")
    assert [count(net, layer) for layer in net.layers] == [832, 51_264, 524_800, 5_130]
    assert (net.head, net.body) == ("fc2", ("conv1", "conv2", "fc1"))
    assert "582,026" in repr(net)


def test_resnet32_has_a_layer_per_block():
    net = small("resnet32")
    assert net.layers == ("conv1", *(f"block{i}" for i in range(1, 16)), "fc")
    assert net.layer_of("bn1.running_mean") == "conv1"
    assert net.layer_of("block6.shortcut.0.weight") == "block6"


def test_resnet_stages_of_equal_width_still_line_up():
    net = nets.build("resnet18", (1, 16, 16), 3, width=0.01)
    assert net(torch.rand(2, 1, 16, 16)).shape == (2, 3)


@pytest.mark.parametrize("name", nets.names())
@pytest.mark.parametrize("channels", [1, 3])
def test_every_cut_gives_the_whole_forward_pass(name, channels):
    net = small(name, channels)
    net.module.eval()
    x = torch.rand(2, *net.input_shape)
    with torch.no_grad():
        whole = net(x)
        assert whole.shape == (2, 7)
        for k in range(len(net.layers) + 1):
            torch.testing.assert_close(net.run_suffix(net.run_prefix(x, k), k), whole, rtol=0, atol=0)
        features = net.features(x)
        assert features.ndim == (4 if name == "conv3attn" else 2)
        torch.testing.assert_close(net.module.get_submodule(net.head_path)(features), whole, rtol=0, atol=0)
        torch.testing.assert_close(features, net.run_prefix(x, len(net.body)), rtol=0, atol=0)


@pytest.mark.parametrize("name", nets.names())
def test_layers_partition_the_state(name):
    net = small(name)
    owned = [net.names(layer) for layer in net.layers]
    assert sum(map(len, owned)) == len(frozenset().union(*owned))
    assert frozenset().union(*owned) == frozenset(net.module.state_dict()) == net.names(*net.layers)
    assert all(net.layer_of(n) == layer for layer in net.layers for n in net.names(layer))
    assert not net.names()


@pytest.mark.parametrize("name", nets.names())
def test_odd_and_larger_images_train(name):
    side = max(nets.min_size(name), 16) + 3
    net = small(name, 1, side)
    net(torch.rand(3, 1, side, side)).square().mean().backward()
    assert all(p.grad is not None for p in net.module.parameters())


@pytest.mark.parametrize("name", nets.names())
def test_same_seed_same_bits(name):
    first, again, other = small(name).module, small(name).module, small(name, seed=1).module
    pairs = zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_cut_is_the_first_trained_layer_and_never_behind_the_head():
    net = small("cnn")
    assert [net.cut({layer}) for layer in net.layers] == [0, 1, 2, 3]
    assert net.cut({"fc2", "conv2"}) == 1
    assert net.cut(()) == 3
    with pytest.raises(UnknownNameError, match=r"'fc2\.weight'.*fc2"):
        net.cut({"fc2.weight"})


def test_a_clone_shares_nothing():
    net = small("digitsnet")
    twin = net.clone()
    with torch.no_grad():
        for tensor in twin.module.state_dict().values():
            tensor.add_(1)
    assert all(
        not torch.equal(a, b) for a, b in zip(*(n.module.state_dict().values() for n in (net, twin)), strict=True)
    )
    x = torch.rand(2, *net.input_shape)
    net.module.eval(), twin.module.eval()
    assert not torch.equal(twin.run_prefix(x, 1), net.run_prefix(x, 1))


def test_with_head_changes_the_head_alone():
    net = small("conv3").with_head(nn.Sequential(nn.Linear(256, 5), nn.Linear(5, 3)), 3)
    assert net.num_classes == 3
    assert net.names("fc2") == {"fc2.0.weight", "fc2.0.bias", "fc2.1.weight", "fc2.1.bias"}
    x = torch.rand(2, *net.input_shape)
    assert torch.equal(net.run_suffix(net.run_prefix(x, 4), 4), net(x))
    assert net(x).shape == (2, 3)


def test_random_layers_are_found_where_they_are():
    net = small("cifarnet")  # dropout between fc2 and the head
    assert [net.stochastic(k) for k in range(6)] == [False, False, False, False, True, True]
    assert not small("cnn").stochastic(4)


def test_batchnorm_of_residual_blocks_is_found():
    net = small("resnet18")
    assert net.has_batchnorm
    assert {"block3.shortcut.1.running_var", "bn1.weight", "block8.bn2.num_batches_tracked"} <= net.batchnorm_names
    assert not any("conv" in name or name.startswith("fc") for name in net.batchnorm_names)
    assert len(net.batchnorm_names) == 5 * (1 + 16 + 3)
    assert not small("cnn").has_batchnorm
    assert small("cnn").batchnorm_names == frozenset()


def test_attention_is_the_papers_formula():
    torch.manual_seed(0)
    block = CrossAttention(8, 3, 2, heads=2).double()
    q_from, kv_from = torch.rand(2, 1, 8, 3, 2, dtype=torch.float64)
    out = block(q_from, kv_from)
    rows = [m(x)[0].flatten(1).T for m, x in ((block.query, q_from), (block.key, kv_from), (block.value, kv_from))]
    position = block.position.flatten(1).T
    for h in (slice(0, 4), slice(4, 8)):
        q, k, v, p = (m[:, h] for m in (*rows, position))
        expected = torch.softmax((q @ k.T + q @ p.T) / math.sqrt(6), dim=1) @ v
        torch.testing.assert_close(out[0].flatten(1).T[:, h], expected)
    assert torch.equal(block(q_from), block(q_from, q_from))
    assert not torch.allclose(block(q_from), out)


def test_the_attention_networks_head_is_its_whole_classifier():
    net = small("conv3attn")
    assert net.layers == ("conv1", "conv2", "conv3", "classifier")
    weights = ("attention.query", "attention.key", "attention.value", "fc1", "fc2")
    biases = ("fc1", "fc2")
    assert net.names("classifier") == {f"classifier.{n}.weight" for n in weights} | {
        f"classifier.{n}.bias" for n in biases
    }
    x = torch.rand(2, *net.input_shape)
    maps = net.features(x)
    classifier = net.module.get_submodule(net.head_path)
    assert torch.equal(classifier[1:](classifier[0](maps, maps)), net(x)), "queries can be taken from elsewhere"
    placed = nets.build("conv3attn", (3, 16, 16), 7, position=True).module.get_submodule("classifier.attention")
    assert placed.position.shape == maps.shape[1:]
    placed.set_position(False)
    assert "position" not in placed.state_dict()


def test_the_scale_of_the_maps_means_nothing_to_the_attention():
    """An extractor whose weights have grown is as good a start for a new classifier as a fresh one."""
    net = small("conv3attn")
    x = torch.rand(5, *net.input_shape)
    maps, scores = net.features(x), net(x)
    torch.testing.assert_close(maps.square().mean(dim=(1, 2, 3)), torch.ones(5))
    with torch.no_grad():
        for parameter in net.module.get_submodule("conv3").parameters():
            parameter.mul_(50)
    torch.testing.assert_close(net(x), scores)


def test_mlp_takes_vectors_and_any_depth():
    x = torch.rand(4, 30)
    for hidden in ([], [9], [9, 8, 7]):
        net = nets.build("mlp", (30,), 5, hidden=hidden)
        assert len(net.layers) == len(hidden) + 1
        assert torch.equal(net.module.get_submodule(net.head_path)(net.features(x)), net(x))
    assert nets.build("mlp", (1, 8, 8), 10, hidden=[]).features(torch.rand(2, 1, 8, 8)).shape == (2, 64)


def test_names_options_and_sizes_that_do_not_exist_are_refused_by_name():
    with pytest.raises(UnknownNameError, match=r"network 'resnet19'.*'resnet18'"):
        nets.build("resnet19", (3, 32, 32), 10)
    with pytest.raises(UnknownNameError, match="network"):
        nets.min_size("nope")
    with pytest.raises(ConfigError, match=r"option of network 'mlp' 'hiden'.*'hidden'"):
        nets.build("mlp", (1, 8, 8), 10, hiden=[3])
    with pytest.raises(ConfigError, match=r"'hidden\.0' of network 'mlp' cannot be -3"):
        nets.build("mlp", (1, 8, 8), 10, hidden=[-3])
    with pytest.raises(ConfigError, match="dropout"):
        nets.build("cnn", (1, 28, 28), 10, dropout=1.0)
    with pytest.raises(NetError, match=r"'cnn' needs images of 16x16 or more, not 8x8.*28x28"):
        nets.build("cnn", (1, 8, 8), 10)
    with pytest.raises(NetError, match="channels, height, width"):
        nets.build("cnn", (784,), 10)
    with pytest.raises(NetError, match=r"0 classes"):
        nets.build("cnn", (1, 28, 28), 0)
    with pytest.raises(NetError, match="stem = 'small'"):
        nets.build("alexnet", (3, 32, 32), 10, stem="full")
    assert nets.min_size("cnn") == nets.min_size("lenet5") == 28
    assert nets.min_size("mlp") == 8


@pytest.mark.parametrize(
    ("name", "least"),
    [("cnn", 16), ("lenet5", 12), ("conv3", 8), ("conv3attn", 8), ("resnet18", 8), ("alexnet", 16), ("digitsnet", 8)],
)
def test_the_stated_minimum_works_and_one_less_does_not(name, least):
    net = small(name, 1, least)
    assert net(torch.rand(2, 1, least, least)).shape == (2, 7)
    with pytest.raises(NetError, match=f"{least}x{least} or more, not {least - 1}x{least - 1}"):
        small(name, 1, least - 1)
