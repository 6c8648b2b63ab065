"""Checkpoint layouts: what lies in runs of bytes is read in place, exactly; the rest is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from definitions import DEFINITIONS
from mlx_lm.utils import load_model
from tiny import make_tiny, save

from mlxmoe import CheckpointError, UnsupportedModelError, load
from mlxmoe.decode import Decoder
from mlxmoe.experts.places import locate_experts
from mlxmoe.experts.safetensors import read_checkpoint
from mlxmoe.experts.switch import switch_modules
from mlxmoe.loading import LoadedModel, load_folder
from mlxmoe.opening import open_folder
from mlxmoe.registry import FUSED, PER_EXPERT

TOKENS = list(range(5, 60))
CHUNK = 64


def weights(folder: Path) -> dict[str, mx.array]:
    tensors = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    mx.eval(tensors)
    return tensors


def rewritten(source: Path, target: Path, change: Callable[[dict[str, mx.array]], None]) -> Path:
    """A copy of a tiny model with its tensors laid out in another way."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = weights(source)
    change(tensors)
    save(target, tensors, json.loads((source / "config.json").read_text()))
    return target


Change = Callable[[str, dict[str, mx.array]], None]  # of one module's path, and all tensors

W = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
UP_DOWN = {"fc1": "up_proj", "fc2": "down_proj"}


def per_expert(template: str, names: dict[str, str] | None = None) -> Change:
    """Hugging Face's layout: one tensor for each expert, under a name of its own."""

    def change(path: str, tensors: dict[str, mx.array]) -> None:
        parent = path.rpartition(".")[0]
        for name in [name for name in tensors if name.startswith(f"{path}.")]:
            projection, _, suffix = name.removeprefix(f"{path}.").partition(".")
            for expert, part in enumerate(tensors.pop(name)):
                place = template.format(
                    parent=parent,
                    block=parent.removesuffix(".mlp"),
                    e=expert,
                    p=(names or {}).get(projection, projection),
                )
                tensors[f"{place}.{suffix}"] = mx.contiguous(part)

    return change


def fused(gate_up: str, down: str) -> Change:
    """gate and up behind one another in one tensor, as newer Hugging Face checkpoints have them."""

    def change(path: str, tensors: dict[str, mx.array]) -> None:
        places = {"path": path, "parent": path.rpartition(".")[0]}
        gate, up, last = (tensors.pop(f"{path}.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj"))
        tensors[gate_up.format(**places)] = mx.concatenate([gate, up], axis=-2)
        tensors[down.format(**places)] = last

    return change


IN_EXPERTS = "{parent}.experts.{e}.{p}"
PER_EXPERT_CASES: dict[str, Change] = {
    **dict.fromkeys(
        (
            "Klear", "afmoe", "bailing_moe_v3", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
            "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan", "jamba", "kimi_k25", "kimi_vl",
            "laguna", "longcat_flash", "mellum", "mimo_v2_flash", "mistral3", "mistral4", "olmoe", "qwen2_moe",
            "qwen3_moe", "qwen3_next", "solar_open",
        ),
        per_expert(IN_EXPERTS),
    ),
    **dict.fromkeys(("lfm2_moe", "minimax", "minimax_m3_vl", "mixtral", "phimoe"), per_expert(IN_EXPERTS, W)),
    **dict.fromkeys(("kimi_k3", "kimi_linear"), per_expert("{block}.block_sparse_moe.experts.{e}.{p}", W)),
    "nemotron_h": per_expert(IN_EXPERTS, UP_DOWN),
    "phixtral": per_expert("{parent}.mlp.{e}.{p}"),
}  # fmt: skip
FUSED_CASES: dict[str, Change] = {
    **dict.fromkeys(("gemma4", "gemma4_text"), fused("{parent}.gate_up_proj", "{parent}.down_proj")),
    **dict.fromkeys(
        ("granitemoe", "granitemoehybrid"), fused("{parent}.input_linear.weight", "{parent}.output_linear.weight")
    ),
    **dict.fromkeys(
        ("mistral3", "mistral4", "qwen3_5_moe"), fused("{parent}.experts.gate_up_proj", "{parent}.experts.down_proj")
    ),
    "minimax_m3_vl": fused("{path}.gate_up_proj.weight", "{path}.down_proj.weight"),
}

# Definitions whose unconverted checkpoints have norms that are one less, so that these random ones are another model.
ONE_MORE = {"qwen3_next"}

