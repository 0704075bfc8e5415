"""A client's personal model as files: safetensors or ONNX, and a model card that says what it is."""

from __future__ import annotations

import json
import logging
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from perfed import rundir
from perfed.config import GIVEN
from perfed.core.method import Method
from perfed.core.state import State, digest, to_bytes
from perfed.errors import ConfigError, ExtraError
from perfed.report.tables import percent
from perfed.result import Result, versions

FORMATS = ("safetensors", "onnx")


def export(result: Result, client: int, out: Path | str, format: str = "safetensors") -> list[Path]:
    """Write a client's personal model, adapted as it was scored, and its card; returns the files."""
    if format not in FORMATS:
        raise ConfigError(f"format = {format[:80]!r} is not accepted.", f"It must be one of {', '.join(FORMATS)}.")
    if format == "onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise ExtraError("ONNX export needs the packages onnx and onnxscript.", "Run: pip install 'perfed[onnx]'.")
    place = Path(out)
    with result.scored(client) as found:
        state, memory = dict(found.net.module.state_dict()), found.memory
    files = []
    try:
        place.mkdir(parents=True, exist_ok=True)
        if format == "onnx":
            model = place / "model.onnx"
            _onnx(result.model(client).eval(), result.made().federation.input_shape, model)
        else:
            model = place / "model.safetensors"
            rundir.write(model, to_bytes(state))
            if memory:
                files.append(place / "memory.safetensors")
                rundir.write(files[0], to_bytes(memory))
        card = place / "README.md"
        rundir.write(card, _card(result, client, state, model.name).encode())
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {error}.", "Give another --out.") from None
    return [model, *files, card]


def _onnx(model: nn.Module, shape: tuple[int, ...], path: Path) -> None:
    example = torch.zeros(2, *shape)
    batch = torch.export.Dim("batch", min=1)
    chatter = logging.getLogger("torch.onnx")
    level = chatter.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, about packages that are not needed here
        chatter.setLevel(logging.ERROR)
        program = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            input_names=["images"],
            output_names=["scores"],
            dynamic_shapes=({0: batch},),
            verbose=False,
            external_data=False,
        )
    chatter.setLevel(level)
    assert program is not None
    program.save(path)


def _card(result: Result, client: int, state: State, file: str) -> str:
    config, federation = result.config, result.made().federation
    method, accuracy = config.method["name"], result.accuracy.get(client)
    share = "not measured alone (it joined after the training)" if accuracy is None else percent(accuracy)
    shape, classes = federation.input_shape, federation.classes
    who = federation.client_names[client] if federation.client_names else str(client)
    return f"""---
library_name: perfed
tags: [federated-learning, personalised, {method}]
---
# Client {who}'s personal model by {method}

Trained by {method} among {federation.num_clients} clients on {config.data["name"]} and adapted as it was scored.

| | |
|---|---|
| accuracy on the client's own test data | {share} |
| mean over clients | {percent(result.metrics["local.mean"])} |
| rounds | {config.rounds} |
| input | float32 (n, {", ".join(map(str, shape))}), pixels in [-1, 1]: (value / 255 - 0.5) / 0.5 |
| output | scores of {len(classes)} classes: {", ".join(classes[:20])}{" ..." if len(classes) > 20 else ""} |
| model_sha256 (its tensors) | `{digest(state)}` |
| state_sha256 (the whole run) | `{result.state_sha256}` |
| partition_sha256 | `{result.partition_sha256}` |
| made with | {", ".join(f"{name} {version}" for name, version in versions().items())} |

## Use

```python
{_usage(result, shape, len(classes), file)}
```

## Configuration

```toml
{config.toml().strip()}
```
"""


def _usage(result: Result, shape: tuple[int, ...], classes: int, file: str) -> str:
    if file.endswith(".onnx"):
        session = f'session = onnxruntime.InferenceSession("{file}")'
        return f'import onnxruntime\n\n{session}\nscores = session.run(None, {{"images": images}})[0]'
    config = result.config
    options = "".join(f", {key}={json.dumps(value)}" for key, value in config.net.items() if key != "name")
    lines = ["import safetensors.torch", "import perfed.nets", ""]
    if config.net["name"].startswith(GIVEN):
        lines = ["import safetensors.torch", "", "module = ...  # your own network"]
    else:
        lines.append(f'net = perfed.nets.build("{config.net["name"]}", {shape}, {classes}{options})')
        if type(result.made().method).build is not Method.build:
            lines[1] = "import perfed.core.registry\nimport perfed.nets"
            lines.append(f'net = perfed.core.registry.make("{config.method["name"]}").build(net)')
        lines.append("module = net.module")
    lines += [f'module.load_state_dict(safetensors.torch.load_file("{file}"))', "module.eval()"]
    if type(result.made().method).predict is not Method.predict:
        lines.append("# This method predicts with more than its network: see perfed.load(RUN).predict(client, images).")
    return "\n".join(lines)
