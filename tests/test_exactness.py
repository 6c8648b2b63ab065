"""The contract: streaming never changes a bit, whatever the capacity and whoever interrupts or interleaves."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import mlx.core as mx
import pytest
from conftest import InterruptAt, watch_passes
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tiny import copy_folder

from mlxmoe import CheckpointReadError, Engine, load
from mlxmoe.hub import demo_folder
from mlxmoe.loading import load_folder

PROMPTS = ["In the beginning", "And it came to pass, that", "En el principio", "the LORD said unto Moses, " * 5]
REPLY_TOKENS = 8


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """The demo model at every kind of capacity."""
    opened = {experts: load(experts=experts) for experts in ("25%", "40%", "75%", "all")}
    yield opened
    for engine in opened.values():
        engine.close()


@pytest.fixture(scope="module")
def expected(stock_demo: tuple[Any, Any]) -> dict[str, list[int]]:
    """The tokens that mlx-lm's own generation gives for each prompt, greedily."""
    return {prompt: stock_tokens(stock_demo, prompt, REPLY_TOKENS) for prompt in PROMPTS}


def stock_tokens(stock: tuple[Any, Any], prompt: str, count: int) -> list[int]:
    model, tokenizer = stock
    return [response.token for response in stream_generate(model, tokenizer, prompt, max_tokens=count)]


def tokens_of(engine: Engine, prompt: str, count: int = REPLY_TOKENS) -> list[int]:
    return [chunk.token for chunk in engine.stream(prompt, max_tokens=count)]


def consume_badly(engine: Engine) -> None:
    for _ in engine.stream(PROMPTS[0]):
        raise RuntimeError("mine")


def generate_until(timer: threading.Timer, engine: Engine, prompt: str) -> None:
    timer.start()
    while True:
        tokens_of(engine, prompt, 200)


def test_tokens_are_those_of_mlx_lm(engines: dict[str, Engine], expected: dict[str, list[int]]) -> None:
    for experts, engine in engines.items():
        for prompt in PROMPTS:
            assert tokens_of(engine, prompt) == expected[prompt], experts


def test_logits_are_those_of_mlx_lm_to_the_bit(engines: dict[str, Engine], stock_demo: tuple[Any, Any]) -> None:
    model, tokenizer = stock_demo
    tokens = tokenizer.encode(PROMPTS[3])[:100]
    cache = make_prompt_cache(model)
    prefill, last = model(mx.array([tokens[:-1]]), cache=cache)[0], model(mx.array([tokens[-1:]]), cache=cache)[0]
    stock = mx.concatenate([prefill, last])
    for engine in engines.values():
        assert mx.array_equal(engine.logits(tokens), stock)


def test_a_quarter_of_the_experts_really_streams() -> None:
    with load(experts="25%", lookahead=False) as engine:  # a guess that is being read is a miss of no more bytes
        before = engine.stats()
        tokens_of(engine, PROMPTS[0], 40)
        after = engine.stats()
        expert_bytes = engine.plan.expert_bytes // sum(layer.num_experts for layer in after.layers)
    assert after.misses > before.misses
    assert after.evictions > before.evictions
    assert sum(layer.slots for layer in after.layers) * 4 == sum(layer.num_experts for layer in after.layers)
    assert after.bytes_read == after.misses * expert_bytes


def test_a_resident_layer_is_stock_code(engines: dict[str, Engine]) -> None:
    from mlx_lm.models.switch_layers import SwitchGLU

    from mlxmoe.experts.switch import switch_modules

    kinds = {type(module) for module in switch_modules(engines["all"].model).values()}
    assert kinds == {SwitchGLU}


def test_the_model_itself_can_be_called(engines: dict[str, Engine], stock_demo: tuple[Any, Any]) -> None:
    tokens = mx.array([[5, 6, 7, 8]])
    for engine in engines.values():
        first, second = engine.model(tokens), engine.model(tokens + 90)  # built before either is evaluated
        assert mx.array_equal(first, stock_demo[0](tokens))
        assert mx.array_equal(second, stock_demo[0](tokens + 90))


# What happens next: to which of three talkers, and whether it goes on, is left, or begins another turn.
moves = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["go", "go", "go", "go", "leave", "turn"])), max_size=30
)
starts = st.lists(st.tuples(st.sampled_from(PROMPTS), st.booleans()), min_size=1, max_size=3)


