"""The desk: asks from any thread, one that owns the engine; joined, cancelled, drained, unloaded, never gone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxmoe import (
    ContextError,
    Engine,
    EngineClosedError,
    MemoryPressureError,
    ModelNotFoundError,
    PromptError,
    QueueFullError,
    RequestError,
    SamplingError,
    load,
)
from mlxmoe.batch.shared import SharedCache
from mlxmoe.serving.desk.desk import EngineDesk
from mlxmoe.serving.desk.limits import DeskLimits
from mlxmoe.serving.jobs import Ask, Event, Failed, Spoken, Started


@dataclass
class Ear:
    """Keeps what it is told."""

    events: list[Event] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    spoke: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Spoken):
            self.spoke.set()
        if isinstance(event, Failed) or (isinstance(event, Spoken) and event.chunk.finish_reason):
            self.ended.set()

    @property
    def text(self) -> str:
        assert self.ended.wait(60), "no end within a minute"
        return "".join(event.chunk.text for event in self.spoken)

    @property
    def spoken(self) -> list[Spoken]:
        return [event for event in self.events if isinstance(event, Spoken)]

    @property
    def error(self) -> Exception:
        assert self.ended.wait(60), "no end within a minute"
        last = self.events[-1]
        assert isinstance(last, Failed)
        return last.error


def ask(prompt: Any = "In the beginning", **options: Any) -> Ask:
    return Ask(prompt, {"max_tokens": 8, **options})


@pytest.fixture
def open_desk() -> Iterator[Callable[..., EngineDesk]]:
    desks: list[EngineDesk] = []

    def opened(loads: Callable[[], Engine] | None = None, **limits: Any) -> EngineDesk:
        desk = EngineDesk(loads or (lambda: load(experts="25%")), "demo", DeskLimits(**limits))
        desks.append(desk)
        desk.start()
        return desk

    yield opened
    for desk in desks:
        desk.close()


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "not within a minute"
        time.sleep(0.005)


def test_replies_of_many_threads_are_those_of_stream(open_desk: Callable[..., EngineDesk], demo: Engine) -> None:
    desk = open_desk()
    prompts = ["In the beginning", "And it came to pass", "Blessed are the meek", "The LORD said"]
    ears = [Ear() for _ in range(8)]
    threads = [threading.Thread(target=desk.submit, args=(ask(prompts[i % 4]), ear)) for i, ear in enumerate(ears)]
    for thread in threads:
        thread.start()
    for i, ear in enumerate(ears):
        assert ear.text == demo.generate(prompts[i % 4], max_tokens=8)
        assert isinstance(ear.events[0], Started)
        assert [event for event in ear.events if isinstance(event, Started)] == ear.events[:1]
    status = desk.status()
    assert (status.replies, status.tokens, status.queued, status.active) == (8, 64, 0, 0)
    assert status.memory is not None
    assert status.memory.kv_bytes == 0


def test_exact_replies_are_stream_bit_for_bit(open_desk: Callable[..., EngineDesk], demo: Engine) -> None:
    desk = open_desk(exact=True)
    ears = [Ear(), Ear()]
    for i, ear in enumerate(ears):
        desk.submit(ask(temperature=1.0, seed=i, max_tokens=20), ear)
    for i, ear in enumerate(ears):
        assert ear.text is not None
        alone = demo.stream("In the beginning", raw=True, temperature=1.0, seed=i, max_tokens=20)
        assert [(e.chunk.token, e.chunk.logprob) for e in ear.spoken] == [(c.token, c.logprob) for c in alone]
    assert desk._work is not None
    assert desk._work._batch.together is False


def test_a_cancelled_reply_says_no_more_and_gives_its_room_back(open_desk: Callable[..., EngineDesk]) -> None:
    desk, ear = open_desk(), Ear()
    job = desk.submit(ask(max_tokens=200), ear)
    assert ear.spoke.wait(60)
    job.cancel()
    wait_until(lambda: desk.status().active == 0)
    said = len(ear.events)
    other = Ear()
    desk.submit(ask(), other)
    assert len(other.text) > 0
    assert len(ear.events) == said
    memory = desk.status().memory
    assert memory is not None
    assert memory.kv_bytes == 0


def test_what_waits_is_told_its_place_and_can_be_cancelled(open_desk: Callable[..., EngineDesk]) -> None:
    desk = open_desk(most_together=1)
    long, second, third = Ear(), Ear(), Ear()
    first = desk.submit(ask(max_tokens=150), long)
    assert long.spoke.wait(60)
    waits, last = desk.submit(ask(), second), desk.submit(ask(), third)
    assert (first.position, waits.position, last.position) == (0, 0, 1)
    assert desk.status().queued == 2
    waits.cancel()
    wait_until(lambda: desk.status().queued == 1)
    first.cancel()
    assert third.text
    assert second.events == []


def test_clients_take_turns(open_desk: Callable[..., EngineDesk]) -> None:
    desk, order = open_desk(most_together=1), []
    holds = Ear()
    job = desk.submit(ask(max_tokens=200), holds)
    assert holds.spoke.wait(60)
    ears = []
    for name in ("greedy 1", "greedy 2", "greedy 3", "modest 1"):
        ear = Ear()
        ears.append(ear)

        def tell(event: Event, name: str = name, ear: Ear = ear) -> None:
            if isinstance(event, Started):
                order.append(name)
            ear(event)

        desk.submit(Ask("In the", {"max_tokens": 2}, client=name.split()[0]), tell)
    job.cancel()
    assert all(ear.text for ear in ears)
    assert order == ["greedy 1", "modest 1", "greedy 2", "greedy 3"]


def test_beyond_its_queue_the_desk_refuses_and_says_when_to_ask_again(open_desk: Callable[..., EngineDesk]) -> None:
    desk, ear = open_desk(most_together=1, most_waiting=1), Ear()
    desk.submit(ask(max_tokens=150), ear)
    assert ear.spoke.wait(60)
    desk.submit(ask(), Ear())
    with pytest.raises(QueueFullError) as full:
        desk.submit(ask(), Ear())
    assert full.value.retry_after_s > 0
    assert desk.status().refused == 1


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (Ask("", {}), PromptError),
        (Ask([5, 99999], {}), PromptError),
        (Ask([{"role": "user", "content": "hello"}], {}), PromptError),  # the demo has no chat template
        (Ask([5] * 200, {"max_tokens": 100}), ContextError),
        (Ask([5] * 400, {}), ContextError),
        (Ask("In", {"logit_bias": {5000: 1.0}}), SamplingError),
        (Ask("In", {}, json_schema={"type": "nonsense"}), RequestError),
    ],
)
def test_what_is_wrong_with_one_ask_is_told_to_it_alone(
    open_desk: Callable[..., EngineDesk], wrong: Ask, error: type[Exception]
) -> None:
    desk, bad, good = open_desk(), Ear(), Ear()
    desk.submit(wrong, bad)
    desk.submit(ask(), good)
    assert isinstance(bad.error, error)
    assert good.text


def test_asks_that_are_refused_do_not_hold_up_a_reply(open_desk: Callable[..., EngineDesk]) -> None:
    """Each takes its time to be looked at: they are told while the thread that computes does nothing."""
    desk, ear, wrong = open_desk(), Ear(), [Ear() for _ in range(8)]
    desk.submit(ask(max_tokens=200), ear)
    assert ear.spoke.wait(60)
    assert desk._work is not None
    with desk._work.engine.decoder.turn():  # the next step waits
        for one in wrong:
            desk.submit(ask("word " * 2000), one)
        assert all(isinstance(one.error, ContextError) for one in wrong)
    assert len(ear.text) > 0
    assert ear.spoken[-1].chunk.finish_reason is not None
    assert desk.status().queued == 0


def test_options_that_make_no_sense_are_refused_at_once(open_desk: Callable[..., EngineDesk]) -> None:
    with pytest.raises(SamplingError):
        open_desk().submit(ask(temperature=-1), Ear())


def test_a_reply_without_max_tokens_takes_what_the_context_leaves(open_desk: Callable[..., EngineDesk]) -> None:
    desk, ear = open_desk(), Ear()
    desk.submit(Ask([5] * 250, {}), ear)
    assert ear.text is not None
    assert len(ear.spoken) <= 6


def test_max_tokens_beyond_the_context_are_refused_with_what_fits_and_hold_no_room(
    open_desk: Callable[..., EngineDesk], demo: Engine
) -> None:
    desk, speaks, huge, most, other = open_desk(), Ear(), Ear(), Ear(), Ear()
    desk.submit(ask(max_tokens=200), speaks)
    assert speaks.spoke.wait(60)
    held = desk.status().memory
    desk.submit(ask([5] * 16, max_tokens=10_000_000), huge)
    assert "max_tokens is 10000000, but the context is 256 tokens" in str(huge.error)
    assert "Lower max_tokens to 240 or less" in str(huge.error)
    now = desk.status().memory
    assert held is not None
    assert now is not None
    assert now.kv_bytes <= held.kv_bytes
    desk.submit(ask([5] * 16, max_tokens=240), most)
    desk.submit(ask(), other)
    assert other.text == demo.generate("In the beginning", raw=True, max_tokens=8)
    assert most.text is not None
    assert speaks.text is not None
    assert 1 <= len(most.spoken) <= 240


def test_max_tokens_of_a_text_without_end_hold_no_more_than_its_window(open_desk: Callable[..., EngineDesk]) -> None:
    desk, huge, other = open_desk(lambda: load(window=64)), Ear(), Ear()
    job = desk.submit(ask(max_tokens=10_000_000, logit_bias={0: -100}), huge)
    assert huge.spoke.wait(60)
    desk.submit(ask(), other)
    assert len(other.text) > 0
    assert desk._work is not None
    kv = desk._work.engine._balance.kv
    assert desk._work.engine.memory().kv_bytes <= 2 * kv.of(1000)
    assert kv.of(10_000_000) == kv.of(1000)
    job.cancel()


def test_a_prompts_scores_come_first_and_alone_where_no_reply_is_wanted(
    open_desk: Callable[..., EngineDesk],
) -> None:
    def scored(max_tokens: int) -> Ask:
        options: Any = {"max_tokens": max_tokens, "top_logprobs": 2}
        return Ask("In the beginning God", options, score_prompt=True, token_texts=True)

    desk, both, only = open_desk(), Ear(), Ear()
    desk.submit(scored(3), both)
    desk.submit(scored(0), only)
    assert both.text
    assert only.text == ""
    for ear, spoken in ((both, 3), (only, 1)):
        started = ear.events[0]
        assert isinstance(started, Started)
        assert started.prompt_tokens == len(started.prompt)
        assert "".join(score.text for score in started.prompt) == "In the beginning God"
        assert started.prompt[0].logprob is None
        assert all(score.logprob is not None and score.logprob < 0 for score in started.prompt[1:])
        assert all(len(score.top) == 2 for score in started.prompt[1:])
        assert len(ear.spoken) == spoken
    assert (only.spoken[0].chunk.token, only.spoken[0].chunk.finish_reason) == (-1, "length")


def test_a_reply_held_to_a_schema_is_json_of_it(open_desk: Callable[..., EngineDesk]) -> None:
    schema = {
        "type": "object",
        "properties": {"who": {"enum": ["Moses", "Aaron"]}, "old": {"type": "boolean"}},
        "required": ["who", "old"],
        "additionalProperties": False,
    }
    desk, ears = open_desk(), [Ear() for _ in range(4)]
    for seed, ear in enumerate(ears):
        options: Any = {"max_tokens": 60, "temperature": 1.0, "seed": seed}
        desk.submit(Ask("And it came to pass", options, json_schema=schema), ear)
    for ear in ears:
        said = json.loads(ear.text)
        assert said["who"] in ("Moses", "Aaron")
        assert isinstance(said["old"], bool)
        assert ear.spoken[-1].chunk.finish_reason == "stop"


def test_a_schema_that_nothing_can_fulfil_fails_alone(open_desk: Callable[..., EngineDesk], demo: Engine) -> None:
    """Its grammar fails when the first token is to be drawn: no empty reply may pass for a whole one."""
    desk, other, endless = open_desk(), Ear(), Ear()
    desk.submit(ask(max_tokens=30), other)
    assert other.spoke.wait(60)
    desk.submit(Ask("And it came to pass", {}, json_schema={"$ref": "#"}), endless)
    assert isinstance(endless.error, RequestError)
    assert not endless.spoken
    assert other.text == demo.generate("In the beginning", raw=True, max_tokens=30)


def test_a_schema_that_is_too_much_for_a_grammar_is_said_in_the_middle(open_desk: Callable[..., EngineDesk]) -> None:
    desk, ear = open_desk(), Ear()
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}}
    desk.submit(Ask("And it came to pass", {}, json_schema=wide), ear)
    assert "held to this schema" in str(ear.error)


def test_a_token_without_a_text_fails_alone(
    open_desk: Callable[..., EngineDesk], demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokenizers raise for an id of the model that is none of theirs; a bias can bring any about."""
    desk, odd, other = open_desk(), Ear(), Ear()
    assert desk._work is not None
    told = desk._work._text_of

    def text_of(token: int) -> str:
        if token == 5:
            raise IndexError("piece id is out of range.")
        return told(token)

    monkeypatch.setattr(desk._work, "_text_of", text_of)
    desk.submit(Ask("And it", {"max_tokens": 8, "logit_bias": {5: 100}}, token_texts=True), odd)
    desk.submit(ask(), other)
    assert isinstance(odd.error, IndexError)
    assert other.text == demo.generate("In the beginning", raw=True, max_tokens=8)
    wait_until(lambda: desk.status().active == 0)
    assert desk.status().state == "ready"


