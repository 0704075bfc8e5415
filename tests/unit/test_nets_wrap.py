"""Models that users bring: how they are divided, where they can be cut, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfed import nets
from perfed.errors import NetError
from perfed.nets.net import Net

torch.set_num_threads(1)
SHAPE = (1, 6, 6)


class Custom(nn.Module):
    """A branching body, a renamed nested BatchNorm, a buffer of its own, and a head in the middle of the list."""

    def __init__(self, finish=lambda logits: logits, drop: float = 0.0) -> None:
        super().__init__()
        self.finish = finish
        self.drop = drop
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.tensor(0.5))
        self.left = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(8, 3)
        self.right = nn.ModuleDict({"conv": nn.Conv2d(1, 4, 3), "normalise": nn.BatchNorm2d(4)})
        self.track = nn.BatchNorm1d(8, affine=False)

    def forward(self, x):
        x = (x - self.mean) * self.scale
        both = torch.cat([self.left(x), self.right["normalise"](self.right["conv"](x))], 1).amax((2, 3))
        return self.finish(self.fc(F.dropout(self.track(both), self.drop, self.training)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3))

    def forward(self, x):
        return self.classifier(self.features(x))


def assert_partition(net: Net) -> None:
    owned = [net.names(layer) for layer in net.layers]
    assert all(owned)
    assert sum(map(len, owned)) == len(net.module.state_dict())
    assert frozenset().union(*owned) == frozenset(net.module.state_dict())


def assert_cut_before_head(net: Net) -> None:
    net.module.eval()
    x = torch.rand(3, *SHAPE)
    k = net.cut({net.head})
    assert k == len(net.body)
    assert torch.equal(net.run_suffix(net.run_prefix(x, k), k), net(x))
    assert torch.equal(net.features(x), net.run_prefix(x, k))


def test_a_custom_module_is_divided_and_cut_before_its_head():
    net = nets.wrap(Custom(), "fc", SHAPE)
    assert net.layers == ("root", "left", "right", "fc")
    assert net.names("root") == {"scale", "mean"}
    assert net.layer_of("track.running_mean") == "right"
    assert (net.num_classes, net.input_shape) == (3, SHAPE)
    assert_partition(net)
    assert_cut_before_head(net)
    assert net.cut({"right"}) == net.cut({"right", "fc"}) == net.cut({"root"}) == 0
    with pytest.raises(NetError, match="cannot be cut before layer 1"):
        net.run_prefix(torch.rand(2, *SHAPE), 1)


def test_gradients_through_the_cut_are_those_of_the_whole():
    net = nets.wrap(Custom(), "fc", SHAPE)
    x = torch.rand(4, *SHAPE)
    grads = []
    for run in (net, lambda x: net.run_suffix(net.run_prefix(x, 3), 3)):
        net.module.zero_grad()
        run(x).logsumexp(1).sum().backward()
        grads.append([p.grad.clone() for p in net.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    "finish",
    [
        lambda z: F.log_softmax(z, 1),
        lambda z: z * 1.0,  # equal values today; a learnable factor would be lost by the cut
        lambda z: z.mul_(1.0),
        lambda z: z.mul_(2.0),
        lambda z: z.flip(1),
    ],
)
def test_a_head_whose_output_is_processed_further_is_never_cut(finish):
    net = nets.wrap(Custom(finish), "fc", SHAPE)
    assert net.cut({"fc"}) == 0
    assert net.features(torch.rand(5, *SHAPE)).shape == (5, 8)
    with pytest.raises(NetError, match="cannot be cut"):
        net.run_suffix(torch.rand(2, 8), 3)


def test_processing_in_training_mode_alone_is_noticed():
    class Sly(Custom):
        def forward(self, x):
            logits = super().forward(x)
            return logits / 2 if self.training else logits

    assert nets.wrap(Sly(), "fc", SHAPE).cut({"fc"}) == 0


def test_a_view_of_the_heads_output_is_still_the_heads_output():
    assert nets.wrap(Custom(lambda z: z.view(-1, 3)), "fc", SHAPE).cut({"fc"}) == 3


def test_a_head_that_runs_twice_is_never_cut():
    class Twice(Custom):
        def forward(self, x):
            first, second = super().forward(x), super().forward(1 - x)
            return second if self.second else first

    for second in (False, True):
        model = Twice()
        model.second = second
        assert nets.wrap(model, "fc", SHAPE).cut({"fc"}) == 0


def test_a_nested_head_leaves_a_layer_of_the_rest_before_it():
    net = nets.wrap(Nested(), "classifier.3", SHAPE)
    assert net.layers == ("features", "classifier", "classifier.3")
    assert net.names("classifier") == {"classifier.0.weight", "classifier.0.bias"}
    assert net.names("classifier.3") == {"classifier.3.weight", "classifier.3.bias"}
    assert_partition(net)
    assert_cut_before_head(net)


def test_explicit_layers():
    net = nets.wrap(Nested(), "classifier.3", SHAPE, layers=["features.0", "classifier.0"])
    assert net.layers == ("features.0", "classifier.0", "classifier.3")
    assert_partition(net)
    assert_cut_before_head(net)
    with pytest.raises(NetError, match=r"No layer owns features\.0\.weight"):
        nets.wrap(Nested(), "classifier.3", layers=["classifier.0"])
    with pytest.raises(NetError, match=r"'feature\.0'.*'features\.0'"):
        nets.wrap(Nested(), "classifier.3", layers=["feature.0", "classifier.0"])
    with pytest.raises(NetError, match="do not end with the head"):
        nets.wrap(Nested(), "classifier.3", layers=["classifier.3", "features", "classifier.0"])


def sequential() -> nn.Sequential:
    relu = nn.ReLU()  # shared between two places, which named_children() would show once
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 3), nn.Softplus()
    )


def test_a_sequential_is_cut_before_every_layer():
    net = nets.wrap(sequential(), "6", SHAPE)
    assert net.layers == ("1", "2", "4", "6")
    assert_partition(net)
    net.module.eval()
    x = torch.rand(3, *SHAPE)
    for k, layer in enumerate(net.layers):
        assert net.cut({layer}) == k
        assert torch.equal(net.run_suffix(net.run_prefix(x, k), k), net(x))
    assert torch.equal(net.module[7](net.module[6](net.features(x))), net(x))
    with pytest.raises(NetError, match=r"'6' runs after the head '4'.*head='6'"):
        nets.wrap(sequential(), "4", SHAPE)


def test_a_sequential_with_a_forward_of_its_own_is_not_taken_apart():
    class Reversed(nn.Sequential):
        def forward(self, x):
            return super().forward(x).flip(1)

    net = nets.wrap(Reversed(nn.Flatten(), nn.Linear(36, 5), nn.Linear(5, 3)), "2", SHAPE)
    assert net.layers == ("1", "2")
    assert net.cut({"2"}) == 0


def test_probing_leaves_no_trace():
    model = Custom(drop=0.5).train()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    net = nets.wrap(model, "fc", SHAPE)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert net.module is model
    assert not model.fc._forward_pre_hooks
    assert not model.fc._forward_hooks
    net.features(torch.rand(2, *SHAPE))
    assert not model.fc._forward_pre_hooks


def test_without_a_shape_nothing_is_cut_until_it_is_probed():
    net = nets.wrap(Custom(), "fc")
    assert net.input_shape == ()
    net(torch.rand(2, *SHAPE))
    assert net.cut({"fc"}) == 0
    net.probe(SHAPE)
    assert net.input_shape == SHAPE
    assert net.cut({"fc"}) == 3
    assert net.clone().cut({"fc"}) == 3


def test_features_do_not_run_the_head():
    model = Custom()
    model.fc = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    net = nets.wrap(model, "fc", SHAPE)
    state = torch.get_rng_state()
    net.module.train()
    net.run_prefix(torch.rand(2, *SHAPE, generator=torch.Generator()), 3)
    assert model.fc[0].num_batches_tracked == 0
    assert model.track.num_batches_tracked == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert not net.stochastic(3)  # the dropout is the head's


def test_batchnorm_is_found_by_type_under_any_name():
    net = nets.wrap(Custom(), "fc")
    kept = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    tracked = {"track.running_mean", "track.running_var", "track.num_batches_tracked"}
    assert net.batchnorm_names == {f"right.normalise.{name}" for name in kept} | tracked
    norm = nn.BatchNorm1d(36)
    twice = nn.Sequential(nn.Flatten(), nn.ModuleDict({"a": norm, "b": norm}), nn.Linear(36, 3))
    assert len(nets.wrap(twice, "2").batchnorm_names) == 10
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(36), nn.Linear(36, 3))
    model[2].bn = nn.Parameter(torch.zeros(1))
    assert nets.wrap(model, "2").batchnorm_names == frozenset()


def test_randomness_is_found_by_type_and_by_trial():
    assert nets.wrap(Nested(), "classifier.3").stochastic(2)
    assert not nets.wrap(Nested(), "classifier.3").stochastic(0)
    assert nets.wrap(Custom(drop=0.5), "fc", SHAPE).stochastic(3)  # F.dropout: no module to see
    assert not nets.wrap(Custom(), "fc", SHAPE).stochastic(3)

    class Hazy(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.rand_like(x)

    hazy = nets.wrap(nn.Sequential(nn.Flatten(), Hazy(36, 36), nn.Linear(36, 3)), "2", SHAPE)
    assert hazy.stochastic(1)
    assert hazy.with_head(nn.Linear(36, 3)).stochastic(1)
    assert not nets.wrap(nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(36, 3)), "2").stochastic(1)


def test_errors_name_what_is_wrong():
    with pytest.raises(NetError, match=r"no module 'clasifier\.3'.*Did you mean 'classifier\.3'"):
        nets.wrap(Nested(), "clasifier.3")
    with pytest.raises(NetError, match=r"head 'classifier\.1' has no parameters"):
        nets.wrap(Nested(), "classifier.1")
    with pytest.raises(NetError, match="Pass num_classes"):
        nets.wrap(nn.Sequential(nn.Conv2d(1, 3, 6)), "0")
    assert nets.wrap(nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten()), "0", SHAPE, 3).num_classes == 3
    with pytest.raises(NetError, match=r"returns a tensor of shape \[2, 3\], not logits of shape \[2, 4\]"):
        nets.wrap(Nested(), "classifier.3", SHAPE, 4)
    with pytest.raises(NetError, match=r"cannot run on samples of shape \[1, 9, 9\]"):
        nets.wrap(Nested(), "classifier.3", (1, 9, 9))
    with pytest.raises(NetError, match="returns no tensor"):
        nets.wrap(Custom(lambda z: (z, z)), "fc", SHAPE)
    unused = Nested()
    unused.other = nn.Linear(2, 3)
    with pytest.raises(NetError, match="never runs its head 'other'"):
        nets.wrap(unused, "other", SHAPE)
    with pytest.raises(NetError, match="owns 'nothing'"):
        nets.wrap(Nested(), "classifier.3").layer_of("nothing")


def test_tied_and_unfinished_weights_are_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Linear(36, 36))
    model[2].weight = model[1].weight
    with pytest.raises(NetError, match=r"1\.weight and 2\.weight are one tensor"):
        nets.wrap(model, "2")
    with pytest.raises(NetError, match="no shape yet"):
        nets.wrap(nn.Sequential(nn.LazyLinear(3)), "0", num_classes=3)


def test_layers_out_of_order_or_claimed_twice_are_refused():
    with pytest.raises(NetError, match="out of order"):
        Net(sequential(), {"a": ["1", "4"], "b": ["2"], "head": ["6"]}, SHAPE, 3)
    with pytest.raises(NetError, match="both claim 'features'"):
        Net(Nested(), {"a": ["features"], "b": ["features"], "head": ["classifier"]}, None, 3)
    with pytest.raises(NetError, match=r"'b' \(feature\) has no parameters"):
        Net(Nested(), {"a": ["features"], "b": ["feature"], "head": ["classifier"]}, None, 3)


def test_a_net_with_another_head_is_cut_like_the_first():
    net = nets.wrap(Nested(), "classifier.3", SHAPE)
    changed = net.with_head(nn.Linear(8, 5), 5)
    assert net(torch.rand(2, *SHAPE)).shape == (2, 3)
    assert changed(torch.rand(2, *SHAPE)).shape == (2, 5)
    assert_cut_before_head(changed)
