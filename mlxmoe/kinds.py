"""What serves the texts of one engine, by the kind of their KV caches: its own, and what sessions ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxmoe.balance import Balance
from mlxmoe.decode import Decoder
from mlxmoe.experts.cache import ExpertCache
from mlxmoe.growth import handed_rows, kv_growth
from mlxmoe.kv.choose import choose
from mlxmoe.kv.prefix import Prefixes
from mlxmoe.kv.settings import KVSettings
from mlxmoe.memory.plan import KVBytes
from mlxmoe.prompts import PromptEncoder
from mlxmoe.reply import Replier


@dataclass(frozen=True)
class Kind:
    """What serves texts whose caches are of one kind. `kv`: what such a cache takes."""

    prompts: PromptEncoder
    replier: Replier
    kv: KVBytes


class Kinds:
    """A Kind for each KVSettings, made when it is first asked for; any thread may ask.

    `settings`, `own`: the engine's, which is there from the start. `name`: the model's, for messages. `stored`: what
    the prefix store has of the model, where prompts are divided into chunks of so many tokens.
    """

    def __init__(
        self,
        settings: KVSettings,
        own: Kind,
        *,
        tokenizer: TokenizerWrapper,
        name: str,
        experts: ExpertCache,
        balance: Balance,
        stored: Callable[[int], Prefixes | None],
    ) -> None:
        self._own = own
        self._tokenizer = tokenizer
        self._name = name
        self._experts = experts
        self._balance = balance
        self._stored = stored
        self._lock = threading.RLock()  # a signal handler may close the engine while it is held
        self._kinds = {settings: own}

    def of(self, settings: KVSettings) -> Kind:
        """What serves texts with such caches. Raises what `Engine.session` raises, EngineClosedError once closed."""
        if settings in self._kinds:
            return self._kinds[settings]
        self._experts.passes.refuse_within()  # before the lock: who holds it may wait for this thread's pass
        with self._lock:
            if settings not in self._kinds:
                self._kinds[settings] = self._new(settings)
            return self._kinds[settings]

    def close(self) -> None:
        """Close the decoders. Raises RequestError, and then nothing has changed, where it is called within a pass."""
        self._experts.passes.refuse_within()  # before the lock: who holds it may wait for this thread's pass
        with self._lock:  # and so for one that is being made
            for kind in self._kinds.values():  # the engine's own first
                kind.replier.decoder.close()

    def _new(self, settings: KVSettings) -> Kind:
        plan, own = self._balance.plan, self._own.replier.decoder
        model = own.model  # raises if the engine is closed
        chunk_tokens = min(own.chunk_tokens, plan.context or own.chunk_tokens)  # as planned
        with self._experts.listening():
            choice = choose(model, settings, plan.model_context)
            kv, handed = kv_growth(model, choice.caches), handed_rows(model, choice, chunk_tokens)
        context = None if choice.endless else plan.context or plan.model_context
        decoder = Decoder(
            model,
            self._experts,
            chunk_tokens=chunk_tokens,
            kv_choice=choice,
            upkeep=self._balance,
            prefixes=self._stored(chunk_tokens),
        )
        return Kind(
            PromptEncoder(self._tokenizer, self._name, self._own.prompts.vocab, context),
            Replier(decoder, self._tokenizer, context, self._experts.lookups),
            replace(kv, rows=(*kv.rows, *handed)),
        )
