"""A head of independent branches: rows of one linear layer, each group of classes decided by its own rows.

A branch says whether a sample belongs to its group. It has one logit for the group, or one for each class of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.errors import ConfigError, NetError
from perfed.nets.net import Net


@dataclass(frozen=True)
class Branches:
    """Which branch decides about which classes."""

    groups: tuple[tuple[int, ...], ...]
    class_logits: bool = False

    @cached_property
    def owner(self) -> Tensor:
        """The branch of every class."""
        owner = torch.empty(sum(map(len, self.groups)), dtype=torch.int64)
        for branch, group in enumerate(self.groups):
            owner[list(group)] = branch
        return owner

    @cached_property
    def rows(self) -> Tensor:
        """(branches, logits): 1 where a logit belongs to a branch."""
        return F.one_hot(self.owner).T.float() if self.class_logits else torch.eye(len(self.groups))

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Every branch's binary cross-entropy, a mean over the samples; a branch with several logits adds theirs up."""
        each = F.binary_cross_entropy_with_logits(logits, self.labels(y), reduction="none")
        return self.rows @ each.mean(dim=0)

    def labels(self, y: Tensor) -> Tensor:
        """(samples, logits): what each logit should say, 0 or 1."""
        return F.one_hot(y if self.class_logits else self.owner[y], self.rows.shape[1]).float()

    def held(self, counts: Tensor) -> Tensor:
        """Whether a client with these class counts has any class of a branch, for each of its logits."""
        present = torch.zeros(len(self.groups)).index_add_(0, self.owner, (counts > 0).float())
        return self.rows.T @ present > 0

    def scores(self, logits: Tensor, counts: Tensor) -> Tensor:
        """(samples, classes): logits whose softmax are class probabilities.

        If exactly one branch is right, its odds are e^logit, so the softmax over branches is the probability of each.
        A single logit cannot tell the classes of a group apart: they share it as in the client's own training data.
        """
        if self.class_logits:
            return logits
        smooth = counts.float() + 1
        group = torch.zeros(len(self.groups)).index_add_(0, self.owner, smooth)
        return logits[:, self.owner] + (smooth / group[self.owner]).log()

    def verdicts(self, scores: Tensor) -> Tensor:
        """(samples, branches): above 0 where a branch claims the sample, from what `scores` returned."""
        per_branch = [scores[:, list(group)] for group in self.groups]
        if self.class_logits:
            return torch.stack([some.amax(dim=1) for some in per_branch], dim=1)
        return torch.stack([some.logsumexp(dim=1) for some in per_branch], dim=1)


@cache
def divide(classes: int, count: int, groups: tuple[tuple[int, ...], ...], class_logits: bool) -> Branches:
    """Branches of these groups, or of `count` groups of consecutive classes; 0 makes one for each class."""
    if not groups:
        count = count or classes
        groups = tuple(tuple(c for c in range(classes) if c * count // classes == b) for b in range(count))
    if sorted(c for group in groups for c in group) != list(range(classes)) or not all(groups):
        raise ConfigError(
            f"branches = {count}, groups = {[list(group) for group in groups]} do not divide {classes} classes.",
            f"Give at most {classes} branches, or groups that name every class from 0 to {classes - 1} once.",
        )
    return Branches(groups, class_logits)


def linear_head(net: Net) -> nn.Linear:
    """The head's module, which must be a linear layer."""
    head = net.module.get_submodule(net.head_path)
    if not isinstance(head, nn.Linear):
        raise NetError(
            f"The head {net.head_path!r} is a {type(head).__name__}, which has no rows to be branches.",
            "Use a network whose head is a linear layer.",
        )
    return head


def head_names(net: Net) -> Sequence[str]:
    """The names of the linear head's tensors."""
    return [f"{net.head_path}.{name}" for name in linear_head(net).state_dict()]
