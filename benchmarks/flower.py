"""What Flower costs: seconds per round beside one process, and bytes on the wire beside the ledger's count.

    python benchmarks/flower.py simulated      10 and 100 clients on Ray; start it where Ray may listen (docs/flower.md)
    python benchmarks/flower.py deployed       three sites over TLS on loopback, through a proxy that counts bytes
    python benchmarks/flower.py kills          ten kills each of a site's node, the SuperLink and the ServerApp

Each writes its part of results/flower.json. Rounds of the engines take turns and the fastest counts, so that what else
the machine does matters little.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from perfed import config as configuration  # noqa: E402
from perfed.engine.rounds import Simulation  # noqa: E402
from perfed.flower.messages import Job  # noqa: E402
from perfed.flower.nodes import Nodes  # noqa: E402
from perfed.prepare import Prepared, prepare  # noqa: E402
from perfed.result import versions  # noqa: E402

RESULT = ROOT / "results" / "flower.json"
ROUNDS = 8
KILLS = 10


def prepared(clients: int) -> Prepared:
    words = {"method": "fedavg", "net": "mlp", "clients": clients, "split": "iid", "rounds": ROUNDS, "workers": 2}
    return prepare(configuration.resolve(words | {"eval_every": ROUNDS}))


def stepped(simulation: Simulation, t: int) -> float:
    started = time.perf_counter()
    simulation.step(t)
    return time.perf_counter() - started


def simulated() -> dict[str, Any]:
    """The fastest round of each engine, in turns."""
    from perfed.flower.simulate import simulate

    runs = {clients: prepared(clients) for clients in (10, 100)}
    found: dict[str, Any] = {}

    def run(make: Callable[[Any], Nodes]) -> None:
        nodes = make(None)
        for clients, made in runs.items():
            mine = replace(nodes, job=Job(made.config.toml()))
            with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
                local = made.simulation(Path(a))
                flower = made.simulation(Path(b), executor=lambda worker, mine=mine: mine.limited(worker))
                times = [(stepped(local, t), stepped(flower, t)) for t in range(1, ROUNDS)]  # the last one scores
                local.close()
                flower.close()
            found[str(clients)] = {
                "local_seconds": round(min(x for x, _ in times), 4),
                "flower_seconds": round(min(y for _, y in times), 4),
            }

    simulate(runs[100], run)
    return found


class Counting:
    """A proxy that counts what goes through."""

    def __init__(self, target: int) -> None:
        self.up = self.down = 0
        self.target, self.listener = target, socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            for one, other, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._pump, args=(one, other, way), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, way: str) -> None:
        try:
            while data := one.recv(1 << 16):
                setattr(self, way, getattr(self, way) + len(data))
                other.sendall(data)
        except OSError:
            pass
        finally:
            other.close()


def deployed() -> dict[str, Any]:
    """Three sites with the 582,026-parameter network: bytes on the wire, and the seconds of a round."""
    from tests.e2e.cluster import SITES, Cluster, in_process

    from perfed.flower.coordinate import Terms

    rounds = 4
    given = {"method": "fedavg", "net": "cnn", "rounds": rounds, "eval_every": rounds, "adapt": "never"}
    with tempfile.TemporaryDirectory() as place:
        made = Cluster(Path(place))
        proxy = Counting(made.port)
        for name in SITES:
            file = made.place / name / "site.toml"
            file.write_text(file.read_text().replace(str(made.port), str(proxy.port)))
        try:
            made.start()
            result = made.finish(made.place / "run", given, Terms(sites=3), 3000)
            local = in_process(made, given)
        finally:
            made.stop()
        assert result.state_sha256 == local.state_sha256
        trained, scored = (sum(result.cost[f"bytes_{way}"] for way in ways) for ways in (("down", "up"), ("scored",)))
        return {
            "rounds": rounds,
            "training_bytes": trained,
            "scoring_bytes": scored,
            "wire_bytes": proxy.up + proxy.down,
            "ratio": round((proxy.up + proxy.down) / (trained + scored), 4),
            "seconds_per_round": round(result.cost["seconds"] / rounds, 2),
            "local_seconds_per_round": round(local.cost["seconds"] / rounds, 2),
        }


def kills() -> dict[str, Any]:
    """Who is killed at a random moment is started again: whether runs end, with which hash, and what was lost.

    Every kill is written as soon as its run has ended; the same command again does those that are missing.
    """
    from tests.e2e.cluster import cluster
    from tests.e2e.kills import KINDS, kill

    found = written().get("kills", {})
    with tempfile.TemporaryDirectory() as place, cluster(Path(place)) as made:
        for kind in KINDS:
            done = found.setdefault(kind, [])
            for seed in range(1000):
                if len(done) >= KILLS:
                    break
                if seed not in [one["seed"] for one in done] and (one := kill(made, kind, seed)):
                    done.append({key: value for key, value in asdict(one).items() if key != "kind"})
                    write("kills", found)
                    print(one, flush=True)
    return found


def written() -> dict[str, Any]:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def write(part: str, found: dict[str, Any]) -> None:
    RESULT.write_text(json.dumps(written() | {part: found, "versions": versions()}, indent=1) + "\n")


def main() -> None:
    part = sys.argv[1]
    found = {"simulated": simulated, "deployed": deployed, "kills": kills}[part]()
    write(part, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
