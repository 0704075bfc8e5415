"""A data set as its publisher made it, before it is divided among clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from perfed.data import images
from perfed.errors import DataError

Array = Tensor | npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class Source:
    """Images, labels, and the published test set if there is one.

    `x` is uint8 (N, C, H, W), or float32 in [0, 1]; `y` is int64 (N,). `domain` is the client or domain that
    each sample comes from: image folders with one folder per client, or several sources joined.
    """

    name: str
    x: Tensor
    y: Tensor
    classes: tuple[str, ...]
    x_test: Tensor | None = None
    y_test: Tensor | None = None
    domain: Tensor | None = None
    domain_test: Tensor | None = None
    domain_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check("", self.x, self.y, self.domain)
        if (self.x_test is None) != (self.y_test is None):
            raise DataError(f"The data set {self.name!r} has test images or test labels but not both.")
        if self.x_test is not None and self.y_test is not None:
            self._check("test ", self.x_test, self.y_test, self.domain_test)
            if self.x_test.shape[1:] != self.x.shape[1:] or self.x_test.dtype != self.x.dtype:
                raise DataError(
                    f"The test images of {self.name!r} are {self.x_test.dtype} {tuple(self.x_test.shape[1:])}, "
                    f"its training images {self.x.dtype} {tuple(self.x.shape[1:])}."
                )

    def _check(self, which: str, x: Tensor, y: Tensor, domain: Tensor | None) -> None:
        if x.ndim != 4 or x.dtype not in (torch.uint8, torch.float32):
            raise DataError(
                f"The {which}images of {self.name!r} are {x.dtype} of shape {tuple(x.shape)}.",
                "Give uint8, or float32 in [0, 1], of shape (N, C, H, W).",
            )
        if y.shape != (len(x),) or y.dtype != torch.int64:
            raise DataError(
                f"{self.name!r} has {len(x)} {which}images and labels of shape {tuple(y.shape)}, {y.dtype}.",
                "Give one int64 label per image.",
            )
        if len(y) and (int(y.min()) < 0 or int(y.max()) >= len(self.classes)):
            raise DataError(
                f"The {which}labels of {self.name!r} run from {int(y.min())} to {int(y.max())}, "
                f"but it has {len(self.classes)} classes.",
                "Labels count from 0.",
            )
        if domain is not None and (domain.shape != y.shape or domain.dtype != torch.int64):
            raise DataError(f"{self.name!r} has {len(y)} {which}samples and {tuple(domain.shape)} domains.")
        if domain is not None and len(domain):
            low, high = int(domain.min()), int(domain.max())
            if low < 0 or high >= len(self.domain_names):
                raise DataError(
                    f"The {which}domains of {self.name!r} run from {low} to {high}, "
                    f"but it names {len(self.domain_names)} domains."
                )
        if x.dtype == torch.float32 and len(x):
            dark, bright = float(x.min()), float(x.max())
            if not (dark >= 0.0 and bright <= 1.0):  # also true of NaN
                raise DataError(
                    f"The {which}images of {self.name!r} have values from {dark:g} to {bright:g}.",
                    "Scale float images to [0, 1], or give uint8.",
                )

    @property
    def num_classes(self) -> int:
        """How many classes there are, held or not."""
        return len(self.classes)

    def fitted(self, shape: tuple[int, int, int]) -> Source:
        """The same data set with images of shape (C, H, W)."""
        test = None if self.x_test is None else images.fit(self.x_test, shape)
        return Source(
            self.name, images.fit(self.x, shape), self.y, self.classes, test, self.y_test,
            self.domain, self.domain_test, self.domain_names,
        )  # fmt: skip


def _tensor(values: Array, what: str, cure: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"The {what} are no numbers: {error}", cure) from None


def _images(x: Array) -> Tensor:
    t = _tensor(x, "images", "Give numbers of shape (N, C, H, W).")
    if t.ndim == 3:
        t = t.unsqueeze(1)
    if t.dtype in (torch.float64, torch.float16, torch.bfloat16):
        t = t.float()
    return t.contiguous()


def _labels(y: Array, name: str) -> Tensor:
    t = _tensor(y, f"labels of {name!r}", "Give whole numbers counted from 0.")
    if t.is_floating_point() or t.dtype == torch.bool:
        raise DataError(f"The labels of {name!r} are {t.dtype}.", "Give whole numbers counted from 0.")
    return t.to(torch.int64).contiguous()


def from_tensors(
    x: Array,
    y: Array,
    *,
    x_test: Array | None = None,
    y_test: Array | None = None,
    domain: Array | None = None,
    domain_test: Array | None = None,
    classes: Sequence[str] | None = None,
    domain_names: Sequence[str] | None = None,
    name: str = "tensors",
) -> Source:
    """A source from tensors or arrays in memory: images (N, H, W) or (N, C, H, W) and whole-number labels."""
    labels = _labels(y, name)
    test = None if y_test is None else _labels(y_test, name)
    if classes is None:
        top = max((int(t.max()) for t in (labels, test) if t is not None and len(t)), default=-1)
        classes = [str(c) for c in range(top + 1)]
    where = None if domain is None else _labels(domain, name)
    where_test = None if domain_test is None else _labels(domain_test, name)
    if domain_names is None:
        top = max((int(t.max()) for t in (where, where_test) if t is not None and len(t)), default=-1)
        domain_names = [str(d) for d in range(top + 1)]
    return Source(
        name, _images(x), labels, tuple(classes), None if x_test is None else _images(x_test), test,
        where, where_test, tuple(domain_names),
    )  # fmt: skip


def join(sources: Sequence[Source]) -> Source:
    """Several sources of the same classes as the domains of one, in the largest shape among them."""
    if not sources:
        raise DataError("There is no source to join.", "Give at least one.")
    if len({s.classes for s in sources}) > 1:
        raise DataError(
            "The sources "
            + ", ".join(f"{s.name!r} ({s.num_classes} classes)" for s in sources)
            + " do not have the same classes.",
            "Join data sets that label the same things.",
        )
    shapes = [s.x.shape[1:] for s in sources]
    shape = (max(s[0] for s in shapes), max(s[1] for s in shapes), max(s[2] for s in shapes))
    fitted = [s.fitted(shape) for s in sources]
    if len({s.x.dtype for s in fitted}) > 1:
        raise DataError("Some of the joined sources are uint8 and some float32.", "Give them alike.")
    published = all(s.x_test is not None for s in fitted)
    domain = [torch.full((len(s.y),), i, dtype=torch.int64) for i, s in enumerate(fitted)]
    tests = [(s.x_test, s.y_test) for s in fitted if s.x_test is not None and s.y_test is not None]
    return Source(
        "+".join(s.name for s in sources),
        torch.cat([s.x for s in fitted]),
        torch.cat([s.y for s in fitted]),
        sources[0].classes,
        torch.cat([x for x, _ in tests]) if published else None,
        torch.cat([y for _, y in tests]) if published else None,
        torch.cat(domain),
        torch.cat([torch.full((len(y),), i, dtype=torch.int64) for i, (_, y) in enumerate(tests)])
        if published
        else None,
        tuple(s.name for s in sources),
    )


def find(name: str, data_dir: Path | str | None, folders: Sequence[str], files: Sequence[str], page: str) -> Path:
    """The first of the folders under data_dir that has every one of the files (or its .gz)."""
    base = Path("data" if data_dir is None else data_dir)
    tried = [base / f for f in folders]
    missing: dict[Path, list[str]] = {}
    for folder in tried:
        missing[folder] = [f for f in files if not (folder / f).exists() and not (folder / f"{f}.gz").exists()]
        if not missing[folder]:
            return folder
    begun = min(missing, key=lambda folder: len(missing[folder]))
    partly = len(missing[begun]) < len(files)
    where = str(begun) if partly else " or ".join(str(t) for t in tried)
    raise DataError(
        f"The data set {name!r} is not complete: no {', '.join(missing[begun])} in {where}.",
        f"Run 'perfed data get {name} --data-dir {base}', or fetch the files by hand from {page}.",
    )
