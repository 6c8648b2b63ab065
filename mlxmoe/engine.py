"""load() and the Engine it returns: the thin API over loading, the token loop and replies."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxmoe.decode import Decoder
from mlxmoe.experts.bank import BankCounters
from mlxmoe.hub import Progress, resolve
from mlxmoe.kv.settings import KVSettings
from mlxmoe.loading import CHUNK_TOKENS, LoadedModel, load_folder
from mlxmoe.memory.plan import Plan, expert_budget
from mlxmoe.memory.reading import usable_bytes
from mlxmoe.memory.sizes import parse_bytes
from mlxmoe.prompts import Prompt, PromptEncoder
from mlxmoe.registry import find_spec
from mlxmoe.reply import Chunk, Replier, ReplyOptions, ReplySettings
from mlxmoe.session import Session
from mlxmoe.stats import EngineStats, LayerStats, MemoryUse

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)


def load(
    model: str | Path | None = None,
    *,
    experts: int | float | str = "auto",
    memory: int | str | None = None,
    context: int | None = None,
    window: int | None = None,
    sinks: int = 4,
    kv_bits: int | None = None,
    progress: Progress | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Engine:
    """Load a model: a local folder, a hub id, or nothing for the built-in demo model.

    `experts`: how much of the routed experts is kept in memory: "auto" (as much as fits), "all", bytes, "12GB", or a
    share such as 0.25 or "25%". Fewer are slower, and change no word. `memory`: the most the engine may use, bytes or
    "24GB"; by default what the machine can give now, less a reserve. `context`: tokens, prompt and reply, that must
    fit; by default what the model was made for.

    Lossy, and off unless asked for, are `window` and `kv_bits`. `window`: tokens that each token attends to, the
    first `sinks` of the text and the last `window - sinks`. The KV cache grows no further, and where positions can be
    kept within what the model was made for (else a warning says so) a text may go on for ever. `kv_bits`: 8 or 4 for
    a quantised KV cache.

    `progress(stage, done_bytes, total_bytes)`: called during download
    and loading. `revision`: of a hub id. `adapter`: folder of a LoRA adapter of trunk modules, as mlx-lm trains them.
    `trust_remote_code`: run model code that comes with the weights.

    Raises ModelError, DownloadError, MemoryBudgetError or WindowError; see mlxmoe.errors.
    """
    kv_settings = KVSettings(window, sinks, kv_bits)
    memory_bytes = usable_bytes() if memory is None else parse_bytes(memory, "memory")
    expert_budget(experts, (), auto_bytes=0)  # what makes no sense is said before a download
    folder = resolve(model, revision, progress)
    loaded = load_folder(
        folder,
        experts=experts,
        memory_bytes=memory_bytes,
        context=context,
        progress=progress,
        adapter=None if adapter is None else Path(adapter).expanduser(),
        trust_remote_code=trust_remote_code,
        kv_settings=kv_settings,
    )
    model_type = loaded.config["model_type"]
    if loaded.layers and find_spec(model_type) is None:
        logger.warning("Model type %s is not yet checked here. `mlxmoe verify` proves it on your model.", model_type)
    return Engine(loaded)


class Engine:
    """A loaded model. Made by `load()`; a context manager; its streams may interleave, from any thread.

    `tokenizer`: mlx-lm's tokenizer wrapper. `config`: the model's config.json. `path`: its folder. `plan`: how the
    memory was divided. `kv_settings`: the window and the bits of its KV caches.
    """

    def __init__(self, loaded: LoadedModel, *, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.tokenizer: TokenizerWrapper = loaded.tokenizer
        self.config: dict[str, Any] = loaded.config
        self.path: Path = loaded.path
        self.plan: Plan = loaded.plan
        self.kv_settings: KVSettings = loaded.kv_choice.settings
        self._layers = loaded.layers
        self._counters = {path: stream.bank.counters for path, stream in loaded.streams.items()}
        self._reader = loaded.reader
        self._decoder = Decoder(
            loaded.model,
            loaded.streams.values(),
            loaded.passes,
            chunk_tokens=chunk_tokens,
            kv_choice=loaded.kv_choice,
        )
        context = loaded.plan.context
        self._prompts = PromptEncoder(loaded.tokenizer, loaded.path.name, loaded.vocab_size, context)
        self._replier = Replier(self._decoder, loaded.tokenizer, context, self._lookups)

    @property
    def model(self) -> nn.Module:
        """mlx-lm's model, callable with caches as mlx-lm's are. Raises EngineClosedError."""
        return self._decoder.model

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
        seed: int | None = None,
        stop: str | Iterable[str] = (),
        raw: bool = False,
    ) -> Iterator[Chunk]:
        """Stream a reply, one chunk a token, each before the next one is computed.

        `prompt`: text (put through the model's chat template where it has one, unless `raw`), chat messages, or token
        ids. `max_tokens`: the reply's most. `temperature`: 0 is greedy. `top_p`: 1 is off. `top_k`, `min_p`: 0 is
        off. `repetition_penalty`: above 1 discourages what was said in the last 20 tokens. `seed`: the same one gives
        the same text. `stop`: strings that end the reply and are not part of it.

        Raises PromptError or SamplingError at once. While running it may raise CheckpointReadError if the disk fails;
        the engine still answers the next request.
        """
        settings = ReplySettings.check(
            max_tokens=max_tokens,
            stop=stop,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        return self._replier.stream(self._prompts.encode(prompt, raw), settings, self._decoder.new_cache())

    def generate(self, prompt: Prompt, *, raw: bool = False, **options: Unpack[ReplyOptions]) -> str:
        """The whole reply as text; takes what `stream` takes."""
        return "".join(chunk.text for chunk in self.stream(prompt, raw=raw, **options))

    def session(self, system: str | None = None) -> Session:
        """A conversation that keeps its KV cache from turn to turn. Several may interleave."""
        self._decoder.new_cache()  # raises if the engine is closed
        return Session(self._replier, self._prompts, system)

    def logits(self, tokens: Sequence[int]) -> mx.array:
        """The logits `[len(tokens), vocab]` after each of `tokens`, by the very passes that `stream` makes.

        For checks: while they are put together they are in memory twice.
        """
        return self._decoder.logits(self._prompts.check(tokens, reply=0), self._decoder.new_cache())

    def stats(self) -> EngineStats:
        """What the expert cache did since loading, for each MoE layer."""
        nothing = BankCounters()
        return EngineStats(
            tuple(
                LayerStats(
                    path=layer.path,
                    num_experts=layer.num_experts,
                    slots=self.plan.slots[layer.path],
                    **asdict(self._counters.get(layer.path, nothing)),
                )
                for layer in self._layers
            )
        )

    def memory(self) -> MemoryUse:
        """The plan beside what is in use now."""
        return MemoryUse(
            plan=self.plan,
            active_bytes=mx.get_active_memory(),
            pool_bytes=mx.get_cache_memory(),
            peak_bytes=mx.get_peak_memory(),
            usable_bytes=usable_bytes(),
        )

    def close(self) -> None:
        """Give back threads, files and memory; may be repeated. Streams under way raise EngineClosedError."""
        self._decoder.close()
        self._reader.close()
        mx.clear_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lookups(self) -> tuple[int, int]:
        """Hits and misses of all layers so far."""
        counters = self._counters.values()
        return sum(c.hits for c in counters), sum(c.misses for c in counters)
