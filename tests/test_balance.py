"""The line between experts and KV while a model runs: resizing, admission, pressure. No token ever changes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import watch_passes
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import QWEN3_MOE, make_tiny

from mlxmoe import (
    CheckpointReadError,
    Engine,
    EngineClosedError,
    MemoryBudgetError,
    MemoryEvent,
    MemoryPressureError,
    Reading,
    RequestError,
    load,
)
from mlxmoe.experts import slots as slots_module
from mlxmoe.experts.bank import ExpertBank
from mlxmoe.experts.switch import switch_modules
from mlxmoe.memory.guard import GuardTimes
from mlxmoe.memory.reading import MemoryReader, Pressure

PROMPTS = [[5, 6, 7], list(range(40, 75)), [9] * 12]
REPLY = 24


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[tuple[int, float]]]:
    """Token and log-probability of each step, with all experts in memory."""
    with load(tiny, experts="all") as engine:
        return [said(engine.stream(prompt, max_tokens=REPLY)) for prompt in PROMPTS]


def said(chunks: Iterator[Any]) -> list[tuple[int, float]]:
    return [(chunk.token, chunk.logprob) for chunk in chunks]


SESSION_PROMPT = "In the beginning"


@pytest.mark.slow
def test_streams_are_bit_identical_through_500_resizes(tiny: Path, expected: list[list[tuple[int, float]]]) -> None:
    """Several streams and sessions by turns, a resize before most of their steps and within their prompts."""
    prompts = [SESSION_PROMPT, SESSION_PROMPT[::-1]]
    with load(tiny, experts="all") as whole:
        whole._decoder.chunk_tokens = 8
        answers = [said(whole.stream(prompt, max_tokens=REPLY // 2)) for prompt in PROMPTS]
        answers += [said(whole.session().stream(prompt, max_tokens=REPLY // 2)) for prompt in prompts]
    resizes = 0
    with load(tiny, experts="50%") as engine:
        engine._decoder.chunk_tokens = 8
        total, floor = engine.plan.expert_bytes, sum(layer.floor_bytes for layer in engine._experts.layers)

        @settings(max_examples=26)
        @given(
            turns=st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(floor, total)), min_size=20),
            sizes=st.lists(st.sampled_from([floor, total // 3, total]), min_size=3),
        )
        def resize_while_streaming(turns: list[tuple[int, int | None]], sizes: list[int]) -> None:
            nonlocal resizes
            streams = [engine.stream(prompt, max_tokens=REPLY // 2) for prompt in PROMPTS]
            streams += [engine.session().stream(prompt, max_tokens=REPLY // 2) for prompt in prompts]
            heard: list[list[tuple[int, float]]] = [[] for _ in streams]
            for position, (turn, size) in enumerate(turns):
                if (chunk := next(streams[turn], None)) is not None:
                    heard[turn].append((chunk.token, chunk.logprob))
                size = sizes[position % len(sizes)] if size is None else size
                engine.resize(size)
                resizes += 1
                assert engine.plan.bank_bytes <= size
                assert engine.memory().bank_bytes == engine.plan.bank_bytes, "used_bytes <= budget_bytes"
            for number, stream in enumerate(streams):
                if heard[number]:  # one that was never begun says nothing new
                    heard[number] += said(stream)
                    assert heard[number] == answers[number]

        resize_while_streaming()
    assert resizes >= 500


def test_prompts_are_bit_identical_while_the_engine_is_resized_between_their_chunks(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(7 * n * n + n) % 2000 for n in range(150)]
    with load(tiny, experts="all") as engine:
        engine._decoder.chunk_tokens = 8
        answer = said(engine.stream(prompt, max_tokens=5))
        row = engine.logits(prompt)
    with load(tiny, experts="50%") as engine:
        engine._decoder.chunk_tokens = 8
        sizes = itertools.cycle(["25%", "all", 100_000, "60%"])
        monkeypatch.setattr(engine._balance, "before_pass", lambda: engine.resize(next(sizes)))
        assert said(engine.stream(prompt, max_tokens=5)) == answer
        assert mx.array_equal(engine.logits(prompt), row)


@pytest.mark.parametrize(("start", "size"), [("50%", "75%"), ("50%", "25%"), ("all", "50%"), ("50%", "all")])
@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(RuntimeError, marks=pytest.mark.thorough)])
def test_a_resize_that_is_cut_short_leaves_an_exact_engine(
    tiny: Path,
    expected: list[list[tuple[int, float]]],
    monkeypatch: pytest.MonkeyPatch,
    start: str,
    size: str,
    error: type[BaseException],
) -> None:
    """By Ctrl-C, or by an allocation that fails: after any number of arrays."""
    plain = slots_module._rows
    with load(tiny, experts=start) as engine:
        for nth in itertools.count(1):
            engine.resize(start)
            engine.generate(PROMPTS[2], max_tokens=3)
            made = iter(range(1, 10**6))

            def rows(*args: Any, made: Iterator[int] = made, nth: int = nth) -> mx.array:
                if next(made) == nth:
                    raise error("in the middle")
                return plain(*args)

            monkeypatch.setattr(slots_module, "_rows", rows)
            try:
                engine.resize(size)
            except error:
                monkeypatch.undo()
            else:
                monkeypatch.undo()
                assert nth > 20
                break
            assert said(engine.stream(PROMPTS[0], max_tokens=8)) == expected[0][:8]
            assert engine.memory().bank_bytes <= max(engine.plan.bank_bytes, engine.plan.expert_bytes)
            engine.resize(size)
            assert engine.memory().bank_bytes == engine.plan.bank_bytes
            assert said(engine.stream(PROMPTS[2], max_tokens=8)) == expected[2][:8]


def test_growing_beyond_what_the_machine_can_give_now_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tiny, experts="25%") as engine:
        reading = replace(engine.memory().reading, available_bytes=50_000, total_bytes=0)
        monkeypatch.setattr(engine._balance, "reading", lambda: reading)
        monkeypatch.setattr("mlxmoe.memory.reading.RESERVE_LEAST_BYTES", 0)
        with pytest.raises(
            MemoryBudgetError, match=r"'all' takes 165\.9 kB more, but the machine can give 50\.0 kB now"
        ):
            engine.resize("all")
        assert engine.memory().bank_bytes == engine.plan.bank_bytes == engine.plan.expert_bytes // 4
        engine.resize("40%")
        engine.resize("25%")


def test_a_bank_beyond_the_plan_is_brought_back_by_the_guard(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pressed(tiny, monkeypatch, experts="50%") as (engine, _):
        plain, calls = slots_module._rows, itertools.count(1)

        def rows(*args: Any) -> mx.array:
            if next(calls) == 12:
                raise KeyboardInterrupt
            return plain(*args)

        monkeypatch.setattr(slots_module, "_rows", rows)
        with pytest.raises(KeyboardInterrupt):
            engine.resize("25%")
        engine.generate(PROMPTS[0], max_tokens=5)
        assert engine.memory().bank_bytes <= engine.plan.bank_bytes == engine.plan.expert_bytes // 4


def test_a_dense_model_refuses_what_is_no_budget_too(tmp_path: Path) -> None:
    dense = {key: value for key, value in QWEN3_MOE.items() if "expert" not in key} | {"model_type": "qwen3"}
    with load(make_tiny(tmp_path / "dense", dense)) as engine:
        for wrong in ("banana", -5):
            with pytest.raises(MemoryBudgetError):
                engine.resize(wrong)
        engine.resize("50%")
        assert engine.stats().memory_events == ()


def test_direct_calls_of_the_model_are_exact_while_others_resize(tiny: Path) -> None:
    tokens = mx.array([PROMPTS[1]])
    with load(tiny, experts="all") as engine:
        expected = engine.model(tokens)
        mx.eval(expected)
        stop = threading.Event()

        def resizing() -> None:
            for size in itertools.cycle(["25%", "all"]):
                if stop.is_set():
                    return
                engine.resize(size)

        thread = threading.Thread(target=resizing)
        thread.start()
        try:
            for _ in range(150):
                assert mx.array_equal(engine.model(tokens), expected)
        finally:
            stop.set()
            thread.join()


def test_a_layer_that_waited_for_its_turn_computes_from_what_it_then_is(tiny: Path) -> None:
    """Two resizes while a direct call of a streaming layer waits: the bank it saw first is gone by then."""
    with load(tiny, experts="25%") as engine:
        layer = next(iter(switch_modules(engine.model).values()))
        x, indices = mx.random.normal((1, 3, 64), key=mx.random.key(1)), mx.array([[[0, 1], [2, 3], [4, 5]]])
        expected, found = layer(x, indices), []
        passes = engine._experts.passes
        plain, waiting = passes.one, threading.Event()

        @contextmanager
        def one(*following: mx.array) -> Iterator[None]:
            if threading.current_thread() is caller:
                waiting.set()
                resized.wait(10)
            with plain(*following):
                yield

        resized = threading.Event()
        caller = threading.Thread(target=lambda: found.append(layer(x, indices)))
        passes.one = one  # type: ignore[method-assign]
        caller.start()
        waiting.wait(10)
        engine.resize("all")
        engine.resize("25%")
        resized.set()
        caller.join()
        assert mx.array_equal(found[0], expected)


def test_a_resize_says_what_it_did_and_what_it_cannot(tiny: Path) -> None:
    with load(tiny, experts="50%") as engine:
        engine.resize("25%")
        assert engine.plan.bank_bytes == engine.plan.expert_bytes // 4
        assert all(layer.slots == 2 for layer in engine.stats().layers)
        event = engine.stats().memory_events[-1]
        assert (event.action, event.nbytes) == ("resize", -engine.plan.expert_bytes // 4)
        for wrong in ("10%", "none", 0, 1.5):
            with pytest.raises(MemoryBudgetError):
                engine.resize(wrong)
        assert engine.memory().bank_bytes == engine.plan.bank_bytes == engine.plan.expert_bytes // 4
    with pytest.raises(EngineClosedError):
        engine.resize("50%")


def test_a_resize_beyond_the_memory_budget_is_refused(tiny: Path) -> None:
    memory = 2**40
    for _ in range(2):  # with less memory prefill goes in smaller chunks, which leaves room again
        with load(tiny, memory=memory, context=512, experts="50%") as engine:
            memory = engine.plan.total_bytes
    with load(tiny, memory=memory, context=512, experts="50%") as engine:
        with pytest.raises(MemoryBudgetError, match=r"has .* for experts"):
            engine.resize("all")
        assert engine.memory().bank_bytes == engine.plan.bank_bytes == engine.plan.expert_bytes // 2
        engine.resize("auto")
        assert engine.plan.total_bytes <= memory


def test_a_resize_within_a_step_is_refused(tiny: Path) -> None:
    with load(tiny, experts="50%", lookahead=False) as engine:  # the step's own thread reads
        reader, heard = engine._experts._reader, []
        preadv = reader._queue._preadv

        def reading(*args: Any) -> int:
            if threading.current_thread() is not threading.main_thread():
                return preadv(*args)  # type: ignore[no-any-return]
            try:
                engine.resize("25%")
            except RequestError as error:
                heard.append(error)
            return preadv(*args)

        reader._queue._preadv = reading
        assert engine.generate([5, 6, 7], max_tokens=3)
        assert heard


def test_closing_or_asking_within_a_step_is_refused_and_hangs_nothing(tiny: Path) -> None:
    """What a signal handler may do in the middle of a step, while another thread waits to resize."""
    with load(tiny, experts="50%", lookahead=False) as engine:  # the step's own thread reads
        reader, heard, memories = engine._experts._reader, [], []
        preadv = reader._queue._preadv
        others: list[threading.Thread] = []

        def reading(*args: Any) -> int:
            if threading.current_thread() is not threading.main_thread():
                return preadv(*args)  # type: ignore[no-any-return]
            if not others:
                others.append(threading.Thread(target=engine.resize, args=("25%",)))
                others[0].start()
                time.sleep(0.05)  # it holds the room by now, and waits for this pass
            memories.append(engine.memory().bank_bytes)
            for use in (engine.close, lambda: engine.generate([5], max_tokens=1), lambda: engine.logits([5])):
                with pytest.raises(RequestError, match="in the middle of a step"):
                    use()
                heard.append(use)
            return preadv(*args)

        reader._queue._preadv = reading
        assert len(list(engine.stream([5, 6, 7], max_tokens=3))) == 3
        reader._queue._preadv = preadv
        others[0].join(10)
        assert heard
        assert memories
        assert engine._balance._watch._thread.is_alive(), "it was not closed by half"
        assert engine.plan.bank_bytes == engine.plan.expert_bytes // 4


def test_a_stream_of_a_closed_engine_says_so_whenever_the_guard_would_check(tiny: Path) -> None:
    with load(tiny, experts="50%") as engine:
        stream, never_begun = engine.stream([5, 6, 7]), engine.stream([5, 6, 7])
        next(stream)
        engine.close()
        for left in (stream, never_begun):
            engine._balance.guard._next_check = 0.0
            with pytest.raises(EngineClosedError):
                next(left)


def test_nothing_is_released_or_resized_while_all_is_well(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pressed(tiny, monkeypatch, experts="all") as (engine, _):
        released: list[None] = []
        monkeypatch.setattr("mlxmoe.experts.cache.release_freed", lambda: released.append(None))
        monkeypatch.setattr(engine._balance.guard, "_free_pool", lambda: released.append(None))
        assert len(list(engine.stream(PROMPTS[0], max_tokens=REPLY))) == REPLY
        assert released == []
        assert engine.stats().memory_events == ()


def test_threads_may_resize_while_others_stream(tiny: Path, expected: list[list[tuple[int, float]]]) -> None:
    with load(tiny, experts="50%") as engine:
        stop = threading.Event()
        failed: list[BaseException] = []

        def resizing() -> None:
            sizes = iter(range(10**9))
            try:
                while not stop.is_set():
                    engine.resize(("25%", "all", "60%")[next(sizes) % 3])
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=resizing)
        thread.start()
        try:
            for prompt, answer in zip(PROMPTS, expected, strict=True):
                assert said(engine.stream(prompt, max_tokens=REPLY)) == answer
        finally:
            stop.set()
            thread.join()
        assert not failed


# Admission.


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts take as much as a KV cache of a thousand tokens."""
    config = {**QWEN3_MOE, "num_experts": 32, "max_position_embeddings": 4096}
    return make_tiny(tmp_path_factory.mktemp("roomy") / "roomy", config)


