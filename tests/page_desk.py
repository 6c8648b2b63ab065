"""What the page's tests say instead of a model: chosen words, in the real server, and a large model's numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fake_desk import FACTS, FakeDesk, Script

from mlxmoe.memory.plan import Plan
from mlxmoe.memory.reading import Reading
from mlxmoe.serving.jobs import Ask, Status
from mlxmoe.stats import EngineStats, LayerStats, MemoryUse

LAYERS, EXPERTS, SLOTS = 48, 128, 84
GB = 10**9
PLAN = Plan(
    trunk_bytes=1_740_000_000, expert_bytes=15_460_000_000, bank_bytes=13_200_000_000, kv_bytes=3_220_000_000,
    prefill_bytes=890_000_000, pool_bytes=67_108_864, memory_bytes=22_300_000_000, context=32768,
    model_context=40960, chunk_tokens=2048, slots={}, reserve_bytes=3_200_000_000,
)  # fmt: skip
READING = Reading(32 * GB, 9 * GB, 0, 0, 12 * GB, 11 * GB, 0, 12 * GB, None, None, None, "normal")
ANSWER = """Experts that were wanted lately stay in memory; the others wait on the disk. Three things follow:

1. **The first words are slow.** Nothing is known yet of what this text will need.
2. **Then it settles.** Most layers keep asking for the same few experts, so *nine in ten* are already there.
3. **A change of subject costs a little.** Others are read, and those wanted least give up their slots.

```python
from mlxmoe import load

with load("mlx-community/Qwen3-30B-A3B-4bit") as llm:
    for chunk in llm.stream("Why is the sky blue?"):
        print(chunk, end="", flush=True)
```

The words are the same whichever experts happen to be in memory: `mlxmoe verify` shows it."""


class PageDesk(FakeDesk):
    """`answer`: every reply, word by word each `pause_s`; `{}` in it is the last message. `reasoning`: before it.

    `refuse`: what the next requests are refused with. `queued`: positions told before the reply begins. `fail`: what
    ends a reply after five words. `polls`: how often the panel has asked.
    """

    def __init__(self) -> None:
        super().__init__(self._next)
        luck = random.Random(7)
        self._heat = tuple(tuple(luck.random() ** 5 for _ in range(EXPERTS)) for _ in range(LAYERS))
        self._resident = tuple(tuple(one >= sorted(row)[EXPERTS - SLOTS] for one in row) for row in self._heat)
        self._stats = EngineStats(
            tuple(
                LayerStats(f"model.layers.{number}.mlp.switch_mlp", EXPERTS, SLOTS, 943, 57, 40, 0, 0, 0, 0, 0)
                for number in range(LAYERS)
            )
        )
        self.reset()

    def reset(self) -> None:
        self.jobs.clear()
        self.model = FACTS
        self.accepts, self.reason, self.state = True, "", "ready"
        self.answer = ANSWER
        self.reasoning = ""
        self.pause_s = 0.0
        self.refuse: list[Exception] = []
        self.queued: list[int] = []
        self.fail: Exception | None = None
        self.polls = 0

    @property
    def last(self) -> Ask:
        """What was asked for last."""
        return self.jobs[-1].ask

    def status(self, *, heat: bool = False, whole: bool = True) -> Status:
        self.polls += heat
        return replace(
            super().status(heat=heat, whole=whole),
            active=3,
            best_batch=6,
            memory=MemoryUse(PLAN, PLAN.bank_bytes, PLAN.kv_bytes, READING, 4 * GB),
            stats=self._stats,
            heat=self._heat if heat else (),
            resident=self._resident if heat else (),
        )

    def _next(self, ask: Ask) -> Script:
        prompt: Any = ask.prompt
        said = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        marks = FACTS.reasoning or ("", "")
        thought = [marks[0], *_words(self.reasoning), marks[1]] if self.reasoning else []
        return Script(
            tokens=[*thought, *_words(self.answer.replace("{}", said))],
            delay_s=self.pause_s,
            queued=self.queued,
            queue_s=0.25,
            refuse=self.refuse.pop(0) if self.refuse else None,
            fail=self.fail,
            fail_after=5,
        )


def _words(text: str) -> Iterator[str]:
    """With the spaces behind them."""
    *words, last = text.split(" ")
    yield from (f"{word} " for word in words)
    yield last
