"""FedBSD: FedRep's round, in which the received body also teaches the body that is trained.

    h_i <- E_h epochs of CE on D_i with the received body b frozen,
    b_i <- E_b epochs of CE + lam * tau^2 * KL(p_b || p_{b_i}) with h_i frozen,    p = softmax(features / tau),
    b   <- (1 / n) sum_i b_i over the n participants

Wang, Liu, Zeng, Yan, Ge: Personalized Federated Learning via Backbone Self-Distillation. ACM Multimedia Asia 2023.

Differences from the paper: its equation 6, which has the student's probabilities twice and a minus, is read as the KL
divergence from teacher to student times tau^2, as in the distillation it cites. Its section 3.2 lets the received body
replace the client's, its Algorithm 1 trains on from the client's own: both are here, `student` chooses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from perfed.core.client import Batch, Client, Update
from perfed.core.fit import Phase, frozen_output
from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.state import Selection, under, within
from perfed.errors import NetError
from perfed.nets.net import Net


@register("fedbsd")
@dataclass(frozen=True, kw_only=True)
class FedBSD(Method):
    """Backbone self-distillation: head first, then the body with the received one as its teacher."""

    head_epochs: int = 10
    """epochs on the head with the received body frozen (E_h); `epochs` is E_b, those on the body"""
    lam: Annotated[float, Field(ge=0)] = 1.0
    """weight of the distillation (lambda); 0 is FedRep with a uniform mean"""
    tau: Annotated[float, Field(gt=0)] = 2.0
    """temperature of the distillation"""
    student: Literal["received", "own"] = "received"
    """the body that a round starts from and a client predicts with: the received one, or its own of its last round"""

    title = "FedBSD"
    cites = "Wang et al.: Personalized Federated Learning via Backbone Self-Distillation. ACM Multimedia Asia 2023"
    family = "split by layer"
    keeps = "the head and every BatchNorm layer"
    sends = "the body without BatchNorm layers"

    def build(self, net: Net) -> Net:
        """Refuse a network whose features cannot be had."""
        if net.body and not net.cut((net.head,)):
            raise NetError(
                "FedBSD distils what the head receives, and this network cannot be cut before its head"
                f" {net.head_path!r}.",
                "Return the output of the head as it is, and give the head one tensor.",
            )
        return net

    def private(self, part: Part, round: Round) -> Selection:
        """Keep the head and every BatchNorm."""
        return part.is_head or part.is_batchnorm

    def phases(self, client: Client) -> Sequence[Phase]:
        """The head on the received body's features, then the student's body below the frozen head."""
        net, k = client.net, len(client.net.body)
        net.module.eval()
        taught = frozen_output(net, client.data.train.x, k)
        teacher = self.distribution(taught)
        client.meter.prefix_samples += client.size
        if self.student == "own":
            self.personal(client)

        def body_loss(client: Client, batch: Batch) -> Tensor:
            features = net.run_prefix(batch.x, k)
            supervised = F.cross_entropy(net.run_suffix(features, k), batch.y)
            return supervised + self.lam * self.divergence(teacher[batch.index], self.distribution(features))

        drawn = net.stochastic(k) and self.student == "received"  # then every step has its own dropout, as FedRep's
        return [
            Phase(self.head_epochs, trains=(net.head,), features=None if drawn else taught),
            Phase(self.epochs, trains=net.body, loss=body_loss),
        ]

    def distribution(self, features: Tensor) -> Tensor:
        """log softmax(features / tau)."""
        return (features.flatten(1) / self.tau).log_softmax(dim=1)

    def divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        """tau^2 KL(teacher || student) of such distributions, the mean over samples."""
        return self.tau**2 * F.kl_div(student, teacher, log_target=True, reduction="batchmean")

    def train(self, client: Client) -> Update:
        """A round; every participant counts the same in the mean."""
        self.fit(client, self.phases(client))
        update = client.update(weight=1.0)
        if self.student == "own":
            client.memory.update(under("own", update.state))
        return update

    def personal(self, client: Client) -> None:
        """Put in the client's own body, if it keeps one; a client that never took part has the received one."""
        client.load(within("own", client.memory))