@contextmanager
def tight(folder: Path, spare: int = 0, context: int = 512) -> Iterator[Engine]:
    """An engine whose memory is its plan with all experts and a context of `context`, and `spare` bytes more."""
    with load(folder, experts="all", context=context) as engine:
        memory = engine.plan.total_bytes
    with load(folder, memory=memory + spare, context=context) as engine:
        assert engine.plan.bank_bytes == engine.plan.expert_bytes
        yield engine


def test_requests_beside_each_other_take_room_from_the_experts_and_give_it_back(roomy: Path) -> None:
    with tight(roomy) as engine:
        alone = said(engine.stream(PROMPTS[0], max_tokens=4))
        before = engine.memory()
        assert before.bank_bytes == engine.plan.expert_bytes
        one = engine.stream(PROMPTS[0], max_tokens=400)
        two = engine.stream(PROMPTS[0], max_tokens=200)
        first = [next(one)]
        assert engine.memory().bank_bytes == engine.plan.expert_bytes, "what was planned for"
        second = [next(two)]
        memory = engine.memory()
        assert memory.kv_bytes == engine._balance.kv.of(403) + engine._balance.kv.of(203)
        plan = engine.plan
        fixed = plan.trunk_bytes + plan.prefill_bytes + plan.pool_bytes
        assert memory.bank_bytes + memory.kv_bytes + fixed <= plan.memory_bytes
        assert memory.bank_bytes < plan.expert_bytes
        event = engine.stats().memory_events[-1]
        assert (event.action, event.nbytes) == ("admit", plan.expert_bytes - memory.bank_bytes)
        for _ in range(3):
            first.append(next(one))
            second.append(next(two))
        assert said(iter(first)) == said(iter(second)) == alone
        one.close()  # type: ignore[attr-defined]
        two.close()  # type: ignore[attr-defined]
        assert engine.memory().kv_bytes == 0
        for _ in range(2):
            engine._balance.guard._next_check = 0.0
            assert said(engine.stream(PROMPTS[0], max_tokens=4)) == alone
        assert engine.memory().bank_bytes == plan.expert_bytes, "it has grown back"


