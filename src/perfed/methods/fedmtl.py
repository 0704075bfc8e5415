"""Fed-MTL (MOCHA): every client is a task with weights of its own; a relationship between the tasks is learnt too.

    min over W, Sigma   sum_i f_i(w_i) + lambda / 2 * tr(W Omega W'),   Omega = Sigma^-1,   tr(Sigma) = 1
    client    w_i <- SGD on f_i(w) + lambda / 2 * rho_i |w - c_i|^2
              c_i = w_i - 1 / rho_i * sum_j Omega_ij w_j,   rho_i = sum_j |Omega_ij|
    server    Sigma <- (W' W)^(1/2) / tr((W' W)^(1/2)),   some times during the run; at first Sigma = I / m

The pull to c_i bounds the coupling from above and touches it at the current W, so clients may step at the same time,
as in MOCHA's subproblems; its step is implicit, so that no strength is too much for the learning rate.
`relationship = "mean"` is the fixed Omega = I - 11' / m, which draws all tasks to their mean.

Smith, Chiang, Sanjabi, Talwalkar: Federated Multi-Task Learning. NeurIPS 2017.

Differences from the paper: the subproblems are solved by SGD in the primal instead of by dual coordinate ascent, so
that W may be layers of a network: with a linear model it is MOCHA's problem, with a deeper one the last layers are
coupled and the others are the client's alone, which is how Fed-MTL is used with networks. Small eigenvalues of W'W
are raised to 1e-4 of the largest. Tasks are the clients heard of; one is unrelated until Sigma is next learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from perfed.core.client import Client, Update
from perfed.core.fit import Phase
from perfed.core.method import Method
from perfed.core.plan import Part, Plan, Round
from perfed.core.registry import register
from perfed.core.server import Peer, Server
from perfed.core.state import Selection, State, under, within
from perfed.errors import NetError
from perfed.nets.net import Net

RHO, OMEGA, TASKS = "mtl/rho", "mtl/omega", "mtl/tasks"
FLOOR = 1e-4


@register("fedmtl")
@dataclass(frozen=True, kw_only=True)
class FedMTL(Method):
    """Tasks that are drawn to each other as they are related."""

    lam: Annotated[float, Field(ge=0)] = 1e-3
    """strength of the coupling (lambda); 0 is Local"""
    relationship: Literal["learned", "mean"] = "learned"
    """the relationship of the tasks: learnt from their weights, or fixed so that all are drawn to their mean"""
    updates: Annotated[int, Field(ge=1)] = 10
    """how many times during the run the relationship is learnt"""
    coupled_layers: Annotated[int, Field(ge=1)] = 1
    """how many layers are coupled, counted from the output"""

    title = "Fed-MTL (MOCHA)"
    cites = "Smith, Chiang, Sanjabi, Talwalkar: Federated Multi-Task Learning. NeurIPS 2017"
    family = "multi-task"
    keeps = "its whole network"
    sends = "a copy of the coupled layers up, the point they are drawn to down"

    def build(self, net: Net) -> Net:
        """Refuse to couple more layers than there are."""
        if self.coupled_layers > len(net.layers):
            raise NetError(
                f"coupled_layers = {self.coupled_layers}, but the network has {len(net.layers)} layers.",
                "Couple at most all of them.",
            )
        return net

    def private(self, part: Part, round: Round) -> Selection:
        """Every task has weights of its own; the server gets a copy of the coupled ones."""
        return True

    def phases(self, client: Client) -> Sequence[Phase]:
        """Learn the own task; after every step the coupled weights take their implicit step to the centre."""
        stiffness = self.optimiser(client.round).lr * self.lam * float(client.received.get(RHO, 0.0))
        centre = within("centre", client.received)
        coupled = [(weight, centre[n]) for n, weight in client.net.module.named_parameters() if n in centre]

        @torch.no_grad()
        def draw(client: Client) -> None:
            for weight, target in coupled:
                weight.lerp_(target, stiffness / (1 + stiffness))

        return [Phase(self.epochs, trains=client.net.layers, after_step=draw)]

    def train(self, client: Client) -> Update:
        """A local round; the server gets the coupled weights."""
        self.fit(client, self.phases(client))
        weights = client.weights()
        return client.update(extra=under("w", {name: weights[name] for name in self.coupled(client.plan)}))

    def join(self, client: Client) -> None:
        """A new client learns its task as the others do."""
        self.fit(client, [replace(phase, epochs=self.join_epochs) for phase in self.phases(client)], "join")

    def coupled(self, plan: Plan) -> list[str]:
        """The parameters that are a task's column of W."""
        layers = plan.net.layers[-self.coupled_layers :]
        return [name for name, part in plan.parts.items() if part.layer in layers and not part.is_buffer]

    # The server's side

    def start(self, net: Net, clients: int, initial: State) -> State:
        """No task is known yet."""
        return dict(initial) | {OMEGA: torch.zeros(0, 0), TASKS: torch.zeros(0, dtype=torch.int64)}

    def send(self, server: Server, peer: Peer, round: Round) -> State:
        """The point that a client's coupled weights are drawn to, and how strongly."""
        if not peer.learns:
            return {}
        row = self.relations(server, peer.id)
        rho = sum(map(abs, row.values()))
        centre = {name: weight.clone() for name, weight in self.weights(server, peer.id).items()}
        for other, omega in row.items():
            for name, weight in self.weights(server, other).items():
                centre[name].sub_(weight, alpha=omega / max(rho, 1e-30))
        return under("centre", centre) | {RHO: torch.tensor(rho)}

    def relations(self, server: Server, client: int) -> dict[int, float]:
        """A client's row of Omega, by the other clients' numbers."""
        if self.relationship == "mean":
            tasks = sorted({client, *server.slots.known()})
            return {task: (task == client) - 1 / len(tasks) for task in tasks}
        tasks = server.state[TASKS].tolist()
        if client not in tasks:
            return {client: float(server.participants)}
        return dict(zip(tasks, server.state[OMEGA][tasks.index(client)].tolist(), strict=True))

    def weights(self, server: Server, client: int) -> State:
        """A client's column of W; a client not heard of stands at the first weights."""
        return within("w", server.slots[client]) or {
            name: server.plan.initial[name] for name in self.coupled(server.plan)
        }

    def schema(self, server: Server, round: Round) -> State:
        """The coupled weights."""
        return under("w", {name: server.plan.initial[name] for name in self.coupled(server.plan)})

    def combine(self, server: Server, updates: Sequence[Update], round: Round) -> State:
        """Keep the participants' weights; from time to time learn the relationship of all tasks."""
        for update in updates:
            server.slots[update.client] = dict(update.state)
        if self.relationship == "mean" or round.t % max(1, round.T // self.updates):
            return server.state
        tasks = server.slots.known()
        columns = [self.weights(server, task) for task in tasks]
        gram = torch.zeros(len(tasks), len(tasks), dtype=torch.float64)
        for name in columns[0]:
            part = torch.stack([column[name].flatten() for column in columns])
            gram += (part @ part.T).double()
        if not bool(gram.isfinite().all()):
            return server.state
        sigma = covariance(gram) * len(tasks) / server.participants
        return server.state | {OMEGA: torch.linalg.inv(sigma).float(), TASKS: torch.tensor(tasks)}


def covariance(gram: Tensor) -> Tensor:
    """(W'W)^(1/2) / tr((W'W)^(1/2)): the tasks' relationship that is best for given weights."""
    values, vectors = torch.linalg.eigh(gram)
    roots = values.clamp(min=FLOOR * float(values[-1])).sqrt()
    sigma: Tensor = (vectors * roots) @ vectors.T / roots.sum()
    return sigma
