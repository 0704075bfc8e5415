"""Many clients in one batched step: a group's weights lie in one tensor, and a layer is one batched matrix product.

    Z_i = X_i W_i^T + b_i    for all clients i of a group at once

It is for networks of linear layers, where one client's step is too small to be worth a call, and for methods whose
local rule is cross-entropy by phases. The first layer that trains may do so in its dual form (`batched`). Sums run in
another order than one client at a time, so this is a numeric mode of its own: equal to the plain one to 1e-5, not to
the bit. Groups follow from the configuration and the order of clients alone, so the number of workers changes nothing.
Where the server takes the plain mean, a group sends its own mean in place of an update per client: the first of its
clients brings it, with the weight of all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.core import rng
from perfed.core.client import Meter
from perfed.core.fit import Optimiser, Phase, batches, fitting, is_plain
from perfed.core.method import Method
from perfed.core.state import State, finite
from perfed.data.federation import Federation
from perfed.engine.batched import Descents, Layers, pays
from perfed.engine.group import Group
from perfed.engine.worker import Reply, Task, Worker
from perfed.errors import ConfigError, StoreError, UpdateError
from perfed.nets.net import Net

REVISION = 2
"""of the arithmetic: a run that began with another one is not continued"""
GROUP_BYTES = 8 << 20
"""Weights of a group: about what a processor keeps near itself."""
SAMPLE_WISE = (nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus)
Step = Callable[[Tensor, Tensor], None]
"""From the rows of every client's batch and the samples' weights in the loss."""
CURE = "Leave executor out, which computes one client at a time."


def refuse(method: Method, net: Net) -> None:
    """Refuse a method or network that cannot be computed as a cohort, saying why."""
    cls = type(method)
    if cls.train is not Method.train or cls.fit is not Method.fit or not is_plain(method.loss):
        raise ConfigError(
            f"executor = 'cohort' does not fit {cls.__name__}: a round is more than cross-entropy by phases.", CURE
        )
    if len(list(net.module.named_parameters(remove_duplicate=False))) > len(list(net.module.parameters())):
        what = "executor = 'cohort' is for layers with weights of their own, and this network uses some twice."
        raise ConfigError(what, CURE)
    if net.precision is not None:
        raise ConfigError("executor = 'cohort' computes in float32, and precision asks for bfloat16.", CURE)
    modules = net.modules_from(0)
    odd = [m for m in modules if type(m) not in (nn.Linear, nn.Flatten, *SAMPLE_WISE)]
    if odd or any(True for _ in net.module.buffers()):
        what = type(odd[0]).__name__ if odd else "a buffer"
        raise ConfigError(
            f"executor = 'cohort' is for networks of linear layers, and this one has {what}.",
            "Take net = 'mlp', or leave executor out, which computes one client at a time.",
        )
    if len(net.input_shape) > 1 and not any(isinstance(m, nn.Flatten) for m in _leading(modules)):
        raise ConfigError("executor = 'cohort' needs flat input to its first layer.", "Put a Flatten before it.")


class CohortWorker(Worker):
    """Trains groups of clients at once; scores them as every worker does."""

    def __init__(self, federation: Federation, net: Net, method: Method, rounds: int, seed: int) -> None:
        refuse(method, net)
        super().__init__(federation, net, method, rounds, seed)
        self._bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.plan.initial.values())
        cls = type(method)
        self.folds = (cls.combine, cls.verify, cls.schema) == (Method.combine, Method.verify, Method.schema)
        self._stacks: State = {}
        self._linear = {id(module): path for path, module in net.module.named_modules()}
        for phase in method.phases(self.newcomer(0, 1)):
            _check(phase)

    def jobs(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Neighbours train together; anything else is done one at a time."""
        if not tasks or tasks[0].op != "train":
            return super().jobs(tasks)
        groups = -(-len(tasks) // max(1, GROUP_BYTES // self._needs(tasks)))
        groups = min(len(tasks), groups + groups % 2) if groups > 1 else 1  # two workers have as much to do
        cuts = [len(tasks) * k // groups for k in range(groups + 1)]
        return [list(range(a, b)) for a, b in itertools.pairwise(cuts)]

    def _needs(self, tasks: Sequence[Task]) -> int:
        """Bytes that a client's step goes through: its weights, or what stands for those of the first layer."""
        t = tasks[0].t
        try:
            plan = self._phases(tasks[0])
        except (UpdateError, StoreError):  # whoever cannot train is named when it is asked to
            return self._bytes
        trains = next((self.net.names(*phase.trains) for phase in plan if phase.epochs), frozenset[str]())
        most = max(self.federation.size(task.client) for task in tasks)
        found = self._dual(self.net.modules_from(0), trains, self.method.optimiser(self.round(t)), most)
        if not found or not self.folds or found[1] in self._written_out(t):
            return self._bytes
        weight = self.plan.initial[found[1]]
        return self._bytes + 4 * (most * (2 * weight.shape[0] + weight.shape[1] + most) - weight.numel())

    def _written_out(self, t: int) -> set[str]:
        """The tensors of which every client's own is needed after a round."""
        kept = {name for name, which in self.plan.private(t).items() if which is not False}
        return kept | {name for name, which in self.plan.travels(t).items() if which is not True}

    def run_all(self, tasks: Sequence[Task]) -> list[Reply]:
        """Train a group, or do a single task of another kind."""
        if tasks[0].op != "train":
            return super().run_all(tasks)
        try:
            return self._train_group(tasks)
        except (UpdateError, StoreError) as error:  # one client's own state is bad: it alone must suffer
            if len(tasks) == 1:
                return [Reply(tasks[0].client, {}, {}, {"error": str(error), "seconds": 0.0})]
            return [reply for task in tasks for reply in self.run_all([task])]

    def _train_group(self, tasks: Sequence[Task]) -> list[Reply]:
        started = time.perf_counter()
        plans = [self._phases(task) for task in tasks]
        if any(plan != plans[0] for plan in plans):  # clients that train differently do not train together
            return [self._train_group([task])[0] for task in tasks]
        group = self._gather(tasks)
        optimiser = self.method.optimiser(self.round(tasks[0].t))
        for number, phase in enumerate(plans[0]):
            self._train_phase(group, phase, optimiser, f"fit/{number}")
        seconds = (time.perf_counter() - started) / len(tasks)
        replies = {reply.client: reply for reply in self._replies(group, seconds)}
        return [replies[task.client] for task in tasks]

    def _phases(self, task: Task) -> list[Phase]:
        phases = list(self.method.phases(self.described(task)))
        for phase in phases:
            _check(phase)
        return phases

    def _gather(self, tasks: Sequence[Task]) -> Group:
        """Lay the clients' networks and data side by side."""
        ordered = sorted(tasks, key=lambda task: (-self.federation.size(task.client), task.client))
        common = self._common(tasks)
        room = partial(self._room, len(tasks))
        weights = {name: room(name) for name in self.plan.parts if name not in common}
        if weights:
            for row, task in enumerate(ordered):
                self.fill({name: stack[row] for name, stack in weights.items()}, task)
        data, _ = self.federation.stacked([task.client for task in ordered], "train")
        sizes = [self.federation.size(task.client) for task in ordered]
        starts = [sum(sizes[:row]) for row in range(len(sizes))]
        return Group(ordered, weights, common, data.x, data.y, starts, sizes, [Meter() for _ in tasks], room)

    def _common(self, tasks: Sequence[Task]) -> State:
        """What all clients of a group have been sent whole and keep nothing of."""
        found: State = {}
        for name in self.plan.parts:
            for task in tasks:
                down, kept = self.plan.download(task.t, task.since)[name], self.plan.private(task.since)[name]
                tensor = task.received.get(name)
                if down is not True or kept is not False or tensor is None:
                    break
                if found.setdefault(name, tensor).data_ptr() != tensor.data_ptr():
                    break
            else:
                continue
            found.pop(name, None)
        return found

    def _room(self, clients: int, name: str) -> Tensor:
        """Memory for so many clients' tensors: the same one for every group, unless updates are to outlive it."""
        if not self.folds or name not in self._stacks or len(self._stacks[name]) < clients:
            self._stacks[name] = torch.empty(clients, *self.plan.initial[name].shape)
        return self._stacks[name][:clients]

    def _train_phase(self, group: Group, phase: Phase, optimiser: Optimiser, purpose: str) -> None:
        if not phase.epochs:
            return
        trained = sorted(self.net.names(*phase.trains))
        if not trained:  # a body that is not there, or nothing unfrozen
            return
        cut = self._cut(group, phase)
        if cut:
            group.write_out(self.plan.parts)
        x = self._prefix(group, cut) if cut else group.x
        schedule = self._schedule(group, phase.epochs, optimiser.batch_size, purpose)
        suffix = self.net.modules_from(cut)
        make = self._descending if _plain(optimiser) else self._stepping
        step = make(group, x, trained, suffix, replace(optimiser, lr=optimiser.lr if phase.lr is None else phase.lr))
        for index, share in schedule:
            step(index, share)
        trainable = sum(self.plan.initial[name].numel() for name in trained)
        for meter, size in zip(group.meters, group.sizes, strict=True):
            meter.prefix_samples += size if cut else 0
            meter.enter(size * phase.epochs, -(-size // optimiser.batch_size) * phase.epochs, trainable)

    def _dual(
        self, suffix: Sequence[nn.Module], trained: Collection[str], optimiser: Optimiser, most: int
    ) -> tuple[int, str] | None:
        """The first layer's place and weight, if it trains, by plain steps, on fewer samples than it is wide."""
        at = len(_leading(suffix))
        if at == len(suffix) or not _plain(optimiser):
            return None
        name = f"{self._linear[id(suffix[at])]}.weight"
        return (at, name) if name in trained and pays(most, self.plan.initial[name]) else None

    def _descending(
        self, group: Group, x: Tensor, trained: list[str], suffix: Sequence[nn.Module], optimiser: Optimiser
    ) -> Step:
        """Steps without momentum or weight decay: on the way back through the layers."""
        anchor, lr = torch.zeros((), requires_grad=True), optimiser.lr
        found = self._dual(suffix, trained, optimiser, max(group.sizes))
        group.write_out(name for name in self.plan.parts if not found or name != found[1])
        if found:
            at, name = found
            dual = group.begin(name, _through(suffix[:at], x), lr)
            bias, suffix = group.weights.get(f"{name.removesuffix('.weight')}.bias"), suffix[at + 1 :]
            rooms = torch.arange(len(group.sizes)) * max(group.sizes)
            shifts = (rooms - torch.tensor(group.starts)).unsqueeze(1)  # from all samples' rows to the padded ones

        def step(index: Tensor, share: Tensor) -> None:
            count, rows = len(index), index.flatten()
            held = {name: stack[:count] for name, stack in group.weights.items()}
            if found:
                below = dual(index + shifts[:count], None if bias is None else bias[:count], anchor)
            else:
                below = x[rows].view(*index.shape, *x.shape[1:])
            logits = self._forward(suffix, below, held, set(trained), lr, anchor)
            losses = F.cross_entropy(logits.flatten(0, 1), group.y[rows], reduction="none")
            torch.autograd.grad(losses @ share.flatten(), anchor, allow_unused=True)

        return step

    def _stepping(
        self, group: Group, x: Tensor, trained: list[str], suffix: Sequence[nn.Module], optimiser: Optimiser
    ) -> Step:
        """Steps that need the gradients as a whole."""
        group.write_out(self.plan.parts)
        moving, sgd = [group.weights[name] for name in trained], [optimiser.over([])]

        def step(index: Tensor, share: Tensor) -> None:
            count, rows = len(index), index.flatten()
            if not sgd[0].parameters or len(sgd[0].parameters[0]) != count:  # some clients have finished
                fewer = optimiser.over([stack[:count] for stack in moving])
                if sgd[0].parameters:
                    fewer.inherit(sgd[0])
                sgd[0] = fewer
            leaves = [stack.detach().requires_grad_() for stack in sgd[0].parameters]
            held = {name: stack[:count] for name, stack in group.weights.items()}
            below = x[rows].view(*index.shape, *x.shape[1:])
            logits = self._forward(suffix, below, held | dict(zip(trained, leaves, strict=True)))
            losses = F.cross_entropy(logits.flatten(0, 1), group.y[rows], reduction="none")
            gradients = torch.autograd.grad(losses @ share.flatten(), leaves)
            with torch.no_grad():
                sgd[0].move(sgd[0].parameters, list(gradients))

        return step

    def _schedule(self, group: Group, epochs: int, size: int, purpose: str) -> list[tuple[Tensor, Tensor]]:
        """For every step the rows of each active client's batch and their weights in its loss; gaps weigh nothing.

        Clients are in order of their steps, so those that are still active are always the first ones.
        """
        orders: list[list[Tensor]] = []
        for task, start, n in zip(group.tasks, group.starts, group.sizes, strict=True):
            source = rng.generator(self.seed, purpose, task.t, task.client)
            own = [index + start for _ in range(epochs) for index in batches(n, size, source, whole=False)]
            orders.append(own)
        steps, starts = [], torch.tensor(group.starts).unsqueeze(1)
        for step in range(len(orders[0])):
            rows = [own[step] for own in orders if step < len(own)]
            counts = torch.tensor([len(row) for row in rows])
            index = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            inside = torch.arange(index.shape[1]) < counts.unsqueeze(1)
            index = index.where(inside, starts[: len(rows)])
            steps.append((index, inside / counts.unsqueeze(1)))
        return steps

    def _cut(self, group: Group, phase: Phase) -> int:
        """Before which layer the frozen ones end whose output is stored."""
        return fitting(self.net, phase, group.x, sum(group.sizes)) if phase.reuse else 0

    @torch.no_grad()
    def _prefix(self, group: Group, cut: int) -> Tensor:
        """The output of the frozen layers for every sample, client after client."""
        prefix = self.net.modules_from(0)[: -len(self.net.modules_from(cut))]
        parts = []
        for row, (start, size) in enumerate(zip(group.starts, group.sizes, strict=True)):
            own = {name: stack[row : row + 1] for name, stack in group.weights.items()}
            parts.append(self._forward(prefix, group.x[start : start + size].unsqueeze(0), own).squeeze(0))
        return torch.cat(parts)

    def _forward(
        self,
        modules: Sequence[nn.Module],
        x: Tensor,
        weights: State,
        moving: Set[str] = frozenset(),
        lr: float = 0.0,
        anchor: Tensor | None = None,
    ) -> Tensor:
        """The modules one after another, for (clients, samples, ...) at once; `moving` weights step on the way back."""
        for module in modules:
            if isinstance(module, nn.Linear):
                path = self._linear[id(module)]
                own = (x, weights[f"{path}.weight"], weights.get(f"{path}.bias"))
                steps = f"{path}.weight" in moving
                x = Descents.apply(*own, lr, anchor) if steps else Layers.apply(*own)  # type: ignore[no-untyped-call]
            else:
                x = x.flatten(2) if isinstance(module, nn.Flatten) else module(x)
        return x

    def _replies(self, group: Group, seconds: float) -> list[Reply]:
        found = []
        group.write_out(self._written_out(group.tasks[0].t) if self.folds else self.plan.parts)
        for row, task in enumerate(group.tasks):
            weights = {name: stack[row] for name, stack in group.weights.items()}
            kept = self.plan.pick(weights, self.plan.private(task.t))
            memory = {name: tensor for name, tensor in task.private.items() if name not in self.plan.parts}
            scalars = {
                "weight": float(group.sizes[row]),
                "extra": {},
                "meter": asdict(group.meters[row]),
                "seconds": seconds,
            }
            state = {} if self.folds else self.plan.pick(weights, self.plan.travels(task.t))
            found.append(Reply(task.client, state, {k: v.clone() for k, v in kept.items()} | memory, scalars))
        return self._folded(group, found) if self.folds else found

    def _folded(self, group: Group, replies: list[Reply]) -> list[Reply]:
        """The replies, the first of which brings the mean of all; clients whose values are not finite are left out."""
        t = group.tasks[0].t
        sent = [name for name, which in self.plan.travels(t).items() if which is not False]
        kept = [name for name, which in self.plan.private(t).items() if which is not False]
        mean = group.mean(sent, range(len(replies)))
        good = list(range(len(replies)))
        if not all(map(finite, (*mean.values(), *(group.weights[name] for name in kept)))):
            good = [row for row in good if all(group.finite(name, row) for name in (*sent, *kept))]
            bad = "values that are not finite came out of its training."
            replies = [
                one if row in good else Reply(one.client, {}, {}, {"error": bad, "seconds": one.scalars["seconds"]})
                for row, one in enumerate(replies)
            ]
            mean = group.mean(sent, good)
        if good:
            first = replies[good[0]]
            for row in good[1:]:
                replies[row].scalars["within"] = first.client
            first.scalars["weight"] = float(sum(group.sizes[row] for row in good))
            state = self.plan.pick(mean, self.plan.travels(t))
            replies[good[0]] = replace(first, state=state)
        return replies


def _leading(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules before the first linear layer."""
    return list(itertools.takewhile(lambda module: not isinstance(module, nn.Linear), modules))


def _through(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Samples after some modules without weights, none of which may write into what others still need."""
    x = x.clone() if any(getattr(module, "inplace", False) for module in modules) else x
    for module in modules:
        x = x.flatten(1) if isinstance(module, nn.Flatten) else module(x)
    return x


def _plain(optimiser: Optimiser) -> bool:
    return not optimiser.momentum and not optimiser.weight_decay


def _check(phase: Phase) -> None:
    own = phase.loss, phase.slopes, phase.after_epoch, phase.after_step
    if any(own) or phase.features is not None:
        raise ConfigError(
            "executor = 'cohort' does not fit this method: a phase has a loss, gradients or hooks of its own.", CURE
        )
