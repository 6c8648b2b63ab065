"""Continuous batching: each reply is what it would be alone, whoever joins, leaves or fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from definitions import DEFINITIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_tiny

from mlxmoe import (
    CheckpointReadError,
    ContextError,
    Engine,
    MemoryBudgetError,
    PrefixStore,
    PromptError,
    UnsupportedModelError,
    load,
)
from mlxmoe.batch.batch import Batch
from mlxmoe.batch.shared import SharedCache
from mlxmoe.batch.text import Text
from mlxmoe.kv.layers import leaves_of
from mlxmoe.registry import SPECS, decodes_together
from mlxmoe.reply import Chunk, ReplySettings
from mlxmoe.sampling import Sampler, SamplingSettings

# Sums over a batch's longest row may be taken in another order than over one's own. Log-probabilities, absolute.
ROUNDING = 1e-4

TEXTS = ["In the beginning", "And it came to pass", "The LORD said unto him, go", "Blessed are the meek and they"]


def ask(**options: Any) -> ReplySettings:
    return ReplySettings.check(**{"max_tokens": 12, **options})


def run(batch: Batch, said: dict[Text, list[Chunk]] | None = None) -> dict[Text, list[Chunk]]:
    """Every reply of `batch` to its end."""
    said = {text: [] for text in batch.texts} if said is None else said
    while batch.texts:
        for text, chunk in batch.step():
            assert isinstance(chunk, Chunk), chunk
            said.setdefault(text, []).append(chunk)
    return said


def agree(found: Sequence[Chunk], alone: Sequence[Chunk]) -> None:
    """The same tokens with the same probabilities, as far as rounding leaves the best two apart."""
    for one, other in zip(found, alone, strict=True):
        (_, best), (_, second) = other.top_logprobs[:2]
        assert abs(one.logprob - other.logprob) < ROUNDING
        if one.token != other.token:
            assert best - second < ROUNDING
            return  # from here on they are two texts
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)


@pytest.fixture
def quarter() -> Iterator[Engine]:
    with load(experts="25%", lookahead=False) as engine:
        yield engine


def test_one_reply_alone_has_the_bits_of_stream(quarter: Engine) -> None:
    batch = quarter.batch()
    batch.add(quarter.encode(TEXTS[0]), ask(temperature=0.8, seed=3, top_logprobs=2))
    ((found),) = run(batch).values()
    alone = list(quarter.stream(TEXTS[0], max_tokens=12, temperature=0.8, seed=3, top_logprobs=2))
    assert [(c.token, c.logprob, c.top_logprobs, c.text, c.finish_reason) for c in found] == [
        (c.token, c.logprob, c.top_logprobs, c.text, c.finish_reason) for c in alone
    ]


def test_replies_that_join_and_leave_are_those_of_each_alone(quarter: Engine) -> None:
    batch, said = quarter.batch(), {}
    texts = []
    for i, prompt in enumerate(TEXTS):  # they join at different times, and end at different times
        texts.append(batch.add(quarter.encode(prompt), ask(max_tokens=6 + 5 * i, top_logprobs=2)))
        for text, chunk in batch.step():
            said.setdefault(text, []).append(chunk)
    run(batch, said)
    for i, (text, prompt) in enumerate(zip(texts, TEXTS, strict=True)):
        agree(said[text], list(quarter.stream(prompt, max_tokens=6 + 5 * i, top_logprobs=2)))


def test_in_turns_every_reply_has_the_bits_of_stream(quarter: Engine) -> None:
    batch = quarter.batch(together=False)
    for i, prompt in enumerate(TEXTS[:3]):
        batch.add(quarter.encode(prompt), ask(temperature=1.0, seed=i))
    for i, (found, prompt) in enumerate(zip(run(batch).values(), TEXTS[:3], strict=True)):
        alone = quarter.stream(prompt, max_tokens=12, temperature=1.0, seed=i)
        assert [(c.token, c.logprob) for c in found] == [(c.token, c.logprob) for c in alone]


BATCHED = sorted(name for name in DEFINITIONS if decodes_together(name))
# Grouped and latent attention, windows with attention sinks, two attentions a layer, delta rule, state space.
OF_EACH_KIND = {"deepseek_v3", "gemma4_text", "gpt_oss", "jamba", "longcat_flash", "qwen3_moe", "qwen3_next"}


@pytest.mark.usefixtures("kernels_without_metal")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in OF_EACH_KIND else pytest.mark.thorough)
        for name in BATCHED
    ],
)
def test_every_definition_said_to_batch_does(name: str, tmp_path: Path) -> None:
    """Before and after windows of 16 or so are full; one text joins late, one leaves early."""
    folder = make_tiny(tmp_path / name, DEFINITIONS[name])
    prompts = [[(37 * i * i + 11 * i + 101 * row) % 2000 + 3 for i in range(n)] for row, n in enumerate((5, 23, 50))]
    with load(folder, experts=0.5, context=128) as engine:
        batch, said = engine.batch(together=True), {}
        texts = [batch.add(tokens, ask(max_tokens=4 + 4 * i, top_logprobs=2)) for i, tokens in enumerate(prompts)]
        run(batch, said)
        for i, (text, tokens) in enumerate(zip(texts, prompts, strict=True)):
            agree(said[text], list(engine.stream(tokens, max_tokens=4 + 4 * i, top_logprobs=2)))


def test_what_is_not_known_to_batch_goes_in_turns(tmp_path: Path) -> None:
    assert {spec.model_type for spec in SPECS if not spec.together} == {"deepseek_v41", "llama4", "minimax_m3_vl"}
    with load(make_tiny(tmp_path / "llama4", DEFINITIONS["llama4"])) as engine:
        assert engine.batch().together is False
        with pytest.raises(UnsupportedModelError, match="llama4"):
            engine.batch(together=True)


def test_a_rotation_by_the_length_of_the_text_goes_in_turns(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    config = {**DEFINITIONS["olmoe"], "max_position_embeddings": 64, "rope_scaling": scaling}
    folder = make_tiny(tmp_path / "dynamic", config)
    prompts = [list(range(3, 20)), list(range(30, 90))]
    for options in ({"context": 128}, {"window": 24}):
        with load(folder, experts=0.5, **options) as engine:  # type: ignore[arg-type]
            batch = engine.batch()
            for tokens in prompts:
                batch.add(tokens, ask())
            for found, tokens in zip(run(batch).values(), prompts, strict=True):
                alone = engine.stream(tokens, max_tokens=12)
                assert [(c.token, c.logprob) for c in found] == [(c.token, c.logprob) for c in alone]


def test_the_experts_of_a_batch_are_read_once_for_all(quarter: Engine) -> None:
    decoder, tokens = quarter.decoder, quarter.encode(TEXTS[0])

    def wanted(texts: int) -> tuple[int, int]:
        """Experts that 20 steps looked up, and bytes that they read: the texts all want the same experts."""
        shared = SharedCache()
        for _ in range(texts):
            cache = decoder.new_cache()
            decoder.prefill(tokens[:-1], cache)
            with decoder.turn():
                shared.join(cache)
        history, before = list(tokens), quarter.stats()
        for _ in range(20):
            sampled = decoder.step([(history, Sampler(SamplingSettings()))] * texts, shared.cache)
            assert len(set(sampled)) == 1
            history.append(sampled[0].token)
        after = quarter.stats()
        lookups = after.hits + after.misses - before.hits - before.misses
        return lookups, after.bytes_read + after.early_bytes - before.bytes_read - before.early_bytes

    expert_bytes = quarter._experts.layers[0].expert_bytes
    (alone, _), (together, read) = wanted(1), wanted(3)
    assert together == alone > 0
    assert 0 < read <= together * expert_bytes


@pytest.mark.parametrize(("experts", "together", "steps"), [("all", True, 13), ("25%", True, 1), ("all", False, 1)])
def test_a_long_prompt_lets_others_speak_in_between(
    experts: str, together: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxmoe.batch.batch.POLITE_TOKENS", 16)
    prompt = [5 + i for i in range(200)]
    with load(experts=experts) as engine:
        batch = engine.batch(together=together)
        batch.add(prompt, ask(max_tokens=50))
        batch.step()
        assert batch.speaking == 1, "alone it is read as by stream"
        long = batch.add(prompt, ask(max_tokens=3, top_logprobs=2))
        taken = 0
        while batch.speaking < 2:
            taken += 1
            batch.step()
        assert taken == steps
        said = run(batch)[long]
        agree(said, list(engine.stream(prompt, max_tokens=3, top_logprobs=2))[-len(said) :])


def test_room_is_held_for_the_longest_and_given_back(quarter: Engine) -> None:
    batch = quarter.batch()
    held = quarter.memory().kv_bytes
    first = batch.add(quarter.encode(TEXTS[0]), ask(max_tokens=5))
    alone = quarter.memory().kv_bytes - held
    second = batch.add(quarter.encode(TEXTS[1]), ask(max_tokens=600))
    both = quarter.memory().kv_bytes - held
    assert both >= 2 * alone
    batch.step()
    batch.drop(second)
    assert quarter.memory().kv_bytes - held == alone
    batch.drop(first)
    assert quarter.memory().kv_bytes == held
    batch.drop(first)  # it is over: nothing happens
    assert batch.texts == ()


def test_what_is_no_prompt_is_refused_before_it_is_in_a_batch(quarter: Engine) -> None:
    batch = quarter.batch()
    for tokens, error in (([], PromptError), ([5, 99999], PromptError), ([5] * 256, ContextError)):
        with pytest.raises(error):
            batch.add(tokens, max_tokens=3)
    assert batch.texts == ()
    assert quarter.memory().kv_bytes == 0


def test_in_turns_the_failure_of_one_is_its_own(quarter: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = quarter.batch(together=False)
    first, second = (batch.add(quarter.encode(prompt), max_tokens=6) for prompt in TEXTS[:2])
    while batch.speaking < 2:
        batch.step()
    step = quarter.decoder.step

    def fails(texts: Any, cache: Any) -> Any:
        if texts[0][0] is first.history:
            raise RuntimeError("[malloc] Unable to allocate 99 bytes.")
        return step(texts, cache)

    monkeypatch.setattr(quarter.decoder, "step", fails)
    heard = batch.step()
    assert [(text, type(what)) for text, what in heard] == [(first, RuntimeError), (second, Chunk)]
    assert batch.texts == (second,)


def test_who_watches_the_experts_changes_no_chunk_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxmoe.batch.batch.POLITE_TOKENS", 16)
    with load(experts="all") as engine:
        batch = engine.batch()
        batch.add(engine.encode(TEXTS[0]), max_tokens=50)
        batch.step()
        batch.add([5 + i for i in range(100)], max_tokens=3)
        with engine.record():
            batch.step()
        assert batch.speaking == 1, "it is read in small chunks, recorded or not"
        batch.close()


def test_in_turns_each_holds_room_for_itself_alone(quarter: Engine) -> None:
    batch = quarter.batch(together=False)
    first, second = (batch.add(quarter.encode(TEXTS[0]), max_tokens=5) for _ in range(2))
    both = quarter.memory().kv_bytes
    batch.drop(second)
    assert both == 2 * quarter.memory().kv_bytes > 0, "no room for rows as long as the longest, which grow in steps"
    batch.drop(first)
    assert quarter.memory().kv_bytes == 0


def test_a_row_that_leaves_gives_its_memory_back(quarter: Engine) -> None:
    def stored(batch: Batch) -> int:
        return sum(
            array.nbytes for leaf in leaves_of(batch._shared.cache) for array in (leaf.keys, leaf.values)
        )  # what is kept, not what is shown

    batch = quarter.batch()
    long, *short = [batch.add([7 + i for i in range(n)], ask(max_tokens=40)) for n in (200, 20, 30)]
    while batch.speaking < 3:
        batch.step()
    mx.clear_cache()
    before, kept = mx.get_active_memory(), stored(batch)
    batch.drop(long)
    mx.clear_cache()
    assert stored(batch) < kept / 2
    assert mx.get_active_memory() < before - kept / 3
    assert set(batch.texts) == set(short)


def test_no_room_is_said_at_once_and_the_others_go_on(tmp_path: Path) -> None:
    with load(memory="120MB", context=1024) as engine:
        batch = engine.batch()
        first = batch.add(engine.encode(TEXTS[0]), ask(top_logprobs=2))
        held = engine.memory().kv_bytes

        def add_many() -> None:
            for _ in range(1000):
                batch.add([5] * 900, ask(max_tokens=100))

        with pytest.raises(MemoryBudgetError, match=r"of \d+ texts in one batch"):
            add_many()
        others = [text for text in batch.texts if text is not first]
        assert held < engine.memory().kv_bytes <= engine.plan.memory_bytes
        for text in others:
            batch.drop(text)
        agree(run(batch)[first], list(engine.stream(TEXTS[0], max_tokens=12, top_logprobs=2)))


def test_a_disk_that_fails_ends_the_replies_of_that_pass_and_no_more(
    quarter: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = quarter.batch()
    texts = [batch.add(quarter.encode(prompt), ask(max_tokens=60)) for prompt in TEXTS[:2]]
    while batch.speaking < 2:
        batch.step()

    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(quarter._experts._reader._queue, "_preadv", fails)
        heard: list[Any] = []
        while batch.texts:
            heard += [(text, what) for text, what in batch.step() if isinstance(what, Exception)]
    assert {text for text, _ in heard} == set(texts)
    assert all(isinstance(error, CheckpointReadError) for _, error in heard)
    text = batch.add(quarter.encode(TEXTS[0]), ask(top_logprobs=2))
    agree(run(batch)[text], list(quarter.stream(TEXTS[0], max_tokens=12, top_logprobs=2)))


def test_a_prompt_that_cannot_be_read_ends_its_own_reply(quarter: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, said = quarter.batch(), {}
    first = batch.add(quarter.encode(TEXTS[0]), ask(top_logprobs=2))
    while not batch.speaking:
        said.setdefault(first, []).extend(chunk for _, chunk in batch.step())
    second = batch.add(quarter.encode(TEXTS[1]), ask())

    def fails(*_: object, **__: object) -> Iterator[int]:
        raise RuntimeError("[metal::malloc] Attempting to allocate more than the maximum buffer size.")

    with monkeypatch.context() as broken:
        broken.setattr(quarter.decoder, "prefill_steps", fails)
        (text, error), (other, chunk) = batch.step()
    assert (text, other, str(error)[:15]) == (second, first, "[metal::malloc]")
    agree([*said[first], chunk, *run(batch)[first]], list(quarter.stream(TEXTS[0], max_tokens=12, top_logprobs=2)))
    assert quarter.memory().kv_bytes == 0


def test_a_token_that_the_detokeniser_does_not_know_ends_its_own_reply(quarter: Engine) -> None:
    batch = quarter.batch()
    first, second = (batch.add(quarter.encode(prompt), ask(top_logprobs=2)) for prompt in TEXTS[:2])

    def fails(*_: object, **__: object) -> Chunk:
        raise IndexError("list index out of range")

    second.reply.say = fails  # type: ignore[method-assign]
    heard = [one for _ in range(100) if batch.texts for one in batch.step()]
    assert [type(what) for text, what in heard if text is second] == [IndexError]
    chunks: Any = [what for text, what in heard if text is first]
    agree(chunks, list(quarter.stream(TEXTS[0], max_tokens=12, top_logprobs=2)))


def test_a_pass_that_failed_when_it_was_computed_leaves_nothing_that_fails_again(
    quarter: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = quarter.batch()
    for prompt in TEXTS[:3]:
        batch.add(quarter.encode(prompt), ask(max_tokens=60))
    while batch.speaking < 3:
        batch.step()

    def fails(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 99 bytes.")

    with monkeypatch.context() as broken:
        broken.setattr(mx, "eval", fails)
        with pytest.raises(RuntimeError):
            batch.step()
        batch.close()
    assert (batch.texts, quarter.memory().kv_bytes) == ((), 0)
    text = batch.add(quarter.encode(TEXTS[0]), ask(top_logprobs=2))
    agree(run(batch)[text], list(quarter.stream(TEXTS[0], max_tokens=12, top_logprobs=2)))


def test_a_prompts_probabilities_are_those_of_its_logits(quarter: Engine) -> None:
    tokens = quarter.encode(TEXTS[2] * 20)
    logits = quarter.logits(tokens)
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    batch = quarter.batch()
    text = batch.add(tokens, ask(top_logprobs=3), score=True, speaks=False)
    ((chunk,),) = run(batch).values()
    assert (chunk.token, chunk.finish_reason, chunk.generated_tokens) == (-1, "length", 0)
    assert len(text.scores) == len(tokens) - 1
    for place, score in enumerate(text.scores):
        assert score.token == tokens[place + 1]
        assert score.logprob == pytest.approx(expected[place, score.token].item(), abs=ROUNDING)
        assert score.top[0][1] == pytest.approx(expected[place].max().item(), abs=ROUNDING)


def test_a_prompt_that_begins_like_an_earlier_one_is_not_read_again() -> None:
    with load(experts="25%", prefixes=PrefixStore("20MB", exact=False)) as engine:
        batch = engine.batch()
        long = engine.encode(TEXTS[2] * 12)
        first = batch.add(long, ask(max_tokens=30))
        other = batch.add(engine.encode(TEXTS[0]), ask(max_tokens=40))
        said = run(batch)
        reply = [chunk.token for chunk in said[first]]
        again = batch.add([*long, *reply[:-1], 9, 11], ask(top_logprobs=2))  # the reply is kept as well
        (chunk, *_) = run(batch)[again]
        assert chunk.reused_tokens == len(long) + len(reply) - 1
        assert said[other][0].reused_tokens == 0


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_order_of_joining_and_leaving_changes_no_word(data: st.DataObject) -> None:
    engine = _shared_engine()
    said, asked = {}, {}
    with closing(engine.batch()) as batch:  # also where an example is given up half-way
        for _ in range(data.draw(st.integers(3, 14))):
            action = data.draw(st.sampled_from(["add", "step", "step", "step", "drop"]))
            if action == "add":
                number, room = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 9))
                text = batch.add(engine.encode(TEXTS[number]), ask(max_tokens=room, top_logprobs=2))
                asked[text], said[text] = (number, room), []
            elif action == "drop" and batch.texts:
                gone = data.draw(st.sampled_from(batch.texts))
                batch.drop(gone)
                del asked[gone]
            elif action == "step":
                for text, chunk in batch.step():
                    said[text].append(chunk)
            assert len(set(batch.texts)) == len(batch.texts)
            assert batch._shared.texts == batch.speaking
        run(batch, said)
        for text, (number, room) in asked.items():
            alone = _alone(number)[:room]  # longer than this one: its last chunk ends otherwise
            agree(said[text], [*alone[:-1], replace(alone[-1], text=said[text][-1].text, finish_reason="length")])
    assert engine.memory().kv_bytes == 0


_engines: list[Engine] = []
_replies: dict[int, list[Chunk]] = {}


def _shared_engine() -> Engine:
    if not _engines:
        _engines.append(load(experts="25%"))
    return _engines[0]


def _alone(number: int) -> list[Chunk]:
    if number not in _replies:
        _replies[number] = list(_shared_engine().stream(TEXTS[number], max_tokens=10, top_logprobs=2))
    return _replies[number]


@pytest.fixture(autouse=True, scope="module")
def closed_after() -> Iterator[Callable[[], None]]:
    yield lambda: None
    for engine in _engines:
        engine.close()
