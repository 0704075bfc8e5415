"""Publishers' files, whole and damaged: read as they are, or refused by name."""

from __future__ import annotations

import bz2
import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from perfed.data import Source, from_tensors, join, load, names
from perfed.data.sources.cifar_names import CIFAR100, CIFAR100_COARSE, CIFAR100_GROUPS
from perfed.errors import ConfigError, DataError, UnknownNameError

RNG = np.random.default_rng(0)


def write_idx(path: Path, array: np.ndarray, magic: int | None = None) -> None:
    head = struct.pack(f">{1 + array.ndim}I", (0x0800 + array.ndim) if magic is None else magic, *array.shape)
    raw = head + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def make_mnist(folder: Path, gz: bool = True, n: int = 30) -> tuple[np.ndarray, np.ndarray]:
    end = "-ubyte.gz" if gz else "-ubyte"
    x, y = RNG.integers(0, 256, (n + 10, 28, 28)), np.arange(n + 10) % 10
    write_idx(folder / f"train-images-idx3{end}", x[:n])
    write_idx(folder / f"train-labels-idx1{end}", y[:n])
    write_idx(folder / f"t10k-images-idx3{end}", x[n:])
    write_idx(folder / f"t10k-labels-idx1{end}", y[n:])
    return x, y


def cifar_batch(x: np.ndarray, lists: dict[bytes, list[int]], dtype: bytes = b"u1") -> bytes:
    """One file of the python release, in the publisher's own instructions."""

    def text(b: bytes) -> bytes:
        return b"U" + bytes([len(b)]) + b

    out = [b"\x80\x02}q\x01(", text(b"batch_label"), b"q\x02", text(b"a batch")]
    for name, labels in lists.items():
        out += [text(name), b"]q\x05(", b"".join(b"K" + bytes([v]) for v in labels), b"e"]
    rows, columns = x.shape
    out += [
        text(b"data"),
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09(K\x01",
        b"M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86",
        b"cnumpy\ndtype\nq\x0a" + text(dtype) + b"K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNN",
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", x.size) + x.tobytes() + b"tb",
        text(b"filenames") + b"]q\x0d(" + text(b"a.png") + b"q\x0eh\x0ee",
    ]
    return b"".join(out) + b"u."


def make_cifar10(base: Path, n: int = 4) -> tuple[np.ndarray, np.ndarray]:
    x = RNG.integers(0, 256, (6 * n, 3072)).astype(np.uint8)
    y = RNG.integers(0, 10, 6 * n)
    py, binary = base / "py" / "cifar-10-batches-py", base / "bin" / "cifar-10-batches-bin"
    py.mkdir(parents=True)
    binary.mkdir(parents=True)
    for k in range(6):
        name = f"data_batch_{k + 1}" if k < 5 else "test_batch"
        rows = slice(k * n, (k + 1) * n)
        (py / name).write_bytes(cifar_batch(x[rows], {b"labels": y[rows].tolist()}))
        (binary / f"{name}.bin").write_bytes(np.c_[y[rows].astype(np.uint8), x[rows]].tobytes())
    return x, y


def test_digits_come_with_the_package() -> None:
    s = load("digits")
    assert s.x.shape == (1797, 1, 8, 8)
    assert s.x.dtype == torch.uint8
    assert int(s.x.max()) == 255
    assert s.y[:5].tolist() == [0, 1, 2, 3, 4]
    assert s.x_test is None


@pytest.mark.parametrize(("folder", "gz"), [("MNIST/raw", True), ("MNIST/raw", False), (".", True)])
def test_mnist_layouts(tmp_path: Path, folder: str, gz: bool) -> None:
    x, y = make_mnist(tmp_path / folder, gz)
    s = load("mnist", tmp_path)
    assert s.x.shape == (30, 1, 28, 28)
    assert np.array_equal(s.x[:, 0].numpy(), x[:30])
    assert s.x_test is not None
    assert s.y_test is not None
    assert np.array_equal(s.x_test[:, 0].numpy(), x[30:])
    assert s.y_test.tolist() == y[30:].tolist()


def test_fashion_has_its_own_folder(tmp_path: Path) -> None:
    make_mnist(tmp_path / "FashionMNIST/raw")
    assert load("fashionmnist", tmp_path).classes[9] == "Ankle boot"
    with pytest.raises(DataError, match="perfed data get mnist"):
        load("mnist", tmp_path)


def test_a_missing_file_is_named_with_the_folder_where_the_others_are(tmp_path: Path) -> None:
    make_mnist(tmp_path / "MNIST/raw")
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"no t10k-labels-idx1-ubyte in .*MNIST/raw\."):
        load("mnist", tmp_path)


