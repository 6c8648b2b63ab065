"""From a model folder to a model that computes from banks: config, lazy model, plan, banks, trunk in memory.

Expert weights are never materialised outside a slot: mlx-lm builds the model lazily, the experts' arrays are
replaced by banks before anything is evaluated, and only then is the trunk read. Everything of mlx-lm's loading
that is relied on enters here.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_model, load_tokenizer

from mlxmoe.errors import (
    CheckpointError,
    CheckpointReadError,
    MemoryBudgetError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from mlxmoe.experts.bank import ExpertBank
from mlxmoe.experts.checkpoint import ExpertReader
from mlxmoe.experts.layer import (
    LINEAR_TYPES,
    ExpertStream,
    Listening,
    Passes,
    expert_arrays,
    put_bank,
    switch_modules,
)
from mlxmoe.experts.places import locate_experts
from mlxmoe.experts.safetensors import Checkpoint, read_checkpoint
from mlxmoe.hub import Progress
from mlxmoe.memory.plan import KV_STEP, KVBytes, MoeLayer, Plan, make_plan
from mlxmoe.memory.sizes import format_bytes

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 2048  # of prefill at a time: mlx-lm's own default, so that the arithmetic is the same
LOAD_STEP_BYTES = 256 * 2**20  # of trunk evaluated between two progress reports
POOL_BYTES = 64 * 2**20  # buffers that MLX keeps for reuse, and small change

# How the definitions' configs call the number of routed experts.
_EXPERT_COUNT_KEYS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts",
    "moe_num_primary_experts",
)  # fmt: skip


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights are all still on disk, and its sizes. `modules`: those with experts, by path."""

    model: nn.Module
    config: dict[str, Any]
    checkpoint: Checkpoint
    modules: Mapping[str, nn.Module]
    layers: Sequence[MoeLayer]
    trunk_bytes: int
    kv: KVBytes
    vocab_size: int
    model_context: int | None


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


