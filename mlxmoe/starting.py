"""load(): what is asked for, checked before anything is downloaded or read, and the Engine made of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from mlxmoe.engine import Engine
from mlxmoe.errors import RequestError
from mlxmoe.experts.lookahead import LookaheadMode
from mlxmoe.hub import Progress, resolve
from mlxmoe.identity import FolderIdentity
from mlxmoe.kv.prefix import PrefixStore
from mlxmoe.kv.settings import KVSettings
from mlxmoe.loading import load_folder
from mlxmoe.memory.experts import expert_budget
from mlxmoe.memory.guard import MemoryEvent
from mlxmoe.memory.reading import MemoryReader, reserve_bytes, usable_bytes
from mlxmoe.memory.sizes import format_bytes, parse_bytes
from mlxmoe.registry import find_spec
from mlxmoe.tuned import find_tuning

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
    prefixes: PrefixStore | int | str | None = None,
    lookahead: LookaheadMode = "auto",
    progress: Progress | None = None,
    on_memory: Callable[[MemoryEvent], None] | None = None,
    wired: bool = False,
    warm: bool = True,
    tuned: bool = True,
    chunk_tokens: int | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Engine:
    """Load a model: a local folder, a hub id, or nothing for the built-in demo model.

    - `experts`: how much of the routed experts is kept in memory: "auto" (as much as fits), "all", bytes, "12GB", or
      a share such as 0.25 or "25%". Fewer are slower, and change no word.
    - `memory`: the most the engine may use, bytes or "24GB"; by default what the machine can give now, less a
      reserve.
    - `context`: tokens, prompt and reply, that must fit; by default what the model was made for, or what fits; with a
      window any number, where its positions can be kept within what the model was made for.
    - `window`: lossy, and off unless asked for: each token attends to the first `sinks` tokens of the text and to the
      last `window - sinks` only. The KV cache grows no further, and a text may go on for ever; a warning says where
      positions cannot be kept in range. Where they can, `sinks` leave an eighth of what the model was made for.
    - `kv_bits`: lossy, and off unless asked for: 8 or 4 for a quantised KV cache.
    - `prefixes`: how much of the memory may keep states of prompts' beginnings, so that a prompt that begins like an
      earlier one is not prefilled again, bit for bit as if it were: bytes, "1GB", or a PrefixStore, for more.
    - `lookahead`: read what the next layer will probably want before it asks: "auto" while that is faster, which is
      tried out again and again, True always, False never. Changes no word.
    - `progress(stage, done_bytes, total_bytes)`: called during download and loading.
    - `on_memory(event)`: told when memory pressure changes, and what is given back or taken again; another thread may
      be the caller.
    - `wired`: forbid macOS to compress or swap the engine's memory: see mlxmoe.memory.limits for both sides of that.
    - `warm`: fill the slots before returning, at the rate the drive reads: with the experts that `mlxmoe profile`
      found to be used most, or with the first ones. False returns earlier, and reads experts when they are asked for.
    - `tuned`: where `mlxmoe tune` has measured this model on this machine, take its context, experts and chunk for
      those that are not named here; the log says which. What is named here always wins.
    - `chunk_tokens`: the most tokens of a prompt that are computed at once; by default as many as in mlx-lm (2048),
      or what fits. Fewer take less memory; sums may be rounded in another order, as with mlx-lm's prefill_step_size.
    - `revision`: of a hub id. `adapter`: folder of a LoRA adapter of trunk modules, as mlx-lm trains them.
      `trust_remote_code`: run model code that comes with the weights.

    Raises ModelError, DownloadError, MemoryBudgetError or WindowError; see mlxmoe.errors.
    """
    kv_settings = KVSettings(window, sinks, kv_bits)
    if lookahead != "auto" and not isinstance(lookahead, bool):
        raise RequestError(f'lookahead={lookahead!r} is not offered: "auto", True or False.')
    if chunk_tokens is not None and (type(chunk_tokens) is not int or chunk_tokens < 1):
        raise RequestError(f"chunk_tokens={chunk_tokens!r} is no number of tokens: 1 or more, or None.")
    reading = MemoryReader().read()
    memory_bytes = usable_bytes(reading) if memory is None else parse_bytes(memory, "memory")
    if memory is not None and memory_bytes > reading.total_bytes > 0:
        logger.warning(
            "memory=%s is more than this machine has (%s): it would swap.", memory, format_bytes(reading.total_bytes)
        )
    expert_budget(experts, (), auto_bytes=0)  # what makes no sense is said before a download
    store = prefixes if prefixes is None or isinstance(prefixes, PrefixStore) else PrefixStore(prefixes)
    if store is not None:
        memory_bytes = store.memory_beside(memory_bytes)
    adapter = None if adapter is None else Path(adapter).expanduser()
    folder = resolve(model, revision, progress)
    identity = FolderIdentity(folder, adapter)
    loaded = load_folder(
        folder,
        experts=experts,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes(reading) if memory is None else 0,
        context=context,
        progress=progress,
        adapter=adapter,
        trust_remote_code=trust_remote_code,
        kv_settings=kv_settings,
        lookahead=lookahead,
        warm=warm,
        chunk_tokens=chunk_tokens,
        tuning=find_tuning(identity, reading, kv_settings) if tuned else None,
        identity=identity,
    )
    model_type = loaded.config["model_type"]
    if loaded.experts.layers and find_spec(model_type) is None:
        logger.warning("Model type %s is not yet checked here. `mlxmoe verify` proves it on your model.", model_type)
    return Engine(
        loaded,
        prefixes=store,
        owns_prefixes=store is not prefixes,
        wired=wired,
        on_memory=on_memory,
    )
