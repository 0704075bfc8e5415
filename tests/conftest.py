"""What tests share: a small federation of real digits, small networks, and runs on them."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perfed import nets
from perfed.core import registry
from perfed.core.method import Method
from perfed.data import Federation, federate
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Outcome, Settings
from perfed.nets import halfbits
from perfed.nets.net import Net
from perfed.nets.stack import conv, dense, stack

torch.set_num_threads(1)

# bfloat16 is tested everywhere: without the matrix unit where torch cannot use it, before torch's first product asks.
if not halfbits.works():
    os.environ.update([halfbits.LIMIT.split("=")])
    halfbits.works.cache_clear()


# A shell without job control starts what runs in the background deaf to Ctrl-C, and all that it starts in turn.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _no_file_of_the_user_is_touched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _small_work_goes_to_the_pool_too() -> Iterator[None]:
    """Tests are small; what they ask of workers is not to be done in this process unnoticed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perfed.engine.executors.TINY_WORK", 0)
        yield


@pytest.fixture
def flower_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can be made in this process as in Flower's server, and who waits for an answer looks often."""
    from flwr.supercore.task_identity import TaskIdentity

    monkeypatch.setattr(TaskIdentity, "_run_id", 1, raising=False)
    for name in ("run_id", "node_id", "task_id"):
        setattr(TaskIdentity, name, 1)
    monkeypatch.setattr("perfed.flower.nodes.AGAIN", 0.05)
    monkeypatch.setattr("perfed.flower.nodes.LONGEST", 0.05)


@pytest.fixture(scope="session")
def digits() -> Federation:
    """Six clients with two digits each, 8 x 8 pixels."""
    return federate("digits", clients=6, split="classes:2", seed=0)


def small_net(federation: Federation, name: str = "mlp", seed: int = 0, **options: Any) -> Net:
    """A network with the same first weights for the same seed."""
    if name == "batchnorm":
        return batchnorm_net(federation, seed)
    if name == "few-channels":
        return few_channels_net(federation, seed)
    torch.manual_seed(seed)
    options = options or ({"hidden": [16, 12]} if name == "mlp" else {})
    return nets.build(name, federation.input_shape, federation.num_classes, **options)


def few_channels_net(federation: Federation, seed: int = 0) -> Net:
    """A convolution that compiled kernels take, a linear layer and a head."""
    channels, height, width = federation.input_shape
    torch.manual_seed(seed)
    flat = {"flatten": nn.Flatten(), **dense(4 * (height // 2) * (width // 2), 12, 1)}
    layers = {"conv1": conv(channels, 4, 1, kernel=3, pad=1, pool=nn.MaxPool2d(2)), "fc1": flat}
    layers["head"] = {"head": nn.Linear(12, federation.num_classes)}
    return stack(layers, federation.input_shape, federation.num_classes)


def batchnorm_net(federation: Federation, seed: int = 0) -> Net:
    """A convolution and a linear layer, each with a BatchNorm that is called otherwise, and a head."""
    channels, height, width = federation.input_shape
    torch.manual_seed(seed)
    module = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(channels, 4, 3),
            scale=nn.BatchNorm2d(4),
            relu1=nn.ReLU(),
            flatten=nn.Flatten(),
            fc=nn.Linear(4 * (height - 2) * (width - 2), 12),
            shift=nn.BatchNorm1d(12),
            relu2=nn.ReLU(),
            head=nn.Linear(12, federation.num_classes),
        )
    )
    layers = {"conv": ["conv", "scale"], "fc": ["fc", "shift"], "head": ["head"]}
    return Net(module, layers, federation.input_shape, federation.num_classes)


@pytest.fixture(scope="session")
def simulate(digits: Federation) -> Callable[..., Outcome]:
    """A short run: simulate("fedrep", rounds=3, workers=2, lr=0.1) with any setting or hyper-parameter."""

    def run(
        method: str | Method,
        *,
        federation: Federation = digits,
        net: Net | str = "mlp",
        directory: Path | None = None,
        stop_after: int | None = None,
        simulation: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        **hyper: Any,
    ) -> Outcome:
        made = method if isinstance(method, Method) else registry.make(method, **{"lr": 0.05, **hyper})
        start = small_net(federation, net) if isinstance(net, str) else net
        given = Settings(**{"rounds": 3, "fraction": 0.5, **(settings or {})})
        return Simulation(  # type: ignore[return-value]
            federation, made.build(start), made, given, directory=directory, **(simulation or {})
        ).run(stop_after)

    return run
