"""The Engine that load() returns: the thin API over the token loop, replies and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxmoe.balance import Balance, Room
from mlxmoe.batch.batch import Batch
from mlxmoe.batch.shared import can_share
from mlxmoe.decode import Decoder
from mlxmoe.errors import RequestError, UnsupportedModelError
from mlxmoe.experts.profile import ProfileFolder, RoutingProfile
from mlxmoe.experts.recording import MAX_TOKENS, Recording
from mlxmoe.experts.trace import Trace
from mlxmoe.identity import ModelIdentity
from mlxmoe.kinds import Kind, Kinds
from mlxmoe.kv.prefix import Prefixes, PrefixStore
from mlxmoe.kv.settings import KVSettings, checked
from mlxmoe.loading import LoadedModel
from mlxmoe.memory.guard import MemoryEvent, Reclaim
from mlxmoe.memory.limits import hold_pool, hold_wired
from mlxmoe.memory.plan import Plan
from mlxmoe.memory.reading import Pressure, usable_bytes, working_set_bytes
from mlxmoe.prompts import Prompt, PromptEncoder
from mlxmoe.reply import Chunk, Replier, ReplyOptions, ReplySettings
from mlxmoe.session import Session
from mlxmoe.stats import EngineStats, LayerStats, MemoryUse
from mlxmoe.tuned import Tuning

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Engine:
    """A loaded model. Made by `load()`; a context manager; its streams may interleave, from any thread.

    `tokenizer`: mlx-lm's tokenizer wrapper. `config`: the model's config.json. `path`: its folder. `kv_settings`: the
    window and the bits of its KV caches. `tuning`: what of `mlxmoe tune` it was loaded by, None without.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        prefixes: PrefixStore | None = None,
        owns_prefixes: bool = False,
        chunk_tokens: int | None = None,
        wired: bool = False,
        on_memory: Callable[[MemoryEvent], None] | None = None,
    ) -> None:
        self.tokenizer: TokenizerWrapper = loaded.tokenizer
        self.config: dict[str, Any] = loaded.config
        self.path: Path = loaded.path
        self.tuning: Tuning | None = loaded.tuning
        self.kv_settings: KVSettings = loaded.kv_choice.settings
        self._experts = loaded.experts
        chunk_tokens = chunk_tokens or loaded.plan.chunk_tokens
        self._identify = loaded.identify
        self._prefixes = prefixes
        self._owns_prefixes = owns_prefixes
        stored = partial(_stored, prefixes, loaded.identify)
        own_prefixes = stored(chunk_tokens)  # may raise: before anything is held
        spare = () if prefixes is None else (Reclaim("the prefix store", prefixes.shrink_step, prefixes.shrink),)
        room = Room(loaded.experts, loaded.plan, loaded.kv)
        self._let_go = [hold_pool(loaded.plan.pool_bytes, self)]
        if wired:
            self._let_go.append(hold_wired(loaded.plan.memory_bytes, working_set_bytes(), self))
        self._balance = Balance(room, on_event=on_memory, spare=spare)
        self._decoder = Decoder(
            loaded.model,
            loaded.experts,
            chunk_tokens=chunk_tokens,
            kv_choice=loaded.kv_choice,
            upkeep=self._balance,
            prefixes=own_prefixes,
        )
        self._context = context = loaded.plan.context
        self._prompts = PromptEncoder(loaded.tokenizer, loaded.path.name, loaded.vocab_size, context)
        self._replier = Replier(self._decoder, loaded.tokenizer, context, loaded.experts.lookups)
        self._kinds = Kinds(
            self.kv_settings,
            Kind(self._prompts, self._replier, loaded.kv),
            tokenizer=loaded.tokenizer,
            name=loaded.path.name,
            experts=loaded.experts,
            balance=self._balance,
            stored=stored,
        )

    @property
    def model(self) -> nn.Module:
        """mlx-lm's model, callable with caches as mlx-lm's are. Raises EngineClosedError."""
        return self._decoder.model

    @property
    def decoder(self) -> Decoder:
        """The token loop of its own caches: for who measures it, below text and replies."""
        return self._decoder

    @property
    def context(self) -> int | None:
        """Tokens, prompt and reply, that fit; None for a text without end."""
        return self._context

    @property
    def vocab(self) -> int:
        """Token ids that the model knows, from 0 on."""
        return self._prompts.vocab

    @property
    def pressure(self) -> Pressure:
        """The memory pressure that the guard goes by; it reads the machine's itself, at a bounded rate."""
        return self._balance.guard.pressure

    @property
    def num_experts(self) -> tuple[int, ...]:
        """Routed experts of each MoE layer."""
        return tuple(layer.num_experts for layer in self._experts.layers)

    def residents(self) -> tuple[tuple[bool, ...], ...]:
        """Of each MoE layer, whether each expert is in memory now. Any thread may ask."""
        return self._experts.residents()

    @property
    def plan(self) -> Plan:
        """How the memory is to be divided. `memory()` says what is so now."""
        return self._balance.plan

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        top_logprobs: int = 0,
        seed: int | None = None,
        stop: str | Iterable[str] = (),
        raw: bool = False,
    ) -> Iterator[Chunk]:
        """Stream a reply, one chunk a token, each as soon as it is there.

        The next one is being computed by then where all experts are in memory, else when it is asked for.

        `prompt`: text (put through the model's chat template where it has one, unless `raw`), chat messages, or token
        ids. `max_tokens`: the reply's most. `temperature`: 0 is greedy. `top_p`: 1 is off. `top_k`, `min_p`: 0 is
        off. `repetition_penalty`: above 1 discourages what was said in the last 20 tokens. `presence_penalty`,
        `frequency_penalty`: from -2 to 2, taken off the logit of a token that the reply has said, once or each time.
        `logit_bias`: for token ids, what is added to their logits, from -100 to 100. `top_logprobs`: as many of the
        most probable tokens, at most 20, are told with each chunk. `seed`: the same one gives the same text. `stop`:
        strings that end the reply and are not part of it.

        Raises PromptError or SamplingError at once. When the first chunk is asked for, MemoryBudgetError if no room
        can be made for its KV cache, MemoryPressureError while the machine is critically short of memory. While
        running it may raise CheckpointReadError if the disk fails; the engine still answers the next request.
        """
        settings = ReplySettings.check(
            max_tokens=max_tokens,
            stop=stop,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            top_logprobs=top_logprobs,
            seed=seed,
        )
        settings.sampling.refuse_beyond(self._prompts.vocab)
        tokens = self._prompts.encode(prompt, raw)
        return self._replier.stream(tokens, settings, self._decoder.new_cache(), self._balance.lease())

    def generate(self, prompt: Prompt, *, raw: bool = False, **options: Unpack[ReplyOptions]) -> str:
        """The whole reply as text; takes what `stream` takes."""
        return "".join(chunk.text for chunk in self.stream(prompt, raw=raw, **options))

    def session(self, system: str | None = None, *, kv_settings: KVSettings | None = None) -> Session:
        """A conversation that keeps its KV cache from turn to turn. Several may interleave.

        `kv_settings`: its window and bits, by default the engine's. Raises UnsupportedModelError for a model that
        they would break, WindowError for sinks that leave it too little of its context, or for what are no settings.
        """
        self._decoder.new_cache()  # raises if the engine is closed
        kind = self._kinds.of(self.kv_settings if kv_settings is None else checked(kv_settings))
        return Session(kind.replier, kind.prompts, self._balance.lease(kind.kv), system, self._identify)

    def batch(self, *, together: bool | None = None) -> Batch:
        """Replies that are computed together, one pass for all: what `mlxmoe serve` runs on.

        `together`: False computes each reply in passes of its own, bit for bit as `stream`; True raises
        UnsupportedModelError for a model type that the tests did not find right in a batch; by default together where
        that is right. Prompts go in as tokens, made by `encode`; see examples/together.py.
        """
        shares = can_share(self.config["model_type"], self.model, self._decoder.new_cache())
        if together and not shares:
            raise UnsupportedModelError(
                f"Replies of model type {self.config['model_type']} are not known to be right in one batch. "
                f"Leave together= out: they are computed in turns."
            )
        return Batch(
            self._replier,
            self._balance.lease,
            prompts=self._prompts,
            together=shares if together is None else together,
        )

    def encode(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens that `stream` makes of a prompt. Raises PromptError.

        `tools`: told to the model by its chat template; `template`: further variables of that, as `enable_thinking`.
        """
        return self._prompts.encode(prompt, raw, tools, template or {})

    def restore(self, path: str | Path, *, kv_settings: KVSettings | None = None) -> Session:
        """The session that `Session.save(path)` wrote, in this process or another: it goes on bit-identically.

        `kv_settings`: those with which it was saved, by default the engine's; refused as `session` refuses them.
        Raises SavedStateError for a file that is torn, of another model or of another version, PromptError for one
        that is longer than this engine's context, MemoryBudgetError if no room can be made for its KV cache.
        """
        session = self.session(kv_settings=kv_settings)
        session.become(path)
        return session

    def logits(self, tokens: Sequence[int]) -> mx.array:
        """The logits `[len(tokens), vocab]` after each of `tokens`, by the very passes that `stream` makes.

        For checks: while they are put together they are in memory twice.
        """
        tokens = self._prompts.check(tokens, reply=0)
        cache, lease = self._decoder.new_cache(), self._balance.lease()
        lease.begin(len(tokens))
        return self._decoder.logits(tokens, cache)

    def resize(self, experts: int | float | str) -> None:
        """Change how much of the routed experts is kept in memory, also while replies are being streamed.

        `experts`: as for `load`. No token changes. What shrinks gives its memory back to the system; what grows to
        all of a layer's experts reads them now. Waits for the step under way. Raises MemoryBudgetError where the
        budget or the machine has not that much, UnsupportedModelError where the checkpoint's layout cannot be read in
        place, and then nothing has changed; CheckpointReadError.
        """
        _ = self._decoder.model  # raises if the engine is closed
        self._balance.resize(experts)

    @contextmanager
    def record(self, *, max_tokens: int = MAX_TOKENS) -> Iterator[Recording]:
        """Record which experts are asked for: `with llm.record() as recording: ...`, then `recording.trace`.

        Every pass of the engine within the context is recorded, whoever asks for it: streams, sessions and calls of
        `model`, in the order of the passes. No token changes. Tokens that a prefix store or a session had are not
        computed again, and so not recorded. The first `max_tokens` are kept; each takes two bytes for each of its
        experts in each layer. Raises RequestError for a model without routed experts.
        """
        _ = self._decoder.model  # raises if the engine is closed
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise RequestError(f"max_tokens={max_tokens!r} is no number of tokens to record: 1 or more.")
        if not self._experts.layers:
            raise RequestError(f"{self.path.name} has no routed experts: there is no routing to record.")
        with self._experts.recording(max_tokens) as recording:
            yield recording

    def keep_profile(self, trace: Trace) -> Path:
        """Keep, for later loads, how often `trace` asked for each expert and how a layer's hits grow with its slots.

        Returns the file, in the user's cache folder; one that was there before is replaced. Only this, and
        `mlxmoe profile`, which calls it, ever writes one. Raises RequestError for the trace of another model or of no
        token, SavedStateError if it cannot be written, CheckpointError if the model's files have changed.
        """
        layers, identity = self._experts.layers, self._identify()
        try:
            if not trace.tokens:
                raise ValueError("the trace holds no token")
            profile = RoutingProfile.of(trace, layers, model=str(identity), digest=identity.digest)
        except ValueError as error:
            raise RequestError(
                f"This is no profile of {self.path.name}: {error}. Record one with record()."
            ) from error
        return ProfileFolder().keep(profile, layers)

    def stats(self) -> EngineStats:
        """What the expert cache did since loading, for each MoE layer."""
        slots = self._experts.slots
        return EngineStats(
            tuple(
                LayerStats(
                    path=layer.path,
                    num_experts=layer.num_experts,
                    slots=slots[layer.path],
                    **asdict(self._experts.counters[layer.path]),
                )
                for layer in self._experts.layers
            ),
            self._balance.guard.events,
            None if self._prefixes is None else self._prefixes.stats(),
        )

    def memory(self) -> MemoryUse:
        """The plan beside what is so now."""
        reading = self._balance.reading()
        return MemoryUse(
            plan=self.plan,
            bank_bytes=self._experts.nbytes,
            kv_bytes=self._balance.leased_bytes,
            reading=reading,
            usable_bytes=usable_bytes(reading),
        )

    def close(self) -> None:
        """Give back threads, files and memory; may be repeated. Streams under way raise EngineClosedError.

        Raises RequestError, and then nothing has changed, where it is called within a step (by a signal handler).
        """
        self._kinds.close()
        self._balance.close()
        for let_go in self._let_go:
            let_go()
        self._experts.close()
        if self._prefixes is not None and self._owns_prefixes:
            self._prefixes.shrink()
        mx.clear_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stored(store: PrefixStore | None, identify: Callable[[], ModelIdentity], chunk_tokens: int) -> Prefixes | None:
    """What the prefix store has of this model, where prompts are divided into chunks of `chunk_tokens`."""
    return None if store is None else Prefixes(store, identify().content, chunk_tokens)
