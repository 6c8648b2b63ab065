"""Whole models with their texts in one batch: each text's logits are those it has alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, _merge_caches

from mlxmoe import Engine
from mlxmoe.kv.batch import BatchSlidingWindowKVCache
from mlxmoe.kv.choose import KVChoice, choose
from mlxmoe.kv.layers import leaves_of
from mlxmoe.kv.settings import KVSettings
from mlxmoe.kv.window import SlidingWindowKVCache

pytestmark = pytest.mark.slow

WINDOW, SINKS, TRAINED = 24, 3, 40

# Sums over a batch may be taken in another order than those of one text: mostly they are not, and nothing differs.
# Relative to the largest number.
ROUNDING = 1e-4

MODELS = ["deepseek_v3", "gpt_oss", "longcat_flash", "qwen3_moe", "qwen3_next"]
# mlx-lm's caches of a state space take the padding of a shorter prompt for text, also without a window
NOT_PADDED = ["jamba"]
LENGTHS = [5, 23, 39, 60, 90]  # before and after texts outgrow the window and the trained context
MORE = 12


def far(found: mx.array, expected: mx.array) -> float:
    assert found.shape == expected.shape
    return float((mx.abs(found - expected).max() / mx.abs(expected).max()).item())


def texts_of(lengths: list[int]) -> list[list[int]]:
    return [[(37 * i * i + 11 * i + 5 + 101 * row) % 2000 + 3 for i in range(n)] for row, n in enumerate(lengths)]


def decode(model: Any, cache: list[Any], tokens: list[int]) -> mx.array:
    """`[B, vocabulary]` of one more token of each text."""
    logits: mx.array = model(mx.array(tokens)[:, None], cache=cache)[:, -1]
    mx.eval(logits, [entry.state for entry in cache])
    return logits


def agree(found: mx.array, expected: mx.array, bits: int | None) -> None:
    if bits is None:
        assert far(found, expected) < ROUNDING
    else:
        # a number that rounding moves across the border between two levels is off by a whole level
        assert (mx.abs(found - expected).mean() / mx.abs(expected).mean()).item() < ROUNDING
        assert far(found, expected) < 50 * ROUNDING


@pytest.mark.parametrize("trained", [None, TRAINED])
@pytest.mark.parametrize(("window", "bits"), [(WINDOW, None), (WINDOW, 8), (WINDOW, 4), (None, 8)])
@pytest.mark.parametrize("name", [*MODELS, *NOT_PADDED])
def test_logits_in_a_batch_are_those_of_each_text_alone(
    model_of: Callable[[str], Any], name: str, window: int | None, bits: int | None, trained: int | None
) -> None:
    model = model_of(name)
    choice = choose(model, KVSettings(window, SINKS, bits), trained)
    check_joins_and_leaves(model, choice, texts_of([n + MORE for n in LENGTHS]), LENGTHS, bits)


def check_joins_and_leaves(
    model: Any, choice: KVChoice, texts: list[list[int]], lengths: list[int], bits: int | None
) -> None:
    """Decode, one text joins, one leaves and goes on alone."""
    alone, places = [choice.caches(model) for _ in texts], list(lengths)
    for text, cache, n in zip(texts, alone, lengths, strict=True):
        mx.eval(model(mx.array([text[:n]]), cache=cache), [entry.state for entry in cache])
    batch = _merge_caches(alone[:-1])
    assert any(isinstance(leaf, BatchSlidingWindowKVCache) for leaf in leaves_of(batch))
    here = list(range(len(texts) - 1))

    def step() -> None:
        found = decode(model, batch, [texts[row][places[row]] for row in here])
        for logits, row in zip(found, here, strict=True):
            agree(logits, decode(model, alone[row], [texts[row][places[row]]])[0], bits)
            places[row] += 1

    for _ in range(3):
        step()
    for entry, joining in zip(batch, _merge_caches(alone[-1:]), strict=True):
        entry.extend(joining)
    here.append(len(texts) - 1)
    for _ in range(3):
        step()
    leaving = here.pop(1)
    gone = [entry.extract(1) for entry in batch]
    for entry in batch:
        entry.filter([0, *range(2, len(texts))])
    for _ in range(2):
        step()
    for _ in range(3):
        token = [texts[leaving][places[leaving]]]
        agree(decode(model, gone, token), decode(model, alone[leaving], token), bits)
        places[leaving] += 1


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_padded_on_the_right_are_those_of_each_text_alone(
    model_of: Callable[[str], Any], name: str, bits: int | None
) -> None:
    model, texts, chunk = model_of(name), texts_of(LENGTHS), 16
    choice = choose(model, KVSettings(WINDOW, SINKS, bits), TRAINED)
    batch, alone = _merge_caches([choice.caches(model) for _ in texts]), [choice.caches(model) for _ in texts]
    for entry in batch:
        entry.prepare(lengths=LENGTHS, right_padding=[max(LENGTHS) - n for n in LENGTHS])
    tokens = mx.array([text + [0] * (max(LENGTHS) - len(text)) for text in texts])
    for begin in range(0, max(LENGTHS), chunk):
        found = model(tokens[:, begin : begin + chunk], cache=batch)
        mx.eval(found, [entry.state for entry in batch])
        for row, (text, cache) in enumerate(zip(texts, alone, strict=True)):
            if own := text[begin : begin + chunk]:
                agree(found[row, : len(own)], model(mx.array([own]), cache=cache)[0], bits)
    for entry in batch:
        entry.finalize()
    for token in (7, 11, 13):
        found = decode(model, batch, [token] * len(texts))
        for row, cache in enumerate(alone):
            agree(found[row], decode(model, cache, [token])[0], bits)


@pytest.mark.parametrize("settings", [{"window": 64}, {"window": 64, "kv_bits": 8}, {"kv_bits": 4}])
def test_the_demo_model_s_texts_join_and_leave(stock_demo: tuple[Any, Any], settings: dict[str, Any]) -> None:
    model, _ = stock_demo
    lengths = [30, 63, 250, 100, 400]  # its context is 256
    texts = texts_of([n + MORE for n in lengths])
    check_joins_and_leaves(model, choose(model, KVSettings(**settings), 256), texts, lengths, settings.get("kv_bits"))


def test_mlx_lm_s_continuous_batching_says_what_each_text_says_alone(stock_demo: tuple[Any, Any]) -> None:
    model, _ = stock_demo
    choice = choose(model, KVSettings(window=64), 256)
    prompts, budgets = texts_of([300, 12, 70, 61, 140, 5]), [30, 12, 20, 9, 25, 40]
    expected = []
    for prompt, budget in zip(prompts, budgets, strict=True):
        cache, said = choice.caches(model), []
        logits = model(mx.array([prompt]), cache=cache)[:, -1]
        for _ in range(budget):
            said.append(int(mx.argmax(logits).item()))
            logits = decode(model, cache, said[-1:])
        expected.append(said)
    generator = BatchGenerator(model, completion_batch_size=3, prefill_batch_size=2, prefill_step_size=48)
    numbers = generator.insert(prompts, budgets, caches=[choice.caches(model) for _ in prompts])
    found: dict[int, list[int]] = {number: [] for number in numbers}
    ends: dict[int, Any] = {}
    while len(ends) < len(prompts):
        for response in generator.next()[1]:
            found[response.uid].append(response.token)
            if response.finish_reason:
                ends[response.uid] = response.prompt_cache
    generator.close()
    assert [found[number] for number in numbers] == expected
    for number, prompt, said in zip(numbers, prompts, expected, strict=True):
        assert all(cache.seen == len(prompt) + len(said) for cache in ends[number])
        assert all(isinstance(cache, SlidingWindowKVCache) for cache in ends[number])


def test_a_batch_runs_on_streamed_experts(demo: Engine, stock_demo: tuple[Any, Any]) -> None:
    stock, _ = stock_demo
    choice = choose(stock, KVSettings(window=64), 256)
    batches = [_merge_caches([choice.caches(stock) for _ in range(3)]) for _ in range(2)]
    for token in range(70):
        tokens = [token + 3, 2 * token + 5, 900 - token]
        assert mx.array_equal(decode(demo.model, batches[0], tokens), decode(stock, batches[1], tokens))
