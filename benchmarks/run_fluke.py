"""fluke on a workload: its own clients, server and evaluator. torchvision, imported for models not used, is a stub."""

from __future__ import annotations

import sys
from copy import deepcopy
from importlib.metadata import version
from unittest.mock import MagicMock

import torchmetrics  # noqa: F401  looks for torchvision itself, so it comes before the stubs

for stub in ("torchvision", "torchvision.models", "torchvision.datasets", "torchvision.datasets.utils",
             "torchvision.transforms", "wandb", "clearml", "datasets"):  # fmt: skip
    sys.modules.setdefault(stub, MagicMock())

import torch  # noqa: E402
from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.algorithms.fedrep import FedRep, FedRepClient  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402
from fluke.evaluation import ClassificationEval  # noqa: E402
from fluke.nets import EncoderHeadNet  # noqa: E402
from workload import Workload, given, report, timed  # noqa: E402


class OwnNetwork(FedRepClient):
    """Every client gets a network of its own."""

    def __init__(self, *given, model, **more) -> None:
        super().__init__(*given, model=deepcopy(model), **more)


class FedRepOnNetwork(FedRep):
    def get_client_class(self) -> type[FedRepClient]:
        return OwnNetwork


class Splitter:
    def __init__(self, work: Workload) -> None:
        self.work = work

    def assign(self, clients: int, batch: int) -> tuple:
        def loaders(parts: list, size: int, shuffle: bool) -> list:
            return [
                FastDataLoader(*part, num_labels=10, batch_size=size, shuffle=shuffle, skip_singleton=False)
                for part in parts
            ]

        return (loaders(self.work.train, batch, True), loaders(self.work.test, 256, False)), None


def main() -> None:
    work = given()
    FlukeENV().set_evaluator(ClassificationEval(1, 10))
    net = work.module()
    client = {
        "batch_size": work.batch, "local_epochs": 1, "loss": torch.nn.CrossEntropyLoss,
        "optimizer": DDict(name=torch.optim.SGD, lr=work.lr),
        "scheduler": DDict(name=torch.optim.lr_scheduler.StepLR, step_size=1, gamma=1),
    }  # fmt: skip
    if work.method == "fedrep":
        client |= {"local_epochs": work.head_epochs, "tau": 1}
        net = EncoderHeadNet(net[:-1], net[-1:])
        client["model"] = net
    shared = net.encoder if work.method == "fedrep" else net  # what fluke's FedRep sends
    hyper = DDict(client=DDict(**client), server=DDict(weighted=True), model=shared)
    kind = FedRepOnNetwork if work.method == "fedrep" else FedAVG
    made = kind(len(work.train), Splitter(work), hyper)

    def one_round(t: int) -> None:
        chosen = [made.clients[i] for i in work.cohorts[t]]
        made.server.broadcast_model(chosen)
        for one in chosen:
            one.local_update(t + 1)
        models = made.server.receive_client_models(chosen, state_dict=False)
        made.server.aggregate(chosen, models)

    train = [timed(lambda t=t: one_round(t)) for t in range(work.rounds)]
    right: list[float] = []

    def score() -> None:
        evaluator = FlukeENV().get_evaluator()
        for i, one in enumerate(made.clients):
            model = made.server.model
            if work.method == "fedrep":
                made.server.broadcast_model([one])
                one.receive_model()
                model = one.model
            found = evaluator.evaluate(1, model, one.test_set, loss_fn=None, additional_metrics={})
            right.append(found["accuracy"] * len(work.test[i][1]))

    evaluation = timed(score)
    accuracy = sum(right) / sum(len(y) for _, y in work.test)
    report("fluke-fl", version("fluke-fl"), train, evaluation, accuracy)


if __name__ == "__main__":
    main()
