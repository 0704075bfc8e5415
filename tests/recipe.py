"""A recipe that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

RECIPE = """
title = "Digits"
paper = "nobody's"
table = "Table 0"
own = ["fedper"]
[run]
data = { name = "digits", samples = 400 }
split = "classes:2"
clients = 5
net = { name = "mlp", hidden = [8] }
rounds = 3
eval_every = 1
[tune]
lr = [0.0001, 0.1]
rounds = 0.7
[method]
lr = 0.1
[settings.iid]
run = { split = "iid" }
[methods.local]
published = { "local.mean" = [90.0, 1.5], "iid" = 50.0 }
[methods.fedper]
published = { "local.mean" = 95.0, "local.mean@2" = 94.0 }
[[reading]]
claim = "Both were run."
check = "[local local.mean] > 0 and [fedper local.mean] > 0"
[[reading]]
claim = "This is false."
check = "[local local.mean] > 100"
"""


def without_timing(path: Path) -> str:
    held = json.loads(path.read_text())
    assert held.pop("timing")
    return json.dumps(held)
