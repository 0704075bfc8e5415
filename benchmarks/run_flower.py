"""Flower's simulation on a workload: one Ray actor per core. It is run in a network namespace of its own.

The apps are imported by name in every actor, which reads the data once and keeps it.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F
from workload import Workload, load, report

HERE = Path(__file__).parent
_held: list[Workload] = []


def workload() -> Workload:
    if not _held:
        torch.set_num_threads(1)
        _held.append(load(os.environ["PERFED_WORKLOAD"]))
    return _held[0]


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


@client_app.query()
def who(msg: Message, context: Context) -> Message:
    mine = MetricRecord({"client": int(context.node_config["partition-id"])})
    return Message(content=RecordDict({"mine": mine}), reply_to=msg)


class Timed(FedAvg):
    """Asks the cohorts of the common schedule, and notes when each part of a round begins and ends."""

    def __init__(self, work: Workload, nodes: dict[int, int], **given) -> None:
        super().__init__(**given)
        self.work, self.nodes, self.train_seconds, self.started = work, nodes, [], 0.0
        self.eval_seconds = self.accuracy = float("nan")

    def configure_train(self, server_round: int, arrays, config, grid):
        self.started = time.perf_counter()
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        chosen = [self.nodes[client] for client in self.work.cohorts[server_round - 1]]
        return self._construct_messages(record, chosen, MessageType.TRAIN)

    def aggregate_train(self, server_round: int, replies):
        found = super().aggregate_train(server_round, replies)
        self.train_seconds.append(time.perf_counter() - self.started)
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
    while len(ids := list(grid.get_node_ids())) < len(work.train):
        time.sleep(0.1)
    asked = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in ids]
    replies = grid.send_and_receive(asked)
    nodes = {int(reply.content["mine"]["client"]): reply.metadata.src_node_id for reply in replies}
    strategy = Timed(
        work, nodes, fraction_train=cohort / len(work.train), fraction_evaluate=1.0, min_train_nodes=cohort,
        min_evaluate_nodes=len(work.train), min_available_nodes=len(work.train),
    )  # fmt: skip
    initial = ArrayRecord(work.module().state_dict())
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=work.rounds, train_config=ConfigRecord({}))
    report("flwr", version("flwr"), strategy.train_seconds, strategy.eval_seconds, strategy.accuracy)


def main() -> None:
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(HERE)}
    os.environ["PERFED_WORKLOAD"] = sys.argv[1]
    apps = importlib.import_module("run_flower")  # by name, so that actors import them and messages stay small
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": os.cpu_count()}}
    run_simulation(
        apps.server_app, apps.client_app, num_supernodes=len(load(sys.argv[1]).train), backend_config=backend
    )


if __name__ == "__main__":
    main()