@pytest.mark.parametrize("damage", ["magic", "short", "long", "gzip", "empty", "labels"])
def test_damaged_idx_files_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    raw = tmp_path / "MNIST/raw"
    make_mnist(raw, gz=damage == "gzip")
    path = raw / ("train-images-idx3-ubyte.gz" if damage == "gzip" else "train-images-idx3-ubyte")
    whole = path.read_bytes()
    if damage == "magic":
        path.write_bytes(b"\x00\x00\x08\x01" + whole[4:])
    elif damage == "labels":
        write_idx(raw / "train-labels-idx1-ubyte", np.zeros(29))
    else:
        path.write_bytes({"short": whole[:-1], "long": whole + b"x", "gzip": whole[:-40], "empty": b""}[damage])
    with pytest.raises(DataError, match="train-images-idx3"):
        load("mnist", tmp_path)


def test_a_label_outside_the_classes_is_refused(tmp_path: Path) -> None:
    make_mnist(tmp_path / "MNIST/raw", gz=False)
    write_idx(tmp_path / "MNIST/raw/train-labels-idx1-ubyte", np.full(30, 10))
    with pytest.raises(DataError, match="from 10 to 10"):
        load("mnist", tmp_path)


def test_both_releases_of_cifar10_hold_the_same(tmp_path: Path) -> None:
    x, y = make_cifar10(tmp_path)
    python, binary = load("cifar10", tmp_path / "py"), load("cifar10", tmp_path / "bin")
    for s in (python, binary):
        assert s.x.shape == (20, 3, 32, 32)
        assert np.array_equal(s.x.numpy().reshape(20, -1), x[:20])
        assert s.y.tolist() == y[:20].tolist()
        assert s.x_test is not None
        assert np.array_equal(s.x_test.numpy().reshape(4, -1), x[20:])


def test_cifar100_fine_and_coarse(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (4, 3072)).astype(np.uint8)
    fine, coarse = [0, 1, 98, 99], [4, 1, 14, 13]
    py, binary = tmp_path / "a/cifar-100-python", tmp_path / "b/cifar-100-binary"
    py.mkdir(parents=True)
    binary.mkdir(parents=True)
    for name in ("train", "test"):
        (py / name).write_bytes(cifar_batch(x, {b"fine_labels": fine, b"coarse_labels": coarse}))
        (binary / f"{name}.bin").write_bytes(np.c_[coarse, fine, x].astype(np.uint8).tobytes())
    for place in ("a", "b"):
        assert load("cifar100", tmp_path / place).y.tolist() == fine
        assert load("cifar100", tmp_path / place, labels="coarse").y.tolist() == coarse
    with pytest.raises(ConfigError, match="medium"):
        load("cifar100", tmp_path / "a", labels="medium")


def test_cifar100_names_and_groups() -> None:
    assert len(CIFAR100) == 100
    assert (CIFAR100[0], CIFAR100[99]) == ("apple", "worm")
    assert sorted(c for group in CIFAR100_GROUPS for c in group) == list(range(100))
    assert CIFAR100.index("apple") in CIFAR100_GROUPS[CIFAR100_COARSE.index("fruit_and_vegetables")]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (b"\x80\x02cos\nsystem\nU\x04echo\x85R.", "asks for 'os.system'"),
        (b"\x80\x02cbuiltins\neval\n.", "asks for 'builtins.eval'"),
        (b"\x80\x02cnumpy\nndarray\nK\x01\x85R.", "calls something"),
        (b"\x80\x04}.", "version 4"),
        (b"\x80\x02(ios\nsystem\n.", "instruction 0x69"),
        (b"\x80\x02c__main__\nX\n)\x81.", "asks for"),
        (b"\x80\x02]K\x01a.", "does not hold a dict"),
        (b"\x80\x02}", "ends too early"),
        (b"\x80\x02h\x05.", "never made"),
        (b"\x80\x02}.}", "left over"),
        (b"\x80\x02}T\xff\xff\xff\xff.", "ends too early"),
        (b"\x80\x02}(K\x01K\x02u.", "named values"),
        (b"", "ends too early"),
    ],
)
def test_the_batch_reader_runs_nothing(tmp_path: Path, program: bytes, why: str) -> None:
    make_cifar10(tmp_path)
    (tmp_path / "py/cifar-10-batches-py/data_batch_3").write_bytes(program)
    with pytest.raises(DataError, match=r"data_batch_3.*" + why):
        load("cifar10", tmp_path / "py")


