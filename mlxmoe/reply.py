"""From a prompt's tokens to a reply in chunks: the token loop, the text that may be shown, and when to end.

Knows nothing of how the prompt was made, or of the model's files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxmoe.balance import Lease
from mlxmoe.decode import Cache, Decoder
from mlxmoe.errors import MemoryPressureError, SamplingError, brief
from mlxmoe.kv.prefix import PrefixRun
from mlxmoe.sampling import Sampled, Sampler, SamplingSettings
from mlxmoe.stats import hit_rate
from mlxmoe.text import TextStream, check_stop

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "memory"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one token brought. `str(chunk)` is its text.

    `text`: text that can be shown now; empty while a character or a stop string may go on. `token`: its id.
    `logprob`: its log-probability before temperature and filters. `finish_reason`: None but for the last chunk:
    "stop" (end of text, or a stop string), "length" (max_tokens, or the context is full) or "memory" (the machine ran
    short of it; where that was before the first token, the only chunk has no text and `token` is -1).
    `prompt_tokens`, `generated_tokens`: tokens in the prompt, and so far in the reply. `reused_tokens`: those of the
    prompt that a session or a prefix store had, and that were not prefilled. `ttft_s`: seconds to the first token.
    `prompt_tokens_per_s`, `tokens_per_s`: rates of prefill and of decode. `expert_hit_rate`: share of the
    experts asked for since this reply began that were in a slot; 1 where all are resident. `peak_memory_bytes`: the
    most MLX has held since the process began. `top_logprobs`: the most probable tokens in its place and their
    log-probabilities, the first one first, as many as the request asked for.
    """

    text: str
    token: int
    logprob: float
    finish_reason: FinishReason | None
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    ttft_s: float
    prompt_tokens_per_s: float
    tokens_per_s: float
    expert_hit_rate: float
    peak_memory_bytes: int
    top_logprobs: tuple[tuple[int, float], ...] = ()

    def __str__(self) -> str:
        return self.text


class ReplyOptions(TypedDict, total=False):
    """What a request may say of its reply; the values and defaults are those of Engine.stream."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    top_logprobs: int
    seed: int | None
    stop: str | Iterable[str]


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """How a reply is sampled and what ends it besides the model itself. Raises SamplingError."""

    sampling: SamplingSettings
    max_tokens: int
    stop: tuple[str, ...]

    @classmethod
    def check(cls, *, max_tokens: int = 256, stop: str | Iterable[str] = (), **sampling: Any) -> ReplySettings:
        """From ReplyOptions; an unknown one is a TypeError."""
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise SamplingError(f"max_tokens={max_tokens!r} is out of range: it must be a whole number, 1 or more.")
        return cls(SamplingSettings(**sampling), max_tokens, check_stop(stop))

    def with_room(self, max_tokens: int) -> ReplySettings:
        """The same for a reply of at most `max_tokens`."""
        return replace(self, max_tokens=max_tokens)


class Replier:
    """Streams replies of one model.

    `context`: tokens, prompt and reply, that fit, or None. `lookups`: hits and misses of the expert cache so far.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: TokenizerWrapper,
        context: int | None,
        lookups: Callable[[], tuple[int, int]],
    ) -> None:
        self.decoder = decoder
        self._tokenizer = tokenizer
        self._context = context
        self._lookups = lookups

    def stream(self, tokens: Sequence[int], settings: ReplySettings, cache: Cache, lease: Lease) -> Iterator[Chunk]:
        """The reply to `tokens`, once there is room for its cache. Modifies `cache`, which is empty.

        Raises what Lease.begin raises.
        """
        try:
            lease.begin(len(tokens) + self.room(tokens, settings))
            yield from self.reply(tokens, settings, cache, keeps_cache=False)
        finally:
            lease.keep(0)

    def room(self, tokens: Sequence[int], settings: ReplySettings) -> int:
        """The most tokens that a reply to `tokens` may have."""
        if self._context is None:
            return settings.max_tokens
        return min(settings.max_tokens, self._context - len(tokens))

    def reply(
        self,
        tokens: Sequence[int],
        settings: ReplySettings,
        cache: Cache,
        seen: int = 0,
        heard: Callable[[int, str], None] = lambda token, text: None,
        *,
        keeps_cache: bool = True,
    ) -> Iterator[Chunk]:
        """The reply to `tokens`, of which `cache` has seen the first `seen`. Modifies `cache`.

        `heard(token, text)` is told each token before its chunk is handed out. `keeps_cache`: whether somebody goes
        on from `cache`, which must have seen all tokens but the last then.
        """
        reply = self.begin(tokens, settings)
        run = self.decoder.reuse(tokens, cache) if seen == 0 else None
        reply.reused = seen = seen if run is None else run.seen
        sampler = Sampler(settings.sampling)
        try:
            self.decoder.prefill(tokens[seen:-1], cache, run)
        except MemoryPressureError:
            yield reply.unsaid()
            return
        keeps_cache = keeps_cache or (run is not None and run.keeps_replies)
        most = None if keeps_cache else reply.room
        for sampled in self.decoder.generate(tokens, cache, sampler, most=most):
            chunk = reply.say(sampled, short=self.decoder.must_finish)
            heard(sampled.token, chunk.text)
            yield chunk
            if chunk.finish_reason is not None:
                if run is not None:
                    self.keep_for_others(run, reply, cache)
                return

    def begin(self, tokens: Sequence[int], settings: ReplySettings) -> Reply:
        """A reply to `tokens` of which nothing is said yet."""
        text = TextStream(self._tokenizer, tokens, settings.stop)
        return Reply(tokens, text, self._tokenizer.eos_token_ids, self.room(tokens, settings), self._lookups)

    def keep_for_others(self, run: PrefixRun, reply: Reply, cache: Cache) -> None:
        """Note a reply in the prefix store. The reply is whole, whatever becomes of that: nothing is raised."""
        try:
            self.decoder.note_reply(run, [*reply.prompt[-1:], *reply.said[:-1]], cache)
        except Exception as error:  # the engine was closed when the last chunk was seen, to name one; or MLX's own
            logger.info("A reply is not kept for other prompts: %s", brief(error))

    def ends_text(self, token: int) -> bool:
        """Whether `token` is one of the model's end-of-text tokens."""
        return token in self._tokenizer.eos_token_ids


