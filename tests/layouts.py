"""Small made data sets in the layouts of their publishers."""

from __future__ import annotations

import csv
import gzip
import json
import struct
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from perfed.data.sources.histology import TISSUES
from perfed.data.sources.lists import DOMAINS

DRAW = np.random.default_rng(0)


def idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    path.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


def picture(path: Path, value: int, side: int = 12, colour: bool = True) -> None:
    """A noisy picture that is brighter the larger its class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = DRAW.integers(0, 40, (side, side, 3))
    pixels = (noise + 20 * (value % 10)).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels if colour else pixels[..., 0]).save(path)


def emnist(base: Path, part: str = "digits", n: int = 120) -> None:
    first = 1 if part == "letters" else 0
    for half, count in (("train", n), ("test", n // 2)):
        x = np.zeros((count, 28, 28), np.uint8)
        x[:, 3, 20] = 255  # row 3, column 20 in the file: row 20, column 3 upright
        x[:, 10:20, 10:20] = 20 * (np.arange(count) % 10)[:, None, None]
        idx(base / "EMNIST" / "raw" / f"emnist-{part}-{half}-images-idx3-ubyte.gz", x)
        idx(base / "EMNIST" / "raw" / f"emnist-{part}-{half}-labels-idx1-ubyte.gz", first + np.arange(count) % 10)


def mnist(base: Path, n: int = 60) -> None:
    for half, count in (("train", n), ("t10k", 20)):
        x = DRAW.integers(0, 255, (count, 28, 28))
        idx(base / "MNIST" / "raw" / f"{half}-images-idx3-ubyte.gz", x)
        idx(base / "MNIST" / "raw" / f"{half}-labels-idx1-ubyte.gz", np.arange(count) % 10)


def usps(base: Path) -> None:
    (base / "usps").mkdir(parents=True)
    arrays = {
        f"x_{half}": DRAW.integers(0, 255, (n, 16, 16), dtype=np.uint8) for half, n in (("train", 60), ("test", 20))
    }
    labels = {f"y_{half}": np.arange(n) % 10 for half, n in (("train", 60), ("test", 20))}
    np.savez(base / "usps" / "usps.npz", **arrays, **labels)


def house_numbers(base: Path) -> None:
    for folder, stem in (("svhn", ""), ("SynthDigits", "synth_")):
        (base / folder).mkdir(parents=True)
        for half, n in (("train", 60), ("test", 20)):
            y = np.arange(n) % 10
            labels = np.where(y == 0, 10, y) if folder == "svhn" else y
            x = DRAW.integers(0, 255, (32, 32, 3, n), dtype=np.uint8)
            x[0, 1, 2, 0] = 77
            savemat(base / folder / f"{stem}{half}_32x32.mat", {"X": x, "y": labels[:, None]})


def mnist_m(base: Path) -> None:
    for half, n in (("train", 60), ("test", 20)):
        lines = []
        for i in range(n):
            picture(base / "mnist_m" / f"mnist_m_{half}" / f"{i:08d}.png", i % 10, 32)
            lines.append(f"{i:08d}.png {i % 10}")
        (base / "mnist_m" / f"mnist_m_{half}_labels.txt").write_text("\n".join(lines) + "\n")


def femnist(base: Path) -> None:
    """Four writers; every third character of the 62, so that all parts have some."""
    for half, each in (("train", 3), ("test", 2)):
        place = base / "femnist" / half
        place.mkdir(parents=True)
        for file in range(2):
            users = [f"f{file}{w:03d}" for w in range(2)]
            labels = [c for c in range(62) for _ in range(each)]
            data = {u: {"x": [[1.0] * 783 + [c / 62] for c in labels], "y": labels} for u in users}
            held = {"users": users, "num_samples": [len(labels)] * 2, "user_data": data}
            (place / f"all_data_{file}.json").write_text(json.dumps(held))


def tiny_imagenet(base: Path) -> None:
    root, names = base / "tiny-imagenet-200", [f"n{10000000 + c}" for c in range(10)]
    for c, name in enumerate(names):
        for i in range(12):
            picture(root / "train" / name / "images" / f"{name}_{i}.JPEG", c, 64, colour=i > 0)
    (root / "wnids.txt").write_text("\n".join(reversed(names)))
    lines = []
    for i in range(30):
        picture(root / "val" / "images" / f"val_{i}.JPEG", i % 10, 64)
        lines.append(f"val_{i}.JPEG\t{names[i % 10]}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines))


def domain_net(base: Path) -> None:
    """Twelve classes, of which two are rare."""
    root = base / "DomainNet"
    for domain in DOMAINS:
        for half, each in (("train", 3), ("test", 2)):
            lines = []
            for c in range(12):
                for i in range(1 if c in (3, 7) else each):
                    file = f"{domain}/thing_{c}/{domain}_{c}_{half}{i}.jpg"
                    picture(root / file, c, 20)
                    lines.append(f"{file} {c}")
            (root / f"{domain}_{half}.txt").write_text("\n".join(lines))


def flickr_aes(base: Path) -> None:
    """Forty raters; rater 7 has the fewest pictures."""
    root = base / "FLICKR-AES"
    rows = []
    for rater in range(32):
        for i in range(5 if rater == 7 else 10):
            name = f"farm1_{rater}_{i}.jpg"
            picture(root / "40K" / name, i % 5)
            rows.append([f"A{rater:02d}", name, i % 5 + 1])
    with (root / "FLICKR-AES_image_labeled_by_each_worker.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["worker", " imagePair", " score"], *rows])
    for album in range(3):
        picture(base / "REAL-CUR" / f"album{album}" / "a.jpg", album)
        (base / "REAL-CUR" / f"album{album}" / "scores.csv").write_text(f"imagePair,score\na.jpg,{album + 2}\n")


def histology(base: Path) -> None:
    for number, centre in enumerate(("NCT-CRC-HE-100K", "CRC-VAL-HE-7K", "CENTRE-3")):
        for c, tissue in enumerate(TISSUES):
            for i in range(4 + number):
                picture(base / "HISTO-FED" / centre / tissue / f"{tissue}-{i}.tif", c, 16)
    for c, tissue in enumerate(TISSUES):
        picture(base / "HISTO-FED-EXTERNAL" / tissue / "x.tif", c, 16)


def photographs(base: Path) -> None:
    for i in range(2):
        picture(base / "bsds500" / f"{i}.jpg", 5, 40)