def test_the_batch_reader_takes_only_byte_arrays_of_the_right_length(tmp_path: Path) -> None:
    make_cifar10(tmp_path)
    path = tmp_path / "py/cifar-10-batches-py/data_batch_1"
    x = np.zeros((2, 3072), np.uint8)
    path.write_bytes(cifar_batch(x, {b"labels": [1, 2]}, dtype=b"O8"))
    with pytest.raises(DataError, match="unsigned bytes"):
        load("cifar10", tmp_path / "py")
    whole = cifar_batch(x, {b"labels": [1, 2]})
    path.write_bytes(whole.replace(b"M\x02\x00M", b"M\x03\x00M"))
    with pytest.raises(DataError, match=r"shape \(3, 3072\) has 6144 bytes"):
        load("cifar10", tmp_path / "py")
    path.write_bytes(cifar_batch(x, {b"labels": [1]}))
    with pytest.raises(DataError, match="no 'labels' for its 2 images"):
        load("cifar10", tmp_path / "py")


def test_a_cut_binary_batch_is_refused(tmp_path: Path) -> None:
    make_cifar10(tmp_path)
    path = tmp_path / "bin/cifar-10-batches-bin/data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_2\.bin"):
        load("cifar10", tmp_path / "bin")


def test_usps_in_both_layouts(tmp_path: Path) -> None:
    x, y = RNG.integers(0, 256, (6, 16, 16)).astype(np.uint8), np.array([0, 9, 3, 4, 5, 6])
    (tmp_path / "a/usps").mkdir(parents=True)
    np.savez(tmp_path / "a/usps/usps.npz", x_train=x[:4], y_train=y[:4], x_test=x[4:], y_test=y[4:])
    (tmp_path / "b/usps").mkdir(parents=True)
    for name, rows in (("usps.bz2", slice(0, 4)), ("usps.t.bz2", slice(4, 6))):
        lines = [
            f"{label + 1} " + " ".join(f"{i + 1}:{v / 127.5 - 1 + 1e-6:.6f}" for i, v in enumerate(image.ravel()))
            for image, label in zip(x[rows], y[rows], strict=True)
        ]
        (tmp_path / "b/usps" / name).write_bytes(bz2.compress("\n".join(lines).encode()))
    a, b = load("usps", tmp_path / "a"), load("usps", tmp_path / "b")
    for s in (a, b):
        assert np.abs(s.x[:, 0].numpy().astype(int) - x[:4]).max() <= 1
        assert s.y.tolist() == y[:4].tolist()
        assert s.y_test is not None
        assert s.y_test.tolist() == [5, 6]
    (tmp_path / "b/usps/usps.bz2").write_bytes(bz2.compress(b"1 300:0.5"))
    with pytest.raises(DataError, match=r"usps\.bz2.*index 300"):
        load("usps", tmp_path / "b")


def test_npz_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    x = RNG.integers(0, 256, (5, 6, 7)).astype(np.uint8)
    np.savez(path, x=x, y=np.array([0, 1, 2, 0, 1], np.int16), classes=np.array(["a", "b", "c", "d"]))
    s = load(f"npz:{path}")
    assert s.x.shape == (5, 1, 6, 7)
    assert s.classes == ("a", "b", "c", "d")
    assert s.y.dtype == torch.int64
    np.savez(path, x=x)
    with pytest.raises(DataError, match="no y"):
        load("npz", path)
    np.savez(path, x=x, y=np.zeros(5, int), labels=np.zeros(5))
    with pytest.raises(DataError, match="has labels"):
        load("npz", path)
    np.savez(path, x=np.array([{}, {}], dtype=object), y=np.zeros(2, int))
    with pytest.raises(DataError, match="not a plain"):
        load("npz", path)
    path.write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(DataError, match="not a plain"):
        load("npz", path)


