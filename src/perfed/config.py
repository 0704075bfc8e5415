"""The configuration of a run: one flat set of words, the same in TOML files, on the command line and in Python."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perfed.errors import ConfigError, unknown

CHOICES = ("data", "net", "method")
"""Words whose value is a name, or a table with a name and options."""
INDIFFERENT = ("workers", "engine", "out", "data_dir")
"""Words that change no result."""
DIVISION = ("split", "clients", "test", "test_fraction", "val_fraction", "shift", "unseen", "external", "assignment")
"""The words that say how data is divided and scored on."""
GIVEN = "python:"
"""Begins the name of an object that was given in Python and cannot be made from its name."""

Choice = dict[str, Any]
Share = Annotated[float, Field(gt=0, lt=1)]


class Config(BaseModel):
    """Every word of a run. Make one by `resolve`, which fills in the method's hyper-parameters too."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    method: Choice = Field({"name": "fedavg"}, description="the method; hyper-parameters by --set method.NAME=VALUE")
    data: Choice = Field({"name": "digits"}, description="a data set's name, folder:PATH, npz:PATH or A+B")
    data_dir: str | None = Field(None, description="where data sets are kept (default: data)")
    split: str | None = Field(
        None, description="iid, classes:S, dirichlet:A, lognormal:S, domain, file:PATH (default: classes:2, or domain)"
    )
    clients: Annotated[int, Field(ge=1, le=10**7)] | None = Field(
        None, description="how many clients (default: 20, or one per domain)"
    )
    test: Literal["pooled", "published"] = Field("pooled", description="test data: pooled and split, or published")
    test_fraction: Share = Field(0.25, description="test share of every client with test = pooled")
    val_fraction: float = Field(0.1, ge=0, lt=1, description="share of the training part kept for validation")
    shift: str | None = Field(None, description="what sets clients apart, e.g. rotate:0,90")
    unseen: int = Field(0, ge=0, description="clients that never train and join at the end")
    external: str | None = Field(None, description="another data set to score on")
    assignment: str | None = Field(None, description="a CSV file of who has what")
    net: Choice = Field({"name": "cnn"}, description="the network; options by --set net.NAME=VALUE")
    rounds: int = Field(50, ge=1, le=10**7, description="rounds of the federation")
    fraction: float = Field(1.0, gt=0, le=1, description="share of the clients in a round")
    seed: int = Field(0, ge=0, lt=2**63, description="of everything random")
    eval_every: int = Field(0, ge=0, description="rounds between evaluations; 0 makes about ten of them")
    last_k: int = Field(1, ge=1, description="how many last rounds are averaged as local.last")
    adapt: Literal["final", "always", "never"] = Field("final", description="when clients adapt before scoring")
    new: bool | None = Field(None, description="measure New, all clients' vote (default: if it is cheap)")
    executor: Literal["plain", "cohort"] = Field(
        "plain", description="plain, or cohort: groups of small networks in one step, to 1e-5"
    )
    precision: Literal["bfloat16"] | None = Field(
        None, description="bfloat16: products in half the bits, faster on processors that have it (default: float32)"
    )
    kernels: Literal["compiled"] | None = Field(
        None,
        description="compiled: convolutions and attention by code made for this processor (default: torch's)",
    )
    workers: int = Field(1, ge=1, le=1024, description="processes that compute")
    engine: Literal["local", "flower"] = Field("local", description="who computes: this machine, or Flower on Ray")
    out: str | None = Field(None, description="directory of the run")

    def words(self) -> dict[str, Any]:
        """The configuration as plain values, as files have it; what is None is left out."""
        held = {key: value for key, value in self.model_dump().items() if value is not None}
        for key in CHOICES:
            table = {name: "none" if value is None else value for name, value in held[key].items()}
            held[key] = table["name"] if len(table) == 1 else table
        return held

    def identity(self) -> dict[str, Any]:
        """The words that results depend on."""
        return {key: value for key, value in self.words().items() if key not in INDIFFERENT}

    def toml(self) -> str:
        """The resolved file that is saved with a run; it has no `out`, so that the run can be moved."""
        import tomli_w

        words = {key: value for key, value in self.words().items() if key != "out"}
        flat = {key: value for key, value in words.items() if not isinstance(value, dict)}
        return tomli_w.dumps(flat | words)

    def changed(self, **words: Any) -> Config:
        """The same configuration with some words changed."""
        return resolve(self.words() | words)


