"""The division of a data set as a picture: clients across, classes up, a bubble for what each client trains on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perfed.data.federation import Federation
from perfed.errors import ConfigError

MOST = 100  # clients shown
FORMATS = (".png", ".svg", ".pdf")


def draw(federation: Federation, path: Path | str, part: str = "train") -> Path:
    """Save a bubble chart of the (clients, classes) counts as PNG, SVG or PDF; the area follows the count."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    place = Path(path)
    if place.suffix.lower() not in FORMATS:
        raise ConfigError(f"A picture cannot be saved as {place.name!r}.", f"Name it {', '.join(FORMATS)}.")
    counts = federation.counts(part)
    everyone, classes = counts.shape
    counts = counts[:MOST]
    shown = len(counts)
    wide = float(np.clip(2.2 + 0.32 * shown, 6, 20))
    high = float(np.clip(1.8 + 0.32 * classes, 4, 18))
    figure = Figure(figsize=(wide, high), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    who, what = np.nonzero(counts)
    many = counts[who, what]
    cell = 72 * min((wide - 2) / shown, (high - 1.4) / classes)  # points from one bubble to the next
    area = (0.95 * max(cell, 4.0)) ** 2 * many / max(int(counts.max()), 1)
    axes.scatter(who, what, s=np.maximum(area, 1.5), c="#1f6f8b", alpha=0.75, linewidths=0)
    axes.set_xlim(-0.8, shown - 0.2)
    axes.set_ylim(-0.8, classes - 0.2)
    step = 1 if shown <= 40 else 5
    ticks = list(range(0, shown, step))
    names = federation.client_names
    axes.set_xticks(ticks, [names[i][:16] if names else str(i) for i in ticks], rotation=60 if names else 0)
    step = 1 if classes <= 40 else 5
    axes.set_yticks(range(0, classes, step), [c[:20] for c in federation.classes[::step]])
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.grid(color="#e6e6e6", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    note = f", the first {MOST} shown" if everyone > MOST else ""
    what_part = {"train": "training", "val": "validation", "test": "test"}[part]
    figure.suptitle(
        f"{everyone} clients{note}: {what_part} samples per class (largest bubble {int(counts.max())})",
        fontsize=11,
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "perfed", "svg.fonttype": "none"}):  # the same picture, the same file
        figure.savefig(place, metadata={"Date": None} if place.suffix.lower() == ".svg" else None)
    return place
