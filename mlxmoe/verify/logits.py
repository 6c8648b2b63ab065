"""The whole stock model beside the streaming engine: all logits, at every capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx_lm.utils import load_model

from mlxmoe.decode import Decoder
from mlxmoe.experts.cache import ExpertCache
from mlxmoe.loading import load_folder
from mlxmoe.opening import open_folder
from mlxmoe.verify.report import VerifyRow, Watch, expert_sizes, probe_tokens

CHUNK_TOKENS = 128  # shorter than the engine's, so that a prompt longer than one chunk is still quick
PREFILL_TOKENS = (1, 3, 63, 64, 65, 200)  # around the 64 pairs where mlx-lm begins to sort, and past one chunk
DECODE_TOKENS = 64
SHARES = (0.25, 0.5, 0.75, 1.0)

# On Metal the kernel for several tokens may depend on how many experts are stacked, so that their sums are rounded
# in another order: there a prefill may differ by this share of the largest logit. Decode may not differ anywhere.
METAL_PREFILL_TOLERANCE = 0.02


@dataclass(frozen=True)
class _Expected:
    """Stock's answers: the logits of each prompt, and of a greedy decode from one token."""

    prompts: list[list[int]]
    logits: list[mx.array]
    said: list[int]
    decoded: mx.array


def compare_logits(folder: Path, budget: int, trust: bool, add: Callable[[VerifyRow], None]) -> None:
    """Tell `add` a row for each capacity and part. `budget` is not used: two whole models are in memory."""
    opened = open_folder(folder, trust_remote_code=trust)
    floor, total = expert_sizes(opened)
    expected = _stock(folder, opened.vocab_size, trust)
    sizes = {"top_k": floor}
    for share in SHARES:
        if (size := round(share * total)) > max(sizes.values()):
            sizes[f"{share:.0%}" if share < 1 else "all"] = size
    for label, size in sizes.items():
        _compare_one(folder, trust, label, size, expected, add)
        mx.clear_cache()


def _stock(folder: Path, vocab: int, trust: bool) -> _Expected:
    model, _ = load_model(folder, trust_remote_code=trust)
    decoder = Decoder(model, ExpertCache.of_nothing(), chunk_tokens=CHUNK_TOKENS)
    prompts = [probe_tokens(vocab, count) for count in PREFILL_TOKENS]
    logits = [decoder.logits(prompt, decoder.new_cache()) for prompt in prompts]
    cache, said, rows = decoder.new_cache(), prompts[0][:1], []
    for _ in range(DECODE_TOKENS):
        rows.append(decoder.logits(said[-1:], cache))
        said.append(cast(int, mx.argmax(rows[-1][-1]).item()))
    return _Expected(prompts, logits, said[:-1], mx.concatenate(rows))


def _compare_one(
    folder: Path, trust: bool, label: str, size: int, expected: _Expected, add: Callable[[VerifyRow], None]
) -> None:
    loaded = load_folder(folder, experts=size, memory_bytes=2**62, trust_remote_code=trust)
    try:
        decoder = Decoder(loaded.model, loaded.experts, chunk_tokens=CHUNK_TOKENS)
        for prompt, logits in zip(expected.prompts, expected.logits, strict=True):
            watch = Watch(loaded)
            found = decoder.logits(prompt, decoder.new_cache())
            add(watch.row(label, f"prefill {len(prompt)}", found, logits, _bound(len(prompt), logits)))
        watch, cache = Watch(loaded), decoder.new_cache()
        found = mx.concatenate([decoder.logits([token], cache) for token in expected.said])
        add(watch.row(label, f"decode {DECODE_TOKENS}", found, expected.decoded))
    finally:
        loaded.experts.close()


def _bound(tokens: int, logits: mx.array) -> float:
    if tokens == 1 or not mx.metal.is_available():
        return 0.0
    return METAL_PREFILL_TOLERANCE * cast(float, mx.max(mx.abs(logits)).item())
