"""FLICKR-AES and REAL-CUR: pictures with the score that a person gave them, 1 to 5; the score is the class."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import torch

from perfed.data.source import Source, find
from perfed.data.sources.lists import pictures
from perfed.errors import ConfigError, DataError

SCORES = ("1", "2", "3", "4", "5")
TABLE = "FLICKR-AES_image_labeled_by_each_worker.csv"
PAGE = "the project 'Personalized Image Aesthetics' (Ren et al., ICCV 2017)"


def _scored(path: Path) -> list[tuple[str, str, int]]:
    """(person, picture, class) of every line; a table without a column of persons has the person ''."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [{str(k).strip(): str(v).strip() for k, v in row.items()} for row in csv.DictReader(file)]
        return [(row.get("worker", ""), row["imagePair"], round(float(row["score"])) - 1) for row in rows]
    except (OSError, UnicodeDecodeError, KeyError, ValueError) as error:
        raise DataError(
            f"{path} is not a table of scores: {error!r}.", "Its columns: worker, imagePair, score."
        ) from None


def load_flickraes(data_dir: Path | str | None = None, raters: int = 30, size: int = 64) -> Source:
    """Photographs with scores by many people, a domain each: the `raters` who scored most, `size` pixels."""
    if raters < 1 or size < 8:
        raise ConfigError(f"raters = {raters}, size = {size} is not accepted.", "Give 1 rater and 8 pixels or more.")
    folder = find("flickraes", data_dir, ("FLICKR-AES", "flickr-aes"), (TABLE, "40K"), PAGE)
    scored = _scored(folder / TABLE)
    most = sorted(Counter(person for person, _, _ in scored).items(), key=lambda held: (-held[1], held[0]))
    people = sorted(person for person, _ in most[:raters])
    kept = [entry for entry in scored if entry[0] in people]
    x = pictures([folder / "40K" / name for _, name, _ in kept], size)
    y = torch.tensor([score for _, _, score in kept])
    domain = torch.tensor([people.index(person) for person, _, _ in kept])
    return Source("flickraes", x, y, SCORES, domain=domain, domain_names=tuple(people))


def load_realcur(data_dir: Path | str | None = None, size: int = 64) -> Source:
    """Personal albums, each scored by its owner: REAL-CUR/ALBUM/ with pictures and scores.csv; `size` pixels."""
    base = Path("data" if data_dir is None else data_dir) / "REAL-CUR"
    albums = sorted(path.parent for path in base.glob("*/scores.csv"))
    if not albums:
        raise DataError(
            f"The data set 'realcur' is not complete: no scores.csv in the folders of {base}.",
            f"Fetch it by hand from {PAGE}; scores.csv has the columns imagePair, score.",
        )
    listed = [
        (album / name, score, n) for n, album in enumerate(albums) for _, name, score in _scored(album / "scores.csv")
    ]
    x = pictures([path for path, _, _ in listed], size)
    y, domain = (torch.tensor([entry[i] for entry in listed], dtype=torch.int64) for i in (1, 2))
    return Source("realcur", x, y, SCORES, domain=domain, domain_names=tuple(album.name for album in albums))
