"""The ServerApp: a run's rounds over whatever nodes Flower has, simulated clients or sites."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from perfed.errors import PerfedError
from perfed.flower.coordinate import coordinate

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run configuration says; the same words again continue a run that was cut short."""
    try:
        result = coordinate(grid, context.run_config)
    except PerfedError as error:
        print(f"error {error}", flush=True)
        raise
    for fault in result.faults:
        print(f"round {fault['t']}: {fault['reason']}", flush=True)
    print(result.table(), flush=True)
    print(f"state_sha256 {result.state_sha256}\nFiles: {result.directory}", flush=True)
