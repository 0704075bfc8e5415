"""Run a command in a network of its own that has nothing but loopback: some tools listen on every interface.

unshare --map-root-user --net python benchmarks/alone.py COMMAND ...
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1


def lo_up() -> None:
    """Bring up the loopback of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        flags = struct.unpack("16sh", fcntl.ioctl(handle, GET_FLAGS, struct.pack("16sh", b"lo", 0)))[1]
        fcntl.ioctl(handle, SET_FLAGS, struct.pack("16sh", b"lo", flags | UP))


if __name__ == "__main__":
    lo_up()
    os.execvp(sys.argv[1], sys.argv[1:])
