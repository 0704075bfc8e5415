"""The pull towards given weights: its value, and its gradient to the bit."""

import pytest
import torch
from torch.nn import functional as F

from perfed.core.proximal import parameters, proximal
from perfed.nets.lenet import lenet5


@pytest.mark.parametrize("frozen", [(), ("conv1", "conv2")])
@pytest.mark.parametrize("lam", [0.01, 1.0, 15.3])
def test_the_pull_is_that_of_the_written_out_sum_of_squares(frozen: tuple[str, ...], lam: float) -> None:
    torch.manual_seed(0)
    net = lenet5((1, 28, 28), 10)
    anchor = {name: w + 0.1 * torch.randn_like(w) for name, w in parameters(net).items()}
    for name in net.names(*frozen):
        net.module.get_parameter(name).requires_grad_(False)
    trained = {name: w for name, w in net.module.named_parameters() if w.requires_grad}
    x, y = torch.randn(4, 1, 28, 28), torch.arange(4)

    written_out = sum((w - anchor[name]).square().sum() for name, w in trained.items()) / 2
    value = proximal(net, anchor)

    torch.testing.assert_close(value, written_out)
    loss = F.cross_entropy(net.module(x), y)
    found, wanted = (
        torch.autograd.grad(loss + lam * pull, list(trained.values()), retain_graph=True)
        for pull in (value, written_out)
    )
    assert all(map(torch.equal, found, wanted))
