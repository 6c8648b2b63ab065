"""What KV caches take is predicted to the byte, for every definition, from passes that evaluate nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from definitions import ALIASES, DEFINITIONS
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model
from tiny import make_tiny

from mlxmoe.decode import Decoder
from mlxmoe.experts.cache import ExpertCache
from mlxmoe.growth import kv_growth
from mlxmoe.kv.choose import choose
from mlxmoe.kv.settings import KVSettings
from mlxmoe.kv.window import SlidingWindowKVCache
from mlxmoe.memory.plan import Rows
from mlxmoe.opening import open_folder

DECODED = 3

# Tokens of a prompt, and of a prefill chunk: shorter than a step and longer, on a step's edge, in chunks of one and
# several steps; all longer than the tiny windows, but for the first.
PROMPTS = [(2, 256), (200, 256), (257, 256), (600, 256), (600, 512)]


def nbytes(cache: list[Any]) -> int:
    return sum(entry.nbytes for entry in cache)


def passes(tokens: int, chunk: int) -> list[int]:
    """Tokens of each pass that `Decoder` makes for a prompt."""
    return [min(chunk, tokens - 1 - start) for start in range(0, tokens - 1, chunk)] + [1]


@pytest.mark.usefixtures("kernels_without_metal")
@pytest.mark.parametrize("name", [*DEFINITIONS, *ALIASES])
def test_kv_bytes_are_those_of_the_real_caches(tmp_path: Path, name: str) -> None:
    """Of passes that are built and not evaluated: nothing but shapes decides what a cache takes."""
    opened = open_folder(make_tiny(tmp_path / name, DEFINITIONS.get(name) or ALIASES[name]))
    for tokens, chunk in PROMPTS:
        cache = make_prompt_cache(opened.model)
        for count in passes(tokens, chunk):
            opened.model(mx.zeros((1, count), dtype=mx.int32), cache=cache)
        for seen in range(tokens, tokens + DECODED):
            assert opened.kv.of(seen) == nbytes(cache), f"{seen} tokens in chunks of {chunk}"
            opened.model(mx.zeros((1, 1), dtype=mx.int32), cache=cache)


@pytest.mark.usefixtures("kernels_without_metal")
@pytest.mark.parametrize("name", ["deepseek_v41", "llama4", "gpt_oss", "longcat_flash_ngram", "qwen3_next"])
def test_evaluated_caches_are_as_predicted(tmp_path: Path, name: str) -> None:
    """One definition for each kind of cache, computed."""
    folder = make_tiny(tmp_path / name, DEFINITIONS[name])
    kv = open_folder(folder).kv
    model, _ = load_model(folder)
    decoder = Decoder(model, ExpertCache.of_nothing(), chunk_tokens=256)
    for tokens in (2, 260):
        cache = decoder.new_cache()
        decoder.logits([1] * tokens, cache)
        assert kv.of(tokens) == nbytes(cache)


ROW_BYTES = 2 * 4  # keys and values of one head of one number


def one_layer(make: Callable[[], Any], tokens: int, chunk: int) -> int:
    """The rows of a cache after a prompt as `Decoder` feeds it. llama4 cuts its cache before each pass."""
    cache = make()
    for count in passes(tokens, chunk):
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        rows = mx.zeros((1, 1, count, 1))
        cache.update_and_fetch(rows, rows)
    return int(cache.nbytes) // ROW_BYTES


@given(tokens=st.integers(1, 5000), size=st.integers(1, 5000), steps=st.integers(1, 8))
def test_growth_laws_are_those_of_mlx_lms_classes(tokens: int, size: int, steps: int) -> None:
    chunk = 256 * steps
    assert Rows(8, "steps").of(tokens) == one_layer(KVCache, tokens, chunk)
    sliding = one_layer(lambda: SlidingWindowKVCache(size, 0), tokens, chunk) if size > 1 else 1
    assert min(Rows(8, "sliding", size).of(tokens), Rows(8, "sliding", size).of(None)) == sliding
    assert Rows(8, "chunk", size).of(tokens) == one_layer(lambda: ChunkedKVCache(size), tokens, chunk)
    window = one_layer(lambda: RotatingKVCache(size), tokens, chunk)
    lonely = tokens > 2 and (tokens - 1) % chunk == 1  # a last chunk of one token is added as a decoded one is
    assert window <= Rows(8, "window", size).of(tokens) <= window + lonely


@given(tokens=st.integers(2, 3000), decoded=st.integers(0, 600), size=st.integers(1, 3000))
def test_decoding_a_part_takes_no_more_than_prefill_of_all(tokens: int, decoded: int, size: int) -> None:
    cache = RotatingKVCache(size)
    rows = mx.zeros((1, 1, tokens, 1))
    cache.update_and_fetch(rows, rows)
    for _ in range(decoded):
        cache.update_and_fetch(rows[:, :, :1], rows[:, :, :1])
    if decoded:
        assert cache.nbytes // ROW_BYTES <= Rows(8, "window", size).of(tokens + decoded)


def test_a_model_without_caches_of_its_own_is_measured(tiny: Path) -> None:
    model, _ = load_model(tiny, lazy=True)
    kv = kv_growth(model)
    assert (kv.fixed_bytes, kv.rows) == (0, ())
    assert kv.step_bytes == 3 * 2 * 256 * 32 * 4


@pytest.mark.parametrize("kv_settings", [KVSettings(300), KVSettings(300, kv_bits=8), KVSettings(kv_bits=4)], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "longcat_flash", "qwen3_next", "deepseek_v3"])
def test_lossy_caches_are_as_predicted(tmp_path: Path, name: str, kv_settings: KVSettings) -> None:
    """Those that a window or bits replace, beside those that a definition keeps."""
    model, _ = load_model(make_tiny(tmp_path / name, DEFINITIONS[name]), lazy=True)
    choice = choose(model, kv_settings, None)
    kv = kv_growth(model, choice.caches)
    for tokens, chunk in PROMPTS:
        cache = choice.caches(model)
        for count in passes(tokens, chunk):
            model(mx.zeros((1, count), dtype=mx.int32), cache=cache)
        for seen in range(tokens, tokens + DECODED):
            assert kv.of(seen) == nbytes(cache), f"{seen} tokens in chunks of {chunk}"
            model(mx.zeros((1, 1), dtype=mx.int32), cache=cache)
