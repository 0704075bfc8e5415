"""HISTO-FED: patches of colorectal tissue in nine classes, a folder per centre with a folder per class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from perfed.data.source import Source
from perfed.data.sources.folder import _files, _folders
from perfed.data.sources.lists import pictures
from perfed.errors import ConfigError, DataError

TISSUES = ("ADI", "BACK", "DEB", "LYM", "MUC", "MUS", "NORM", "STR", "TUM")
PAGE = "'100,000 histological images of human colorectal cancer and healthy tissue' at Zenodo"


def _centre(folder: Path, patches: int) -> list[tuple[Path, int]]:
    """(file, class) of a centre: all, or `patches` drawn evenly from its sorted files."""
    named = {name: place for place in _folders(folder) if (name := place.name.upper()) in TISSUES}
    if strange := [p.name for p in _folders(folder) if p.name.upper() not in TISSUES]:
        raise DataError(f"{folder / strange[0]} is no class of tissue.", f"Known: {', '.join(TISSUES)}.")
    files = [(file, TISSUES.index(name)) for name, place in sorted(named.items()) for file in _files(place)]
    if patches and len(files) > patches:
        files = [files[int(i)] for i in np.linspace(0, len(files) - 1, patches).round()]
    return files


def _read(name: str, centres: list[Path], size: int, patches: int) -> Source:
    if size < 8 or patches < 0:
        raise ConfigError(
            f"size = {size}, patches = {patches} is not accepted.", "Give 8 pixels or more, and 0 for all."
        )
    listed = [(file, y, n) for n, centre in enumerate(centres) for file, y in _centre(centre, patches)]
    if not listed:
        raise DataError(f"The data set {name!r} is not complete: it has no patches.", f"Fetch them by hand: {PAGE}.")
    x = pictures([file for file, _, _ in listed], size)
    y, domain = (torch.tensor([entry[i] for entry in listed], dtype=torch.int64) for i in (1, 2))
    return Source(name, x, y, TISSUES, domain=domain, domain_names=tuple(centre.name for centre in centres))


def load_histofed(data_dir: Path | str | None = None, size: int = 64, patches: int = 0) -> Source:
    """Tissue patches, a domain per centre: HISTO-FED/CENTRE/CLASS/; `patches` of each (0: all), `size` pixels."""
    base = Path("data" if data_dir is None else data_dir) / "HISTO-FED"
    order = {"NCT-CRC-HE-100K": 0, "CRC-VAL-HE-7K": 1}
    centres = sorted(_folders(base), key=lambda p: (order.get(p.name, 2), p.name)) if base.is_dir() else []
    if not centres:
        raise DataError(f"The data set 'histofed' is not complete: no folders in {base}.", f"Fetch it by hand: {PAGE}.")
    return _read("histofed", centres, size, patches)


def load_histofed_external(data_dir: Path | str | None = None, size: int = 64, patches: int = 0) -> Source:
    """Tissue patches of a centre that takes no part: HISTO-FED-EXTERNAL/CLASS/."""
    base = Path("data" if data_dir is None else data_dir) / "HISTO-FED-EXTERNAL"
    if not base.is_dir():
        raise DataError(f"There is no folder {base}.", "Put patches of another centre there, a folder per class.")
    return _read("histofed-external", [base], size, patches)