def load_folder(
    path: Path,
    *,
    experts: int | float | str = "auto",
    memory_bytes: int,
    context: int | None = None,
    progress: Progress | None = None,
    adapter: Path | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load the model in folder `path`, with as many expert slots as the plan for `memory_bytes` gives.

    Raises ModelError and its kin for a folder that cannot be used, MemoryBudgetError before anything large is read.
    """
    opened = open_folder(path, adapter=adapter, trust_remote_code=trust_remote_code)
    plan = make_plan(
        opened.layers,
        trunk_bytes=opened.trunk_bytes,
        kv=opened.kv,
        prefill_bytes=_prefill_bytes(opened.modules, opened.layers),
        context=_asked_context(path, opened.model_context, context),
        model_context=opened.model_context,
        experts=experts,
        memory_bytes=memory_bytes,
    )
    if context is None and plan.context != plan.model_context:
        logger.warning(
            "%s was made for %s tokens of context; %s fit the memory beside its experts. Set context= to choose.",
            path.name, plan.model_context, plan.context,
        )  # fmt: skip
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
    )


def open_folder(path: Path, *, adapter: Path | None = None, trust_remote_code: bool = False) -> OpenedModel:
    """Look at the model in folder `path` without reading a weight. Raises ModelError and its kin."""
    config = read_config(path)
    checkpoint = read_checkpoint(path)
    model, config = _build_lazily(path, config, trust_remote_code)
    modules = switch_modules(model)
    _refuse_hidden_experts(path, config, modules)
    if adapter is not None:
        _apply_adapter(model, modules, adapter)
    try:
        layers, kv, vocab = _probe(model, modules)
    except Exception as error:  # a value of the config that the definition notices only when it computes
        raise ModelError(
            f"The {config['model_type']} model of {path}/config.json cannot compute: {type(error).__name__}: "
            f"{_brief(error)}"
        ) from error
    trunk_bytes = _trunk_bytes(model, layers)
    return OpenedModel(model, config, checkpoint, modules, layers, trunk_bytes, kv, vocab, _model_context(config))


def read_config(path: Path) -> dict[str, Any]:
    """The model's `config.json`. Raises ModelNotFoundError or ModelError."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelNotFoundError(f"{path} is not a model folder: it has no config.json.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not readable JSON ({error}). Download the model again.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file} names no model_type: it is not a language model's config.")
    return config


def _build_lazily(path: Path, config: dict[str, Any], trust: bool) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model with every weight still on disk, and the config as mlx-lm completed it."""
    kind = config["model_type"]
    if config.get("model_file") and not trust:
        raise UnsupportedModelError(
            f"{path} brings its own model code ({config['model_file']}). If you trust whoever wrote it, "
            f"load it with trust_remote_code=True."
        )
    try:
        model, config = load_model(path, lazy=True, strict=True, trust_remote_code=trust)
    except ValueError as error:
        if "not supported" in str(error):
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            raise UnsupportedModelError(
                f"{path} has model type {kind}, which the installed mlx-lm does not know{cause}. "
                f"See `mlxmoe models` for those it does; a newer mlx-lm may know it."
            ) from error
        raise CheckpointError(f"The weights in {path} are not what its config.json says: {_brief(error)}") from error
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"The weights in {path} cannot be read: {_brief(error)}") from error
    except Exception as error:  # whatever a definition makes of a config or weights that it was not written for
        if isinstance(error, KeyError) and "." in str(error):
            raise CheckpointError(
                f"{path}: the weights have no tensor {error}, which {kind} needs. Download the model again."
            ) from error
        raise ModelError(
            f"mlx-lm could not build a {kind} model from {path}/config.json: {type(error).__name__}: {_brief(error)}"
        ) from error
    _refuse_wrong_dtypes(path, model)
    return model, config


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:400] + " ..."


def _refuse_wrong_dtypes(path: Path, model: nn.Module) -> None:
    """mlx-lm checks names and shapes only: a weight of another kind of number would compute nonsense."""
    for name, module in model.named_modules():
        weight = module.get("weight") if isinstance(module, dict) else None
        if not isinstance(weight, mx.array):
            continue
        packed = "scales" in module
        fits = weight.dtype == mx.uint32 if packed else mx.issubdtype(weight.dtype, mx.floating)
        if not fits:
            raise CheckpointError(
                f"{path}: {name}.weight is stored as {_dtype_name(weight.dtype)}, but the config wants "
                f"{'uint32 (packed quantised)' if packed else 'floating point'} there."
            )


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _refuse_hidden_experts(path: Path, config: dict[str, Any], modules: Mapping[str, nn.Module]) -> None:
    """A config with experts and a model without switch modules: running it as dense would read every expert."""
    sources = [config, *(value for value in config.values() if isinstance(value, dict))]
    counts = [(key, source[key]) for source in sources for key in _EXPERT_COUNT_KEYS if source.get(key)]
    if not modules and any(isinstance(count, int) and count > 1 for _, count in counts):
        key, count = counts[0]
        raise UnsupportedModelError(
            f"{path} ({config['model_type']}) says {key}={count}, but mlx-lm's definition holds its experts in no "
            f"module that can stream (SwitchGLU or SwitchMLP)."
        )


def _apply_adapter(model: nn.Module, modules: Mapping[str, nn.Module], adapter: Path) -> None:
    """Put a LoRA, DoRA or full fine-tune of trunk modules on the lazy model, by mlx-lm's own code."""
    before = {path: set(dict(tree_flatten(module.parameters()))) for path, module in modules.items()}
    try:
        named = cast(dict[str, mx.array], mx.load(str(adapter / "adapters.safetensors")))
        load_adapters(model, str(adapter))
    except Exception as error:  # files, config keys and shapes, each with an error of its own
        raise ModelError(
            f"The adapter in {adapter} cannot be put on this model: {type(error).__name__}: {_brief(error)}"
        ) from error
    model.eval()
    touched = [name for name in named if any(name.startswith(f"{path}.") for path in modules)]
    grown = [path for path, names in before.items() if set(dict(tree_flatten(modules[path].parameters()))) != names]
    if touched or grown:
        raise UnsupportedModelError(
            f"The adapter in {adapter} changes routed experts ({(touched or grown)[0]}), which are read from the "
            f"model's own files. Fuse it into the weights once with `mlx_lm.fuse`, or train one that leaves the "
            f"experts alone."
        )


def _model_context(config: Mapping[str, Any]) -> int | None:
    """Tokens, prompt and reply, that the model was made for, if its config says so."""
    text_config = config.get("text_config")
    sources = [text_config, config] if isinstance(text_config, dict) else [config]
    lengths = [s.get(key) for key in ("max_position_embeddings", "model_max_length") for s in sources]
    return next((length for length in lengths if isinstance(length, int) and length > 1), None)


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


def _probe(model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[list[MoeLayer], KVBytes, int]:
    """Each MoE layer's numbers, the KV cache's growth, and the vocabulary: read off passes never evaluated."""
    caches = []
    with Listening(dict(modules)) as heard:
        for tokens in (1, KV_STEP + 1):
            caches.append(make_prompt_cache(model))
            logits = model(mx.zeros((1, tokens), dtype=mx.int32), cache=caches[-1])
    most = max(heard.top_k.values(), default=0)
    layers = []
    for path, module in modules.items():
        arrays = expert_arrays(module)
        num_experts = next(iter(arrays.values())).shape[0]
        expert_bytes = sum(array.nbytes for array in arrays.values()) // num_experts
        layers.append(MoeLayer(path, num_experts, min(heard.top_k.get(path, most), num_experts), expert_bytes))
    return layers, _kv_bytes(*caches), int(logits.shape[-1])


def _kv_bytes(one: Sequence[Any], more: Sequence[Any]) -> KVBytes:
    """What caches take, from two sets of them that have seen 1 and 257 tokens."""
    fixed, step = 0, 0
    windows: list[tuple[int, int]] = []
    for before, after in zip(one, more, strict=True):
        if hasattr(before, "caches"):  # several caches in one layer
            inner = _kv_bytes(before.caches, after.caches)
            fixed, step, windows = fixed + inner.fixed_bytes, step + inner.step_bytes, [*windows, *inner.windows]
            continue
        first, growth = _nbytes(before), _nbytes(after) - _nbytes(before)
        fixed += first - growth
        size = getattr(before, "max_size", None) or getattr(before, "chunk_size", None)
        if size is not None:
            windows.append((-(-size // KV_STEP), growth))
        else:
            step += growth
    return KVBytes(fixed, step, tuple(windows))


def _nbytes(cache: Any) -> int:
    """A cache's bytes; an empty one may not know."""
    try:
        return int(cache.nbytes)
    except (AttributeError, TypeError, NotImplementedError):
        return sum(array.nbytes for _, array in tree_flatten(cache.state) if isinstance(array, mx.array))


def _trunk_bytes(model: nn.Module, layers: Sequence[MoeLayer]) -> int:
    everything: int = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return everything - sum(layer.nbytes for layer in layers)


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
            f"{_brief(error)}"
        ) from error


def _load_tokenizer(path: Path, config: dict[str, Any], trust: bool) -> TokenizerWrapper:
    try:
        return load_tokenizer(path, {"trust_remote_code": trust}, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # many libraries' errors; all mean the same to the user
        raise ModelError(f"The tokenizer of {path} cannot be loaded: {_brief(error)}") from error
