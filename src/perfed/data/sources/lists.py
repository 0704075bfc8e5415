"""Images that a text file lists: MNIST-M, DomainNet, Tiny-ImageNet's validation set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perfed.data.source import Source, find
from perfed.data.sources.digits import DIGITS
from perfed.data.sources.folder import SUFFIXES, _pixels
from perfed.errors import ConfigError, DataError

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def pictures(paths: Sequence[Path], side: int) -> Tensor:
    """Colour pictures of one size, uint8 (N, 3, side, side)."""
    x = np.empty((len(paths), side, side, 3), np.uint8)
    for i, path in enumerate(paths):
        x[i] = _pixels(path, "RGB", (side, side))
    return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous()


def lines(path: Path) -> list[list[str]]:
    """The words of every line of a text file."""
    try:
        return [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.", "Fetch it again.") from None


def _labelled(path: Path) -> list[tuple[str, int]]:
    """Lines of `FILE LABEL`."""
    try:
        return [(" ".join(words[:-1]), int(words[-1])) for words in lines(path)]
    except (ValueError, IndexError):
        raise DataError(f"{path} has lines other than 'FILE LABEL'.", "Fetch it again.") from None


def load_mnistm(data_dir: Path | str | None = None) -> Source:
    """Handwritten digits on crops of photographs, colour, 32 x 32 (Ganin and Lempitsky's MNIST-M)."""
    halves = ("mnist_m_train", "mnist_m_test")
    page = "the data of 'Unsupervised Domain Adaptation by Backpropagation'"
    folder = find("mnistm", data_dir, ("mnist_m", "MNIST-M", "."), [f"{half}_labels.txt" for half in halves], page)
    read = []
    for half in halves:
        listed = _labelled(folder / f"{half}_labels.txt")
        read += [pictures([folder / half / name for name, _ in listed], 32), torch.tensor([y for _, y in listed])]
    return Source("mnistm", read[0], read[1], DIGITS, read[2], read[3])


def load_domainnet(data_dir: Path | str | None = None, top: int = 10, size: int = 64) -> Source:
    """Pictures of things in six styles, a domain each: the `top` most frequent of 345 classes, `size` pixels."""
    if top < 2 or size < 8:
        raise ConfigError(f"top = {top}, size = {size} is not accepted.", "Give 2 classes and 8 pixels or more.")
    names = [f"{domain}_{half}.txt" for domain in DOMAINS for half in ("train", "test")]
    page = "the page of DomainNet, 'Moment Matching for Multi-Source Domain Adaptation', cleaned version"
    folder = find("domainnet", data_dir, ("DomainNet", "domainnet", "."), names, page)
    listed = {name: _labelled(folder / name) for name in names}
    counts = Counter(y for name, entries in listed.items() if name.endswith("_train.txt") for _, y in entries)
    kept = sorted(label for label, _ in sorted(counts.items(), key=lambda held: (-held[1], held[0]))[:top])
    title = {y: Path(file).parent.name for entries in listed.values() for file, y in entries}
    parts: dict[str, list[Tensor]] = {}
    for half in ("train", "test"):
        chosen = [
            (folder / file, kept.index(y), d)
            for d, domain in enumerate(DOMAINS)
            for file, y in listed[f"{domain}_{half}.txt"]
            if y in kept
        ]
        parts[half] = [pictures([path for path, _, _ in chosen], size)]
        parts[half] += [torch.tensor([entry[i] for entry in chosen], dtype=torch.int64) for i in (1, 2)]
    (x, y, domain), (x_test, y_test, domain_test) = parts["train"], parts["test"]
    classes = tuple(title[label] for label in kept)
    return Source("domainnet", x, y, classes, x_test, y_test, domain, domain_test, DOMAINS)


def load_tinyimagenet(data_dir: Path | str | None = None) -> Source:
    """100,000 + 10,000 pictures of 200 things, colour, 64 x 64; the labelled validation set is the test set."""
    page = "'Tiny ImageNet Visual Recognition Challenge' of Stanford's CS231n"
    places = ("tiny-imagenet-200", "TinyImageNet/tiny-imagenet-200", ".")
    folder = find("tinyimagenet", data_dir, places, ("wnids.txt", "train", "val/val_annotations.txt"), page)
    classes = tuple(sorted(words[0] for words in lines(folder / "wnids.txt")))
    held = {name: folder / "train" / name / "images" for name in classes}
    if missing := [name for name, place in held.items() if not place.is_dir()]:
        raise DataError(f"Tiny ImageNet lacks {held[missing[0]]}.", "Unpack the archive again.")
    train = [(path, y) for y, name in enumerate(classes) for path in sorted(held[name].iterdir()) if _picture(path)]
    noted = [(words[0], words[1]) for words in lines(folder / "val" / "val_annotations.txt")]
    if strange := [name for _, name in noted if name not in classes]:
        raise DataError(f"val_annotations.txt has a class {strange[0]!r}, which wnids.txt has not.")
    test = [(folder / "val" / "images" / file, classes.index(name)) for file, name in noted]
    x, x_test = (pictures([path for path, _ in half], 64) for half in (train, test))
    y, y_test = (torch.tensor([label for _, label in half]) for half in (train, test))
    return Source("tinyimagenet", x, y, classes, x_test, y_test)


def _picture(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES
