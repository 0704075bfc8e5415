"""The process of one run of a grid: `python -m perfed.gridrun DIRECTORY WORKERS [DATA_DIR]`.

It ends with its standard input: whoever started it holds the other end, and takes it along when killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any


def _end_with_parent() -> None:
    while os.read(0, 4096):  # nothing is ever written; this returns when the other end is closed
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Continue the run to its end; a failure is one line on standard error."""
    os.setpgid(0, 0)  # the pool's workers end with this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from perfed import allocator

    allocator.keep()
    from perfed.errors import PerfedError
    from perfed.experiment import resume

    directory, workers = sys.argv[1], int(sys.argv[2])
    moved: dict[str, Any] = {"data_dir": sys.argv[3]} if sys.argv[3:] and sys.argv[3] else {}
    try:
        resume(directory, workers=workers, **moved)
    except PerfedError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
