"""A data set divided among clients: who has what, and each client's data on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perfed.data.images import normalise
from perfed.data.partition import Ints
from perfed.errors import SplitError

PARTS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class Split:
    """Samples as a network takes them: float32 images (n, C, H, W) in [-1, 1] and int64 labels."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


class ClientData:
    """One client's data; a part is gathered and converted when it is first asked for."""

    def __init__(self, federation: Federation, number: int) -> None:
        self._federation, self.number = federation, number

    @cached_property
    def train(self) -> Split:
        """The samples to learn from."""
        return self._federation.split(self.number, "train")

    @cached_property
    def val(self) -> Split:
        """The samples to choose by, taken from the training part; may be empty."""
        return self._federation.split(self.number, "val")

    @cached_property
    def test(self) -> Split:
        """The samples to score on."""
        return self._federation.split(self.number, "test")

    @property
    def num_classes(self) -> int:
        """How many classes the federation has."""
        return self._federation.num_classes

    @cached_property
    def class_counts(self) -> Tensor:
        """Training samples of each class, int64 (num_classes,)."""
        labels = self._federation.labels(self.number, "train")
        return torch.bincount(labels, minlength=self.num_classes)

    @property
    def classes_held(self) -> tuple[int, ...]:
        """The labels that occur in the training part, ascending."""
        return tuple(torch.nonzero(self.class_counts).flatten().tolist())