class Talker:
    """One stream after another, or one session, and what stock gives for the same tokens."""

    def __init__(self, engine: Engine, oracle: Oracle, prompt: str, in_session: bool) -> None:
        self.engine, self.oracle, self.prompt = engine, oracle, prompt
        self.session = engine.session() if in_session else None
        self.text: list[int] = []
        self.begin()

    def begin(self) -> None:
        encode = self.engine.tokenizer.encode
        before = self.text if self.session else []
        self.before = [*before, *encode(self.prompt, add_special_tokens=False)]
        self.heard: list[int] = []
        self.chunks = (self.session or self.engine).stream(self.prompt, max_tokens=REPLY_TOKENS)

    def move(self, move: str) -> None:
        if move == "go" and (chunk := next(self.chunks, None)) is not None:
            self.heard.append(chunk.token)
        elif move != "go":
            self.chunks.close()  # type: ignore[attr-defined]
            self.check()
            if self.heard:
                self.text = [*self.before, *self.heard]
            if len(self.text) < 100:
                self.begin()

    def check(self) -> None:
        assert tuple(self.heard) == self.oracle(tuple(self.before))[: len(self.heard)]


class Oracle:
    """The tokens that mlx-lm's own generation gives after a prompt of tokens, greedily."""

    def __init__(self, stock: tuple[Any, Any]) -> None:
        self._model, self._tokenizer = stock
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __call__(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if tokens not in self._known:
            responses = stream_generate(self._model, self._tokenizer, list(tokens), max_tokens=REPLY_TOKENS)
            self._known[tokens] = tuple(response.token for response in responses)
        return self._known[tokens]


@pytest.fixture(scope="module")
def oracle(stock_demo: tuple[Any, Any]) -> Oracle:
    return Oracle(stock_demo)


@settings(max_examples=100)
@given(experts=st.sampled_from(["25%", "40%", "75%", "all"]), starts=starts, moves=moves)
def test_interleaved_streams_and_sessions_each_give_what_stock_gives(
    engines: dict[str, Engine],
    oracle: Oracle,
    experts: str,
    starts: list[tuple[str, bool]],
    moves: list[tuple[int, str]],
) -> None:
    talkers = [Talker(engines[experts], oracle, prompt, in_session) for prompt, in_session in starts]
    for number, move in moves:
        talkers[number % len(talkers)].move(move)
    for talker in talkers:
        talker.check()


def test_a_prompt_of_several_chunks_is_divided_as_mlx_lm_divides_it(stock_demo: tuple[Any, Any]) -> None:
    model, tokenizer = stock_demo
    prompt = tokenizer.encode(PROMPTS[3] * 2)[:110]
    expected = [
        (token, logprobs[token].item())
        for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=20, prefill_step_size=32)
    ]
    loaded = load_folder(demo_folder(), experts="40%", memory_bytes=2**62)
    with Engine(loaded, chunk_tokens=32) as engine:
        found = [(chunk.token, chunk.logprob) for chunk in engine.stream(prompt, max_tokens=20)]
    assert found == expected


def test_a_call_that_nobody_evaluated_in_a_thread_that_ended_harms_nobody(
    engines: dict[str, Engine], expected: dict[str, list[int]]
) -> None:
    engine = engines["25%"]
    left: list[mx.array] = []
    thread = threading.Thread(target=lambda: left.append(engine.model(mx.array([[5, 6, 7]]))))
    thread.start()
    thread.join()
    assert tokens_of(engine, PROMPTS[0]) == expected[PROMPTS[0]]


def test_the_model_called_beside_a_stream_of_another_thread_is_exact(
    engines: dict[str, Engine], expected: dict[str, list[int]], stock_demo: tuple[Any, Any]
) -> None:
    engine = engines["25%"]
    inputs = [mx.array([[5 + n, 90 + 3 * n, 700 + n]]) for n in range(12)]
    answers = [stock_demo[0](tokens) for tokens in inputs]
    mx.eval(answers)
    right: list[bool] = []

    def call() -> None:
        right.extend(bool(mx.array_equal(engine.model(t), a).item()) for t, a in zip(inputs, answers, strict=True))

    thread = threading.Thread(target=call)
    thread.start()
    for prompt in PROMPTS:
        assert tokens_of(engine, prompt) == expected[prompt]
    thread.join()
    assert right == [True] * len(inputs)