# What runs: a definition, its experts' bits, and how its tensors are laid out.
CASES: list[tuple[str, str, int | None, Change]] = [
    *((name, PER_EXPERT, None, change) for name, change in PER_EXPERT_CASES.items()),
    *((name, PER_EXPERT, 4, PER_EXPERT_CASES[name]) for name in ("mixtral", "deepseek_v3", "olmoe", "phixtral")),
    *((name, FUSED, None, change) for name, change in FUSED_CASES.items()),
]


def logits(loaded: LoadedModel) -> mx.array:
    decoder = Decoder(loaded.model, loaded.experts, chunk_tokens=CHUNK)
    return decoder.logits(TOKENS, decoder.new_cache())


def with_bits(folder: Path, experts: float) -> tuple[mx.array, int]:
    """The logits with a share of the experts in memory, and the evictions it took."""
    layers = open_folder(folder).layers
    size = max(sum(layer.floor_bytes for layer in layers), round(experts * sum(layer.nbytes for layer in layers)))
    loaded = load_folder(folder, experts=size, memory_bytes=2**62, chunk_tokens=CHUNK)
    try:
        return logits(loaded), sum(c.evictions for c in loaded.experts.counters.values())
    finally:
        loaded.experts.close()


# One of each layout, with the rest where there is time: they differ in names.
QUICK_CASES = {("qwen3_moe", None), ("mixtral", 4), ("nemotron_h", None), ("phixtral", 4), ("granitemoe", None)}


@pytest.mark.parametrize(
    ("name", "layout", "bits", "change"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}, {case[1]}, {case[2]} bits",
            marks=() if (case[0], case[2]) in QUICK_CASES else pytest.mark.slow,
        )
        for case in CASES
    ],
)
def test_a_layout_of_whole_runs_is_read_in_place_exactly(
    tmp_path: Path, name: str, layout: str, bits: int | None, change: Change
) -> None:
    converted = make_tiny(tmp_path / "mlx", DEFINITIONS[name], bits=bits)
    paths = [layer.path for layer in open_folder(converted).layers]

    def lay_out(tensors: dict[str, mx.array]) -> None:
        for path in paths:
            change(path, tensors)

    other = rewritten(converted, tmp_path / "other", lay_out)
    with load_of(other) as stock:
        expected = logits(stock)
    if name not in ONE_MORE:
        assert mx.array_equal(expected, with_bits(converted, 0.5)[0]), "a checkpoint and its conversion are one model"
    for experts in (0.0, 0.6):
        found, evictions = with_bits(other, experts)
        assert mx.array_equal(found, expected)
        assert evictions > 0 or experts


@contextmanager
def load_of(folder: Path) -> Iterator[LoadedModel]:
    """The model whole, as mlx-lm itself reads it."""
    loaded = load_folder(folder, experts="all", memory_bytes=2**62, chunk_tokens=CHUNK)
    assert not loaded.experts.streams
    yield loaded
    loaded.experts.close()


def test_prefixed_names_are_read_in_place(tmp_path: Path) -> None:
    converted = make_tiny(tmp_path / "mlx", DEFINITIONS["qwen3_5_moe"])

    def without_prefix(tensors: dict[str, mx.array]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("language_model.")] = tensors.pop(name)

    other = rewritten(converted, tmp_path / "other", without_prefix)
    with load(other, experts="all") as whole, load(other, experts="25%") as engine:
        assert mx.array_equal(engine.logits(TOKENS), whole.logits(TOKENS))


def test_shards_may_cut_a_layer_and_need_no_index(tmp_path: Path) -> None:
    converted = make_tiny(tmp_path / "mlx")
    tensors = weights(converted)
    other = rewritten(converted, tmp_path / "other", lambda tensors: None)
    (other / "model.safetensors").unlink()
    for shard in range(5):
        part = dict(sorted(tensors.items())[shard::5])
        mx.save_safetensors(str(other / f"model-{shard + 1:05}-of-00005.safetensors"), part)
    with load(converted, experts="all") as whole, load(other, experts="25%") as engine:
        assert mx.array_equal(engine.logits(TOKENS), whole.logits(TOKENS))


