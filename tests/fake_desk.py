"""A desk that says what a test tells it to, from another thread as the real one does, and notes who cancelled."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxmoe.memory.plan import Plan
from mlxmoe.memory.reading import Pressure, Reading
from mlxmoe.reply import Chunk, FinishReason
from mlxmoe.serving.jobs import Ask, Event, Failed, ModelFacts, Score, Spoken, Started, State, Status
from mlxmoe.stats import EngineStats, LayerStats, MemoryUse

GIB = 2**30


@dataclass
class Script:
    """`refuse`: what submit raises. `fail`: what ends it, after `fail_after` tokens; before Started where that is
    None. `queued`: positions it waits at, `queue_s` each. `delay_s`: before each token."""

    tokens: Sequence[str] = ("Hello", " there", ",", " friend", ".")
    reason: FinishReason = "stop"
    thinks: bool = False
    delay_s: float = 0.0
    queued: Sequence[int] = ()
    queue_s: float = 0.0
    refuse: Exception | None = None
    fail: Exception | None = None
    fail_after: int | None = None
    reused: int = 0
    prompt_tokens: int = 7
    logprob: float = -0.5


@dataclass
class FakeJob:
    ask: Ask
    position: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    told: int = 0

    def cancel(self) -> None:
        self.cancelled.set()


FACTS = ModelFacts(
    name="tiny/chat-moe",
    created=1_700_000_000,
    context=4096,
    has_chat_template=True,
    reasoning=("<think>", "</think>"),
    tool_calls=("<tool_call>", "</tool_call>"),
    parse_tool_call=lambda text, tools: json.loads(text),
)


class FakeDesk:
    """`script`: what every reply does, or who says so for each ask."""

    def __init__(
        self, script: Script | Callable[[Ask], Script] | None = None, *, model: ModelFacts = FACTS, **status: Any
    ) -> None:
        self.model = model
        self.script = script or Script()
        self.jobs: list[FakeJob] = []
        self.state: State = "ready"
        self.accepts = True
        self.reason = ""
        self.pressure: Pressure = "normal"
        self.active = 0

    def submit(self, ask: Ask, tell: Callable[[Event], None]) -> FakeJob:
        script = self.script(ask) if callable(self.script) else self.script
        if script.refuse is not None:
            raise script.refuse
        job = FakeJob(ask, position=script.queued[0] if script.queued else 0)
        self.jobs.append(job)
        threading.Thread(target=self._run, args=(job, script, tell), daemon=True).start()
        return job

    def status(self, *, heat: bool = False, whole: bool = True) -> Status:
        return Status(
            state=self.state,
            accepts=self.accepts,
            reason=self.reason,
            queued=2,
            active=self.active,
            best_batch=4,
            pressure=self.pressure,
            tokens_per_s=12.5,
            replies=len(self.jobs),
            tokens=sum(job.told for job in self.jobs),
            prompt_tokens=70,
            refused=1,
            uptime_s=3.0,
            memory=_memory(self.pressure),
            stats=EngineStats((LayerStats("model.layers.0.mlp", 8, 4, 30, 10, 6, 4096, 512, 256, 5, 5),)),
            heat=((0.5, float("nan")),) if heat else (),
            resident=((True, False),) if heat else (),
        )

    def _run(self, job: FakeJob, script: Script, tell: Callable[[Event], None]) -> None:
        try:
            for event in self._events(job, script):
                if job.cancelled.is_set():
                    return
                job.told += isinstance(event, Spoken)
                tell(event)
        finally:
            job.ended.set()

    def _events(self, job: FakeJob, script: Script) -> Any:
        for position in script.queued:
            job.position = position
            if job.cancelled.wait(script.queue_s):
                return
        job.position = 0
        if script.fail is not None and script.fail_after is None:
            yield Failed(script.fail)
            return
        yield Started(script.prompt_tokens, _scores(job.ask) if job.ask.score_prompt else (), script.thinks)
        most = job.ask.options.get("max_tokens", len(script.tokens))
        said = list(script.tokens[:most])
        reason: FinishReason = script.reason if len(said) == len(script.tokens) else "length"
        if not said:
            yield Spoken(_chunk("", -1, 0, reason, script))
        for number, text in enumerate(said):
            if script.delay_s and job.cancelled.wait(script.delay_s):
                return
            if script.fail is not None and number == script.fail_after:
                yield Failed(script.fail)
                return
            last = number + 1 == len(said)
            top = tuple((f"{text}{rank}", -1.0 - rank) for rank in range(job.ask.options.get("top_logprobs", 0)))
            chunk = _chunk(text, number, number + 1, reason if last else None, script)
            yield Spoken(chunk, text, top) if job.ask.token_texts else Spoken(chunk)


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Raises where `condition` does not come true in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.005)


def _chunk(text: str, token: int, generated: int, reason: FinishReason | None, script: Script) -> Chunk:
    return Chunk(
        text,
        token,
        script.logprob,
        reason,
        script.prompt_tokens,
        script.reused,
        generated,
        0.1,
        100.0,
        10.0,
        0.75,
        GIB,
    )


def _scores(ask: Ask) -> tuple[Score, ...]:
    prompt = ask.prompt
    texts = list(prompt) if isinstance(prompt, str) else [f"<{token}>" for token in prompt]
    top = tuple((f"{rank}", -1.0 - rank) for rank in range(ask.options.get("top_logprobs", 0)))
    return tuple(Score(i, text, -0.25 if i else None, top if i else ()) for i, text in enumerate(texts))


def _memory(pressure: Pressure) -> MemoryUse:
    plan = Plan(2 * GIB, 16 * GIB, 8 * GIB, GIB, GIB // 2, GIB // 4, 20 * GIB, 4096, 4096, 512, {"model.layers.0": 4})
    reading = Reading(32 * GIB, 9 * GIB, 0, 0, 12 * GIB, 11 * GIB, GIB // 8, 12 * GIB, None, None, None, pressure)
    return MemoryUse(plan, 8 * GIB, GIB, reading, 4 * GIB)
