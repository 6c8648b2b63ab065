"""Model types: the definitions of mlx-lm with routed experts that this project's tests hold to stock, a line each.

The definitions are mlx-lm's own, and whatever is built of its SwitchGLU or SwitchMLP modules can stream: the table
says what was checked, not what is allowed. Knows names only; runs no model.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType

from mlxmoe.errors import UnsupportedModelError

MLX = "MLX"  # experts stacked, as mlx_lm.convert writes them
PER_EXPERT = "one tensor an expert"  # as most of the Hugging Face hub has them
FUSED = "fused halves"  # stacked, with gate and up behind one another in one tensor


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One definition. `model_type`: its file in mlx-lm, and mostly what config.json says.

    `traits`: what it has beside routed experts. `aliases`: other model types in config.json that lead to it.
    `layouts`: which checkpoint layouts the tests read in place. `together`: whether texts can be decoded in one
    batch, each as if it were alone.
    """

    model_type: str
    traits: str = ""
    aliases: tuple[str, ...] = ()
    layouts: tuple[str, ...] = (MLX,)
    together: bool = True


# Checked in every test run: bit-identical to stock at one token's need, half-way and whole, in prefill and in decode.
SPECS = (
    ModelSpec("Klear", "shared experts, dense layers", (), (MLX, PER_EXPERT)),
    ModelSpec("afmoe", "groups of experts, windows, gated attention", (), (MLX, PER_EXPERT)),
    ModelSpec("bailing_hybrid", "lightning and latent attention by turns"),
    ModelSpec("bailing_moe", "groups of experts, shared experts, biases"),
    ModelSpec("bailing_moe_linear", "linear attention, groups of experts"),
    ModelSpec("bailing_moe_v3", "delta attention, groups of experts", (), (MLX, PER_EXPERT)),
    ModelSpec("deepseek", "shared experts, a dense first layer", (), (MLX, PER_EXPERT)),
    ModelSpec("deepseek_v2", "latent attention, groups of experts", (), (MLX, PER_EXPERT)),
    ModelSpec(
        "deepseek_v3", "latent attention, groups of experts", ("joyai_llm_flash", "kimi_k2"), (MLX, PER_EXPERT)
    ),
    ModelSpec("deepseek_v32", "sparse latent attention", (), (MLX, PER_EXPERT)),
    ModelSpec(
        "deepseek_v41",
        "compressed and sparse attention, several residual streams",
        ("deepseek_v41_text",),
        together=False,
    ),
    ModelSpec("dots1", "shared experts, groups of experts", (), (MLX, PER_EXPERT)),
    ModelSpec("ernie4_5_moe", "shared experts, dense layers"),
    ModelSpec("exaone_moe", "windows, groups of experts", (), (MLX, PER_EXPERT)),
    ModelSpec("gemma4", "wrapper of gemma4_text", ("gemma4_unified",), (MLX, FUSED)),
    ModelSpec("gemma4_text", "experts beside a dense block, windows, shared KV", (), (MLX, FUSED)),
    ModelSpec("glm4_moe", "groups of experts, shared experts", (), (MLX, PER_EXPERT)),
    ModelSpec("glm4_moe_lite", "latent attention", (), (MLX, PER_EXPERT)),
    ModelSpec("glm_moe_dsa", "sparse latent attention", (), (MLX, PER_EXPERT)),
    ModelSpec("gpt_oss", "biases in the experts, attention sinks, windows"),
    ModelSpec("granitemoe", "scaled embeddings, residuals and logits", (), (MLX, FUSED)),
    ModelSpec("granitemoehybrid", "Mamba 2 and attention", (), (MLX, FUSED)),
    ModelSpec("hunyuan", "top-k and width differ by layer, shared KV", (), (MLX, PER_EXPERT)),
    ModelSpec("jamba", "Mamba and attention by turns", (), (MLX, PER_EXPERT)),
    ModelSpec("kimi_k25", "wrapper of deepseek_v3", (), (MLX, PER_EXPERT)),
    ModelSpec("kimi_k3", "delta attention, experts narrower than the model", (), (MLX, PER_EXPERT)),
    ModelSpec("kimi_linear", "delta and latent attention by turns", (), (MLX, PER_EXPERT)),
    ModelSpec("kimi_vl", "wrapper of deepseek_v3", (), (MLX, PER_EXPERT)),
    ModelSpec("laguna", "heads differ by layer, windows, a shared expert", (), (MLX, PER_EXPERT)),
    ModelSpec("lfm2_moe", "short convolutions and attention", (), (MLX, PER_EXPERT)),
    ModelSpec("llama4", "one expert a token, chunked attention", together=False),
    ModelSpec("longcat_flash", "experts that do nothing, latent attention", (), (MLX, PER_EXPERT)),
    ModelSpec("longcat_flash_ngram", "longcat_flash with embeddings of several tokens"),
    ModelSpec("mellum", "windows", (), (MLX, PER_EXPERT)),
    ModelSpec("mimo_v2_flash", "windows with sinks", (), (MLX, PER_EXPERT)),
    ModelSpec("minimax", "a bias on the choice of experts", ("minimax_m2",), (MLX, PER_EXPERT)),
    ModelSpec(
        "minimax_m3_vl", "block-sparse attention, a shared expert", (), (MLX, PER_EXPERT, FUSED), together=False
    ),
    ModelSpec("mistral3", "wrapper of mistral4", ("llava",), (MLX, PER_EXPERT, FUSED)),
    ModelSpec("mistral4", "latent attention", (), (MLX, PER_EXPERT, FUSED)),
    ModelSpec("mixtral", "", (), (MLX, PER_EXPERT)),
    ModelSpec("muse_spark", "experts narrower than the model, windows; its Metal kernels were stood in for"),
    ModelSpec("nemotron_h", "Mamba 2, attention and experts a layer each, two-matrix experts", (), (MLX, PER_EXPERT)),
    ModelSpec("olmoe", "query and key norms", (), (MLX, PER_EXPERT)),
    ModelSpec("phimoe", "long rotations, biases", (), (MLX, PER_EXPERT)),
    ModelSpec("phixtral", "two-matrix experts with biases", ("phi-msft",), (MLX, PER_EXPERT)),
    ModelSpec("prism_hadamard_qwen35", "Qwen3.5 with rotated 2-bit layers"),
    ModelSpec("qwen2_moe", "a gated shared expert", (), (MLX, PER_EXPERT)),
    ModelSpec("qwen3_5", "gated delta rule and attention"),
    ModelSpec("qwen3_5_moe", "gated delta rule and attention", (), (MLX, FUSED)),
    ModelSpec("qwen3_moe", "dense layers where asked", (), (MLX, PER_EXPERT)),
    ModelSpec("qwen3_next", "gated delta rule and attention, a gated shared expert", (), (MLX, PER_EXPERT)),
    ModelSpec("qwen3_vl_moe", "wrapper of qwen3_moe"),
    ModelSpec("solar_open", "as glm4_moe", (), (MLX, PER_EXPERT)),
    ModelSpec("step3p5", "windows, gated heads, clipped activations"),
)