def test_a_request_that_cannot_fit_is_refused_with_what_fits(roomy: Path) -> None:
    with tight(roomy) as engine:
        held = [engine.stream(PROMPTS[0], max_tokens=500)]
        next(held[0])
        with pytest.raises(MemoryBudgetError, match=r"At most (\d+) tokens, prompt and reply, fit now") as caught:
            held.extend(begun(engine.stream(PROMPTS[0], max_tokens=500)) for _ in range(20))
        assert "other requests or sessions" in str(caught.value)
        assert next(held[0]).generated_tokens == 2, "those under way go on"
        held[0].close()  # type: ignore[attr-defined]
        assert len(list(engine.stream(PROMPTS[0], max_tokens=5))) == 5


def begun(stream: Iterator[Any]) -> Iterator[Any]:
    next(stream)
    return stream


def test_sessions_hold_what_their_cache_takes_until_they_are_forgotten(roomy: Path) -> None:
    with tight(roomy) as engine:
        kv = engine._balance.kv
        session = engine.session()
        chunks = list(session.stream("In the beginning", max_tokens=300))
        seen = chunks[-1].prompt_tokens + chunks[-1].generated_tokens - 1
        assert engine.memory().kv_bytes == kv.of(seen)
        for chunk in session.stream(" And", max_tokens=10):
            assert engine.memory().kv_bytes >= kv.of(seen)
            del chunk
            break
        del session
        assert engine.memory().kv_bytes == 0


