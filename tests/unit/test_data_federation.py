"""Federations: what each client gets, and what the digest notices."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perfed.data import Federation, Source, federate, from_tensors, join
from perfed.data.federation import PARTS
from perfed.errors import ConfigError, SplitError


def source(n: int = 600, test: int = 200, classes: int = 10, side: int = 4) -> Source:
    """Every image carries its own number, so that a sample can be recognised wherever it goes."""
    number = torch.arange(n + test)
    x = torch.zeros(n + test, 1, side, side, dtype=torch.uint8)
    x[:, 0, 0, 0], x[:, 0, 0, 1] = (number // 256).to(torch.uint8), (number % 256).to(torch.uint8)
    y = (number * 7) % classes
    more: dict[str, Any] = {"x_test": x[n:], "y_test": y[n:]} if test else {}
    return from_tensors(x[:n], y[:n], classes=[f"c{c}" for c in range(classes)], name="numbered", **more)


def number_of(x: torch.Tensor) -> list[int]:
    v = ((x * 0.5 + 0.5) * 255).round().long()
    return (v[:, 0, 0, 0] * 256 + v[:, 0, 0, 1]).tolist()


def everything(f: Federation) -> dict[str, list[int]]:
    return {part: [n for i in range(f.num_clients) for n in number_of(getattr(f.client(i), part).x)] for part in PARTS}


SPLITS = ["iid", "classes:2", "classes:3", "dirichlet:0.1", "lognormal:1"]


@pytest.mark.parametrize("test", ["pooled", "published"])
@pytest.mark.parametrize("split", SPLITS)
def test_no_sample_is_lost_or_twice(split: str, test: str) -> None:
    f = federate(source(), clients=8, split=split, test=test)
    got = everything(f)
    assert sorted(got["train"] + got["val"] + got["test"]) == list(range(800))
    if test == "published":
        assert sorted(got["test"]) == list(range(600, 800))
    else:
        assert len(got["test"]) == pytest.approx(200, abs=8)
        assert any(n < 600 for n in got["test"])
    for i in range(8):
        c = f.client(i)
        assert len(c.train) == f.size(i) > 0
        assert len(c.test) > 0
        assert len(c.val) > 0
        assert set(c.test.y.tolist()) <= set(c.classes_held)
        assert (torch.tensor(number_of(c.train.x)) * 7 % 10).tolist() == c.train.y.tolist()


def test_a_client_is_described_by_its_training_part() -> None:
    f = federate(source(), clients=5, split="classes:2")
    table = f.counts()
    for i in range(5):
        c = f.client(i)
        assert c.train.x.dtype == torch.float32
        assert c.train.y.dtype == torch.int64
        assert c.class_counts.tolist() == table[i].tolist()
        assert c.classes_held == tuple(sorted(set(c.train.y.tolist())))
        assert len(c.classes_held) == 2
        assert c.num_classes == 10
        assert c.train is c.train
    assert f.input_shape == (1, 4, 4)
    assert table.sum(1).tolist() == f.sizes().tolist()
    with pytest.raises(IndexError):
        f.client(5)
    with pytest.raises(IndexError):
        f.size(-1)


def test_values_are_normalised_to_minus_one_and_one() -> None:
    x = torch.tensor([0, 255, 51, 0] * 3, dtype=torch.uint8).view(12, 1, 1, 1)
    f = federate(from_tensors(x, torch.zeros(12, dtype=torch.long)), clients=1, split="iid", val_fraction=0)
    seen = {round(v, 6) for v in torch.cat([f.client(0).train.x, f.client(0).test.x]).flatten().tolist()}
    assert seen == {-1.0, 1.0, -0.6}
    g = federate(
        from_tensors(x.float() / 255, torch.zeros(12, dtype=torch.long)), clients=1, split="iid", val_fraction=0
    )
    assert torch.allclose(g.client(0).train.x, f.client(0).train.x)
    assert torch.equal(g.pooled_test().x, g.pooled_test().x)  # reading does not change what is stored


def test_published_protocol_numbers() -> None:
    """FedRep's protocol in small: 20 clients, 2 classes each, all samples of a class shared by its four holders."""
    f = federate(source(1000, 200), clients=20, split="classes:2", test="published", val_fraction=0)
    assert f.sizes().tolist() == [50] * 20
    assert f.sizes("test").tolist() == [10] * 20
    assert f.sizes("val").tolist() == [0] * 20
    assert len(f.client(0).val) == 0
    assert f.client(0).val.x.shape == (0, 1, 4, 4)
    assert sorted(f.counts().ravel().tolist())[-40:] == [25] * 40
    assert np.array_equal(f.counts() > 0, f.counts("test") > 0)


