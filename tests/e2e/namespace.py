"""Commands in a network of their own that has nothing but loopback: Ray listens on every interface of its machine."""

from __future__ import annotations

import os
import shutil

ALONE = 'ip link set lo up && exec "$@"'


def in_a_namespace(*words: str, processes: bool = False) -> list[str]:
    """The command in a network of its own; with `processes`, all that it starts ends when it ends."""
    unshare = shutil.which("unshare")
    assert unshare, "unshare (util-linux) is needed, as Ray must not listen on the machine's network"
    user = [] if os.geteuid() == 0 else ["--map-root-user"]  # not root: in a user namespace too
    own = ["--pid", "--fork", "--kill-child", "--mount-proc"] if processes else []
    return [unshare, *user, "--net", *own, "sh", "-c", ALONE, "sh", *words]
