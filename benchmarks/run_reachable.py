"""What the machine allows: hand-written loops, channels-last, frozen parts once, batched products, a worker per core.

Workers of one thread each share the weights' memory; clients are dealt out largest first.
"""

from __future__ import annotations

import os

import torch
from torch import multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from workload import Workload, given, report, timed

State = dict[str, torch.Tensor]


def steps(net: nn.Module, parameters: list, x, y, work: Workload, epochs: int = 1) -> None:
    sgd = torch.optim.SGD(parameters, lr=work.lr, fused=True)
    for _ in range(epochs):
        for index in torch.randperm(len(y)).split(work.batch):
            sgd.zero_grad(set_to_none=True)
            F.cross_entropy(net(x[index]), y[index]).backward()
            sgd.step()


def one_by_one(work: Workload, net: nn.Sequential, start: State, heads: State, mine: list[int], total: int) -> State:
    """The weighted sum of what some clients end with."""
    mean = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for client in mine:
        x, y = work.train[client]
        net.load_state_dict(start | own_head(heads, client))
        if work.method == "fedrep":
            body, head = net[:-1], net[-1]
            with torch.no_grad():
                features = torch.cat([body(part) for part in x.split(256)])
            steps(head, list(head.parameters()), features, y, work, work.head_epochs)
            steps(net, list(body.parameters()), x, y, work)
            for name, stack in heads.items():
                stack[client] = net.state_dict()[name]
        else:
            steps(net, list(net.parameters()), x, y, work)
        for name, tensor in net.state_dict().items():
            mean[name].add_(tensor, alpha=len(y) / total)
    return mean


def own_head(heads: State, client: int) -> State:
    return {name: stack[client] for name, stack in heads.items()}


def batched(work: Workload, start: State, mine: list[int], total: int, group: int = 12) -> State:
    """The 784-200-10 network of several clients of one size at once, gradients by hand."""
    mean = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for at in range(0, len(mine), group):
        some = mine[at : at + group]
        n = min(len(work.train[client][1]) for client in some)
        x = torch.stack([work.train[client][0][:n].flatten(1) for client in some])
        y = torch.stack([F.one_hot(work.train[client][1][:n], 10).float() for client in some])
        w1, b1, w2, b2 = (tensor.expand(len(some), *tensor.shape).clone() for tensor in start.values())
        for index in torch.randperm(n).split(work.batch):
            a, target, rate = x[:, index], y[:, index], -work.lr / len(index)
            hidden = torch.baddbmm(b1.unsqueeze(1), a, w1.transpose(1, 2)).relu_()
            slope = torch.baddbmm(b2.unsqueeze(1), hidden, w2.transpose(1, 2)).softmax(2).sub_(target)
            below = torch.bmm(slope, w2).mul_(hidden > 0)
            w2.baddbmm_(slope.transpose(1, 2), hidden, alpha=rate)
            b2.add_(slope.sum(1), alpha=rate)
            w1.baddbmm_(below.transpose(1, 2), a, alpha=rate)
            b1.add_(below.sum(1), alpha=rate)
        for sum_, stack in zip(mean.values(), (w1, b1, w2, b2), strict=True):
            sum_.add_(stack.sum(0), alpha=n / total)
    return mean


@torch.no_grad()
def score(work: Workload, net: nn.Sequential, start: State, heads: State, mine: list[int]) -> int:
    right = 0
    if work.method == "fedrep":
        for client in mine:
            x, y = work.test[client]
            net.load_state_dict(start | own_head(heads, client))
            right += sum(int((net(a).argmax(1) == b).sum()) for a, b in zip(x.split(64), y.split(64), strict=True))
        return right
    net.load_state_dict(start)
    x, y = (torch.cat(parts) for parts in zip(*(work.test[client] for client in mine), strict=True))
    return sum(int((net(a).argmax(1) == b).sum()) for a, b in zip(x.split(64), y.split(64), strict=True))


def deal(sizes: dict[int, int], hands: int) -> list[list[int]]:
    """Largest first, each to whom has least."""
    dealt: list[list[int]] = [[] for _ in range(hands)]
    for client in sorted(sizes, key=lambda c: -sizes[c]):
        min(dealt, key=lambda hand: sum(sizes[c] for c in hand)).append(client)
    return dealt


def worker(work: Workload, start: State, heads: State, sums: State, pipe) -> None:
    torch.set_num_threads(1)
    net = work.module()
    if work.net == "cnn":
        net = net.to(memory_format=torch.channels_last)
    while (job := pipe.recv()) is not None:
        mine, total = job
        if total is None:
            pipe.send(score(work, net, start, heads, mine))
            continue
        mlp = work.net == "mlp"
        mean = batched(work, start, mine, total) if mlp else one_by_one(work, net, start, heads, mine, total)
        for name, tensor in mean.items():
            sums[name].copy_(tensor)
        pipe.send(None)


def main() -> None:
    torch.set_num_threads(1)
    work = given()
    cores = os.cpu_count() or 1
    start = {name: tensor.clone().share_memory_() for name, tensor in work.module().state_dict().items()}
    stacked = {name: t.expand(len(work.train), *t.shape).clone().share_memory_() for name, t in start.items()}
    heads = {name: stack for name, stack in stacked.items() if "fc2" in name and work.method == "fedrep"}
    sums = [{name: torch.zeros_like(t).share_memory_() for name, t in start.items()} for _ in range(cores)]
    context, pipes, workers = mp.get_context("fork"), [], []
    for mine in sums:
        near, far = context.Pipe()
        workers.append(context.Process(target=worker, args=(work, start, heads, mine, far), daemon=True))
        workers[-1].start()
        pipes.append(near)

    def asked(sizes: dict[int, int], total: int | None) -> list:
        for pipe, mine in zip(pipes, deal(sizes, cores), strict=True):
            pipe.send((mine, total))
        return [pipe.recv() for pipe in pipes]

    def one_round(t: int) -> None:
        asked({client: len(work.train[client][1]) for client in work.cohorts[t]}, work.samples(t))
        for name, tensor in start.items():
            tensor.copy_(torch.stack([part[name] for part in sums]).sum(0))

    train = [timed(lambda t=t: one_round(t)) for t in range(work.rounds)]
    sizes = {client: len(y) for client, (_, y) in enumerate(work.test)}
    right: list[int] = []
    evaluation = timed(lambda: right.extend(asked(sizes, None)))
    for pipe in pipes:
        pipe.send(None)
    for one in workers:
        one.join()
    report("reachable", torch.__version__, train, evaluation, sum(right) / sum(sizes.values()))


if __name__ == "__main__":
    main()