def test_pooled_test_is_in_client_order() -> None:
    f = federate(source(), clients=6, split="dirichlet:0.5")
    pooled = f.pooled_test()
    assert number_of(pooled.x) == [n for i in range(6) for n in number_of(f.client(i).test.x)]
    assert len(pooled) == f.sizes("test").sum()


def test_the_digest_follows_everything_and_nothing_else() -> None:
    s = source()
    base: dict[str, Any] = {"clients": 6, "split": "dirichlet:0.5"}
    first = federate(s, **base).sha256
    assert federate(s, **base).sha256 == first
    changed = s.x.clone()
    changed[17, 0, 3, 3] = 1
    others = [
        federate(s, **base, seed=1),
        federate(s, **base | {"clients": 7}),
        federate(s, **base | {"split": "iid"}),
        federate(s, **base, val_fraction=0.0),
        federate(s, **base, test="published"),
        federate(s, **base, unseen=1),
        federate(s, **base, shift="permute:2"),
        federate(from_tensors(changed, s.y, x_test=s.x_test, y_test=s.y_test, classes=s.classes), **base),
    ]
    digests = {first, *(f.sha256 for f in others)}
    assert len(digests) == len(others) + 1


def test_the_digest_is_the_same_on_every_machine() -> None:
    """A fixed value: partitions must not change between versions without anybody noticing."""
    f = federate(source(60, 20, 4), clients=4, split="classes:2")
    table = hashlib.sha256(f.counts().astype("<i8").tobytes()).hexdigest()
    assert (f.sha256[:16], table[:16]) == ("e7d51e21b4fddd90", "26afe5bb77fe68e3")


def test_unseen_clients_are_the_last() -> None:
    f = federate(source(), clients=8, split="iid", unseen=3)
    assert list(f.unseen) == [5, 6, 7]
    assert list(f.participants) == [0, 1, 2, 3, 4]
    assert f.size(7) > 0
    with pytest.raises(SplitError, match="from 0 to 7"):
        federate(source(), clients=8, split="iid", unseen=8)


def test_external_data_takes_the_shape_of_ones_own() -> None:
    other = from_tensors(
        torch.full((9, 3, 8, 8), 255, dtype=torch.uint8),
        torch.arange(9) % 3,
        x_test=torch.full((4, 3, 8, 8), 51, dtype=torch.uint8),
        y_test=torch.arange(4) % 3,
        classes=["c0", "c1", "c2"],
    )
    f = federate(source(), clients=4, split="iid", external=other)
    assert f.external is not None
    assert f.external.x.shape == (4, 1, 4, 4)  # its published test set, gray and small
    assert torch.allclose(f.external.x, torch.tensor(-0.6))
    assert federate(source(), clients=4, split="iid").external is None
    with pytest.raises(SplitError, match="has a class 'c2'"):
        federate(source(classes=2), clients=4, split="iid", external=source())


def test_small_images_are_scaled_up() -> None:
    assert federate("digits", min_size=28).input_shape == (1, 28, 28)
    assert federate("digits", min_size=4).input_shape == (1, 8, 8)


