"""Exported models predict what was scored."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import perfed
from perfed import nets
from perfed.cli import app


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("export") / "run"
    quick = {"name": "fedbabu", "lr": 0.05, "batch_size": 50, "finetune_epochs": 2, "join_epochs": 1}
    net = {"name": "conv3", "hidden": 8}
    perfed.run(quick, net=net, clients=5, rounds=2, unseen=1, fraction=0.5, out=place, split="iid", test_fraction=0.5)
    return place


def export(run: Path, client: int, out: Path, *more: str) -> str:
    answer = CliRunner().invoke(app, ["export", str(run), "--client", str(client), "-o", str(out), *more])
    assert answer.exit_code == 0, answer.output
    return (out / "README.md").read_text()


@pytest.mark.parametrize("client", [0, 3])
def test_reloaded_weights_score_as_the_run_says(run: Path, tmp_path: Path, client: int) -> None:
    card = export(run, client, tmp_path)
    result = perfed.load(run)
    federation = result.made().federation
    net = nets.build("conv3", federation.input_shape, federation.num_classes, hidden=8)
    net.module.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    net.module.eval()
    test = federation.client(client).test
    with torch.no_grad():
        scores = net.module(test.x)
    assert float((scores.argmax(1) == test.y).double().mean()) == result.accuracy[client]
    assert torch.allclose(scores.softmax(1), result.predict(client, test.x), atol=1e-5)
    assert result.state_sha256 in card
    assert result.partition_sha256 in card
    assert f"{100 * result.accuracy[client]:.2f} %" in card
    code = card.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert 'perfed.nets.build("conv3", (1, 16, 16), 10, hidden=8)' in code


def test_adaptation_is_part_of_the_model_and_clients_differ(run: Path) -> None:
    result = perfed.load(run)
    first, again, other = (result.model(c).state_dict() for c in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    heads = [name for name in first if name.startswith(result.made().net.head)]
    assert any(not torch.equal(first[name], other[name]) for name in heads)
    assert result.metrics["local.loss"] < result.metrics["local.before.loss"]


def test_an_unseen_client_has_a_model_too(run: Path, tmp_path: Path) -> None:
    assert "joined after the training" in export(run, 4, tmp_path)


def test_onnx_gives_the_same_scores(run: Path, tmp_path: Path) -> None:
    onnxruntime = import_module("onnxruntime")
    export(run, 0, tmp_path, "--format", "onnx")
    result = perfed.load(run)
    x = result.made().federation.client(0).test.x[:7]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (scores,) = session.run(None, {"images": x.numpy()})
    assert scores.shape == (7, 10)
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(scores), result.model(0)(x), atol=1e-4)


def test_refusals(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*words: str) -> str:
        answer = CliRunner().invoke(app, ["export", str(run), "-o", str(tmp_path / "e"), *words])
        assert answer.exit_code == 2
        return answer.stderr

    assert "from 0 to 4" in call("--client", "5")
    assert "safetensors, onnx" in call("--client", "0", "--format", "pickle")
    monkeypatch.setattr(
        "perfed.export.find_spec", lambda name: None if "onnx" in name else importlib.util.find_spec(name)
    )
    said = call("--client", "0", "--format", "onnx")
    assert "E600" in said
    assert "pip install 'perfed[onnx]'" in said
    assert not (tmp_path / "e").exists()
