"""Apple's pfl on a workload: its own trainer, aggregator and evaluation, in one process or in several by torchrun."""

from __future__ import annotations

import os
import time
from importlib.metadata import version

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn import functional as F
from workload import given, report


class Module(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.train()
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict:
        self.eval()
        return {"right": Weighted(int((self.net(x).argmax(1) == y).sum()), len(y))}


def main() -> None:
    work = given()
    model = Module(work.module())
    # pfl scores before it trains: one more iteration, whose training is left out, scores after the last round
    order = iter([client for cohort in [*work.cohorts, work.cohorts[0]] for client in cohort])
    everyone = iter(list(range(len(work.test))) * 2)

    def shuffled(client: int) -> Dataset:
        x, y = work.train[client]
        index = torch.randperm(len(y))
        return Dataset((x[index], y[index]))

    train_data = FederatedDataset(shuffled, lambda: next(order))
    test_data = FederatedDataset(lambda client: Dataset(work.test[client]), lambda: next(everyone))
    wrapped = PyTorchModel(
        model,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(model.parameters(), 1.0),
    )
    marks: list[tuple[str, float]] = []

    class Timed(SimulatedBackend):
        async def async_gather_results(self, **given):
            kind = given["central_context"].population.name
            start = time.perf_counter()
            found = await super().async_gather_results(**given)
            marks.append((kind, time.perf_counter() - start))
            if kind == "VAL":
                self.last = found[1]
            return found

    backend = Timed(train_data, test_data, postprocessors=[WeightByDatapoints()])
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=work.rounds + 1,
            evaluation_frequency=work.rounds,
            train_cohort_size=len(work.cohorts[0]),
            val_cohort_size=len(work.test),
        ),
        backend,
        wrapped,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch),
        NNEvalHyperParams(local_batch_size=256),
        callbacks=[],
        send_metrics_to_platform=False,
    )
    train = [seconds for kind, seconds in marks if kind == "TRAIN"][: work.rounds]
    evaluation = [seconds for kind, seconds in marks if kind == "VAL"]
    values = {str(name): value for name, value in backend.last}
    accuracy = next(float(getattr(v, "overall_value", v)) for name, v in values.items() if "right" in name)
    if os.environ.get("RANK", "0") == "0":
        report("pfl", version("pfl"), train, evaluation[-1], accuracy)


if __name__ == "__main__":
    main()