def test_domains_become_clients() -> None:
    s = join([source(40, 10), source(60, 20)])
    f = federate(s, split="domain", test="published")
    assert f.num_clients == 2
    assert f.client_names == ("numbered", "numbered")
    assert (f.sizes() + f.sizes("val")).tolist() == [40, 60]
    assert f.sizes("test").tolist() == [10, 20]
    many = federate(s, split="domain", clients=4)
    assert many.client_names == ("numbered/0", "numbered/1") * 2
    assert sum(many.sizes(p) for p in PARTS).tolist() == [25, 25, 40, 40]
    with pytest.raises(SplitError, match="multiple"):
        federate(s, split="domain", clients=3)
    with pytest.raises(SplitError, match="no domains"):
        federate(source(), split="domain")


def test_an_assignment_file_round_trip(tmp_path: Path) -> None:
    f = federate(source(), clients=5, split="dirichlet:0.5")
    f.write_assignment(tmp_path / "who.csv")
    g = federate(source(), assignment=tmp_path / "who.csv")
    assert g.sha256 == f.sha256
    assert federate(source(), split=f"file:{tmp_path / 'who.csv'}").sha256 == f.sha256


def test_an_assignment_file_without_parts_and_with_names(tmp_path: Path) -> None:
    path = tmp_path / "who.csv"
    path.write_text("index,client\n" + "".join(f"{i},{'rome' if i % 3 else 'berlin'}\n" for i in range(90)))
    f = federate(source(), assignment=path, val_fraction=0)
    assert f.client_names == ("berlin", "rome")
    assert (f.sizes() + f.sizes("test")).tolist() == [30, 60]
    g = federate(source(), assignment=path, test="published")
    assert g.sizes("test").sum() == 200
    with pytest.raises(SplitError, match="has 2 clients, not 3"):
        federate(source(), assignment=path, clients=3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "first line"),
        ("sample,site\n1,2\n", "first line"),
        ("index,client\n", "assigns nothing"),
        ("index,client\n800,0\n", "Line 2"),
        ("index,client\n-1,0\n", "Line 2"),
        ("index,client\n1\n", "Line 2"),
        ("index,client\n1,0\n1,1\n", "Line 3 .* again"),
        ("index,client,part\n1,0,training\n", "train, val or test"),
        ("index,client,part\n1,0,train\n", "no test samples"),
        ("index,client\n1,0\n2,0\n3,99999\n", "without gaps"),
        ("index,client\n1,0\n2,0\n3,2\n4,2\n", "Client 1 would have no train"),
    ],
)
def test_bad_assignment_files_are_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "who.csv"
    path.write_text(text)
    with pytest.raises(SplitError, match=why):
        federate(source(), assignment=path)


def test_a_missing_assignment_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SplitError, match=r"nowhere\.csv"):
        federate(source(), assignment=tmp_path / "nowhere.csv")


def test_refusals() -> None:
    with pytest.raises(SplitError, match="no published test set"):
        federate(source(test=0), test="published")
    with pytest.raises(SplitError, match="too few samples to train on 10 classes"):
        federate(source(100, 0), clients=10, split="classes:10")
    for bad in (
        {"test": "mine"},
        {"test_fraction": 1.0},
        {"test_fraction": 0.0},
        {"val_fraction": 1.0},
        {"val_fraction": -0.1},
        {"min_size": 0},
        {"seed": -1},
    ):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            federate(source(), **bad)


def test_classes_without_samples_are_counted_as_zero() -> None:
    s = source(200, 0, 4)
    wide = from_tensors(s.x, s.y, classes=[str(c) for c in range(7)])
    f = federate(wide, clients=4, split="classes:2")
    assert f.num_classes == 7
    assert f.counts().shape == (4, 7)
    assert f.counts()[:, 4:].sum() == 0
    assert f.client(0).class_counts.shape == (7,)


def test_many_clients_cost_little() -> None:
    n = 60_000
    s = from_tensors(torch.zeros(n, 1, 1, 1, dtype=torch.uint8), torch.arange(n) % 10)
    f = federate(s, clients=20_000, split="iid", val_fraction=0)
    assert f.sizes().min() >= 1
    assert f.sizes("test").min() >= 1
    assert len(f.client(19_999).train) == f.size(19_999)
