"""Memory that is freed is kept for the next step, and large tensors lie in large pages.

A training step takes and frees the same memory again and again. By default the C library gives much of it back to the
system each time, which then has to clear every page anew; no result depends on it. Only perfed's own programs and
worker processes call this: in other programs it is theirs to choose.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping

TRIM, MMAP = -1, -3
"""glibc's names of two limits: free memory at the end of the heap that it gives back, blocks that it never keeps."""
KEPT, LARGE = 256 << 20, 32 << 20
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""What PyTorch reads before its first tensor."""


def keep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set both for this process and those it forks, unless the environment says something itself.

    Of what it starts anew, only large pages.
    """
    environment.setdefault(LARGE_PAGES, "1")
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environment):
        return
    try:
        limit = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    limit(MMAP, LARGE)
    limit(TRIM, KEPT)
