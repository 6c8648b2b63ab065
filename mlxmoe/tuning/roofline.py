"""The model of speed: bytes and operations over rates. Pure arithmetic; knows no model, no file and no machine.

A decoded token reads every weight that it uses once, and the KV cache: the time for that is bytes over bandwidth
(the roofline of Williams, Waterman and Patterson, 2009, below its ridge). What is not in memory comes from the disk
first, and each layer that may have to wait for the disk asks the GPU which experts it wants: a host sync.

    decode_s  = (resident_bytes - kv_bytes) / (bandwidth * efficiency) + kv_bytes / KV rate + layers * layer_s
              + missing_bytes / read rate + misses * miss_s + syncs * sync_s
    prefill_s = flops / (flops_per_s * prefill_efficiency) + read_bytes / read rate + chunks * syncs * sync_s

A step for several texts reads the weights once, but computes for each: above the ridge its operations take longer
than its bytes from memory, and count in their stead, at a prompt's rate.

Every constant can be replaced by what was measured: `dataclasses.replace(rates, sync_s=...)`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Share of the slots' experts among all -> share of lookups that are hits.
HitCurve = Callable[[float], float]

# What published decode rates leave of the bandwidth once LAYER_S is taken off: between 0.58 and 0.75 fit M4 (120
# GB/s, 35B-A3B, 33 tokens/s), M2 Pro and M2 Max (gpt-oss-20b, 44 and 91; 35B-A3B, 79.8), M5 Max (35B-A3B, 133).
EFFICIENCY = 0.65
# Launching a layer's kernels and waiting for the last one: with EFFICIENCY from the same rates, as a fast chip gains
# less than its bandwidth says.
LAYER_S = 0.1e-3
# A host sync on Metal. Reported: 12 ms a token on 40 layers.
SYNC_S = 0.3e-3
# What a missed expert costs beside its bytes: a layer waits for the one or two that it misses, a handful of small
# tensors each, and meanwhile the GPU has nothing to do. Fits the published 15.9 and 7.2 tokens/s with 3.6 and 8.3 %
# misses of 320 experts a token (1.8 MB each) on a drive of 2.4 GB/s; to read one at that rate takes 0.7 ms.
MISS_S = 2.2e-3
# The slowest of the Macs' drives that a report is known of; a guess for every other.
READ_BYTES_PER_S = 2_400_000_000
# What published prompt rates leave of the GPU's float32 operations: 0.5 on M3 Max (a 30B-A3B, 1161 tokens/s: issue 92
# of mlx-lm), 0.65 to 0.8 with dense models on M3 Pro and M4.
PREFILL_EFFICIENCY = 0.5
# Experts that are new to a text are missed however many slots there are: published 3.6 % with 95 % of them in slots.
MOST_HITS = 0.97


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second; see the module's docstring. `bandwidth_bytes_per_s`: to unified memory.

    `read_bytes_per_s`: of long reads from the disk. `flops_per_s`: of the GPU, None where it is not known; then
    nothing is said about prefill. `kv_bytes_per_s`: of the KV cache; None where it is read as fast as weights are.
    """

    bandwidth_bytes_per_s: float
    flops_per_s: float | None = None
    read_bytes_per_s: float = READ_BYTES_PER_S
    efficiency: float = EFFICIENCY
    layer_s: float = LAYER_S
    sync_s: float = SYNC_S
    miss_s: float = MISS_S
    prefill_efficiency: float = PREFILL_EFFICIENCY
    kv_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one decoded token asks for. `resident_bytes`: read from memory, weights and KV cache (`kv_bytes`).

    `missing_bytes`: read from the disk first, of `misses` experts. `layers`: of the model. `syncs`: layers that may
    have to wait. `flops`: operations, where they might take longer than what is read from memory.
    """

    resident_bytes: float
    layers: int
    missing_bytes: float = 0.0
    misses: float = 0.0
    syncs: int = 0
    kv_bytes: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a prompt's prefill asks for: operations, bytes from the disk, chunks, and syncs in each chunk."""

    flops: float
    read_bytes: float = 0.0
    chunks: int = 1
    syncs: int = 0


def decode_s(step: Step, rates: Rates) -> float:
    """Seconds for one step: a decoded token, or one of each of several texts."""
    weights_per_s = rates.bandwidth_bytes_per_s * rates.efficiency
    memory_s = (step.resident_bytes - step.kv_bytes) / weights_per_s
    memory_s += step.kv_bytes / (rates.kv_bytes_per_s or weights_per_s)
    if rates.flops_per_s is not None:
        memory_s = max(memory_s, step.flops / (rates.flops_per_s * rates.prefill_efficiency))
    disk_s = step.missing_bytes / rates.read_bytes_per_s + step.misses * rates.miss_s
    return memory_s + step.layers * rates.layer_s + disk_s + step.syncs * rates.sync_s


def prefill_s(prompt: Prompt, rates: Rates) -> float | None:
    """Seconds for a prompt; None where the GPU's rate is not known.

    A chunk reads its experts many at a time, which reaches the drive's rate. Reads and computing are not overlapped.
    """
    if rates.flops_per_s is None:
        return None
    compute_s = prompt.flops / (rates.flops_per_s * rates.prefill_efficiency)
    return compute_s + prompt.read_bytes / rates.read_bytes_per_s + prompt.chunks * prompt.syncs * rates.sync_s


def default_hit_curve(num_experts: int, top_k: int) -> HitCurve:
    """A guess: hits of an LRU with a share `s` of each layer's experts in slots are `1 - (1 - s) ** p`.

    `p = 0.9 + 0.95 * log2(top_k)`, at least 1 (no locality at all). Fitted to replayed routing: gpt-oss-20b (top-4)
    .60/.76/.87/.93/.96 with 8/12/16/20/24 of 32 experts, Qwen3-30B-A3B (captured with top-6) .90 and gpt-oss-120b
    (captured with top-2) .72 with half of 128; and to a published .917 with 47 % of 256 (top-8). The number of
    experts counts through the share alone: nothing more was seen. Within .05 of those; texts differ by more.
    """
    power = max(1.0, 0.9 + 0.95 * math.log2(max(1, top_k)))
    least = top_k / max(num_experts, top_k)

    def hits(share: float) -> float:
        if share >= 1:
            return 1.0
        return min(MOST_HITS, 1 - math.pow(1 - max(share, least), power))

    return hits


def curve_through(points: Sequence[tuple[float, float]]) -> HitCurve:
    """The curve through measured `(share of experts in slots, hit rate)`, straight between them."""
    known = sorted({0.0: 0.0, **dict(points), 1.0: 1.0}.items())

    def hits(share: float) -> float:
        for (low, below), (high, above) in itertools.pairwise(known):
            if share <= high:
                return below + (above - below) * (max(share, low) - low) / (high - low)
        return 1.0

    return hits