def test_a_trimmed_cache_counts_as_what_it_still_holds(roomy: Path) -> None:
    with tight(roomy) as engine:
        session = engine.session()
        session.generate("In the beginning " * 30, max_tokens=200)
        held = engine.memory().kv_bytes
        cut = session._cached[:20]
        session._text = cut  # as if a turn of long ago were taken up again
        session.generate("x", max_tokens=2)
        assert engine.memory().kv_bytes == held == sum(entry.nbytes for entry in session._cache or [])


# Pressure.


class ScriptedReader(MemoryReader):
    """The machine's reading, with a pressure that the test sets."""

    pressure: Pressure = "normal"

    def read(self) -> Reading:
        return replace(super().read(), pressure=self.pressure, available_bytes=2**40, total_bytes=2**41)


FAST = GuardTimes(check_s=0.0, settle_s=0.0, fall_s=0.0, calm_s=0.0, finish_s=0.0)


@contextmanager
def pressed(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[Engine, ScriptedReader]]:
    """An engine that believes it is on a machine under scripted pressure, and reacts at once."""
    reader = ScriptedReader()
    monkeypatch.setattr("mlxmoe.balance.MemoryReader", lambda: reader)
    monkeypatch.setattr("mlxmoe.memory.guard.CHECKS_SHARE", float("inf"))
    with load(folder, **options) as engine:
        engine._balance.guard._times = FAST
        engine._balance.guard._calm_s = engine._balance.guard._next_check = 0.0
        yield engine, reader


