"""Guessing the next layer's experts: it changes no bit, says how good it is, and stops where it does not pay."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe import Engine, RequestError, load
from mlxmoe.experts.bank import BankCounters
from mlxmoe.experts.lookahead import Gate, Lookahead, Trial
from mlxmoe.experts.switch import switch_modules

PROMPT = "In the beginning God created"


def passes(trial: Trial, seconds: dict[bool, float], count: int) -> list[bool]:
    """Whether each of `count` passes was one with it."""
    modes = []
    for _ in range(count):
        modes.append(trial.on)
        trial.asked = True
        trial.note(seconds[trial.on])
    return modes


@pytest.mark.parametrize(("with_it", "without"), [(1.0, 1.1), (1.1, 1.0)])
def test_after_as_many_passes_of_each_kind_the_faster_one_is_held(with_it: float, without: float) -> None:
    trial = Trial()
    modes = passes(trial, {True: with_it, False: without}, 2 * Trial.TURNS)
    assert modes.count(True) == modes.count(False) == Trial.TURNS
    assert set(passes(trial, {True: with_it, False: without}, Trial.HOLD)) == {with_it < without}


def test_it_is_tried_again_when_the_result_is_old() -> None:
    trial = Trial()
    passes(trial, {True: 2.0, False: 1.0}, 2 * Trial.TURNS + Trial.HOLD)
    modes = passes(trial, {True: 1.0, False: 2.0}, 2 * Trial.TURNS)
    assert modes.count(True) == Trial.TURNS
    assert set(passes(trial, {True: 1.0, False: 2.0}, 10)) == {True}


def test_passes_that_could_not_do_it_say_nothing() -> None:
    trial = Trial()
    for _ in range(3 * Trial.TURNS):
        trial.note(0.001)  # a prefill chunk, say
    assert trial.on
    modes = passes(trial, {True: 1.0, False: 2.0}, 2 * Trial.TURNS)
    assert modes.count(False) == Trial.TURNS


def calls(gate: Gate, missing: int, named: int, count: int = Gate.CALLS) -> bool:
    for n in range(count):
        gate.note(missing if n % 2 else 0, named if n % 2 and gate.open else 0)
    return gate.open


def test_a_layer_that_misses_nothing_is_left_alone_until_it_does() -> None:
    gate = Gate()
    assert not calls(gate, missing=0, named=0)
    assert not calls(gate, missing=2, named=0), "guesses that named nothing are not tried again at once"
    for _ in range(Gate.REST // Gate.CALLS - 1):
        calls(gate, missing=2, named=0)
    assert gate.open
    assert calls(gate, missing=2, named=1), "enough of what was missing is named now"


def test_guesses_that_name_little_of_what_is_missing_stop() -> None:
    gate = Gate()
    assert calls(gate, missing=4, named=1)
    assert not calls(gate, missing=4, named=0)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=400))
def test_a_gate_takes_any_counts(counts: list[tuple[int, int]]) -> None:
    gate = Gate()
    for missing, named in counts:
        gate.note(missing, min(missing, named))
    assert isinstance(gate.open, bool)


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], mx.array]:
    with load(experts="all", context=256) as engine:
        return tokens_of(engine), engine.logits([5, 6, 7, 8, 9])


def tokens_of(engine: Engine, count: int = 40) -> list[int]:
    return [chunk.token for chunk in engine.stream(PROMPT, max_tokens=count) if chunk.token is not None]


@pytest.mark.parametrize("experts", ["25%", "40%", "60%"])
@pytest.mark.parametrize("lookahead", ["auto", True, False])
def test_words_are_the_same_with_and_without(
    expected: tuple[list[int], mx.array], experts: str, lookahead: bool | str
) -> None:
    with load(experts=experts, context=256, lookahead=lookahead) as engine:  # type: ignore[arg-type]
        assert tokens_of(engine) == expected[0]
        assert mx.array_equal(engine.logits([5, 6, 7, 8, 9]), expected[1])
        stats = engine.stats()
        assert (stats.foreseen + stats.unforeseen > 0) is (lookahead is not False)
        for layer in stats.layers:
            assert 0 <= layer.early_useful_bytes <= layer.early_bytes


def test_the_demo_is_foreseen_better_than_by_chance_and_the_bytes_add_up() -> None:
    read = 0

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        count = os.preadv(descriptor, buffers, offset)
        read += count
        return count

    with load(experts="25%", context=256, lookahead=True) as engine:
        engine._experts._reader._queue._preadv = counting
        tokens_of(engine, 100)
        stats = engine.stats()
    chance = engine.config["num_experts_per_tok"] / stats.layers[0].num_experts
    assert stats.lookahead_recall is not None
    assert stats.lookahead_recall > 2 * chance
    first, *others = stats.layers
    assert first.foreseen == first.unforeseen == first.early_bytes == 0, "nobody guesses for the first layer"
    assert all(layer.foreseen > 0 for layer in others)
    assert read == stats.bytes_read + stats.early_bytes
    assert 0 < stats.early_useful_bytes < stats.early_bytes


def test_without_a_guess_there_is_no_recall() -> None:
    with load(experts="all", context=256) as engine:
        tokens_of(engine, 3)
        assert engine.stats().lookahead_recall is None
        assert engine.stats().as_dict()["lookahead_recall"] is None


def test_resizing_in_between_leaves_words_and_guesses_right(expected: tuple[list[int], mx.array]) -> None:
    with load(experts="25%", context=256, lookahead=True) as engine:
        stream, found = engine.stream(PROMPT, max_tokens=40), []
        for n, chunk in enumerate(stream):
            found.append(chunk.token)
            engine.resize(("all", "40%", 0.6, "25%")[n % 4])
        assert [token for token in found if token is not None] == expected[0]


def test_a_definition_that_routes_elsewhere_is_not_guessed_for(expected: tuple[list[int], mx.array]) -> None:
    with load(experts="25%", context=256, lookahead=True) as engine:
        for lookahead in engine._experts._lookaheads.values():
            lookahead._block = None  # type: ignore[assignment]
        assert tokens_of(engine) == expected[0]
        assert engine.stats().lookahead_recall is None


class Expecting:
    """A bank's part in guesses: it notes whom it is to expect, in order."""

    expert_bytes = 1

    def __init__(self) -> None:
        self.counters = BankCounters()
        self.asked: list[list[int]] = []

    def expect(self, experts: list[int]) -> None:
        self.asked.append(experts)


