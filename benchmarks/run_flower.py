"""Flower's simulation on a workload: one Ray actor per core. It is run in a network namespace of its own.

Flower draws its cohorts itself; its seconds are scaled to the samples of the common schedule.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import time
from importlib.metadata import version

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F
from workload import Workload, load, report

FILE = sys.argv[1]
_held: list[Workload] = []


def workload() -> Workload:
    if not _held:
        torch.set_num_threads(1)
        _held.append(load(FILE))
    return _held[0]


def lo_up() -> None:
    """Bring up the loopback of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        flags = struct.unpack("16sh", fcntl.ioctl(handle, 0x8913, struct.pack("16sh", b"lo", 0)))[1]
        fcntl.ioctl(handle, 0x8914, struct.pack("16sh", b"lo", flags | 1))


client_app = ClientApp()


def model_of(msg: Message, context: Context) -> torch.nn.Sequential:
    net = workload().module()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    if "head" in context.state:
        net[-1].load_state_dict(context.state["head"].to_torch_state_dict())
    return net


def steps(net: torch.nn.Module, parameters: list, x, y, epochs: int) -> None:
    work = workload()
    sgd = torch.optim.SGD(parameters, lr=work.lr)
    for _ in range(epochs):
        for index in torch.randperm(len(y)).split(work.batch):
            sgd.zero_grad()
            F.cross_entropy(net(x[index]), y[index]).backward()
            sgd.step()


@client_app.train()
def train(msg: Message, context: Context) -> Message:
    work, net = workload(), model_of(msg, context)
    x, y = work.train[int(context.node_config["partition-id"])]
    if work.method == "fedrep":
        body, head = list(net[:-1].parameters()), list(net[-1].parameters())
        for group, epochs in ((head, work.head_epochs), (body, 1)):
            for parameter in net.parameters():
                parameter.requires_grad_(any(parameter is one for one in group))
            steps(net, group, x, y, epochs)
        context.state["head"] = ArrayRecord(net[-1].state_dict())
    else:
        steps(net, list(net.parameters()), x, y, 1)
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=msg)


@client_app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    net = model_of(msg, context)
    x, y = workload().test[int(context.node_config["partition-id"])]
    with torch.no_grad():
        right = sum(int((net(a).argmax(1) == b).sum()) for a, b in zip(x.split(256), y.split(256), strict=True))
    metrics = MetricRecord({"num-examples": len(y), "accuracy": right / len(y)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)


class Timed(FedAvg):
    """Notes when each part of a round begins and ends."""

    def __init__(self, work: Workload, **given) -> None:
        super().__init__(**given)
        self.work, self.train_seconds, self.started = work, [], 0.0
        self.eval_seconds = self.accuracy = float("nan")

    def configure_train(self, server_round: int, arrays, config, grid):
        self.started = time.perf_counter()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies):
        replies = list(replies)
        seen = sum(int(reply.content["metrics"]["num-examples"]) for reply in replies)
        found = super().aggregate_train(server_round, replies)
        usual = sum(self.work.samples(t) for t in range(self.work.rounds)) / self.work.rounds
        self.train_seconds.append((time.perf_counter() - self.started) / seen * usual)
        return found

    def configure_evaluate(self, server_round: int, arrays, config, grid):
        if server_round < self.work.rounds:
            return []
        self.started = time.perf_counter()
        return super().configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies):
        found = super().aggregate_evaluate(server_round, replies)
        if found is not None and "accuracy" in found:
            self.eval_seconds, self.accuracy = time.perf_counter() - self.started, float(found["accuracy"])
        return found


server_app = ServerApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    work = workload()
    cohort = len(work.cohorts[0])
    strategy = Timed(
        work, fraction_train=cohort / len(work.train), fraction_evaluate=1.0, min_train_nodes=cohort,
        min_evaluate_nodes=len(work.train), min_available_nodes=len(work.train),
    )  # fmt: skip
    initial = ArrayRecord(work.module().state_dict())
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=work.rounds, train_config=ConfigRecord({}))
    report("flwr", version("flwr"), strategy.train_seconds, strategy.eval_seconds, strategy.accuracy)


def main() -> None:
    lo_up()
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": os.cpu_count()}}
    run_simulation(server_app, client_app, num_supernodes=len(workload().train), backend_config=backend)


if __name__ == "__main__":
    main()
