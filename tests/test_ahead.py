"""The token loop a step ahead: where all experts are in memory, the next pass is under way when a token is out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import pytest
from conftest import watch_passes
from mlx_lm.generate import generate_step

from mlxmoe import Engine, EngineClosedError, PrefixStore, load
from mlxmoe.balance import Balance
from mlxmoe.sampling import Sampler, SamplingSettings

T = TypeVar("T")

PROMPT = [5, 6, 7, 900, 31]
REPLY = 12


@pytest.fixture
def whole(tiny: Path) -> Iterator[Engine]:
    """All experts in memory."""
    with load(tiny, experts="all") as engine:
        yield engine


def said(chunks: Iterator[Any]) -> list[tuple[int, float]]:
    return [(chunk.token, chunk.logprob) for chunk in chunks]


def step_by_step(engine: Engine, **sampling: Any) -> list[tuple[int, float]]:
    """The same reply from passes of which each is over before the next one is begun."""
    decoder, cache = engine.decoder, engine.decoder.new_cache()
    decoder.prefill(PROMPT[:-1], cache)
    return said(islice(decoder.generate(PROMPT, cache, Sampler(SamplingSettings(**sampling))), REPLY))


def elsewhere(do: Callable[[], T]) -> T:
    """What `do` returns in a thread of its own, which is gone afterwards."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.3}], ids=str)
def test_a_step_ahead_changes_no_token(whole: Engine, sampling: dict[str, Any]) -> None:
    assert said(whole.stream(PROMPT, max_tokens=REPLY, **sampling)) == step_by_step(whole, **sampling)


def test_the_tokens_are_those_of_mlx_lms_own_loop(demo_stock_tokens: list[int]) -> None:
    with load(experts="all") as engine:
        assert [chunk.token for chunk in engine.stream(PROMPT, max_tokens=REPLY)] == demo_stock_tokens


@pytest.fixture
def demo_stock_tokens(stock_demo: tuple[Any, Any]) -> list[int]:
    step: Any = generate_step
    return [int(token) for token, _ in step(mx.array(PROMPT), stock_demo[0], max_tokens=REPLY)]


def test_the_first_token_waits_for_no_second_pass_and_none_is_made_beyond_the_last(
    whole: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = watch_passes(whole, monkeypatch)
    begun = [len(passes) for _ in whole.stream(PROMPT, max_tokens=5)]
    assert begun == [2, 4, 5, 6, 6], "one of the prompt; then one a token, from the second token on one ahead"


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_short_reply_takes_a_pass_a_token(whole: Engine, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    passes = watch_passes(whole, monkeypatch)
    assert len(list(whole.stream(PROMPT, max_tokens=tokens))) == tokens
    assert passes == [len(PROMPT) - 1] + [1] * tokens


def in_step(engine: Engine, monkeypatch: pytest.MonkeyPatch, stream: Iterator[Any]) -> bool:
    """Whether each token is out before the pass behind it is begun."""
    passes = watch_passes(engine, monkeypatch)
    begun = [passes.count(1) for _ in stream]
    return begun == list(range(1, len(begun) + 1))


def test_where_layers_stream_a_token_waits_for_no_later_pass(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tiny, experts=0.5) as engine:
        assert in_step(engine, monkeypatch, engine.stream(PROMPT, max_tokens=5))


def test_a_cache_that_is_gone_on_from_sees_no_token_too_many(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tiny, experts="all", prefixes=PrefixStore("10MB", exact=False)) as engine:
        assert in_step(engine, monkeypatch, engine.stream(PROMPT, max_tokens=5)), "the store keeps replies"
        assert in_step(engine, monkeypatch, engine.session().stream("And", max_tokens=5))


def test_a_recording_has_no_token_too_many(whole: Engine) -> None:
    with whole.record() as recording:
        tokens = [chunk.token for chunk in islice(whole.stream(PROMPT, max_tokens=REPLY), 5)]
    assert len(recording.trace.experts) == len(PROMPT) + len(tokens) - 1


def test_a_reply_that_has_to_end_begins_no_further_pass(whole: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = watch_passes(whole, monkeypatch)
    stream = whole.stream(PROMPT, max_tokens=REPLY)
    chunks = [next(stream), next(stream)]
    monkeypatch.setattr(Balance, "must_finish", True)
    chunks += stream
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "memory"]
    assert len(passes) == 1 + len(chunks)


def test_tokens_may_be_asked_for_in_a_thread_each(whole: Engine) -> None:
    expected = step_by_step(whole)
    stream = whole.stream(PROMPT, max_tokens=REPLY)
    assert said(elsewhere(lambda: next(stream)) for _ in range(REPLY)) == expected


def test_streams_by_turns_are_exact(whole: Engine) -> None:
    expected = step_by_step(whole)
    streams = [whole.stream(PROMPT, max_tokens=REPLY) for _ in range(3)]
    turns = [said(chunks) for chunks in zip(*streams, strict=True)]
    assert turns == [[one] * 3 for one in expected]


@pytest.mark.parametrize("away", [elsewhere, lambda do: do()], ids=["in another thread", "in the same thread"])
def test_a_resize_between_two_tokens_changes_none(whole: Engine, away: Callable[[Callable[[], None]], None]) -> None:
    expected = step_by_step(whole)
    found = []
    for number, chunk in enumerate(whole.stream(PROMPT, max_tokens=REPLY)):
        found.append((chunk.token, chunk.logprob))
        away(lambda: whole.resize("all" if number % 4 == 3 else 0.5))  # noqa: B023  # called at once
    assert found == expected


def test_whoever_has_the_next_turn_finds_the_step_done(whole: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = whole._experts.passes
    stream = whole.stream(PROMPT, max_tokens=REPLY)
    for _ in range(3):
        next(stream)
    assert passes._left is not None, "a step is under way"
    with passes.one():
        assert passes._left is None


@pytest.mark.parametrize("tokens", [3, REPLY], ids=["the last is under way", "in the middle"])
def test_a_closed_engine_says_so_though_the_next_token_is_under_way(tiny: Path, tokens: int) -> None:
    engine = load(tiny, experts="all")
    stream = engine.stream(PROMPT, max_tokens=tokens)
    next(stream)
    next(stream)
    engine.close()
    with pytest.raises(EngineClosedError):
        next(stream)


def test_a_stream_left_early_leaves_the_engine_as_it_was(whole: Engine) -> None:
    expected = step_by_step(whole)
    for _ in range(3):
        stream = whole.stream(PROMPT, max_tokens=REPLY)
        for _ in range(4):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert whole.memory().kv_bytes == 0
    assert said(whole.stream(PROMPT, max_tokens=REPLY)) == expected
