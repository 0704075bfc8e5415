"""What the machine allows: hand-written loops on one thread, channels-last, frozen parts once, batched products.

Its seconds are divided by the number of cores, as if the work could be dealt out without loss.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn import functional as F
from workload import Workload, given, report, timed


def steps(net: nn.Module, parameters: list, x, y, work: Workload, epochs: int = 1) -> None:
    sgd = torch.optim.SGD(parameters, lr=work.lr, fused=True)
    for _ in range(epochs):
        for index in torch.randperm(len(y)).split(work.batch):
            sgd.zero_grad(set_to_none=True)
            F.cross_entropy(net(x[index]), y[index]).backward()
            sgd.step()


def one_by_one(work: Workload, net: nn.Sequential, heads: dict, t: int) -> None:
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    total, mean = work.samples(t), {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for client in work.cohorts[t]:
        x, y = work.train[client]
        net.load_state_dict(start | heads.get(client, {}))
        if work.method == "fedrep":
            body, head = net[:-1], net[-1]
            with torch.no_grad():
                features = torch.cat([body(part) for part in x.split(256)])
            steps(head, list(head.parameters()), features, y, work, work.head_epochs)
            steps(net, list(body.parameters()), x, y, work)
            heads[client] = {f"fc2.{name}": tensor.clone() for name, tensor in head.state_dict().items()}
        else:
            steps(net, list(net.parameters()), x, y, work)
        for name, tensor in net.state_dict().items():
            mean[name].add_(tensor, alpha=len(y) / total)
    net.load_state_dict(mean | ({name: start[name] for name in start if "fc2" in name} if heads else {}))


def batched(work: Workload, net: nn.Sequential, t: int, group: int = 12) -> None:
    """The 784-200-10 network of several clients of one size at once, gradients by hand."""
    start = [tensor.clone() for tensor in net.state_dict().values()]
    mean = [torch.zeros_like(tensor) for tensor in start]
    for at in range(0, len(work.cohorts[t]), group):
        some = work.cohorts[t][at : at + group]
        n = min(len(work.train[client][1]) for client in some)
        x = torch.stack([work.train[client][0][:n].flatten(1) for client in some])
        y = torch.stack([F.one_hot(work.train[client][1][:n], 10).float() for client in some])
        w1, b1, w2, b2 = (tensor.expand(len(some), *tensor.shape).clone() for tensor in start)
        for index in torch.randperm(n).split(work.batch):
            a, target, rate = x[:, index], y[:, index], -work.lr / len(index)
            hidden = torch.baddbmm(b1.unsqueeze(1), a, w1.transpose(1, 2)).relu_()
            slope = torch.baddbmm(b2.unsqueeze(1), hidden, w2.transpose(1, 2)).softmax(2).sub_(target)
            below = torch.bmm(slope, w2).mul_(hidden > 0)
            w2.baddbmm_(slope.transpose(1, 2), hidden, alpha=rate)
            b2.add_(slope.sum(1), alpha=rate)
            w1.baddbmm_(below.transpose(1, 2), a, alpha=rate)
            b1.add_(below.sum(1), alpha=rate)
        for total, stack in zip(mean, (w1, b1, w2, b2), strict=True):
            total.add_(stack.sum(0), alpha=1 / len(work.cohorts[t]))
    net.load_state_dict(dict(zip(net.state_dict(), mean, strict=True)))


@torch.no_grad()
def score(work: Workload, net: nn.Sequential, heads: dict) -> float:
    own = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    right = total = 0
    if heads:
        for client, (x, y) in enumerate(work.test):
            net.load_state_dict(own | heads.get(client, {}))
            right += int((net(x).argmax(1) == y).sum())
            total += len(y)
        return right / total
    x, y = (torch.cat(parts) for parts in zip(*work.test, strict=True))
    for a, b in zip(x.split(64), y.split(64), strict=True):
        right += int((net(a).argmax(1) == b).sum())
    return right / len(y)


def main() -> None:
    torch.set_num_threads(1)
    work = given()
    net = work.module()
    if work.net == "cnn":
        net = net.to(memory_format=torch.channels_last)
    heads: dict = {}
    one_round = batched if work.net == "mlp" else lambda w, n, t: one_by_one(w, n, heads, t)
    cores = os.cpu_count() or 1
    train = [timed(lambda t=t: one_round(work, net, t)) / cores for t in range(work.rounds)]
    found: list[float] = []
    evaluation = timed(lambda: found.append(score(work, net, heads))) / cores
    report("reachable", torch.__version__, train, evaluation, found[0])


if __name__ == "__main__":
    main()
