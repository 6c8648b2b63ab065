"""Makes random MoE checkpoints of any size, of mlx-lm's qwen3_moe: `make_synthetic.py FOLDER`.

For tests and benchmarks that need bytes in the right places and sane numbers, not sense. Owns the presets,
the configs and the random weights; writing is checkpoint_writer's.

qwen3_moe is the only type today. Another is one more entry in TYPES, under the name of its module in
mlx_lm.models: a function from Sizes to its config, the pattern of its stacked expert tensors, and the name
that one expert's tensor has in Hugging Face's checkpoints.
"""

import argparse
import importlib
import re
import shutil
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from checkpoint_writer import FolderError, new_folder, write_json, write_weights
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from transformers import AutoTokenizer

DEMO = Path(__file__).resolve().parent.parent / "mlxmoe" / "demo"
RESIDUAL = ("o_proj", "down_proj")  # modules whose output is added to the residual stream
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


@dataclass(frozen=True)
class Sizes:
    """What is asked for; the defaults are the preset `bench`: 512 experts of 246 kB in 4 bits."""

    layers: int = 8
    experts: int = 64
    top_k: int = 8
    hidden: int = 512
    intermediate: int = 256  # of one expert
    heads: int = 8
    kv_heads: int = 2
    vocab: int | None = None  # None: the tokenizer's, rounded up to a multiple of 64
    bits: int | None = 4  # None: float32
    group_size: int = 64
    shards: int = 4
    seed: int = 0
    neighbours: float = 0.0  # correlation of the embeddings of tokens t and t + 1: they share experts accordingly

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"--top-k {self.top_k} must lie between 1 and --experts {self.experts}.")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"--hidden {self.hidden}, --heads {self.heads}, --kv-heads {self.kv_heads}: "
                "each must divide by the next."
            )
        if not 0 <= self.neighbours < 1:
            raise ValueError(f"--neighbours {self.neighbours} must lie between 0 and 1.")
        for name in ("hidden", "intermediate"):
            if self.bits is not None and getattr(self, name) % self.group_size:
                raise ValueError(f"--{name} {getattr(self, name)} must divide by --group-size {self.group_size}.")


PRESETS = {
    "bench": Sizes(),
    "1gb": Sizes(layers=16, hidden=1024, intermediate=512, heads=16, kv_heads=4),
}


# --- definitions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """One mlx-lm model type: its config, and the Hugging Face name of one expert's tensor.

    `stacked` matches the path of a stacked expert tensor; `single` is a template for `re.Match.expand`
    in which `{expert}` becomes the expert's number.
    """

    config: Callable[[Sizes], dict]
    stacked: re.Pattern[str]
    single: str


def qwen3_moe_config(sizes: Sizes) -> dict:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.intermediate * sizes.top_k,
        "moe_intermediate_size": sizes.intermediate,
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.hidden // sizes.heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }


TYPES = {
    "qwen3_moe": Definition(
        config=qwen3_moe_config,
        stacked=re.compile(r"(.+\.mlp)\.switch_mlp\.(\w+)\.weight"),
        single=r"\1.experts.{expert}.\2.weight",
    ),
}


# --- weights ----------------------------------------------------------------------------------------------


def random_weights(model: nn.Module, seed: int, neighbours: float = 0.0) -> list[tuple[str, mx.array]]:
    """A lazy float32 array for each of the model's parameters; a name and a seed always give the same one."""
    layers = len(model.layers)
    weights = {name: random_array(name, a.shape, layers, seed) for name, a in tree_flatten(model.parameters())}
    if neighbours:
        (name,) = (name for name in weights if "embed_tokens" in name)
        weights[name] = correlated(weights[name], neighbours)
    return list(weights.items())


def correlated(rows: mx.array, correlation: float) -> mx.array:
    """Rows of the same variance of which each correlates with the next (a first-order autoregression)."""
    chain = np.array(rows)
    for row in range(1, len(chain)):
        chain[row] = correlation * chain[row - 1] + (1 - correlation**2) ** 0.5 * chain[row]
    return mx.array(chain)