def fused_and_transposed(tensors: dict[str, mx.array]) -> None:
    for name in [name for name in tensors if name.endswith("switch_mlp.gate_proj.weight")]:
        prefix = name.removesuffix("switch_mlp.gate_proj.weight")
        gate, up = tensors.pop(name), tensors.pop(f"{prefix}switch_mlp.up_proj.weight")
        tensors[f"{prefix}experts.gate_up_proj"] = mx.contiguous(mx.concatenate([gate, up], axis=-2).swapaxes(-1, -2))
        down = tensors.pop(f"{prefix}switch_mlp.down_proj.weight")
        tensors[f"{prefix}experts.down_proj"] = mx.contiguous(down.swapaxes(-1, -2))


def interleaved(tensors: dict[str, mx.array]) -> None:
    """gpt-oss as published: the rows of gate and up by turns; its mxfp4 weights in blocks of bytes."""
    for name in [name for name in tensors if ".experts.gate_proj." in name]:
        leaf = name.rpartition(".")[2]
        prefix = name.removesuffix(f"gate_proj.{leaf}")
        gate, up = tensors.pop(name), tensors.pop(f"{prefix}up_proj.{leaf}")
        both = mx.stack([gate, up], axis=2).reshape(gate.shape[0], 2 * gate.shape[1], *gate.shape[2:])
        as_published = {"weight": "_blocks", "scales": "_scales", "bias": "_bias"}[leaf]
        for projection, array in (("gate_up_proj", both), ("down_proj", tensors.pop(f"{prefix}down_proj.{leaf}"))):
            if leaf == "weight":
                array = mx.unflatten(array.view(mx.uint8), -1, (-1, 16))
            tensors[f"{prefix}{projection}{as_published}"] = array


def fp8_blocks(tensors: dict[str, mx.array]) -> None:
    per_expert(IN_EXPERTS)("model.layers.1.mlp.switch_mlp", tensors)
    per_expert(IN_EXPERTS)("model.layers.2.mlp.switch_mlp", tensors)
    for name in [name for name in tensors if ".mlp.experts." in name and name.endswith(".weight")]:
        tensors[name] = mx.to_fp8(tensors[name])
        tensors[f"{name}_scale_inv"] = mx.ones((1, 1))


REFUSED_LAYOUTS: dict[str, tuple[str, dict[str, object] | None, Callable[[dict[str, mx.array]], None], str]] = {
    "transposed": ("qwen3_vl_moe", None, fused_and_transposed, "transposed"),
    "interleaved": ("gpt_oss", {"bits": 4, "group_size": 32, "mode": "mxfp4"}, interleaved, "in mxfp4 blocks"),
    "fp8": ("deepseek_v3", None, fp8_blocks, "in blocks of fp8"),
}


@pytest.mark.parametrize("name", REFUSED_LAYOUTS)
def test_a_layout_that_is_no_run_of_bytes_is_refused_by_name_before_it_is_read(tmp_path: Path, name: str) -> None:
    definition, quantization, change, says = REFUSED_LAYOUTS[name]
    converted = make_tiny(tmp_path / "mlx", DEFINITIONS[definition], quantization=quantization)
    other = rewritten(converted, tmp_path / "other", change)
    load_folder(other, experts="all", memory_bytes=2**62).experts.close()  # the layout is one that mlx-lm reads
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with pytest.raises(
        UnsupportedModelError, match=rf"{says}.*mlx_lm\.convert --hf-path {other} --mlx-path other-mlx"
    ):
        load(other, experts="50%")
    expert_bytes = sum(layer.nbytes for layer in open_folder(converted).layers)
    assert mx.get_peak_memory() - before < expert_bytes, "nothing large was read"


def test_packed_integers_are_refused_by_name(tmp_path: Path) -> None:
    converted = make_tiny(tmp_path / "mlx", DEFINITIONS["mixtral"], bits=4)

    def pack(tensors: dict[str, mx.array]) -> None:
        for name in [name for name in tensors if ".switch_mlp." in name and name.endswith(".weight")]:
            tensors[name.removesuffix("weight") + "qweight"] = tensors.pop(name)

    packed = read_checkpoint(rewritten(converted, tmp_path / "other", pack))
    model, _ = load_model(converted, lazy=True)
    with pytest.raises(UnsupportedModelError, match="packed integers"):
        locate_experts(model, switch_modules(model), packed)


def test_a_gguf_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    (tmp_path / "model-Q4_K_M.gguf").touch()
    with pytest.raises(CheckpointError, match=r"GGUF.*mlx_lm\.convert"):
        load(tmp_path)
