"""What every measured tool is given: the same data, division, schedule of cohorts, network and first weights.

This file imports nothing but numpy and torch, so that it runs in every tool's own environment.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

Split = tuple[Tensor, Tensor]


@dataclass
class Workload:
    name: str
    method: str
    net: str
    batch: int
    lr: float
    head_epochs: int
    train: list[Split]
    test: list[Split]
    cohorts: list[list[int]]
    initial: dict[str, Tensor]
    seed: int

    @property
    def rounds(self) -> int:
        return len(self.cohorts)

    def module(self) -> nn.Sequential:
        """The network as anyone would write it, with the first weights."""
        if self.net == "cnn":
            layers = OrderedDict(
                conv1=nn.Conv2d(1, 32, 5), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(32, 64, 5), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2), flatten=nn.Flatten(),
                fc1=nn.Linear(1024, 512), fcrelu1=nn.ReLU(), fc2=nn.Linear(512, 10),
            )  # fmt: skip
        else:
            layers = OrderedDict(
                flatten=nn.Flatten(), fc1=nn.Linear(784, 200), fcrelu1=nn.ReLU(), fc2=nn.Linear(200, 10)
            )
        net = nn.Sequential(layers)
        net.load_state_dict(self.initial)
        return net

    def samples(self, t: int) -> int:
        return sum(len(self.train[client][1]) for client in self.cohorts[t])


def load(path: Path | str) -> Workload:
    """Read a workload's file."""
    with np.load(path) as held:
        facts = json.loads(str(held["facts"]))
        x, y = held["x"], torch.from_numpy(held["y"])
        initial = {name[5:]: torch.from_numpy(held[name]) for name in held.files if name.startswith("init/")}
        owner = {part: held[f"owner/{part}"] for part in ("train", "test")}
    images = torch.from_numpy(x).float().div(127.5).sub(1.0)
    parts = {}
    for part, who in owner.items():
        rows = np.argsort(who, kind="stable")
        rows = rows[who[rows] >= 0]
        cuts = np.cumsum(np.bincount(who[rows], minlength=facts["clients"]))[:-1]
        parts[part] = [(images[torch.from_numpy(r)], y[torch.from_numpy(r)]) for r in np.split(rows, cuts)]
    keys = ("name", "method", "net", "batch", "lr", "head_epochs", "cohorts", "seed")
    return Workload(**{key: facts[key] for key in keys}, train=parts["train"], test=parts["test"], initial=initial)


def given() -> Workload:
    """The workload that this process was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    return load(parser.parse_args().file)


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(tool: str, version: str, train: list[float], evaluation: float, accuracy: float, **more: float) -> None:
    """Print what was measured; the first round is for warming up and is left out."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    facts = {
        "tool": tool, "version": version, "train": sum(train[1:]) / len(train[1:]), "eval": evaluation,
        "accuracy": accuracy, "peak_mb": round(peak / 1024),
    }  # fmt: skip
    print("\n" + json.dumps(facts | more))
