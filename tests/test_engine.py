"""The API as a user meets it: prompts, chunks, limits, statistics, closing."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conftest import watch_passes
from mlx_lm import generate as stock_generate

from mlxmoe import Engine, EngineClosedError, MemoryBudgetError, PromptError, RequestError, SamplingError, load


def test_text_is_the_prompts_continuation_as_mlx_lm_writes_it(demo: Engine, stock_demo: tuple[Any, Any]) -> None:
    text = demo.generate("In the beginning God", max_tokens=30)
    stock = stock_generate(*stock_demo, "In the beginning God", max_tokens=30)
    assert text.lstrip(" ") == stock.lstrip(" ")
    ids = demo.tokenizer.encode("In the beginning God")
    ids += [chunk.token for chunk in demo.stream(ids, max_tokens=30)]
    assert "In the beginning God" + text == demo.tokenizer.decode(ids), "prompt and reply read on"


def test_chunks_add_up(demo: Engine) -> None:
    chunks = list(demo.stream("And the LORD", max_tokens=12))
    assert [chunk.generated_tokens for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) == 12
    assert demo.tokenizer.decode([chunk.token for chunk in chunks]) == "".join(map(str, chunks))
    last = chunks[-1]
    assert last.prompt_tokens == len(demo.tokenizer.encode("And the LORD"))
    assert last.ttft_s > 0
    assert last.tokens_per_s > 0
    assert last.prompt_tokens_per_s > 0
    assert 0 < last.expert_hit_rate < 1
    assert last.peak_memory_bytes >= demo.plan.trunk_bytes
    assert all(chunk.logprob <= 0 for chunk in chunks)


def test_token_ids_are_a_prompt(demo: Engine) -> None:
    ids = demo.tokenizer.encode("In the beginning")
    assert demo.generate(ids, max_tokens=5) == demo.generate("In the beginning", max_tokens=5)


def test_arrays_of_ids_are_prompts(demo: Engine) -> None:
    ids = demo.tokenizer.encode("In the beginning")
    expected = demo.generate(ids, max_tokens=3)
    assert demo.generate(mx.array(ids), max_tokens=3) == expected
    assert demo.generate(np.array(ids), max_tokens=3) == expected


def test_end_of_text_ends_the_reply(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    third = list(demo.stream("In the beginning", max_tokens=5))[2].token
    demo.tokenizer.eos_token_ids = {*demo.tokenizer.eos_token_ids, third}
    chunks = list(demo.stream("In the beginning", max_tokens=5))
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].token == third
    assert chunks[-1].text == "", "the end-of-text token is no text"
    assert len(chunks) <= 3


def test_a_stop_string_ends_the_reply_and_is_not_in_it(demo: Engine) -> None:
    whole = demo.generate("In the beginning", max_tokens=40)
    stop = whole[7:12]
    chunks = list(demo.stream("In the beginning", max_tokens=40, stop=stop))
    assert chunks[-1].finish_reason == "stop"
    assert "".join(map(str, chunks)) == whole[: whole.find(stop)]


def test_the_reply_ends_where_the_context_does() -> None:
    with load(context=20) as engine:
        chunks = list(engine.stream(list(range(30, 45)), max_tokens=100))
        assert (len(chunks), chunks[-1].finish_reason) == (5, "length")
        assert len(list(engine.stream(list(range(30, 49)), max_tokens=100))) == 1
        with pytest.raises(PromptError, match=r"20 tokens.*20 tokens"):
            engine.stream(list(range(30, 50)))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, -1], "-1 is no token"),
        ([1, 10**6], "1000000 is no token"),
        ([1, "a"], "'a' is no token"),
        ([True], "True is no token"),
        ([{"role": "user"}], "chat message"),
        ([{"role": "user", "content": "x"}, 3], "chat message"),
        ([{"role": "user", "content": "x"}], "no chat template"),
        ("word " * 400, "context is 256"),
        ("\ud800", "no text"),
        (None, "not NoneType"),
        (b"hello", "not bytes"),
        ({1, 2}, "not set"),
        (5, "not int"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_refused_at_once(demo: Engine, prompt: Any, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        demo.stream(prompt)


@pytest.mark.parametrize("max_tokens", [0, -5, 1.5, True, None])
def test_max_tokens_is_checked_at_once(demo: Engine, max_tokens: Any) -> None:
    with pytest.raises(SamplingError, match="max_tokens"):
        demo.stream("x", max_tokens=max_tokens)


def test_an_unknown_argument_is_refused(demo: Engine) -> None:
    with pytest.raises(TypeError, match="temprature"):
        demo.generate("x", temprature=3)


@pytest.mark.parametrize("experts", ["lots", "0%", "101%", 1.5, 0.0, -3, True, None, "5%%", "nan%"])
def test_an_expert_budget_that_is_none_is_refused(experts: Any) -> None:
    with pytest.raises(MemoryBudgetError, match="experts"):
        load(experts=experts)


def test_a_budget_below_one_tokens_need_says_what_is_needed() -> None:
    with pytest.raises(MemoryBudgetError, match=r"one token needs .* \(4 experts x 6 layers\).*25%"):
        load(experts="10%")
    with load(experts="25%") as engine:
        assert engine.stats().layers[0].slots == 4


@pytest.mark.parametrize("experts", [0.5, "50%", "1474560", 1474560, "1.475MB"])
def test_every_way_to_say_half(experts: int | float | str) -> None:
    with load(experts=experts) as engine:
        half = engine.plan.expert_bytes // 2
        assert engine.plan.bank_bytes <= max(half, 1_475_000)
        assert {layer.slots for layer in engine.stats().layers} == {8}


def test_memory_bounds_everything_together() -> None:
    with load() as engine:
        plan = engine.plan
    for part in (plan.prefill_bytes // 3, plan.prefill_bytes // 2, plan.prefill_bytes // 2 + plan.bank_bytes // 8):
        with load(memory=plan.total_bytes - part) as engine:
            assert engine.plan.total_bytes <= plan.total_bytes - part
            assert engine.plan.chunk_tokens < plan.chunk_tokens, "the first lever is the size of prefill chunks"
            assert engine.generate("In the beginning", max_tokens=3)
    with pytest.raises(MemoryBudgetError, match=r"budget is 1\.0 MB.*trunk"):
        load(memory="1MB")
    with pytest.raises(MemoryBudgetError, match="experts='all' need"):
        load(memory=plan.total_bytes - plan.prefill_bytes, experts="all")


def test_statistics_and_memory_are_plain_facts(demo: Engine) -> None:
    demo.generate("In the beginning", max_tokens=5)
    stats, memory = demo.stats().as_dict(), demo.memory().as_dict()
    assert stats["misses"] == sum(layer["misses"] for layer in stats["layers"]) > 0
    assert memory["plan"]["total_bytes"] == demo.plan.total_bytes
    assert memory["reading"]["active_bytes"] >= demo.plan.trunk_bytes + demo.plan.bank_bytes


def test_a_closed_engine_says_so(demo: Engine) -> None:
    stream, session = demo.stream("In the beginning"), demo.session()
    next(stream)
    demo.close()
    demo.close()
    for use in (
        lambda: next(stream),
        lambda: demo.generate("x"),
        lambda: demo.session(),
        lambda: session.generate("x"),
        lambda: demo.logits([1]),
        lambda: demo.model,
    ):
        with pytest.raises(EngineClosedError, match="load\\(\\)"):
            use()


def test_closing_gives_memory_back(tiny: Path) -> None:
    gc.collect()
    before = mx.get_active_memory()
    engine = load(tiny, experts="50%")
    engine.generate("x", max_tokens=3)
    assert mx.get_active_memory() > before + engine.plan.trunk_bytes
    engine.close()
    del engine
    gc.collect()
    assert mx.get_active_memory() <= before + 4096


# --- sessions ---------------------------------------------------------------------------------------------


def test_a_session_goes_on_where_it_was(demo: Engine) -> None:
    session = demo.session()
    first = session.generate("In the beginning", max_tokens=6)
    second = session.generate(" And God", max_tokens=6)
    ids = [*demo.tokenizer.encode("In the beginning")]
    ids += [chunk.token for chunk in demo.stream(ids, max_tokens=6)]
    assert demo.tokenizer.decode(ids) == "In the beginning" + first
    ids += demo.tokenizer.encode(" And God", add_special_tokens=False)
    assert second == demo.generate(ids, max_tokens=6)
    assert [message["content"] for message in session.messages] == ["In the beginning", first, " And God", second]


def test_a_session_prefills_only_what_is_new(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = demo.session()
    session.generate("In the beginning God created the heaven", max_tokens=4)
    passes = watch_passes(demo, monkeypatch)
    new = len(demo.tokenizer.encode(" and the earth"))
    session.generate(" and the earth", max_tokens=2)
    assert sum(passes) == 1 + new + 1, "the token said last, the new text, one decode step"


def test_a_turn_left_early_keeps_what_was_said(demo: Engine) -> None:
    session = demo.session()
    stream = session.stream("In the beginning", max_tokens=50)
    said = next(stream).text + next(stream).text
    with pytest.raises(RequestError, match="still streaming"):
        session.stream("more")
    stream.close()  # type: ignore[attr-defined]
    assert session.messages[1]["content"] == said
    ids = [*demo.tokenizer.encode("In the beginning" + said)]
    ids += demo.tokenizer.encode(" And", add_special_tokens=False)
    assert session.generate(" And", max_tokens=6) == demo.generate(ids, max_tokens=6)


def test_a_turn_that_said_nothing_leaves_no_trace(demo: Engine) -> None:
    session = demo.session()
    session.stream("never started")
    with pytest.raises(PromptError):
        session.stream("word " * 400)
    assert session.messages == []
    assert session.generate("In the", max_tokens=4) == demo.generate("In the", max_tokens=4)


def test_turns_made_together_do_not_run_together(demo: Engine) -> None:
    session = demo.session()
    one, two = session.stream("In the", max_tokens=3), session.stream("And God", max_tokens=3)
    said = "".join(map(str, two))
    with pytest.raises(RequestError, match="gone on since"):
        next(one)
    assert [message["content"] for message in session.messages] == ["And God", said]


def test_a_closed_engine_ends_a_session_without_locking_it(demo: Engine) -> None:
    session = demo.session()
    stream = session.stream("In the", max_tokens=3)
    demo.close()
    for _ in range(2):
        with pytest.raises(EngineClosedError):
            next(stream)
        stream = session.stream("In the", max_tokens=3)
    assert session.messages == []


def test_a_signal_handler_that_calls_the_engine_is_refused_and_nothing_hangs(demo: Engine) -> None:
    heard: list[BaseException] = []

    def handler(*_: object) -> None:
        for use in (demo.close, lambda: demo.generate("x", max_tokens=1)):
            try:
                use()
            except RequestError as error:
                heard.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        preadv = demo._experts._reader._queue._preadv
        demo._experts._reader._queue._preadv = lambda *args: (signal.raise_signal(signal.SIGUSR1), preadv(*args))[1]
        assert demo.generate("In the", max_tokens=2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(heard) >= 2


def test_engines_that_are_forgotten_give_files_and_threads_back(tiny: Path) -> None:
    def resources() -> tuple[int, int]:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "mlxmoe-guard":
                thread.join(5)
        return len(os.listdir("/dev/fd")), threading.active_count()

    load(tiny, experts="50%").generate([5, 6], max_tokens=2)
    before = resources()
    for _ in range(3):
        load(tiny, experts="50%").generate([5, 6], max_tokens=2)
    assert resources() == before


def test_a_text_goes_on_beyond_an_end_of_text_token(demo: Engine) -> None:
    session = demo.session()
    third = list(demo.stream("In the", max_tokens=3))[2].token
    eos = set(demo.tokenizer.eos_token_ids)
    demo.tokenizer.eos_token_ids = {*eos, third}
    session.generate("In the", max_tokens=5)
    demo.tokenizer.eos_token_ids = eos
    ids = [*demo.tokenizer.encode("In the"), *(c.token for c in demo.stream("In the", max_tokens=2))]
    ids += demo.tokenizer.encode(" And", add_special_tokens=False)
    assert session.generate(" And", max_tokens=4) == demo.generate(ids, max_tokens=4)


def test_a_session_without_a_template_takes_no_system_message(demo: Engine) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        demo.session(system="Be brief.")
