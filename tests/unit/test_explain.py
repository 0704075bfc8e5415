"""Explanations show the models that they say they show."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from captum.attr import LayerGradCam
from PIL import Image
from typer.testing import CliRunner

import perfed
from perfed.cli import app
from perfed.errors import ConfigError
from perfed.explain import clients, explanation, maps, models
from perfed.explain.explanation import kept
from perfed.leaderboard import Comparison
from perfed.report.page import render
from perfed.result import Result

WORDS = {"net": "lenet5", "clients": 5, "rounds": 2, "fraction": 0.8, "split": "classes:2"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    place = tmp_path_factory.mktemp("explained") / "runs"
    return perfed.compare(["local", "fedavg", "fedrep"], out=place, method={"lr": 0.05}, **WORDS)


def test_the_three_models_are_the_true_ones(compared: Comparison) -> None:
    result = Result.load(compared.runs["fedrep"][0].directory)
    client = 1
    personal, shared, alone = models.side_by_side(result, client)
    x = result.made().federation.client(client).test.x
    with torch.no_grad():
        assert torch.allclose(personal.module(x).softmax(1), result.predict(client, x), atol=1e-6)
        local = Result.load(compared.runs["local"][0].directory).predict(client, x)
        assert torch.allclose(alone.module(x).softmax(1), local, atol=1e-6)
    assert "from the comparison's run" in alone.note
    assert f"{personal.net.head} never travels" in shared.note
    body = [name for name in personal.net.module.state_dict() if personal.net.layer_of(name) != personal.net.head]
    assert all(torch.equal(personal.net.module.state_dict()[n], shared.net.module.state_dict()[n]) for n in body)


def test_local_training_on_the_spot_is_the_run_of_local(compared: Comparison, tmp_path: Path) -> None:
    copy = Result.load(compared.runs["fedrep"][0].directory).save(tmp_path / "away")
    result = Result.load(copy)
    for client in range(3):
        alone = models.side_by_side(result, client)[-1]
        assert "trained for this picture" in alone.note
        x = result.made().federation.client(client).test.x
        with torch.no_grad():
            expected = Result.load(compared.runs["local"][0].directory).predict(client, x)
            assert torch.allclose(alone.module(x).softmax(1), expected, atol=1e-6)


def test_fedavgs_personal_model_is_the_global_one_and_local_has_none(compared: Comparison) -> None:
    personal, shared, _ = models.side_by_side(Result.load(compared.runs["fedavg"][0].directory), 0)
    x = torch.randn(4, *personal.net.input_shape)
    assert torch.equal(personal.module(x), shared.module(x))
    assert [m.name for m in models.side_by_side(Result.load(compared.runs["local"][0].directory), 0)] == ["personal"]


def test_maps_and_channels_are_grad_cams(compared: Comparison) -> None:
    result = Result.load(compared.runs["fedrep"][0].directory)
    personal = models.side_by_side(result, 0)[0]
    data = result.made().federation.client(0).test
    right, wrong = maps.choose(personal, data)
    said = personal.module(data.x).argmax(dim=1)
    assert bool((said[right] == data.y[right]).all())
    assert not bool((said[wrong] == data.y[wrong]).any())
    layer = personal.conv()
    assert layer is [m for m in personal.net.module.modules() if isinstance(m, torch.nn.Conv2d)][-1]
    seen = maps.look(personal, data.x[:3])
    cam = LayerGradCam(personal.module, layer).attribute(data.x[:3], target=seen.said, relu_attributions=True)
    big = torch.nn.functional.interpolate(cam, data.x.shape[-2:], mode="bilinear")[:, 0]
    for found, want in zip(seen.maps, big, strict=True):
        assert torch.allclose(found * want.max(), want, atol=1e-5)
    alpha = maps.channels(personal, data)
    assert alpha is not None
    assert alpha.shape == (layer.out_channels,)


def test_clients_are_compared_by_what_they_keep(compared: Comparison) -> None:
    result = Result.load(compared.runs["fedrep"][0].directory)
    with models.opened(result, 0) as simulation:
        found = clients.likeness(simulation, 0)
        conflict = clients.conflicts(simulation, 0)
        assert found
        assert conflict
        who, cosines, what = found
        heads = []
        for client in who:
            _, state = simulation.store.client(client)
            first = simulation.plan.initial
            heads.append(torch.cat([(state[n] - first[n]).flatten() for n in first if n in state]))
    assert what == "private parameters"
    one = torch.nn.functional.cosine_similarity(heads[0], heads[1], dim=0)
    assert cosines[0, 1] == pytest.approx(float(one), abs=1e-4)
    assert np.allclose(np.diag(cosines), 1, atol=1e-5)
    labels, table = conflict
    assert table.shape == (len(labels), len(labels))
    assert np.allclose(table, table.T, atol=1e-9, equal_nan=True)
    known = table[np.isfinite(table)]
    assert known.size
    assert known.min() >= -1.000001
    assert known.max() <= 1.000001


def test_pictures_are_written_and_stand_in_the_page(compared: Comparison) -> None:
    place = compared.runs["fedrep"][0].directory
    made = CliRunner().invoke(app, ["explain", str(place), "--client", "1"])
    assert made.exit_code == 0, made.output
    files = [Path(line) for line in made.stdout.split()]
    assert [file.name for file in files] == [
        "maps.png",
        "channels.png",
        "similarity.png",
        "conflicts.png",
        "explanation.json",
    ]
    for file in files[:-1]:
        with Image.open(file) as picture:
            assert min(picture.size) > 200
    words = json.loads(files[-1].read_text())
    assert all(one["alt"] and one["note"] for one in words["pictures"])
    page = render([compared.directory])
    assert page.count("data:image/png;base64,") == 4
    assert words["title"] in page
    (place / "explain-client-9").mkdir()
    (place / "explain-client-9" / "explanation.json").write_text("{")
    assert len(kept(place)) == 1


def test_a_network_without_convolutions_is_explained_by_gradients(tmp_path: Path) -> None:
    result = perfed.run(
        "fedavg", net={"name": "mlp", "hidden": [8]}, clients=5, rounds=1, split="classes:2", out=tmp_path / "mlp"
    )
    made = CliRunner().invoke(app, ["explain", str(result.directory), "--client", "0"])
    assert made.exit_code == 0, made.output
    words = json.loads((result.directory / "explain-client-0" / "explanation.json").read_text())
    titles = [one["title"] for one in words["pictures"]]
    assert titles[0] == "Where the models look (Gradients)"
    assert "no convolution" in words["pictures"][1]["note"]


def test_a_client_that_is_not_there_is_refused(compared: Comparison) -> None:
    with pytest.raises(ConfigError, match="client = 99"):
        models.side_by_side(Result.load(compared.runs["fedrep"][0].directory), 99)
    with pytest.raises(ConfigError, match="There is no client 99"):
        explanation.explain(Result.load(compared.runs["fedrep"][0].directory), 99)
