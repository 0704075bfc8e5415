"""One client's explanation: pictures with their words, as files beside the run and inside the report."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch

from perfed import rundir
from perfed.errors import ConfigError, PerfedError
from perfed.explain import clients, maps, pictures
from perfed.explain.models import opened, side_by_side
from perfed.report.tables import percent
from perfed.result import Result

FILE = "explanation.json"
FOLDER = "explain-client-"


def explain(result: Result, client: int, out: Path | None = None) -> list[Path]:
    """Write the pictures of a client and what they show; returns the files."""
    maps.require()
    place = out or result.directory / f"{FOLDER}{client}"
    found = list(_pictures(result, client))
    federation = result.made().federation
    who = federation.client_names[client] if federation.client_names else str(client)
    method, accuracy = result.config.method["name"], percent(result.accuracy.get(client))
    title = f"Client {who} explained ({method}, seed {result.config.seed})"
    words = [{key: value for key, value in one.items() if key != "png"} for one in found]
    try:
        place.mkdir(parents=True, exist_ok=True)
        for one in found:
            if "png" in one:
                rundir.write(place / one["file"], one["png"])
        text = json.dumps({"title": title, "client": client, "accuracy": accuracy, "pictures": words}, indent=1)
        rundir.write(place / FILE, text.encode())
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {error}.", "Give another --out.") from None
    return [*(place / one["file"] for one in found if "png" in one), place / FILE]


def _pictures(result: Result, client: int) -> list[dict[str, Any]]:
    federation = result.made().federation
    if not 0 <= client < federation.num_clients:
        raise ConfigError(f"There is no client {client}.", f"The run has clients 0 to {federation.num_clients - 1}.")
    data, classes = federation.client(client).test, federation.classes
    torch.manual_seed(0)
    models = side_by_side(result, client)
    made = [_cams(models, data, classes), _channels(models, data)]
    with opened(result, client) as simulation:
        alike, conflict = clients.likeness(simulation, client), clients.conflicts(simulation, client)
        held = [classes[c] for c in federation.client(client).classes_held]
    if alike:
        who, table, what = alike
        names = [federation.client_names[i] if federation.client_names else str(i) for i in who]
        mine = federation.client_names[client] if federation.client_names else str(client)
        near = [n for n in sorted(range(len(who)), key=lambda k: -table[who.index(client), k]) if who[n] != client]
        closest = ", ".join(names[k] for k in near[:3])
        made.append(
            {
                "file": "similarity.png",
                "title": "How alike clients are in what they keep",
                "note": f"Cosine of the clients' {what}, as moved away from the common start. Nearest to this client:"
                f" {closest}.",
                "alt": f"A matrix of cosines between {len(who)} clients, alike ones together; nearest: {closest}.",
                "png": pictures.matrix(table, names, [mine], "cosine"),
            }
        )
    else:
        made.append(_without("How alike clients are in what they keep", "Clients keep nothing that could be compared."))
    if conflict:
        labels, table = conflict
        pairs = [(table[i, j], i, j) for i in range(len(labels)) for j in range(len(labels)) if i <= j]
        low = min((p for p in pairs if p[0] == p[0]), default=None)
        worst = (
            f" The strongest: {classes[labels[low[1]]]} and {classes[labels[low[2]]]} ({low[0]:.2f})." if low else ""
        )
        made.append(
            {
                "file": "conflicts.png",
                "title": "Conflicts between clients' classes",
                "note": "Mean cosine between gradients on what the head receives, over pairs of different clients."
                f" Below zero, learning one class undoes the other.{worst} In bold: this client's classes.",
                "alt": f"A matrix of {len(labels)} classes.{worst}",
                "png": pictures.matrix(table, [classes[c] for c in labels], held, "cosine of gradients"),
            }
        )
    else:
        made.append(_without("Conflicts between clients' classes", "There are not two clients to compare."))
    return made


def _cams(models: list[Any], data: Any, classes: Any) -> dict[str, Any]:
    right, wrong = maps.choose(models[0], data)
    rows = torch.cat([right, wrong])
    seen = [maps.look(model, data.x[rows]) for model in models]
    where = maps.names(models)
    kind = "Grad-CAM" if models[0].conv() is not None else "Gradients"
    errors = "" if len(wrong) else " The personal model makes no mistake on this client's test data."
    notes = "; ".join(f"{model.name}: {model.note}" for model in models)
    hits = ", ".join(f"{s.model.name} {int((s.said == data.y[rows]).sum())} of {len(rows)}" for s in seen)
    return {
        "file": "maps.png",
        "title": f"Where the models look ({kind})",
        "note": f"{len(right)} test images that the personal model gets right and {len(wrong)} that it gets wrong;"
        f" maps for the class that each model says, at {where}. Each map is scaled to its own maximum: colours compare"
        f" places of one map, not strengths of two.{errors} {notes}.",
        "alt": f"{kind} maps of {len(rows)} images for {len(seen)} models. Right on these images: {hits}.",
        "png": pictures.cams(data.x[rows], data.y[rows], len(right), seen, classes),
    }


def _channels(models: list[Any], data: Any) -> dict[str, Any]:
    from perfed.methods.pse import excited

    title = "Which channels matter, and where they differ"
    other = next((m for m in models[1:] if m.name == "global"), models[-1])
    alphas = {m.name: maps.channels(m, data) for m in (models[0], other)}
    if models[0] is other or any(a is None for a in alphas.values()):
        return _without(title, "The network has no convolution, or there is no other model to compare with.")
    personal, shared = alphas.values()
    if personal is None or shared is None or personal.shape != shared.shape:
        return _without(title, "The models have different channels.")
    chosen = excited(personal, shared)
    return {
        "file": "channels.png",
        "title": title,
        "note": f"α is Grad-CAM's weight of a channel for the true class, mean over the client's test images."
        f" In orange: the {int(chosen.sum())} of {len(chosen)} channels that PSE would excite, those whose lead in the"
        f" {other.name} model is positive and not below the mean.",
        "alt": f"Bars of {len(chosen)} channels, {int(chosen.sum())} of them excited.",
        "png": pictures.channels({"personal": personal.detach(), other.name: shared.detach()}, chosen),
    }


def _without(title: str, note: str) -> dict[str, Any]:
    return {"title": title, "note": note, "alt": ""}


def kept(directory: Path) -> list[dict[str, Any]]:
    """The explanations in a run's directory, as the report takes them; damaged ones are left out."""
    found = []
    for place in sorted(directory.glob(f"{FOLDER}*")):
        try:
            words = rundir.read_json(place / FILE)
            shown = [
                {key: str(one.get(key, "")) for key in ("title", "note", "alt")}
                | {
                    "data": base64.b64encode((place / Path(one["file"]).name).read_bytes()).decode()
                    if "file" in one
                    else ""
                }
                for one in words["pictures"]
            ]
            found.append({"title": str(words["title"]), "pictures": shown})
        except (PerfedError, OSError, KeyError, TypeError):
            continue
    return found
