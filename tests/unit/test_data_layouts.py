"""Data sets that perfed cannot fetch: read from small made ones in their publishers' layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from perfed.data import load
from perfed.data.sources.histology import TISSUES
from perfed.errors import ConfigError, DataError
from tests import layouts


def test_emnist_stands_upright_and_letters_count_from_a(tmp_path: Path) -> None:
    layouts.emnist(tmp_path)
    layouts.emnist(tmp_path, "letters")
    digits, letters = load("emnist", tmp_path), load("emnist", tmp_path, part="letters")
    assert digits.x.shape == (120, 1, 28, 28)
    assert digits.x[0, 0, 20, 3] == 255
    assert digits.x_test is not None
    assert digits.x_test.shape[0] == 60
    assert (digits.num_classes, letters.num_classes, letters.classes[int(letters.y[0])]) == (10, 26, "A")


def test_house_numbers_call_ten_zero(tmp_path: Path) -> None:
    layouts.house_numbers(tmp_path)
    for name in ("svhn", "synthdigits"):
        found = load(name, tmp_path)
        assert found.x.shape == (60, 3, 32, 32)
        assert found.x[0, 2, 0, 1] == 77
        assert torch.equal(found.y, torch.arange(60) % 10)


def test_mnist_m_joins_other_digits(tmp_path: Path) -> None:
    layouts.mnist_m(tmp_path)
    layouts.usps(tmp_path)
    found = load("mnistm+usps", tmp_path)
    assert found.x.shape == (120, 3, 32, 32)
    assert found.domain_names == ("mnistm", "usps")


@pytest.mark.parametrize(
    ("part", "count", "first"), [("digits", 10, "0"), ("a-j", 10, "a"), ("letters", 52, "A"), ("all", 62, "0")]
)
def test_femnist_by_writer_and_part(part: str, count: int, first: str, tmp_path: Path) -> None:
    layouts.femnist(tmp_path)
    found = load("femnist", tmp_path, part=part)
    assert found.classes[0] == first
    assert found.num_classes == count == int(found.y.max()) + 1
    assert found.domain_names == ("f0000", "f0001", "f1000", "f1001")
    assert len(found.y) == 4 * 3 * count
    assert found.x[0, 0, 0, 0] == 0  # white paper becomes black ground
    assert found.x_test is not None
    assert len(found.x_test) == 4 * 2 * count


def test_tiny_imagenet_takes_its_annotated_validation_set_as_test(tmp_path: Path) -> None:
    layouts.tiny_imagenet(tmp_path)
    found = load("tinyimagenet", tmp_path)
    assert found.x.shape == (120, 3, 64, 64)
    assert found.classes[0] == "n10000000"
    assert found.y_test is not None
    assert torch.equal(found.y_test, torch.arange(30) % 10)
    bright = [float(found.x[found.y == c].float().mean()) for c in range(10)]
    assert bright == sorted(bright)


def test_domainnet_keeps_the_frequent_classes_of_all_domains(tmp_path: Path) -> None:
    layouts.domain_net(tmp_path)
    found = load("domainnet", tmp_path, size=16)
    assert found.classes == tuple(f"thing_{c}" for c in range(12) if c not in (3, 7))
    assert found.x.shape == (6 * 10 * 3, 3, 16, 16)
    assert found.domain is not None
    assert torch.bincount(found.domain).tolist() == [30] * 6
    assert found.domain_test is not None
    assert torch.bincount(found.domain_test).tolist() == [20] * 6


def test_flickr_aes_takes_the_raters_with_most_pictures(tmp_path: Path) -> None:
    layouts.flickr_aes(tmp_path)
    found = load("flickraes", tmp_path, raters=30, size=8)
    assert len(found.domain_names) == 30
    assert "A07" not in found.domain_names
    assert found.classes == ("1", "2", "3", "4", "5")
    albums = load("realcur", tmp_path, size=8)
    assert [albums.classes[int(y)] for y in albums.y] == ["2", "3", "4"]


def test_histology_has_a_domain_per_centre(tmp_path: Path) -> None:
    layouts.histology(tmp_path)
    found = load("histofed", tmp_path, size=8, patches=40)
    assert found.domain_names == ("NCT-CRC-HE-100K", "CRC-VAL-HE-7K", "CENTRE-3")
    assert found.domain is not None
    assert torch.bincount(found.domain).tolist() == [36, 40, 40]
    assert set(found.y.tolist()) == set(range(9))
    assert load("histofed-external", tmp_path).classes == TISSUES


@pytest.mark.parametrize(
    "name",
    ["emnist", "femnist", "svhn", "mnistm", "synthdigits", "domainnet", "tinyimagenet", "flickraes", "realcur",
     "histofed", "histofed-external"],
)  # fmt: skip
def test_what_is_missing_is_named_with_its_origin(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    assert caught.value.cure


def spoil(file: str, text: str) -> Callable[[Path], None]:
    return lambda base: (base / file).write_text(text) and None


@pytest.mark.parametrize(
    ("make", "file", "name"),
    [
        (layouts.house_numbers, "svhn/train_32x32.mat", "svhn"),
        (layouts.mnist_m, "mnist_m/mnist_m_test_labels.txt", "mnistm"),
        (layouts.femnist, "femnist/train/all_data_1.json", "femnist"),
        (layouts.tiny_imagenet, "tiny-imagenet-200/val/val_annotations.txt", "tinyimagenet"),
        (layouts.domain_net, "DomainNet/real_test.txt", "domainnet"),
        (layouts.flickr_aes, "FLICKR-AES/FLICKR-AES_image_labeled_by_each_worker.csv", "flickraes"),
    ],
)
def test_a_damaged_file_is_refused(make: Callable[[Path], Any], file: str, name: str, tmp_path: Path) -> None:
    make(tmp_path)
    spoil(file, "not what it\nshould be x\n")(tmp_path)
    with pytest.raises(DataError):
        load(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("emnist", {"part": "x"}),
        ("femnist", {"part": "x"}),
        ("domainnet", {"top": 1}),
        ("flickraes", {"raters": 0}),
        ("digits", {"samples": 0}),
    ],
)
def test_an_impossible_option_is_refused(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load(name, tmp_path, **options)