def test_while_a_prompt_becomes_tokens_others_speak_and_shorter_prompts_come_first(
    open_desk: Callable[..., EngineDesk], demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, speaks, long, short = open_desk(), Ear(), Ear(), Ear()
    assert desk._work is not None
    engine, go_on, threads = desk._work.engine, threading.Event(), set()
    encode = engine.encode

    def slow(prompt: Any, **more: Any) -> list[int]:
        threads.add(threading.current_thread())
        if prompt == "And it came to pass":
            assert go_on.wait(60)
        return encode(prompt, **more)

    monkeypatch.setattr(engine, "encode", slow)
    desk.submit(ask("And it came to pass"), long)
    desk.submit(ask(max_tokens=30), speaks)
    assert speaks.text == demo.generate("In the beginning", raw=True, max_tokens=30)
    desk.submit(ask("Blessed are the meek"), short)
    assert short.text == demo.generate("Blessed are the meek", raw=True, max_tokens=8)
    assert long.events == []
    assert desk.status().queued == 1
    go_on.set()
    assert long.text == demo.generate("And it came to pass", raw=True, max_tokens=8)
    assert desk._thread not in threads


def test_a_model_is_unloaded_only_when_no_prompt_becomes_tokens(
    open_desk: Callable[..., EngineDesk], demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or another thread would be the last to hold what is MLX's."""
    desk, left, other = open_desk(keep_alive_s=0.05), Ear(), Ear()
    assert desk._work is not None
    engine, begun, go_on = desk._work.engine, threading.Event(), threading.Event()
    encode = engine.encode

    def slow(prompt: Any, **more: Any) -> list[int]:
        begun.set()
        assert go_on.wait(60)
        assert engine.stats().layers  # EngineClosedError where it is closed
        return encode(prompt, **more)

    monkeypatch.setattr(engine, "encode", slow)
    job = desk.submit(ask(), left)
    assert begun.wait(60)
    job.cancel()
    wait_until(lambda: desk.status().state == "unloaded")
    desk.submit(ask(), other)
    go_on.set()
    assert other.text == demo.generate("In the beginning", raw=True, max_tokens=8)
    assert left.events == []


def test_tokens_are_told_by_themselves_only_where_that_was_asked_for(
    open_desk: Callable[..., EngineDesk], demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, plain, scored, told = open_desk(), Ear(), Ear(), Ear()
    assert desk._work is not None
    looked: list[int] = []
    text_of = desk._work._text_of

    def note(token: int) -> str:
        looked.append(token)
        return text_of(token)

    monkeypatch.setattr(desk._work, "_text_of", note)
    desk.submit(ask(top_logprobs=2), plain)
    desk.submit(Ask("In the beginning", {"max_tokens": 0}, score_prompt=True), scored)
    assert plain.text == demo.generate("In the beginning", raw=True, max_tokens=8)
    assert scored.text == ""
    assert looked == []
    assert all(spoken.token_text == "" and not spoken.top for spoken in plain.spoken)
    desk.submit(Ask("In the beginning", {"max_tokens": 8, "top_logprobs": 2}, token_texts=True), told)
    assert told.text == plain.text
    assert "".join(spoken.token_text for spoken in told.spoken) == told.text
    assert looked
    assert all(len(spoken.top) == 2 for spoken in told.spoken)


def test_a_step_that_fails_ends_its_replies_and_the_desk_goes_on(
    open_desk: Callable[..., EngineDesk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, ear, after = open_desk(), Ear(), Ear()
    desk.submit(ask(max_tokens=200), ear)
    assert ear.spoke.wait(60)
    assert desk._work is not None
    batch = desk._work._batch

    def fails() -> Any:
        monkeypatch.undo()
        raise RuntimeError("[malloc] Unable to allocate 99 bytes.")

    monkeypatch.setattr(batch, "step", fails)
    assert "allocate" in str(ear.error)
    desk.submit(ask(), after)
    assert after.text
    assert desk.status().state == "ready"


def test_where_rows_cannot_be_put_together_anew_the_desk_goes_on(
    open_desk: Callable[..., EngineDesk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, ears, after = open_desk(), [Ear() for _ in range(3)], Ear()
    jobs = [desk.submit(ask(max_tokens=200), ear) for ear in ears]
    for ear in ears:
        assert ear.spoke.wait(60)

    def fails(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("[malloc] Unable to allocate 99 bytes.")

    monkeypatch.setattr(SharedCache, "leave", fails)
    jobs[0].cancel()
    assert all("allocate" in str(ear.error) for ear in ears[1:])
    desk.submit(ask(), after)
    assert after.text
    assert desk.status().memory.kv_bytes == 0  # type: ignore[union-attr]


def test_whatever_fails_in_its_thread_the_desk_begins_anew(
    open_desk: Callable[..., EngineDesk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, ear, after = open_desk(), Ear(), Ear()

    def fails(work: object) -> bool:
        monkeypatch.undo()
        raise KeyError("nobody foresaw this")

    monkeypatch.setattr(desk, "_admit", fails)
    desk.submit(ask(), ear)
    assert isinstance(ear.error, KeyError)
    desk.submit(ask(), after)
    assert after.text
    assert desk.status().state == "ready"


def test_the_replies_of_one_request_are_taken_together_or_not(open_desk: Callable[..., EngineDesk]) -> None:
    desk, ear = open_desk(most_together=1, most_waiting=1), Ear()
    desk.submit(ask(max_tokens=150), ear)
    assert ear.spoke.wait(60)
    desk.submit(ask(), Ear())
    with pytest.raises(QueueFullError):
        desk.submit(ask(), Ear())
    desk.submit(Ask("In", {"max_tokens": 2}, follows=True), Ear())
    assert desk.status().queued == 2


def test_a_listener_that_fails_harms_nobody_else(open_desk: Callable[..., EngineDesk]) -> None:
    desk, ear = open_desk(), Ear()

    def deaf(event: Event) -> None:
        raise OSError("gone")

    desk.submit(ask(max_tokens=200), deaf)
    desk.submit(ask(), ear)
    assert ear.text
    wait_until(lambda: desk.status().active == 0)


def test_closing_lets_what_is_under_way_end(open_desk: Callable[..., EngineDesk], demo: Engine) -> None:
    desk, ear, late = open_desk(), Ear(), Ear()
    desk.submit(ask(max_tokens=30), ear)
    assert ear.spoke.wait(60)
    closing = threading.Thread(target=desk.close, args=(60,))
    closing.start()
    wait_until(lambda: desk.status().state == "draining")
    with pytest.raises(EngineClosedError):
        desk.submit(ask(), late)
    assert ear.text == demo.generate("In the beginning", raw=True, max_tokens=30)
    closing.join(60)
    assert not closing.is_alive()
    assert late.events == []


def test_closing_without_patience_tells_who_was_cut_short(open_desk: Callable[..., EngineDesk]) -> None:
    desk, ear, waits = open_desk(most_together=1), Ear(), Ear()
    desk.submit(ask(max_tokens=240), ear)
    assert ear.spoke.wait(60)
    desk.submit(ask(), waits)
    desk.close()
    assert isinstance(ear.error, EngineClosedError)
    assert isinstance(waits.error, EngineClosedError)


def test_an_idle_model_is_unloaded_and_loaded_again_on_demand(
    open_desk: Callable[..., EngineDesk], demo: Engine
) -> None:
    desk, ear, engines = None, Ear(), []

    def loads() -> Engine:
        engines.append(load(experts="25%"))
        return engines[-1]

    desk = open_desk(loads, keep_alive_s=0.05)
    facts = desk.model
    wait_until(lambda: desk.status().state == "unloaded")
    assert desk.status().memory is None
    with pytest.raises(EngineClosedError):
        engines[0].generate("In")
    desk.submit(ask(), ear)
    assert ear.text == demo.generate("In the beginning", raw=True, max_tokens=8)
    assert len(engines) == 2
    assert desk.model == facts


def test_idleness_begins_when_a_model_is_loaded(open_desk: Callable[..., EngineDesk]) -> None:
    def loads() -> Engine:
        engine = load(experts="25%", warm=False)
        time.sleep(0.6)
        return engine

    desk, ear = open_desk(loads, keep_alive_s=0.5), Ear()
    assert desk.status().state == "ready"
    desk.submit(ask(), ear)
    assert ear.spoke.wait(0.5), "it had to be loaded again"


def test_what_was_cancelled_takes_no_place_in_the_queue(open_desk: Callable[..., EngineDesk]) -> None:
    desk, first, last = open_desk(most_waiting=1, most_together=1), Ear(), Ear()
    with desk._work.engine.decoder.turn():  # type: ignore[union-attr]  # a long step of the desk's thread
        desk.submit(ask(), first)
        wait_until(lambda: desk.status().active == 1)
        desk.submit(ask(), Ear()).cancel()
        desk.submit(ask(), last)
        with pytest.raises(QueueFullError):
            desk.submit(ask(), Ear())
    assert first.text == last.text


def test_a_model_that_cannot_be_loaded_again_is_told_to_who_asks(open_desk: Callable[..., EngineDesk]) -> None:
    answers: list[Any] = [lambda: load(), ModelNotFoundError("The disk is gone."), lambda: load()]

    def loads() -> Engine:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer()  # type: ignore[no-any-return]

    desk, first, second = open_desk(loads, keep_alive_s=0.05), Ear(), Ear()
    wait_until(lambda: desk.status().state == "unloaded")
    desk.submit(ask(), first)
    assert isinstance(first.error, EngineClosedError)  # to be asked again, and no fault of the ask
    assert "cannot be loaded again" in str(first.error)
    desk.submit(ask(), second)
    assert second.text


def test_a_model_that_cannot_be_loaded_at_first_is_said_by_start(tmp_path: Path) -> None:
    desk = EngineDesk(lambda: load(tmp_path / "nothing"), "nothing")
    with pytest.raises(ModelNotFoundError):
        desk.start()
    assert not desk._thread.is_alive()


def test_under_critical_pressure_new_work_is_refused_and_what_runs_goes_on(
    open_desk: Callable[..., EngineDesk],
) -> None:
    desk, ear, after = open_desk(), Ear(), Ear()
    desk.submit(ask(max_tokens=40), ear)
    assert ear.spoke.wait(60)
    assert desk._work is not None
    guard = desk._work.engine._balance.guard
    with guard._lock:  # not in the middle of a check; and held from now on: nothing reads it again
        guard._next_check = float("inf")
        guard.pressure, guard._read = "critical", lambda: pytest.fail("read")
    with pytest.raises(MemoryPressureError, match="critically"):
        desk.submit(ask(), after)
    status = desk.status()
    assert (status.accepts, status.pressure) == (False, "critical")
    assert "critically" in status.reason
    assert ear.text
    guard.pressure = "normal"
    desk.submit(ask(), after)
    assert after.text


def test_heat_is_there_for_who_watches(open_desk: Callable[..., EngineDesk]) -> None:
    desk, ear = open_desk(), Ear()
    job = desk.submit(ask(max_tokens=200), ear)
    wait_until(lambda: any(max(row) == 1.0 for row in desk.status(heat=True).heat))
    job.cancel()
    wait_until(lambda: desk.status().active == 0)  # within a step some experts are on their way
    status = desk.status(heat=True)
    assert status.stats is not None
    assert [len(row) for row in status.heat] == [layer.num_experts for layer in status.stats.layers]
    assert [sum(row) for row in status.resident] == [layer.slots for layer in status.stats.layers]
    json.dumps(status.as_dict())


@pytest.mark.parametrize("bad", [{"most_together": 0}, {"most_waiting": -1}, {"max_tokens": 0}, {"keep_alive_s": -1}])
def test_limits_that_make_no_sense_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(bad)).removesuffix("_s")):
        DeskLimits(**bad)