def random_array(name: str, shape: tuple[int, ...], layers: int, seed: int) -> mx.array:
    """Ones for vectors (norms); matrices are uniform, of the variance that keeps numbers near 1.

    Embeddings have variance 1 and what is added to the residual stream is scaled down by the depth (as in
    GPT-2). Without these two the tokens grow alike from layer to layer and share their experts.
    """
    if len(shape) == 1:
        return mx.ones(shape)
    variance = 1.0 if "embed" in name else 1 / shape[-1]
    if name.removesuffix(".weight").endswith(RESIDUAL):
        variance /= 2 * layers
    bound = (3 * variance) ** 0.5
    return mx.random.uniform(-bound, bound, shape, key=mx.random.key(zlib.crc32(f"{seed}/{name}".encode())))


def split_experts(tensors: dict[str, mx.array], definition: Definition) -> dict[str, mx.array]:
    """The same tensors with each stacked one [E, ...] cut into one tensor per expert."""
    split = {}
    for name, array in tensors.items():
        match = definition.stacked.fullmatch(name)
        if match is None:
            split[name] = array
            continue
        template = match.expand(definition.single)
        split |= {template.format(expert=e): array[e] for e in range(array.shape[0])}
    return split


def build(folder: Path, model_type: str, sizes: Sizes, layout: str, tokenizer_ids: dict) -> int:
    """Write config.json and the weights into `folder`; return their bytes. Arrays are lazy until written."""
    definition = TYPES[model_type]
    config = {"model_type": model_type, "vocab_size": sizes.vocab, "torch_dtype": "float32"}
    config |= tokenizer_ids | definition.config(sizes)
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.load_weights(random_weights(model, sizes.seed, sizes.neighbours), strict=True)
    if sizes.bits is not None:
        model, config = quantize_model(model, config, sizes.group_size, sizes.bits)
    tensors = dict(tree_flatten(model.parameters()))
    del model
    if layout == "per-expert":
        tensors = split_experts(tensors, definition)
    write_json(folder / "config.json", config)
    return write_weights(folder, tensors, shards=sizes.shards)


# --- the tokenizer ----------------------------------------------------------------------------------------


def copy_tokenizer(source: Path, folder: Path) -> tuple[int, dict]:
    """Copy the tokenizer's files; return how many tokens it has, and its special ids for config.json."""
    if not (source / "tokenizer.json").exists():
        raise FileNotFoundError(f"{source} has no tokenizer.json; give --tokenizer FOLDER.")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return len(tokenizer), {key: value for key, value in ids.items() if value is not None}


def fitting_vocab(asked: int | None, tokens: int) -> int:
    if asked is None:
        return -(-tokens // 64) * 64
    if asked < tokens:
        raise ValueError(f"--vocab {asked} does not cover the tokenizer's {tokens} tokens.")
    return asked


# --- the command ------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--type", choices=sorted(TYPES), default="qwen3_moe")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="bench", help="what no option says")
    parser.add_argument(
        "--layout",
        choices=("mlx", "per-expert"),
        default="mlx",
        help="per-expert: one float32 tensor per expert, as Hugging Face has it",
    )
    for field in fields(Sizes):
        kind = {"bits": parse_bits, "neighbours": float}.get(field.name, int)
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, default=DEMO, help="model folder to copy it from")
    parser.add_argument("--force", action="store_true", help="replace a model folder that is there")
    return parser.parse_args(arguments)


def parse_bits(text: str) -> int | None:
    return None if text == "none" else int(text)


def chosen_sizes(options: argparse.Namespace) -> Sizes:
    """The preset, changed by the options that were given."""
    given = {field.name: getattr(options, field.name) for field in fields(Sizes) if hasattr(options, field.name)}
    if options.layout == "per-expert" and given.setdefault("bits", None) is not None:
        raise ValueError("--layout per-expert is not quantised: leave --bits out.")
    return Sizes(**(vars(PRESETS[options.preset]) | given))


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    start = time.perf_counter()
    try:
        sizes = chosen_sizes(options)
        with new_folder(options.folder, force=options.force) as folder:
            tokens, ids = copy_tokenizer(options.tokenizer, folder)
            sizes = Sizes(**(vars(sizes) | {"vocab": fitting_vocab(sizes.vocab, tokens)}))
            written = build(folder, options.type, sizes, options.layout, ids)
    except (FolderError, OSError, ValueError) as error:
        print(f"make_synthetic: {error}", file=sys.stderr)
        return 1
    seconds, peak = time.perf_counter() - start, mx.get_peak_memory()
    print(f"{options.folder}: {written / 1e9:.3f} GB, {seconds:.0f} s, peak {peak / 1e6:.0f} MB in MLX")
    return 0


if __name__ == "__main__":
    sys.exit(main())