class Reply:
    """One reply while it is said: its text, its end, its times and counts. Knows nothing of how tokens come about.

    `prompt`: the prompt's tokens, `said`: the reply's so far; `room`: the most that it may have. `reused`: tokens of
    the prompt that were not prefilled. `ends`: the model's end-of-text tokens.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        text: TextStream,
        ends: Collection[int],
        room: int,
        lookups: Callable[[], tuple[int, int]],
    ) -> None:
        self.prompt = prompt
        self.said: list[int] = []
        self.room = room
        self.reused = 0
        self._text = text
        self._ends = ends
        self._lookups = lookups
        self._hits, self._misses = lookups()
        self._start = self._first = self._last = time.perf_counter()

    def say(self, sampled: Sampled, *, short: bool = False) -> Chunk:
        """The chunk of the next token. `short`: there may be none after it, because memory is short."""
        self._count(sampled.token)
        ended = sampled.token in self._ends
        shown = "" if ended else self._text.add(sampled.token)
        full = len(self.said) == self.room
        if ended or self._text.stopped or full or short:
            shown += self._text.finish()  # the rest that was held back may itself complete a stop string
        reason: FinishReason | None = None
        if ended or self._text.stopped:
            reason = "stop"
        elif full or short:
            reason = "length" if full else "memory"
        return Chunk(shown, sampled.token, sampled.logprob, reason, **self._reading(), top_logprobs=sampled.top)

    def unsaid(self, reason: FinishReason = "memory") -> Chunk:
        """The only chunk of a reply that says nothing, or the last of one that is cut short between two tokens."""
        text = self._text.finish() if self.said else ""
        return Chunk(text, -1, 0.0, reason, **self._reading())

    def _count(self, token: int) -> None:
        self.said.append(token)
        self._last = time.perf_counter()
        if len(self.said) == 1:
            self._first = self._last

    def _reading(self) -> dict[str, Any]:
        """Chunk's fields of the same names."""
        hits, misses = self._lookups()
        ttft_s, decode_s = self._first - self._start, self._last - self._first
        return {
            "prompt_tokens": len(self.prompt),
            "reused_tokens": self.reused,
            "generated_tokens": len(self.said),
            "ttft_s": ttft_s,
            "prompt_tokens_per_s": (len(self.prompt) - self.reused) / ttft_s if ttft_s > 0 else 0.0,
            "tokens_per_s": (len(self.said) - 1) / decode_s if decode_s > 0 else 0.0,
            "expert_hit_rate": hit_rate(hits - self._hits, misses - self._misses),
            "peak_memory_bytes": mx.get_peak_memory(),
        }