class Federation:
    """Clients over one tensor of images as they were read.

    For each part there is a flat list of row numbers, client after client, and where each client's rows begin:
    what a client costs depends on its own samples only.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        owners: dict[str, Ints],
        num_clients: int,
        classes: Sequence[str],
        *,
        client_names: Sequence[str] | None = None,
        unseen: int = 0,
        external: tuple[Tensor, Tensor] | None = None,
        alone: int | None = None,
    ) -> None:
        self._x, self._y = x, y
        self.num_clients = num_clients
        self.classes = tuple(classes)
        self.client_names = None if client_names is None else tuple(client_names)
        self.unseen = range(num_clients - unseen, num_clients)
        self.participants = range(num_clients - unseen)
        self._external = external
        self._rows: dict[str, Tensor] = {}
        self._offsets: dict[str, Ints] = {}
        for part in PARTS:
            owner = owners[part]
            rows = np.flatnonzero(owner >= 0)
            rows = rows[np.argsort(owner[rows], kind="stable")]
            self._rows[part] = torch.from_numpy(rows)
            counts = np.bincount(owner[rows], minlength=num_clients)
            self._offsets[part] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        here = np.arange(num_clients) if alone is None else np.array([alone])  # alone: no other client's data is here
        for part in ("train", "test"):
            if len(empty := here[self.sizes(part)[here] == 0]):
                raise SplitError(
                    f"Client {empty[0]} would have no {part} samples ({len(empty)} of {num_clients}).",
                    "Give fewer clients or more data.",
                )

    @property
    def num_classes(self) -> int:
        """How many classes there are, held or not."""
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        _, channels, height, width = self._x.shape
        return channels, height, width

    def _check(self, i: int) -> None:
        if not 0 <= i < self.num_clients:
            raise IndexError(f"there is no client {i} among {self.num_clients}")

    def rows(self, i: int, part: str) -> Tensor:
        """The row numbers of a client's samples, ascending."""
        self._check(i)
        at = self._offsets[part]
        return self._rows[part][int(at[i]) : int(at[i + 1])]

    def labels(self, i: int, part: str) -> Tensor:
        """The labels of a client's samples."""
        return self._y[self.rows(i, part)]

    def split(self, i: int, part: str) -> Split:
        """A client's samples of one part, converted."""
        rows = self.rows(i, part)
        return Split(normalise(self._x.index_select(0, rows)), self._y[rows])

    def stacked(self, clients: Sequence[int], part: str) -> tuple[Split, Tensor]:
        """The samples of one part of several clients, and for each sample the place of its client in the list."""
        found = [self.rows(i, part) for i in clients]
        rows = torch.cat(found)
        owner = torch.repeat_interleave(torch.tensor([len(one) for one in found]))
        return Split(normalise(self._x.index_select(0, rows)), self._y[rows]), owner

    def client(self, i: int) -> ClientData:
        """The data of client i."""
        self._check(i)
        return ClientData(self, i)

    def size(self, i: int) -> int:
        """How many training samples client i has."""
        self._check(i)
        at = self._offsets["train"]
        return int(at[i + 1] - at[i])

    def sizes(self, part: str = "train") -> Ints:
        """How many samples of a part each client has."""
        return np.diff(self._offsets[part])

    def counts(self, part: str = "train") -> Ints:
        """The (clients, classes) matrix of sample counts."""
        labels = self._y[self._rows[part]].numpy()
        who = np.repeat(np.arange(self.num_clients), self.sizes(part))
        flat = np.bincount(who * self.num_classes + labels, minlength=self.num_clients * self.num_classes)
        return flat.reshape(self.num_clients, self.num_classes).astype(np.int64)

    def summary(self, most: int = 1000) -> dict[str, Any]:
        """Names, and who has how much of which class, of the first clients: [class, samples, class, samples, ...]."""
        shown = min(self.num_clients, most)
        names = self.client_names
        parts = {part: self.counts(part)[:shown] for part in ("train", "test")}
        return {
            "clients": self.num_clients,
            "unseen": len(self.unseen),
            "classes": list(self.classes),
            "names": list(names[:shown]) if names else None,
            **{
                part: [[int(v) for c in np.flatnonzero(row) for v in (c, row[c])] for row in counts]
                for part, counts in parts.items()
            },
        }

    def pooled_test(self) -> Split:
        """Every client's test samples, in client order."""
        rows = self._rows["test"]
        return Split(normalise(self._x.index_select(0, rows)), self._y[rows])

    @cached_property
    def external(self) -> Split | None:
        """Samples of another source in this one's shape, if one was given."""
        if self._external is None:
            return None
        x, y = self._external
        return Split(normalise(x), y)

    @cached_property
    def sha256(self) -> str:
        """A digest of everything a client can see: images, labels, and who has which in which part."""
        digest = hashlib.sha256(b"perfed federation 1")
        digest.update(repr((tuple(self._x.shape), str(self._x.dtype), self.num_clients, len(self.unseen))).encode())
        digest.update("\x1f".join(self.classes).encode())
        images = self._x.contiguous().numpy()
        digest.update(images.astype(images.dtype.newbyteorder("<"), copy=False).data)
        digest.update(self._y.numpy().astype("<i8").data)
        for part in PARTS:
            digest.update(self._offsets[part].astype("<i8").data)
            digest.update(self._rows[part].numpy().astype("<i8").data)
        return digest.hexdigest()

    def placed(self, client: int, clients: int, classes: Sequence[str]) -> Federation:
        """The one client of this federation as one of many, the data of whom is elsewhere, with all their classes."""
        if strange := [name for name in self.classes if name not in classes]:
            raise SplitError(f"The class {strange[0]!r} is not among those agreed on.", "Begin a new run.")
        number = torch.tensor([classes.index(name) for name in self.classes])
        owners = {part: np.full(len(self._y), -1, np.int64) for part in PARTS}
        for part, owner in owners.items():
            owner[self.rows(0, part).numpy()] = client
        return Federation(self._x, number[self._y], owners, clients, classes, alone=client)

    def write_assignment(self, path: Path | str) -> None:
        """Write who has what as CSV with the columns index, client, part: what split = 'file:PATH' reads."""
        with Path(path).open("w", encoding="utf-8", newline="") as out:
            out.write("index,client,part\n")
            for part in PARTS:
                who = np.repeat(np.arange(self.num_clients), self.sizes(part))
                for row, client in zip(self._rows[part].tolist(), who.tolist(), strict=True):
                    out.write(f"{row},{client},{part}\n")