def test_what_a_router_is_surest_of_is_read_first_at_whichever_end_of_its_choice_it_is() -> None:
    bank: Any = Expecting()
    lookahead = Lookahead(nn.Module(), nn.Module(), None)
    lookahead.follow(bank)
    two_tokens = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    for wanted in ({3, 4, 8}, {1, 2, 5, 6}, {1}):
        lookahead.expect(two_tokens)
        lookahead.note_call(wanted)
    assert bank.asked[0] == [1, 5, 2, 6, 3, 7, 4, 8], "nothing is known: as the router has them"
    assert bank.asked[1] == bank.asked[0][::-1], "the last ones were right"
    assert bank.asked[2] == bank.asked[0], "the first ones were, more often"


def test_when_reads_dominate_and_guesses_are_good_less_is_waited_for() -> None:
    """By what is asked for in time, not by the clock: with a slow disk most demanded bytes were begun early."""

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        time.sleep(0.0005)
        return os.preadv(descriptor, buffers, offset)

    read = {}
    for lookahead in (True, False):
        with load(experts="25%", context=256, lookahead=lookahead) as engine:
            engine._experts._reader._queue._preadv = slow
            tokens_of(engine, 60)
            read[lookahead] = engine.stats().bytes_read
    assert read[True] < 0.8 * read[False], read


def test_a_read_that_only_a_guess_asked_for_fails_no_reply(expected: tuple[list[int], mx.array]) -> None:
    in_time = threading.Event()

    def early_ones_fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            in_time.wait(0.0005)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, buffers, offset)

    with load(experts="25%", context=256, lookahead=True) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxmoe.experts.reader.ALONE_S", 10.0)  # threads read what is early and nothing else
        engine._experts._reader._queue._preadv = early_ones_fail
        assert tokens_of(engine) == expected[0]
        assert mx.array_equal(engine.logits([5, 6, 7, 8, 9]), expected[1])


@pytest.mark.parametrize("lookahead", ["on", None, 2, "AUTO", 1, 0.0])
def test_what_is_not_offered_is_refused(lookahead: object) -> None:
    with pytest.raises(RequestError, match="lookahead="):
        load(lookahead=lookahead)  # type: ignore[arg-type]


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    with load(experts="25%", context=256, lookahead=True) as engine:
        before = {path: type(module) for path, module in switch_modules(engine.model).items()}
        parameters = len(dict(engine.model.named_modules()))
        tokens_of(engine, 10)
        assert {path: type(module) for path, module in switch_modules(engine.model).items()} == before
        assert len(dict(engine.model.named_modules())) == parameters
        assert all("heard" not in vars(module) for module in switch_modules(engine.model).values())