def picture(path: Path, value: int, size: tuple[int, int] = (6, 5), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = value if mode in ("L", "I;16") else (value, 0, 0)
    Image.new(mode, size, colour).save(path)


def test_a_folder_of_classes(tmp_path: Path) -> None:
    picture(tmp_path / "cat/1.png", 10)
    picture(tmp_path / "cat/2.png", 20)
    picture(tmp_path / "dog/1.png", 30, size=(12, 10))
    (tmp_path / "dog/notes.txt").write_text("not an image")
    s = load(f"folder:{tmp_path}")
    assert s.x.shape == (3, 3, 5, 6)  # the most common size
    assert s.x[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert s.classes == ("cat", "dog")
    assert s.domain is None
    assert load("folder", tmp_path, size=8, channels=1).x.shape == (3, 1, 8, 8)


def test_a_folder_of_clients(tmp_path: Path) -> None:
    picture(tmp_path / "berlin/cat/1.png", 10, mode="L")
    picture(tmp_path / "rome/cat/1.png", 20, mode="L")
    picture(tmp_path / "rome/dog/1.png", 30 << 8, mode="I;16")
    s = load("folder", tmp_path)
    assert s.domain_names == ("berlin", "rome")
    assert s.domain is not None
    assert s.domain.tolist() == [0, 1, 1]
    assert s.x.shape == (3, 1, 5, 6)
    assert s.x[:, 0, 0, 0].tolist() == [10, 20, 30]
    picture(tmp_path / "cat/1.png", 1)
    with pytest.raises(DataError, match="one depth"):
        load("folder", tmp_path)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "cat/1.png", 10)
    picture(tmp_path / "cat/2.png", 10, size=(64, 64))
    whole = (tmp_path / "cat/2.png").read_bytes()
    (tmp_path / "cat/2.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cat/2\.png"):
        load("folder", tmp_path)
    (tmp_path / "cat/2.png").write_bytes(b"no image at all")
    with pytest.raises(DataError, match=r"cat/2\.png"):
        load("folder", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images"):
        load("folder", tmp_path / "empty")


def test_names_and_options_are_checked() -> None:
    assert "digits" in names()
    with pytest.raises(UnknownNameError, match="'mnist'"):
        load("minst")
    with pytest.raises(UnknownNameError):
        load("digits:somewhere")
    with pytest.raises(ConfigError, match="no option 'size'"):
        load("digits", size=3)


@pytest.mark.parametrize(
    ("x", "y", "why"),
    [
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.long), "shape"),
        (torch.zeros(3, 4, 4), torch.zeros(2, dtype=torch.long), "3 images"),
        (torch.zeros(3, 4, 4), torch.zeros(3), "whole numbers"),
        (torch.zeros(3, 4, 4), torch.tensor([0, 1, -1]), "count from 0"),
        (torch.full((3, 4, 4), 2.0), torch.zeros(3, dtype=torch.long), "from 2 to 2"),
        (torch.full((3, 4, 4), float("nan")), torch.zeros(3, dtype=torch.long), "nan"),
        (torch.zeros(3, 4, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.long), "uint8"),
    ],
)
def test_impossible_tensors_are_refused(x: torch.Tensor, y: torch.Tensor, why: str) -> None:
    with pytest.raises(DataError, match=why):
        from_tensors(x, y)


def source(n: int, side: int, channels: int = 1, test: int = 0, classes: int = 2) -> Source:
    x = torch.randint(0, 256, (n + test, channels, side, side), dtype=torch.uint8)
    y = torch.arange(n + test) % classes
    more = {"x_test": x[n:], "y_test": y[n:]} if test else {}
    return from_tensors(x[:n], y[:n], classes=[str(c) for c in range(classes)], name=f"s{side}", **more)


def test_joined_sources_are_domains_of_one_shape() -> None:
    s = join([source(4, 8, test=2), source(6, 16, channels=3, test=3)])
    assert s.x.shape == (10, 3, 16, 16)
    assert s.domain is not None
    assert s.domain.tolist() == [0] * 4 + [1] * 6
    assert s.domain_test is not None
    assert s.domain_test.tolist() == [0] * 2 + [1] * 3
    assert s.domain_names == ("s8", "s16")
    assert torch.equal(s.x[:4, 0], s.x[:4, 2])  # gray became three equal channels
    assert join([source(4, 8, test=2), source(6, 8)]).x_test is None
    with pytest.raises(DataError, match="same classes"):
        join([source(4, 8), source(4, 8, classes=3)])
