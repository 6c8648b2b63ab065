"""What the machine says now. The only place that asks the operating system about memory."""

from __future__ import annotations

import mlx.core as mx
import psutil

RESERVE_SHARE = 0.1  # of the machine's memory: for the page cache that feeds misses, and for other programs
RESERVE_LEAST_BYTES = 2**30


def usable_bytes() -> int:
    """What an engine may take now: memory available without swapping less a reserve, within the GPU's working set.

    Misleads: on macOS "available" leaves out what compressed pages and purgeable files could still give.
    """
    memory = psutil.virtual_memory()
    reserve = max(RESERVE_LEAST_BYTES, int(memory.total * RESERVE_SHARE))
    available = int(memory.available) - reserve
    working_set = working_set_bytes()
    if working_set is not None:
        available = min(available, working_set - mx.get_active_memory())
    return max(0, available)


def working_set_bytes() -> int | None:
    """What the GPU recommends to keep at most; None where there is no GPU (beyond it, Metal fails allocations)."""
    size = mx.device_info().get("max_recommended_working_set_size")
    return int(size) if size else None