def find_spec(model_type: str) -> ModelSpec | None:
    """The line for a config's model type, or None: then it is not yet checked."""
    return next((spec for spec in SPECS if model_type == spec.model_type or model_type in spec.aliases), None)


def decodes_together(model_type: str) -> bool:
    """Whether texts of this model type were found right in one batch; False for one that was not checked."""
    spec = find_spec(model_type)
    return spec is not None and spec.together


def register(model_type: str, module: ModuleType) -> None:
    """Let mlx-lm, and so `load`, find a definition of your own: a module with `Model` and `ModelArgs` as mlx-lm has.

    It takes the place in `mlx_lm.models` that mlx-lm looks in, so that stock mlx-lm (and `verify`) find it too. Its
    experts stream if they are SwitchGLU or SwitchMLP modules. Raises UnsupportedModelError for a module without the
    two classes, and for a name that mlx-lm has already.
    """
    missing = [name for name in ("Model", "ModelArgs") if not hasattr(module, name)]
    if missing:
        raise UnsupportedModelError(
            f"{module.__name__} has no {' and no '.join(missing)}: a definition is a module with Model and ModelArgs."
        )
    place = f"mlx_lm.models.{model_type}"
    known = sys.modules.get(place)
    if known is not module and (known is not None or importlib.util.find_spec(place) is not None):
        raise UnsupportedModelError(f"There is a definition of model type {model_type} already. Take another name.")
    sys.modules[place] = module


def markdown_table() -> str:
    """SPECS as README shows them."""
    lines = ["| model type | what it has beside routed experts | read in place |", "| --- | --- | --- |"]
    for spec in SPECS:
        names = ", ".join(f"`{name}`" for name in (spec.model_type, *spec.aliases))
        lines.append(f"| {names} | {spec.traits} | {', '.join(spec.layouts)} |")
    return "\n".join(lines) + "\n"
