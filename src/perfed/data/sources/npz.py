"""A user's own arrays in a NumPy .npz file: x, y and optionally x_test, y_test, domain, domain_test."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from perfed.data.source import Source, from_tensors
from perfed.errors import DataError

NAMES = ("x", "y", "x_test", "y_test", "domain", "domain_test", "classes", "domain_names")


def read_arrays(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays of an .npz file; arrays of Python objects are refused."""
    if not path.is_file():
        raise DataError(f"There is no file {path}.", "Give the path of an .npz file.")
    try:
        with path.open("rb") as file, np.load(file) as held:
            return {str(k): held[k] for k in held.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as e:
        raise DataError(f"{path} is not a plain .npz file: {e}.", "Write it with numpy.savez.") from e


def load_npz(data_dir: Path | str | None = None) -> Source:
    """Your own arrays: an .npz file with x, y and optionally x_test, y_test, domain, domain_test, classes."""
    if data_dir is None:
        raise DataError("No file was given for the data set 'npz'.", "Write npz:PATH.")
    path = Path(data_dir)
    held = read_arrays(path)
    if extra := sorted(set(held) - set(NAMES)):
        raise DataError(f"{path} has {', '.join(extra)}.", f"Its arrays may be {', '.join(NAMES)}.")
    if missing := [n for n in ("x", "y") if n not in held]:
        raise DataError(f"{path} has no {' and no '.join(missing)}.", "Give images x and labels y.")
    words = {k: [str(c) for c in held.pop(k)] for k in ("classes", "domain_names") if k in held}
    return from_tensors(**held, **words, name=path.stem)  # type: ignore[arg-type]
