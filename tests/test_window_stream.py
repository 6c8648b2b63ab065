"""A text many times longer than everything: memory does not move, and what is said stays as likely."""

from __future__ import annotations

import math
import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model
from tiny import QWEN3_MOE, make_tiny

from mlxmoe.kv.choose import KVChoice, choose
from mlxmoe.kv.settings import KVSettings


def test_memory_is_constant_over_a_long_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = {**QWEN3_MOE, "num_hidden_layers": 1, "max_position_embeddings": 128}
    model, _ = load_model(make_tiny(tmp_path_factory.mktemp("small") / "small", config))
    choice = choose(model, KVSettings(window=64), 128)
    cache, rng, readings = choice.caches(model), random.Random(0), []
    for begin in range(0, 10_000, 500):
        while (seen := cache[0].seen) < begin + 500:
            tokens = min(rng.choice((1, 3, 40, 150)), begin + 500 - seen)
            mx.eval(model(mx.random.randint(0, 2048, (1, tokens)), cache=cache), [entry.state for entry in cache])
        mx.clear_cache()
        readings.append(mx.get_active_memory())
        assert cache[0].offset < 128
        assert cache[0].nbytes == 64 * cache[0].row_bytes
    # MLX may give an array a freed buffer that is a little larger: some pages in all, however long the text
    assert max(readings) - min(readings) < 16_384


@pytest.fixture(scope="module")
def verses(stock_demo: tuple[Any, Any]) -> list[int]:
    """Text that the demo model finds likely: its own, in one breath within its context, one after the other."""
    model, tokenizer = stock_demo
    tokens: list[int] = []
    for start in ("In the beginning", "And it came to pass", "And Jesus said", "Now the sons of"):
        cache, text = choose(model, KVSettings(), None).caches(model), tokenizer.encode(start)
        mx.random.seed(len(tokens))
        logits = model(mx.array([text]), cache=cache)[:, -1]
        while len(text) < 200:
            text.append(int(mx.random.categorical(logits / 0.8).item()))
            logits = model(mx.array([text[-1:]]), cache=cache)[:, -1]
        tokens += text
    return tokens


def perplexity(model: Any, choice: KVChoice, tokens: list[int], counted: int) -> float:
    """Of the last `counted` tokens."""
    cache, nats = choice.caches(model), []
    for begin in range(0, len(tokens) - 1, 128):
        piece = mx.array([tokens[begin : begin + 129]])
        cost = nn.losses.cross_entropy(model(piece[:, :-1], cache=cache), piece[:, 1:])
        mx.eval(cost, [entry.state for entry in cache])
        nats += cost[0].tolist()
    return math.exp(sum(nats[-counted:]) / counted)


@pytest.mark.slow
@pytest.mark.parametrize("contexts", [6, pytest.param(16, marks=pytest.mark.thorough)])
def test_text_is_as_likely_at_many_contexts_as_within_one(
    stock_demo: tuple[Any, Any], verses: list[int], contexts: int
) -> None:
    model, _ = stock_demo
    choice = choose(model, KVSettings(window=128, kv_bits=8), 256)
    inside = perplexity(model, choice, verses[:200], 199)
    beyond = perplexity(model, choice, [*(verses * 6)[: 256 * contexts], *verses[:200]], 199)
    assert beyond < 1.10 * inside
