"""pFedC: a linear branch per class above a shared body; a client takes part in the branches of its own classes only.

    L_i = sum_c lambda_c BCE(w_i^c . phi_i(x), [y = c]),   lambda by MGDA-UB for phi, 1 for each w^c
    phi <- sum_i |D_i| / |D| * phi_i,   w_i^c <- mean of w_n^c over the clients n with class c, if i has class c

Anonymous: Disentangled Knowledge Transfer: A New Perspective for Personalized Federated Learning. Under review, 2022.
MGDA-UB: Sener, Koltun: Multi-Task Learning as Multi-Objective Optimization. NeurIPS 2018.

Differences from the paper: MGDA weighs gradients divided by their losses, and its weights sum to the number of
branches. The paper does not say; bare min-norm weights favour the branches of absent classes, whose gradients are
small, so that the representation moves little. Its figure, the mean accuracy of the binary branch tasks, is measured as
`task`, beside the accuracy that other methods are judged by. A class that no participant of a round has keeps its last
mean. Only the branches of a client's own classes leave it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.core.client import Batch, Client, Update
from perfed.core.method import Method
from perfed.core.minnorm import min_norm
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.server import Peer, Server
from perfed.core.state import Selection, State, under, within
from perfed.errors import NetError, UpdateError
from perfed.nets.branches import Branches, divide, head_names, linear_head
from perfed.nets.net import Net

PRESENCE = "presence/branch"


@register("pfedc")
@dataclass(frozen=True, kw_only=True)
class PFedC(Method):
    """Classes are tasks; who has nothing of a class is not asked about it."""

    branches: int = 0
    """number of branches (the paper's T); 0: one per class; fewer than classes: groups of consecutive classes"""
    groups: tuple[tuple[int, ...], ...] = ()
    """the classes of each branch, every class once; goes before `branches`"""
    group_logits: bool = False
    """whether a branch has a logit for each class of its group instead of one for them all"""
    combine_losses: Literal["mgda", "sum"] = "mgda"
    """how the branch losses move the representation: with MGDA-UB's min-norm weights, or by their sum"""
    normalise: Literal["none", "l2", "loss"] = "loss"
    """what MGDA divides each branch's gradient by before weighing them: nothing, its norm, or the branch's loss"""
    scale: bool = True
    """whether MGDA's weights, which sum to 1, are multiplied by the number of branches"""

    title = "pFedC"
    cites = (
        "Anonymous: Disentangled Knowledge Transfer: A New Perspective for Personalized Federated Learning. 2022."
        " MGDA-UB: Sener, Koltun: Multi-Task Learning as Multi-Objective Optimization. NeurIPS 2018"
    )
    family = "split by class"
    keeps = "the branches of classes that the client does not have"
    sends = "the body, the branches of the client's classes, and which classes these are"

    def tasks(self, net: Net) -> Branches:
        """Which branch decides about which classes."""
        return divide(net.num_classes, self.branches, self.groups, self.group_logits)

    def build(self, net: Net) -> Net:
        """Branches in the place of the head, whose output must be the network's."""
        head, rows = linear_head(net), self.tasks(net).rows.shape[1]
        if not net.head_is_output:
            raise NetError(
                f"The branches' logits must be what the network returns, and this network does not return what its"
                f" head {net.head_path!r} gives.",
                "Return the output of the head as it is, without a softmax or the like behind it.",
            )
        if head.out_features == rows:
            return net
        return net.with_head(nn.Linear(head.in_features, rows, bias=head.bias is not None))

    def private(self, part: Part, round: Round) -> Selection:
        """Keep the head: which of its branches are shared depends on the client's data."""
        return part.is_head

    # A client's round

    def held(self, client: Client) -> Tensor:
        """The client's pi_i: whether it has the class, for each row of the head."""
        return self.tasks(client.net).held(client.data.class_counts)

    def personal(self, client: Client) -> None:
        """The held branches are the received means, the others the client's own."""
        self.take_over(client, within("branch", client.received))

    @torch.no_grad()
    def take_over(self, client: Client, means: State) -> None:
        """Put the means of the held branches into the network."""
        held, own = self.held(client), client.net.module.state_dict()
        for name, mean in means.items():
            own[name][held] = mean[held]

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """The sum of the branch losses, or for the representation their MGDA-UB combination."""
        tasks = self.tasks(client.net)
        if self.combine_losses == "sum" or batch.cut:  # behind a cut nothing but branches is trained
            return tasks.losses(client.logits(batch), batch.y).sum()
        head, z = linear_head(client.net), client.net.features(batch.x)
        own = tasks.losses(head(z.detach()), batch.y)
        logits = F.linear(z, head.weight.detach(), None if head.bias is None else head.bias.detach())
        residual = logits.detach().sigmoid() - tasks.labels(batch.y)
        weights = self.weigh(tasks.rows, residual, head.weight.detach(), own.detach())
        return own.sum() + weights @ tasks.losses(logits, batch.y)

    def weigh(self, rows: Tensor, residual: Tensor, weight: Tensor, losses: Tensor) -> Tensor:
        """MGDA-UB's weights of the branches.

        d L_t / d z_i = sum over the rows r of branch t of residual_ir * w_r / n, so the inner products of these
        gradients are block sums of (R'R) * (WW') / n^2: no backward pass per branch.
        """
        rows, residual, weight, losses = (tensor.double() for tensor in (rows, residual, weight, losses))
        gram = rows @ (residual.T @ residual * (weight @ weight.T)) @ rows.T / len(residual) ** 2
        by = {"none": torch.ones_like(losses), "l2": gram.diagonal().sqrt(), "loss": losses}[self.normalise]
        by = by.clamp(min=1e-12)
        return min_norm(gram / by / by[:, None]).float() * (len(rows) if self.scale else 1)

    def train(self, client: Client) -> Update:
        """Start from the received means; the held branches go back."""
        self.personal(client)
        self.fit(client, self.phases(client))
        branches, held = self.contribution(client)
        return client.update(extra=under("branch", branches) | {PRESENCE: held})

    def contribution(self, client: Client) -> tuple[State, Tensor]:
        """The held branches, zeros in the place of the others, and pi_i."""
        held, state = self.held(client).float(), client.weights()
        return {name: masked(state[name], held) for name in head_names(client.net)}, held

    # The server's side

    def start(self, net: Net, clients: int, initial: State) -> State:
        """Every branch's mean begins with the common initial value."""
        return super().start(net, clients, initial) | under("branch", {n: initial[n] for n in head_names(net)})

    def send(self, server: Server, peer: Peer, round: Round) -> State:
        """The body and the mean of every branch."""
        return super().send(server, peer, round) | under("branch", within("branch", server.state))

    def schema(self, server: Server, round: Round) -> State:
        """The body, the branches and which of them count."""
        branches = under("branch", within("branch", server.state))
        rows = len(next(iter(branches.values())))
        return super().schema(server, round) | branches | {PRESENCE: torch.zeros(rows)}

    def verify(self, server: Server, state: State, sender: str, round: Round) -> None:
        """A branch is there or not."""
        super().verify(server, state, sender, round)
        if not bool(torch.isin(state[PRESENCE], torch.tensor([0.0, 1.0])).all()):
            raise UpdateError(f"{sender} sent {PRESENCE} with values other than 0 and 1.")

    def combine(self, server: Server, updates: Sequence[Update], round: Round) -> State:
        """The bodies' mean by data size; each branch's uniform mean over those who hold it, if any."""
        bodies = [replace(u, state={n: v for n, v in u.state.items() if n in server.plan.parts}) for u in updates]
        count = torch.stack([u.state[PRESENCE] for u in updates]).sum(dim=0)
        means: State = {}
        for name, last in within("branch", server.state).items():
            total = torch.stack([masked(u.state[f"branch/{name}"], u.state[PRESENCE]) for u in updates]).sum(dim=0)
            means[name] = mean_of_holders(total, count, last)
        return super().combine(server, bodies, round) | under("branch", means)

    # What a client predicts with

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Class scores from the branches' logits."""
        return self.tasks(client.net).scores(client.net(x), client.data.class_counts)

    def measures(self, client: Client, scores: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The mean accuracy of the binary branch tasks, and of the choice between groups where there are any."""
        tasks = self.tasks(client.net)
        verdicts, right = tasks.verdicts(scores), tasks.owner[y]
        task = ((verdicts > 0) == F.one_hot(right, len(tasks.groups)).bool()).double().mean(dim=1)
        grouped = {"group": verdicts.argmax(dim=1) == right} if len(tasks.groups) < len(tasks.owner) else {}
        return {"task": task} | grouped

    def measured(self, net: Net) -> tuple[str, ...]:
        """The choice between groups is measured where there are any."""
        tasks = self.tasks(net)
        return ("task", "group") if len(tasks.groups) < len(tasks.owner) else ("task",)


def masked(rows: Tensor, mask: Tensor) -> Tensor:
    """The rows of a weight or bias, each times its entry of the mask."""
    return rows * mask.view(-1, *[1] * (rows.dim() - 1))


def mean_of_holders(total: Tensor, count: Tensor, last: Tensor) -> Tensor:
    """The rows of a sum, each divided by how many made it; the last mean where nobody did."""
    return torch.where(masked(torch.ones_like(last), count) > 0, masked(total, 1 / count.clamp(1)), last)