def test_pressure_takes_slots_and_calm_gives_them_back_with_the_same_words(
    tiny: Path, expected: list[list[tuple[int, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[MemoryEvent] = []
    with pressed(tiny, monkeypatch, experts="all", on_memory=events.append) as (engine, reader):
        stream, heard, slots = engine.stream(PROMPTS[1], max_tokens=REPLY), [], []
        script: list[Pressure] = ["normal"] * 4 + ["warning"] * 5 + ["normal"] * 15
        for pressure, chunk in zip(script, stream, strict=True):
            heard.append((chunk.token, chunk.logprob))
            slots.append(sum(layer.slots for layer in engine.stats().layers))
            reader.pressure = pressure
        assert heard == expected[1]
        assert slots[4] == 24
        assert slots[4:10] == sorted(slots[4:10], reverse=True)
        assert min(slots) <= 12
        assert slots[-1] == 24
        assert {event.action for event in events} == {"pressure", "shrink", "grow"}
        assert engine.stats().memory_events == tuple(events)


def test_critical_pressure_ends_a_reply_with_its_text_and_the_engine_lives(
    tiny: Path, expected: list[list[tuple[int, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pressed(tiny, monkeypatch, experts="all") as (engine, reader):
        chunks = []
        for chunk in engine.stream(PROMPTS[0], max_tokens=REPLY):
            chunks.append(chunk)
            if len(chunks) == 5:
                reader.pressure = "critical"
        assert chunks[-1].finish_reason == "memory"
        assert 5 < len(chunks) < REPLY
        assert said(iter(chunks)) == expected[0][: len(chunks)]
        assert all(layer.slots == 2 for layer in engine.stats().layers), "the floor: one token's experts"
        with pytest.raises(MemoryPressureError, match="critically short"):
            next(engine.stream(PROMPTS[0]))
        with pytest.raises(MemoryPressureError):
            engine.session().generate("x")
        assert engine.memory().kv_bytes == 0
        reader.pressure = "normal"
        assert said(engine.stream(PROMPTS[0], max_tokens=REPLY)) == expected[0]


def test_a_prompt_under_critical_pressure_goes_in_small_chunks_and_may_end(
    roomy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [t % 2000 for t in range(1200)]
    with pressed(roomy, monkeypatch, experts="all", context=2000) as (engine, reader):
        engine._balance.guard._times = replace(FAST, finish_s=1e9, fall_s=1e9)
        stream = engine.stream(prompt, max_tokens=3)
        calls = watch_passes(engine, monkeypatch, lambda: setattr(reader, "pressure", "critical"))
        engine._decoder.chunk_tokens = 500
        assert [chunk.finish_reason for chunk in stream] == [None, None, "length"]
        assert calls == [500, 256, 256, 187, 1, 1, 1]
        reader.pressure, engine._balance.guard.pressure = "normal", "normal"
        engine._balance.guard._times = FAST
        calls.clear()
        (only,) = engine.stream(prompt, max_tokens=3)
        assert (only.text, only.token, only.finish_reason, only.generated_tokens) == ("", -1, "memory", 0)
        assert sum(calls) < 1200
        assert engine.memory().kv_bytes == 0


def test_a_refused_turn_keeps_the_sessions_cache(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pressed(tiny, monkeypatch, experts="all") as (engine, reader):
        session = engine.session()
        session.generate("In the beginning", max_tokens=10)
        seen, held = list(session._cached), engine.memory().kv_bytes
        reader.pressure = "critical"
        with pytest.raises(MemoryPressureError):
            session.generate(" And")
        assert session._cached == seen
        assert session._cache is not None
        assert engine.memory().kv_bytes == held
        reader.pressure = "normal"
        passes = watch_passes(engine, monkeypatch)
        session.generate(" And", max_tokens=2)
        assert sum(passes) < 10, "the conversation was not prefilled again"


def test_smaller_chunks_under_critical_pressure_change_no_token(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [(7 * n * n + n) % 2000 for n in range(480)]
    with load(tiny, experts="all") as engine:
        answer = said(engine.stream(prompt, max_tokens=10))
    with pressed(tiny, monkeypatch, experts="all") as (engine, reader):
        engine._balance.guard._times = replace(FAST, finish_s=1e9, fall_s=1e9)
        monkeypatch.setattr("mlxmoe.balance.CHUNK_TOKENS_UNDER_PRESSURE", 64)
        stream = engine.stream(prompt, max_tokens=10)
        passes = watch_passes(engine, monkeypatch, lambda: setattr(reader, "pressure", "critical"))
        engine._decoder.chunk_tokens = 200
        heard = said(stream)
        assert passes[:6] == [200, 64, 64, 64, 64, 23]
        assert [token for token, _ in heard] == [token for token, _ in answer]


def test_an_idle_engine_gives_memory_back_too(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = threading.Event()
    with pressed(tiny, monkeypatch, experts="all", on_memory=lambda event: given.set()) as (engine, reader):
        reader.pressure = "critical"
        assert given.wait(10)
        engine._balance.close()  # waits for the check under way
        assert all(layer.slots == 2 for layer in engine.stats().layers)


def test_experts_that_cannot_be_read_in_place_stay_and_it_is_said_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlxmoe import UnsupportedModelError

    def unreadable() -> Any:
        raise UnsupportedModelError("stored transposed")

    with pressed(tiny, monkeypatch, experts="all") as (engine, reader):
        engine._experts._locate = unreadable
        reader.pressure = "warning"
        engine.generate(PROMPTS[0], max_tokens=5)
        assert all(layer.slots == 8 for layer in engine.stats().layers)
        assert caplog.text.count("stay in memory whatever happens: stored transposed") == 1
        with pytest.raises(UnsupportedModelError):
            engine.resize("50%")


def test_a_layer_that_cannot_be_filled_while_growing_goes_on_streaming(
    tiny: Path, expected: list[list[tuple[int, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pressed(tiny, monkeypatch, experts="all") as (engine, reader):
        stream, heard = engine.stream(PROMPTS[1], max_tokens=REPLY), []
        for pressure, chunk in zip(["warning"] * 4 + ["normal"] * 20, stream, strict=True):
            heard.append((chunk.token, chunk.logprob))
            reader.pressure = pressure  # type: ignore[assignment]
            if pressure == "normal":
                monkeypatch.setattr(ExpertBank, "fill", broken)
        assert heard == expected[1]
        assert engine._experts.streams
        failures = [event for event in engine.stats().memory_events if "cannot grow just now: broken" in event.text]
        assert failures
    monkeypatch.undo()
    with load(tiny, experts="25%") as engine:
        monkeypatch.setattr(ExpertBank, "fill", broken)
        with pytest.raises(CheckpointReadError):
            engine.resize("all")
        monkeypatch.undo()
        assert said(engine.stream(PROMPTS[2], max_tokens=REPLY)) == expected[2]


def broken(bank: ExpertBank, order: object = None) -> None:
    raise CheckpointReadError("broken")
