"""pFedSD: FedAvg whose clients are taught, while they train, by the personal model of their own last round.

    v_i <- SGD on CE + lambda * tau^2 * KL(p_teacher || p_v) from w,    p = softmax(logits / tau),    teacher: last v_i
    w   <- sum_i |D_i| / |D| * v_i

Jin, Bai, Yao, Dou, Wei, Zhu, Yang: Personalized Edge Intelligence via Federated Self-Knowledge Distillation. IEEE
Transactions on Parallel and Distributed Systems 34(2), 2023.

Differences from the paper: none known. The teacher's logits are computed once a round, in eval mode; a client's first
round has no teacher. The mean is weighted by data size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from perfed.core.client import Batch, Client, Update
from perfed.core.fit import Phase, frozen_output
from perfed.core.method import Method
from perfed.core.registry import register
from perfed.core.state import under, within
from perfed.core.twin import twin


@register("pfedsd")
@dataclass(frozen=True, kw_only=True)
class PFedSD(Method):
    """Self-knowledge distillation from the last personal model."""

    lam: float = 1.0
    """weight of the distillation (lambda); 0 is FedAvg scored with its local models"""
    tau: float = 1.0
    """temperature of the distillation"""

    title = "pFedSD"
    cites = "Jin et al.: Personalized Edge Intelligence via Federated Self-Knowledge Distillation. IEEE TPDS 2023"
    family = "distillation"
    keeps = "the network as it last trained it"
    sends = "the whole network"

    def phases(self, client: Client) -> Sequence[Phase]:
        """FedAvg's round under the teacher's eye."""
        last = within("v", client.memory)
        if not last:
            return super().phases(client)
        teacher = twin(client, last).net
        teacher.module.eval()
        taught = (frozen_output(teacher, client.data.train.x, len(teacher.layers)) / self.tau).log_softmax(dim=1)
        client.meter.prefix_samples += client.size

        def loss(client: Client, batch: Batch) -> Tensor:
            logits = client.logits(batch)
            student = (logits / self.tau).log_softmax(dim=1)
            distance = F.kl_div(student, taught[batch.index], log_target=True, reduction="batchmean")
            return F.cross_entropy(logits, batch.y) + self.lam * self.tau**2 * distance

        return [Phase(self.epochs, trains=client.net.layers, loss=loss)]

    def train(self, client: Client) -> Update:
        """A round; what it leaves is the personal model and the next teacher."""
        update = super().train(client)
        client.memory.update(under("v", client.weights()))
        return update

    def personal(self, client: Client) -> None:
        """Predict with v_i; a client that never took part has the global model."""
        client.load(within("v", client.memory))
