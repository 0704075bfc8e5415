"""The data sets that perfed reads in their publishers' own layouts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perfed.data.source import Source, join
from perfed.data.sources.aesthetics import load_flickraes, load_realcur
from perfed.data.sources.cifar import load_cifar10, load_cifar100
from perfed.data.sources.digits import load_digits
from perfed.data.sources.emnist import load_emnist
from perfed.data.sources.folder import load_folder
from perfed.data.sources.histology import load_histofed, load_histofed_external
from perfed.data.sources.housenumbers import load_svhn, load_synthdigits
from perfed.data.sources.idx import load_fashionmnist, load_mnist
from perfed.data.sources.leaf import load_femnist
from perfed.data.sources.lists import load_domainnet, load_mnistm, load_tinyimagenet
from perfed.data.sources.npz import load_npz
from perfed.data.sources.usps import load_usps
from perfed.errors import ConfigError, unknown

_LOADERS: dict[str, Callable[..., Source]] = {
    "digits": load_digits,
    "mnist": load_mnist,
    "fashionmnist": load_fashionmnist,
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "usps": load_usps,
    "emnist": load_emnist,
    "femnist": load_femnist,
    "svhn": load_svhn,
    "mnistm": load_mnistm,
    "synthdigits": load_synthdigits,
    "domainnet": load_domainnet,
    "tinyimagenet": load_tinyimagenet,
    "flickraes": load_flickraes,
    "realcur": load_realcur,
    "histofed": load_histofed,
    "histofed-external": load_histofed_external,
    "npz": load_npz,
    "folder": load_folder,
}


def names() -> tuple[str, ...]:
    """The names that `load` knows."""
    return tuple(_LOADERS)


def describe() -> dict[str, str]:
    """One line on each data set."""
    return {name: (loader.__doc__ or "").strip().splitlines()[0] for name, loader in _LOADERS.items()}


def load(name: str, data_dir: Path | str | None = None, **options: Any) -> Source:
    """Read a data set by name from data_dir (default `data`).

    `npz:PATH` and `folder:PATH` read a file or folder of your own; `A+B` joins data sets as domains of one.
    """
    if "+" in name and ":" not in name:
        return join([load(part, data_dir, **options) for part in name.split("+")])
    word, _, path = name.partition(":")
    if word not in _LOADERS or (path and word not in ("npz", "folder")):
        raise unknown("data set", name, _LOADERS)
    loader = _LOADERS[word]
    known = set(inspect.signature(loader).parameters) - {"data_dir"}
    for key in options:
        if key not in known:
            accepted = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"The data set {word!r} has no option {key!r}.", f"Its options: {accepted}.")
    return loader(path or data_dir, **options)
