"""The picture of a division."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from perfed.data import federate, from_tensors
from perfed.data.picture import draw
from perfed.errors import ConfigError


def test_a_png_shows_a_bubble_for_what_is_held_and_none_for_what_is_not(tmp_path: Path) -> None:
    f = federate("digits", clients=5, split="classes:2")
    pixels = np.asarray(Image.open(draw(f, tmp_path / "deep/a.png")).convert("RGB")).astype(int)
    blue = (np.abs(pixels - [87, 147, 168]).sum(2) < 60).mean()
    full = federate("digits", clients=5, split="iid")
    every = np.asarray(Image.open(draw(full, tmp_path / "b.png")).convert("RGB")).astype(int)
    assert 0.005 < blue < (np.abs(every - [87, 147, 168]).sum(2) < 60).mean()


def test_an_svg_names_the_clients_that_are_not_shown(tmp_path: Path) -> None:
    s = from_tensors(torch.zeros(1200, 1, 1, 1, dtype=torch.uint8), torch.arange(1200) % 3)
    f = federate(s, clients=130, split="iid")
    text = draw(f, tmp_path / "a.svg").read_text()
    assert "130 clients, the first 100 shown" in text
    assert text == draw(f, tmp_path / "b.svg").read_text()
    with pytest.raises(ConfigError, match=r"\.png"):
        draw(f, tmp_path / "a.bmpx")
