"""From a model folder to a model that computes from banks: plan, banks in place, trunk in memory, tokenizer.

Expert weights are never materialised outside a slot: the experts' arrays of the lazy model are replaced by banks
before anything is evaluated, and only then is the trunk read.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from mlxmoe.errors import CheckpointReadError, MemoryBudgetError, ModelError, brief
from mlxmoe.experts.bank import ExpertBank
from mlxmoe.experts.checkpoint import ExpertReader
from mlxmoe.experts.layer import LINEAR_TYPES, ExpertStream, Passes, expert_arrays, put_bank
from mlxmoe.experts.places import locate_experts
from mlxmoe.hub import Progress
from mlxmoe.kv.choose import KVChoice
from mlxmoe.kv.settings import KVSettings
from mlxmoe.memory.plan import MoeLayer, Plan, make_plan
from mlxmoe.memory.sizes import format_bytes
from mlxmoe.opening import OpenedModel, open_folder

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 2048  # of prefill at a time: mlx-lm's own default, so that the arithmetic is the same
LOAD_STEP_BYTES = 256 * 2**20  # of trunk evaluated between two progress reports
POOL_BYTES = 64 * 2**20  # buffers that MLX keeps for reuse, and small change


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `vocab_size`: token ids it knows; the tokenizer may use fewer.

    `streams`: the streamed layers by their path; resident layers are not in it.
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    path: Path
    vocab_size: int
    plan: Plan
    layers: Sequence[MoeLayer]
    streams: Mapping[str, ExpertStream]
    passes: Passes
    reader: ExpertReader
    kv_choice: KVChoice


def load_folder(
    path: Path,
    *,
    experts: int | float | str = "auto",
    memory_bytes: int,
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
        prefill_bytes=_prefill_bytes(opened.modules, opened.layers) + _handed_bytes(opened, context or bound),
        context=context,
        model_context=bound,
        experts=experts,
        memory_bytes=memory_bytes,
    )
    if context is None and plan.context != plan.model_context:
        logger.warning(
            "%s was made for %s tokens of context; %s fit the memory beside its experts. Set context= to choose.",
            path.name, plan.model_context, plan.context,
        )  # fmt: skip
    plan = replace(plan, model_context=opened.model_context)
    reader, passes = ExpertReader(opened.checkpoint.files), Passes()
    try:
        streams = _place_banks(opened, plan, reader, passes)
        _read_trunk(opened.model, path, progress)
        tokenizer = _load_tokenizer(path, opened.config, trust_remote_code)
    except BaseException:
        reader.close()
        raise
    return LoadedModel(
        model=opened.model,
        tokenizer=tokenizer,
        config=opened.config,
        path=path,
        vocab_size=opened.vocab_size,
        plan=plan,
        layers=opened.layers,
        streams=streams,
        passes=passes,
        reader=reader,
        kv_choice=opened.kv_choice,
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


def _prefill_bytes(modules: Mapping[str, nn.Module], layers: Sequence[MoeLayer]) -> int:
    """Room for one chunk's routed activations in the widest layer, float32, and MLX's pool of freed buffers.

    For each token and each of its experts: the gathered input, every projection's output, and two more copies of the
    last one while waves are put together.
    """
    widths = []
    for layer in layers:
        linears = [m for m in modules[layer.path].children().values() if isinstance(m, LINEAR_TYPES)]
        width = sum(linear.output_dims for linear in linears) + 3 * linears[0].input_dims
        widths.append(layer.top_k * width)
    return POOL_BYTES + CHUNK_TOKENS * max(widths, default=0) * 4


def _handed_bytes(opened: OpenedModel, context: int | None) -> int:
    """Room for the rows that one layer at a time has before it beside those that are stored.

    Those of a window and a chunk, or of the whole `context` where quantised rows are handed out without a window.
    """
    settings = opened.kv_choice.settings
    if settings.lossless:
        return 0
    tokens = (context or 0) if settings.window is None else settings.window + CHUNK_TOKENS
    return tokens * opened.handed_row_bytes


def _place_banks(opened: OpenedModel, plan: Plan, reader: ExpertReader, passes: Passes) -> dict[str, ExpertStream]:
    """Give every layer that is not resident a bank instead of its arrays. Modifies the model."""
    streamed = {
        layer.path: opened.modules[layer.path]
        for layer in opened.layers
        if plan.slots[layer.path] < layer.num_experts
    }
    if not streamed:
        return {}
    places = locate_experts(opened.model, streamed, opened.checkpoint)
    for path, module in streamed.items():
        put_bank(module, ExpertBank(places[path], expert_arrays(module), plan.slots[path], reader), passes)
    return {path: module.expert_stream for path, module in streamed.items()}


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
