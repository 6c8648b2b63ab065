"""Looking at a model folder without reading a weight: config, lazy model, adapter, and every size the plan needs.

mlx-lm builds the model with all its weights still on disk; sizes are read off forward passes that are never
evaluated. What of mlx-lm's building of models is relied on enters here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_adapters, load_model

from mlxmoe.errors import CheckpointError, MlxMoeError, ModelError, ModelNotFoundError, UnsupportedModelError, brief
from mlxmoe.experts.safetensors import Checkpoint, read_checkpoint
from mlxmoe.experts.switch import Listening, expert_arrays, switches_of
from mlxmoe.growth import kv_growth
from mlxmoe.kv.choose import KVChoice, choose
from mlxmoe.kv.settings import KVSettings
from mlxmoe.memory.experts import MoeLayer
from mlxmoe.memory.plan import KVBytes
from mlxmoe.tree import Tree

# How the definitions' configs call the number of routed experts.
_EXPERT_COUNT_KEYS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts",
    "moe_num_primary_experts",
)  # fmt: skip


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights are all still on disk, and its sizes. `modules`: those with experts, by path.

    `classes`: those of all its modules, and of its arguments.
    `shapes_digest`: of its weights' names, shapes and dtypes. `kv`: what its caches take, as `kv_choice` makes them.
    """

    model: nn.Module
    config: dict[str, Any]
    checkpoint: Checkpoint
    modules: Mapping[str, nn.Module]
    classes: frozenset[type]
    layers: Sequence[MoeLayer]
    trunk_bytes: int
    shapes_digest: str
    kv: KVBytes
    vocab_size: int
    model_context: int | None
    kv_choice: KVChoice


def open_folder(
    path: Path,
    *,
    adapter: Path | None = None,
    trust_remote_code: bool = False,
    kv_settings: KVSettings = KVSettings(),  # noqa: B008  # frozen
) -> OpenedModel:
    """Look at the model in folder `path` without reading a weight. Raises ModelError and its kin."""
    config = read_config(path)
    checkpoint = read_checkpoint(path)
    model, config = _build_lazily(path, config, trust_remote_code)
    tree = Tree.of(model)
    modules = switches_of(tree.modules)
    _refuse_hidden_experts(path, config, modules)
    _refuse_wrong_dtypes(path, tree.parameters)
    if adapter is not None:
        _apply_adapter(model, modules, adapter)
        tree = Tree.of(model)
        _refuse_wrong_dtypes(adapter, tree.parameters)
    try:
        context = _model_context(config)
        layers, kv, vocab, kv_choice = _probe(model, modules, kv_settings, context)
    except MlxMoeError:
        raise
    except Exception as error:  # a value of the config that the definition notices only when it computes
        raise ModelError(
            f"The {config['model_type']} model of {path}/config.json cannot compute: {type(error).__name__}: "
            f"{brief(error)}"
        ) from error
    trunk_bytes = sum(array.nbytes for array in tree.parameters.values()) - sum(layer.nbytes for layer in layers)
    return OpenedModel(
        model=model,
        config=config,
        checkpoint=checkpoint,
        modules=modules,
        classes=frozenset({type(getattr(model, "args", None)), *map(type, tree.modules.values())}),
        layers=layers,
        trunk_bytes=trunk_bytes,
        shapes_digest=_shapes_digest(tree.parameters),
        kv=kv,
        vocab_size=vocab,
        model_context=context,
        kv_choice=kv_choice,
    )


def read_config(path: Path) -> dict[str, Any]:
    """The model's `config.json`. Raises ModelNotFoundError or ModelError."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelNotFoundError(f"{path} is not a model folder: it has no config.json.")
    return read_config_file(file)


def read_config_file(file: Path) -> dict[str, Any]:
    """A model's config, whatever the file is called. Raises ModelError."""
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
    with definition_errors(path, kind):
        model, config = load_model(path, lazy=True, strict=True, trust_remote_code=trust)
    return model, config


@contextmanager
def definition_errors(path: Path, kind: str) -> Iterator[None]:
    """Within this context, what mlx-lm raises while it builds a `kind` model from `path` becomes a ModelError."""
    try:
        yield
    except ValueError as error:
        if "not supported" in str(error):
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            raise UnsupportedModelError(
                f"{path} has model type {kind}, which the installed mlx-lm does not know{cause}. "
                f"See `mlxmoe models` for those it does; a newer mlx-lm may know it."
            ) from error
        raise CheckpointError(f"The weights in {path} are not what its config.json says: {brief(error)}") from error
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"The weights in {path} cannot be read: {brief(error)}") from error
    except Exception as error:  # whatever a definition makes of a config or weights that it was not written for
        if isinstance(error, KeyError) and "." in str(error):
            raise CheckpointError(
                f"{path}: the weights have no tensor {error}, which {kind} needs. Download the model again."
            ) from error
        raise ModelError(
            f"mlx-lm could not build a {kind} model from {path}/config.json: {type(error).__name__}: {brief(error)}"
        ) from error


def _shapes_digest(weights: Mapping[str, mx.array]) -> str:
    names: dict[mx.Dtype, str] = {}  # MLX takes its time to say one
    digest = hashlib.sha256()
    for path, array in weights.items():
        dtype = array.dtype
        digest.update(f"{path} {array.shape} {names.get(dtype) or names.setdefault(dtype, str(dtype))}\n".encode())
    return digest.hexdigest()


def _refuse_wrong_dtypes(path: Path, weights: Mapping[str, mx.array]) -> None:
    """mlx-lm checks names and shapes only: a weight of another kind of number would compute nonsense."""
    for name, weight in weights.items():
        module, _, own = name.rpartition(".")
        if own != "weight":
            continue
        packed = f"{module}.scales" in weights
        fits = weight.dtype == mx.uint32 if packed else mx.issubdtype(weight.dtype, mx.floating)
        if not fits:
            raise CheckpointError(
                f"{path}: {name} is stored as {_dtype_name(weight.dtype)}, but the config wants "
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
    if not (adapter / "adapters.safetensors").is_file():
        raise ModelNotFoundError(f"{adapter} is no adapter's folder: it has no adapters.safetensors.")
    before = {path: set(dict(tree_flatten(module.parameters()))) for path, module in modules.items()}
    try:
        named = cast(dict[str, mx.array], mx.load(str(adapter / "adapters.safetensors")))
        load_adapters(model, str(adapter))
    except Exception as error:  # files, config keys and shapes, each with an error of its own
        raise ModelError(
            f"The adapter in {adapter} cannot be put on this model: {type(error).__name__}: {brief(error)}"
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


def _probe(
    model: nn.Module, modules: Mapping[str, nn.Module], kv_settings: KVSettings, context: int | None
) -> tuple[list[MoeLayer], KVBytes, int, KVChoice]:
    """Each MoE layer's numbers, the KV cache's growth, the vocabulary, the caches: from passes never evaluated."""
    with Listening(dict(modules)) as heard:
        kv_choice = choose(model, kv_settings, context)
        caches = kv_choice.caches(model)
        logits = model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
        kv = kv_growth(model, kv_choice.caches, caches)
    most = max(heard.top_k.values(), default=0)
    layers = []
    for path, module in modules.items():
        arrays = expert_arrays(module)
        num_experts = next(iter(arrays.values())).shape[0]
        expert_bytes = sum(array.nbytes for array in arrays.values()) // num_experts
        layers.append(MoeLayer(path, num_experts, min(heard.top_k.get(path, most), num_experts), expert_bytes))
    return layers, kv, int(logits.shape[-1]), kv_choice