def test_streams_of_two_threads_each_give_what_they_give_alone(
    engines: dict[str, Engine], expected: dict[str, list[int]]
) -> None:
    for engine in engines.values():
        heard: dict[str, list[int]] = {}

        def say(prompt: str, engine: Engine = engine, heard: dict[str, list[int]] = heard) -> None:
            heard[prompt] = tokens_of(engine, prompt)

        threads = [threading.Thread(target=say, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert heard == expected


def test_a_stream_may_move_to_another_thread(engines: dict[str, Engine], expected: dict[str, list[int]]) -> None:
    stream = engines["25%"].stream(PROMPTS[0], max_tokens=REPLY_TOKENS)
    heard = [next(stream).token for _ in range(4)]
    thread = threading.Thread(target=lambda: heard.extend(chunk.token for chunk in stream))
    thread.start()
    thread.join()
    assert heard == expected[PROMPTS[0]]


def test_the_first_token_comes_before_the_second_pass(engines: dict[str, Engine], monkeypatch: Any) -> None:
    engine = engines["25%"]
    passes = watch_passes(engine, monkeypatch)
    stream = engine.stream([5, 6, 7, 8], max_tokens=5)
    next(stream)
    assert passes == [3, 1], "the prompt's prefill and its last token, nothing more"
    next(stream)
    assert passes == [3, 1, 1]


def test_an_exception_in_the_consumer_leaves_the_engine_exact(
    engines: dict[str, Engine], expected: dict[str, list[int]]
) -> None:
    for engine in engines.values():
        with pytest.raises(RuntimeError, match="mine"):
            consume_badly(engine)
        assert tokens_of(engine, PROMPTS[1]) == expected[PROMPTS[1]]


def test_a_failed_read_is_an_error_and_the_next_request_is_exact(
    engines: dict[str, Engine], expected: dict[str, list[int]]
) -> None:
    engine = engines["25%"]
    reads = 0

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal reads
        reads += 1
        if reads % 7 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, buffers, offset)

    session = engine.session()
    for prompt in PROMPTS:
        engine._experts._reader._queue._preadv = failing
        with pytest.raises(CheckpointReadError, match="Input/output error"):
            tokens_of(engine, prompt, 200)
        with pytest.raises(CheckpointReadError):
            session.generate(prompt, max_tokens=30)
        engine._experts._reader._queue._preadv = os.preadv
        assert tokens_of(engine, prompt) == expected[prompt]


def test_a_file_that_changes_while_running_is_an_error_that_says_so(tiny: Path, tmp_path: Path) -> None:
    folder = copy_folder(tiny, tmp_path / "model")
    with load(folder, experts="25%") as engine, load(tiny) as whole:
        before = engine.generate([5, 6, 7], max_tokens=3)
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(CheckpointReadError, match=r"model\.safetensors changed while the model was in use"):
            engine.generate([900, 41, 333, 17, 1500], max_tokens=30)
        assert before == whole.generate([5, 6, 7], max_tokens=3)


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05])
def test_ctrl_c_at_any_moment_leaves_the_engine_exact(
    engines: dict[str, Engine], expected: dict[str, list[int]], delay_s: float
) -> None:
    engine = engines["25%"]
    for attempt in range(3):
        timer = threading.Timer(delay_s + attempt * 0.0007, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            generate_until(timer, engine, PROMPTS[attempt])
        timer.join()
        assert tokens_of(engine, PROMPTS[attempt]) == expected[PROMPTS[attempt]]


def in_the_expert_cache(code: CodeType) -> bool:
    """Not where a lock is held: a tracer can raise on a `with` line that is being left, before the lock is, and no
    signal can.
    """
    return "/mlxmoe/experts/" in code.co_filename and not code.co_qualname.startswith(("Passes.one", "_Queue."))


@settings(max_examples=40)
@given(nth=st.integers(1, 3000))
def test_an_interrupt_at_any_line_of_the_expert_cache_leaves_the_engine_exact(
    engines: dict[str, Engine], expected: dict[str, list[int]], nth: int
) -> None:
    import sys

    engine = engines["25%"]
    tracer = InterruptAt(nth, in_the_expert_cache)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        tokens_of(engine, PROMPTS[nth % 4], 6)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    assert tokens_of(engine, PROMPTS[0]) == expected[PROMPTS[0]]
