"""The command that makes the same runs again, from what their configurations say."""

from __future__ import annotations

import json
import shlex
from typing import Any

from perfed.config import CHOICES, GIVEN, INDIFFERENT, Config
from perfed.core import registry
from perfed.data.download import CATALOGUE
from perfed.hyperparameters import table
from perfed.report.collect import Setting


def commands(setting: Setting) -> list[str]:
    """One command, or several where methods differ in network or occur twice; none if Python gave an object."""
    if given(setting):
        return []
    made = []
    rest = {label: results[0].config for label, results in setting.runs.items()}
    while rest:
        batch: dict[str, tuple[str, Config]] = {}
        net = next(iter(rest.values())).net
        for label, config in rest.items():
            if config.net == net:
                batch.setdefault(config.method["name"], (label, config))
        for label, _ in batch.values():
            del rest[label]
        seeds = [result.config.seed for result in setting.runs[next(iter(batch.values()))[0]]]
        made.append(_command({name: config for name, (_, config) in batch.items()}, seeds))
    return made


def given(setting: Setting) -> list[str]:
    """The words whose values were objects in Python, which no command can name."""
    configs = [results[0].config for results in setting.runs.values()]
    return [word for word in CHOICES if any(getattr(c, word)["name"].startswith(GIVEN) for c in configs)]


def _command(methods: dict[str, Config], seeds: list[int]) -> str:
    own = {name: _changed(config) for name, config in methods.items()}
    common = {
        key: value
        for key, value in next(iter(own.values())).items()
        if all(key in other and other[key] == value for other in own.values())
    }
    if len(methods) == 1 and len(seeds) == 1:
        words = ["perfed", "run", "--method", next(iter(methods)), "--seed", str(seeds[0])]
    else:
        words = ["perfed", "compare", "--methods", ",".join(methods), "--seeds", ",".join(map(str, seeds))]
    words += _flags(next(iter(methods.values())))
    words += [f for key, value in common.items() for f in ("--set", f"method.{key}={_text(value)}")]
    for name, values in own.items():
        words += [
            f for key, value in values.items() if key not in common for f in ("--set", f"{name}.{key}={_text(value)}")
        ]
    return shlex.join(words)


def _changed(config: Config) -> dict[str, Any]:
    """The hyper-parameters that are not the method's defaults."""
    name = config.method["name"]
    usual = {"name": name} | table(registry.make(name))
    return {key: value for key, value in config.method.items() if value != usual.get(key)}


def _flags(config: Config) -> list[str]:
    words: list[str] = []
    for key, field in Config.model_fields.items():
        value = getattr(config, key)
        if key in ("method", "seed", *INDIFFERENT) or value is None or value == field.default:
            continue
        flag = f"--{key.replace('_', '-')}"
        if key in CHOICES:
            if value["name"] != field.default["name"]:
                words += [flag, value["name"]]
            for name, option in value.items():
                if name != "name":
                    words += ["--set", f"{key}.{name}={_text(option)}"]
        elif isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    if any(name in CATALOGUE for name in config.data["name"].split("+")):
        words += ["--data-dir", "DIR"]
    return words


def _text(value: Any) -> str:
    """A value as `--set` reads it."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
