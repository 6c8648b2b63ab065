"""What the machine says now. The only place that asks the operating system about memory."""

from __future__ import annotations

import psutil

RESERVE_SHARE = 0.1  # of the machine's memory: for the page cache that feeds misses, and for other programs
RESERVE_LEAST_BYTES = 2**30


def usable_bytes() -> int:
    """What an engine may take now: memory that is available without swapping, less a reserve."""
    memory = psutil.virtual_memory()
    reserve = max(RESERVE_LEAST_BYTES, int(memory.total * RESERVE_SHARE))
    return max(0, int(memory.available) - reserve)
