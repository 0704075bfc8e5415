"""Tensors in shared memory, and what the pool copies."""

from __future__ import annotations

import os

import pytest
import torch

from perfed.core import registry
from perfed.data import Federation
from perfed.engine.executors import Pool
from perfed.engine.rounds import Simulation
from perfed.engine.settings import Settings
from perfed.engine.shared import Area
from tests.conftest import small_net


def test_tensors_come_back_to_the_bit() -> None:
    area = Area()
    state = {
        "float": torch.randn(3, 5),
        "whole": torch.arange(7),
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(4).bfloat16(),
        "single": torch.tensor(2.5),
        "nothing": torch.zeros(0, 3),
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }
    for _ in range(2):
        found = area.read(area.write(state))
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
    assert area.read(area.write({})) == {}
    area.close()


def test_an_area_grows_and_another_process_sees_it() -> None:
    area = Area()
    area.write({"small": torch.zeros(3)})
    child = os.fork()
    if not child:
        area.write({"large": torch.arange(100_000)})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found = area.read([("large", "int64", [100_000], 0)])
    assert torch.equal(found["large"], torch.arange(100_000))
    area.close()


@pytest.mark.parametrize(("name", "each"), [("fedavg", 0), ("local", 1)])
def test_what_all_clients_receive_is_written_once(name: str, each: int, digits: Federation) -> None:
    method = registry.make(name, lr=0.05)
    net = small_net(digits)
    model = sum(parameter.numel() * 4 for parameter in net.module.parameters())
    simulation = Simulation(digits, net, method, Settings(rounds=3, eval_every=9), workers=2)
    simulation.step(1)
    pool = simulation.executor
    assert isinstance(pool, Pool)
    before = pool._common.written, sum(desk.inbox.written for desk in pool._desks)
    simulation.step(2)
    common, own = pool._common.written - before[0], sum(desk.inbox.written for desk in pool._desks) - before[1]
    assert common == model * (not each)
    assert own == model * 6 * each
    simulation.close()
