"""The explanations as PNG files, with a title, a note and a text alternative each."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from perfed.explain.clients import Numbers
from perfed.explain.maps import Seen

SMALLEST = 9
"""points of the smallest letters"""
MAP, OVER = "inferno", 0.55
SCALED = "each map scaled to its own maximum"
TICKS = 16
"""channels, or clients, that are named along an axis"""
RIGHT, WRONG, INK = "#0b6e4f", "#b3400a", "#22272e"


def cams(images: Tensor, y: Tensor, right: int, seen: Sequence[Seen], classes: Sequence[str]) -> bytes:
    """Images down, models across; the warmer a place, the more it spoke for the class that was said."""
    rows, columns = len(images), 1 + len(seen)
    figure, axes = _figure(rows, columns, (1.75 * columns + 0.5, 1.95 * rows + 1.1))
    shown = ((images.permute(0, 2, 3, 1) + 1) / 2).clamp(0, 1).numpy()
    for r in range(rows):
        _image(axes[r, 0], shown[r])
        axes[r, 0].set_title(f"true: {_cut(classes[int(y[r])])}", fontsize=SMALLEST, color=INK)
        axes[r, 0].set_ylabel("right" if r < right else "wrong", fontsize=SMALLEST, color=RIGHT if r < right else WRONG)
        for c, model in enumerate(seen, start=1):
            _image(axes[r, c], shown[r], faded=True)
            axes[r, c].imshow(model.maps[r].numpy(), cmap=MAP, alpha=OVER, vmin=0, vmax=1)
            hit = bool(model.said[r] == y[r])
            text = f"{_cut(classes[int(model.said[r])])} {100 * float(model.sure[r]):.0f} %"
            head = f"{model.model.name}\n" if r == 0 else ""
            axes[r, c].set_title(
                f"{head}{'✓' if hit else '✗'} {text}", fontsize=SMALLEST, color=RIGHT if hit else WRONG
            )
    _scale(figure, axes[:, 1:])
    return _png(figure)


def _scale(figure: Any, axes: Any) -> None:
    """The maps' colours, as they look over a grey image."""
    from matplotlib.cm import ScalarMappable

    bar = figure.colorbar(
        ScalarMappable(cmap=MAP), ax=list(axes.flat), location="bottom", aspect=40, pad=0.02, alpha=OVER
    )
    bar.set_label(SCALED, fontsize=SMALLEST)
    bar.set_ticks([0, 0.5, 1], labels=["0", "half", "its maximum"])
    bar.ax.tick_params(labelsize=SMALLEST)


def channels(alphas: dict[str, Tensor], excited: Tensor) -> bytes:
    """Each channel's lead in the global model, sorted; those that PSE would excite stand out."""
    figure, axes = _figure(1, 1, (7.4, 2.9))
    one = axes[0, 0]
    names = list(alphas)
    lead = (alphas[names[1]].sigmoid() - alphas[names[0]].sigmoid()).numpy()
    order = np.argsort(-lead)
    colours = ["#b3400a" if bool(excited[k]) else "#1f78b4" for k in order]
    one.bar(range(len(lead)), lead[order], color=colours, width=0.85)
    named = range(0, len(lead), -(-len(lead) // TICKS))
    one.set_xticks(list(named), [str(order[k]) for k in named])
    one.axhline(0, color=INK, linewidth=0.8)
    one.set_xlabel(f"numbers of the last convolution's channels, by lead of the {names[1]} model", fontsize=SMALLEST)
    one.set_ylabel(f"σ(α) {names[1]} − {names[0]}", fontsize=SMALLEST)
    one.tick_params(labelsize=SMALLEST)
    one.spines[["top", "right"]].set_visible(False)
    return _png(figure)


def matrix(table: Numbers, names: Sequence[str], marked: Sequence[str], label: str) -> bytes:
    """A square of cosines from -1 to 1; the client's own rows are in bold."""
    side = float(np.clip(1.8 + 0.36 * len(names), 3.4, 7))
    figure, axes = _figure(1, 1, (side + 1, side))
    one = axes[0, 0]
    drawn = one.imshow(table, cmap="PuOr_r", vmin=-1, vmax=1)
    step = -(-len(names) // TICKS)
    ticks = list(range(0, len(names), step))
    one.set_xticks(
        ticks, [_cut(names[k]) for k in ticks], rotation=90 if max(map(len, names)) > 2 else 0, fontsize=SMALLEST
    )
    one.set_yticks(ticks, [_cut(names[k]) for k in ticks], fontsize=SMALLEST)
    for text in (*one.get_xticklabels(), *one.get_yticklabels()):
        text.set_fontweight("bold" if text.get_text() in map(_cut, marked) else "normal")
    if len(names) <= 14:
        for i in range(len(names)):
            for j in range(len(names)):
                if np.isfinite(table[i, j]):
                    dark = "white" if abs(table[i, j]) > 0.6 else INK
                    one.text(
                        j,
                        i,
                        f"{table[i, j] + 0.0:.1f}".replace("-0.0", "0.0"),
                        ha="center",
                        va="center",
                        fontsize=SMALLEST,
                        color=dark,
                    )
    bar = figure.colorbar(drawn, ax=one, fraction=0.046, pad=0.03)
    bar.set_label(label, fontsize=SMALLEST)
    bar.ax.tick_params(labelsize=SMALLEST)
    return _png(figure)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _image(axes: Any, image: Any, faded: bool = False) -> None:
    grey = image.mean(axis=2) if faded or image.shape[2] == 1 else image
    axes.imshow(grey, cmap="gray" if grey.ndim == 2 else None, vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _cut(text: str) -> str:
    """A name that fits, its dollar signs no formula."""
    return (text if len(text) <= 12 else text[:11] + "…").replace("$", r"\$")


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
