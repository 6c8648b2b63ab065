"""From a model folder to a model that computes from banks: plan, banks in place, trunk in memory, tokenizer.

Expert weights are never materialised outside a slot: the experts' arrays of the lazy model are replaced by banks
before anything is evaluated, and only then is the trunk read.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from mlxmoe.errors import CheckpointReadError, MemoryBudgetError, ModelError, brief
from mlxmoe.experts.cache import ExpertCache
from mlxmoe.experts.checkpoint import ExpertReader
from mlxmoe.experts.places import locate_experts
from mlxmoe.hub import Progress
from mlxmoe.kv.choose import KVChoice
from mlxmoe.kv.settings import KVSettings
from mlxmoe.memory.plan import KVBytes, Plan, make_plan
from mlxmoe.memory.sizes import format_bytes
from mlxmoe.opening import OpenedModel, open_folder
from mlxmoe.transients import PrefillTransients

logger = logging.getLogger(__name__)

LOAD_STEP_BYTES = 256 * 2**20  # of trunk evaluated between two progress reports


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `vocab_size`: token ids it knows; the tokenizer may use fewer.

    `plan`: how the memory is divided. `kv`: what a KV cache takes, as `kv_choice` makes it.
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    path: Path
    vocab_size: int
    plan: Plan
    kv: KVBytes
    kv_choice: KVChoice
    experts: ExpertCache


def load_folder(
    path: Path,
    *,
    experts: int | float | str = "auto",
    memory_bytes: int,
    reserve_bytes: int = 0,
    context: int | None = None,
    progress: Progress | None = None,
    adapter: Path | None = None,
    trust_remote_code: bool = False,
    kv_settings: KVSettings = KVSettings(),  # noqa: B008  # frozen
) -> LoadedModel:
    """Load the model in folder `path`, with as many expert slots as the plan for `memory_bytes` gives.

    Raises ModelError and its kin for a folder that cannot be used, MemoryBudgetError before anything large is read.
    """
    opened = open_folder(path, adapter=adapter, trust_remote_code=trust_remote_code, kv_settings=kv_settings)
    bound = None if opened.kv_choice.endless else opened.model_context
    context = _asked_context(path, bound, context)
    plan = make_plan(
        opened.layers,
        trunk_bytes=opened.trunk_bytes,
        kv=opened.kv,
        prefill=partial(_prefill_bytes, opened),
        context=context,
        model_context=bound,
        experts=experts,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
    )
    if context is None and plan.context != plan.model_context:
        logger.warning(
            "%s was made for %s tokens of context; %s fit the memory beside its experts. Set context= to choose.",
            path.name, plan.model_context, plan.context,
        )  # fmt: skip
    plan = replace(plan, model_context=opened.model_context)
    cache = ExpertCache(
        opened.modules,
        opened.layers,
        lambda: locate_experts(opened.model, opened.modules, opened.checkpoint),
        ExpertReader(opened.checkpoint.files),
    )
    try:
        cache.start_streaming(plan.slots)
        _read_trunk(opened.model, path, progress)
        tokenizer = _load_tokenizer(path, opened.config, trust_remote_code)
    except BaseException:
        cache.close()
        raise
    return LoadedModel(
        model=opened.model,
        tokenizer=tokenizer,
        config=opened.config,
        path=path,
        vocab_size=opened.vocab_size,
        plan=plan,
        kv=opened.kv,
        kv_choice=opened.kv_choice,
        experts=cache,
    )


def _asked_context(path: Path, model_context: int | None, asked: int | None) -> int | None:
    if asked is None:
        return None
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 2:
        raise MemoryBudgetError(f"context={asked!r} is no number of tokens: at least 2, for a prompt and a reply.")
    if model_context is not None and asked > model_context:
        warnings.warn(
            f"context={asked}: {path.name} was made for {model_context} tokens and may lose the thread beyond them.",
            stacklevel=4,
        )
    return asked


def _prefill_bytes(opened: OpenedModel, chunk_tokens: int, context: int | None) -> int:
    """Room for one chunk's activations, however the experts are resized later: half of them in slots, or all.

    Without a `context`: of a chunk after as many tokens as any later one attends to.
    """
    if context is None:
        seen = -(-opened.kv_choice.settled_tokens // chunk_tokens) * chunk_tokens
        context = seen + chunk_tokens + (seen > 0)  # the last token is no chunk's
    make_caches = opened.kv_choice.caches
    half = {layer.path: max(layer.top_k, layer.num_experts // 2) for layer in opened.layers}
    needs = (PrefillTransients(opened.model, opened.modules, opened.kv, slots, make_caches) for slots in (half, None))
    return max(transients.of(chunk_tokens, context) for transients in needs)


def _read_trunk(model: nn.Module, path: Path, progress: Progress | None) -> None:
    """Evaluate every weight that is still on disk: the trunk and the resident layers' experts.

    And every array that a module keeps beside its parameters (rotary frequencies and the like): one that stayed lazy
    could only be evaluated by the thread that loaded the model.
    """
    arrays = [array for _, array in tree_flatten(model.parameters())]
    total = sum(array.nbytes for array in arrays)
    done, step, step_bytes = 0, [], 0
    try:
        for array in arrays:
            step.append(array)
            step_bytes += array.nbytes
            if step_bytes >= LOAD_STEP_BYTES or array is arrays[-1]:
                mx.eval(step)
                done += step_bytes
                step, step_bytes = [], 0
                if progress is not None:
                    progress("load", done, total)
        mx.eval([[value for value in m.values() if isinstance(value, mx.array)] for m in model.modules()])
    except (RuntimeError, OSError) as error:
        raise CheckpointReadError(
            f"Reading the weights of {path} stopped after {format_bytes(done)} of {format_bytes(total)}: "
            f"{brief(error)}"
        ) from error


def _load_tokenizer(path: Path, config: dict[str, Any], trust: bool) -> TokenizerWrapper:
    try:
        return load_tokenizer(path, {"trust_remote_code": trust}, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # many libraries' errors; all mean the same to the user
        raise ModelError(f"The tokenizer of {path} cannot be loaded: {brief(error)}") from error