def resolve(raw: Mapping[str, Any]) -> Config:
    """A checked and complete configuration from plain words, or a ConfigError with key, value and cure."""
    words = _keys(raw, "")
    for key in words:
        if key not in Config.model_fields:
            raise unknown("key", key, Config.model_fields)
    from perfed import hyperparameters

    for key, field in Config.model_fields.items():
        if key in CHOICES:
            table = _choice(key, words.get(key), field.default["name"])
            words[key] = {name: hyperparameters.fitting(f"{key}.{name}", value, Any) for name, value in table.items()}
        elif key in words and words[key] is not None:
            hint = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            words[key] = hyperparameters.fitting(key, words[key], hint)
    words |= _paths(words)
    name, settings = words["method"]["name"], {k: v for k, v in words["method"].items() if k != "name"}
    if not name.startswith(GIVEN):
        settings = hyperparameters.table(hyperparameters.check(name, settings))
    words["method"] = {"name": name} | settings
    if words.get("kernels") and words.get("precision"):
        what = f"kernels = {words['kernels']!r} computes in float32, and precision asks for {words['precision']}."
        raise ConfigError(what, "Leave one of them out.")
    try:
        return Config(**words)
    except ValidationError as error:  # each word was checked alone; this is for what only the whole shows
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}.") from None


def read(path: Path | str) -> dict[str, Any]:
    """The words of a TOML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"The file {path} cannot be read: {error}.", "Give a TOML file in UTF-8.") from None
    return parse(text, f"The file {path}")


def parse(text: str, what: str = "The configuration") -> dict[str, Any]:
    """The words of a TOML text."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{what} is not TOML: {error}.", "Correct it at the place named.") from None


def load(path: Path | str) -> Config:
    """The configuration in a TOML file."""
    return resolve(read(path))


def override(words: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Words changed by `key=value` and `table.key=value`; values as TOML writes them, bare words as text."""
    words = {key: dict(value) if isinstance(value, dict) else value for key, value in words.items()}
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = [key.strip().replace("-", "_") for key in path.split(".")]
        if not equals or not all(keys) or len(keys) > 2:
            raise ConfigError(f"{setting[:80]!r} is not a setting.", "Write key=value, or method.key=value.")
        if len(keys) == 1 and keys[0] in CHOICES and isinstance(words.get(keys[0]), dict):
            words[keys[0]]["name"] = _value(text)
        elif len(keys) == 1:
            words[keys[0]] = _value(text)
        elif keys[0] not in CHOICES:
            close = difflib.get_close_matches(keys[0], CHOICES, n=1)
            near = f"Did you mean {close[0] + '.' + keys[1]!r}? " if close else ""
            raise ConfigError(f"{keys[0][:80]!r} has no settings of its own.", f"{near}Known: {', '.join(CHOICES)}.")
        else:
            table = words.get(keys[0], {})
            words[keys[0]] = (table if isinstance(table, dict) else {"name": table}) | {keys[1]: _value(text)}
    return words


def merged(words: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Words with the flags that were given on top; a flag's name keeps the options that a file has beside it."""
    result = _keys(words, "")
    for key, value in flags.items():
        table = result.get(key)
        result[key] = table | {"name": value} if key in CHOICES and isinstance(table, dict) else value
    return result


def _value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return text.strip()
    return found["value"] if found.keys() == {"value"} else text.strip()


def _keys(raw: Mapping[str, Any], within: str) -> dict[str, Any]:
    """Hyphens in keys read as underscores."""
    words: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name in words:
            raise ConfigError(f"The key {within}{name} is given twice.", "Give it once.")
        words[name] = _keys(value, f"{name}.") if isinstance(value, Mapping) and name in CHOICES else value
    return words


def _choice(key: str, value: Any, default: str) -> Choice:
    """A name, or a table with a name and plain options, as a table."""
    table = {"name": default} if value is None else {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.setdefault("name", default), str) or not table["name"]:
        raise ConfigError(f"{key} = {str(value)[:80]!r} is not accepted.", "It must be a name, or a table with a name.")
    return table


def _paths(words: Mapping[str, Any]) -> dict[str, Any]:
    """Paths made absolute, so that a run can be resumed from anywhere; a bare path as data means its own images."""
    changed = {key: _absolute(words[key]) for key in ("data_dir", "assignment") if words.get(key)}
    data = dict(words["data"])
    kind, colon, path = data["name"].partition(":")
    if colon and kind in ("folder", "npz") and path:
        data["name"] = f"{kind}:{_absolute(path)}"
    elif not colon and ("/" in kind or kind.endswith(".npz") or (Path(kind).is_dir() and not _is_known(kind))):
        data["name"] = ("npz:" if kind.endswith(".npz") else "folder:") + _absolute(kind)
    split = words.get("split") or ""
    if split.startswith("file:") and len(split) > 5:
        changed["split"] = f"file:{_absolute(split[5:])}"
    return changed | {"data": data}


def _absolute(path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except (RuntimeError, ValueError):
        return path


def _is_known(name: str) -> bool:
    from perfed.data import names

    return name in names()
