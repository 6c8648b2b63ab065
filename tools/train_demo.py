"""Trains the built-in demo model, a small bilingual Mixture-of-Experts, into an mlx-lm checkpoint.

Owns the command, the export to mlx-lm, and the model card. Text, model, training and measuring are of
demo_text, demo_model, demo_training and demo_measure. None of them knows the package: PyTorch trains; mlx-lm
defines, quantises, saves and measures.

    python tools/train_demo.py        # about an hour on two cores; the same seed gives the same weights
    python tools/train_demo.py --steps 60 --out demo-try
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import torch
from demo_measure import SAMPLE_TOKENS, Measured, measure
from demo_model import GROUP, SHAPE, DemoModel
from demo_text import CONTEXT, EOT, Data, make_data
from demo_training import Recipe, train
from mlx_lm.models import qwen3_moe
from mlx_lm.utils import quantize_model, save_config, save_model
from tokenizers import Tokenizer

MOST_BYTES = 6_000_000  # of the whole folder


def export(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes `model` into `folder` as an mlx-lm checkpoint of 4 bits with float32 scales."""
    stock = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(SHAPE))
    weights = [(n.replace("__", "."), mx.array(p.detach().numpy())) for n, p in model.named_parameters()]
    stock.load_weights(weights)
    stock, config = quantize_model(stock, dict(SHAPE), GROUP, 4)
    save_model(folder, stock)
    save_config(config, folder / "config.json")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


CARD = """\
---
language: [en, es]
library_name: mlx
pipeline_tag: text-generation
tags: [mlx, mixture-of-experts]
---

# The built-in demo model of mlxmoe

A Mixture-of-Experts language model small enough to live in the package, so that everything can be tried and
tested without a download. It writes in the manner of its two books, in English and in Spanish, and knows
nothing else: it is no assistant and has no chat template.

It was made from nothing by `tools/train_demo.py`:

    python tools/train_demo.py --seed {seed} --steps {steps} --threads {threads}

The same seed, steps and threads give the same weights on the same kind of processor with the same libraries
({versions}).

## Data

| text | Debian packages | bytes trained on | tokens | chapters held out |
| --- | --- | --- | --- | --- |
{data}

Both texts are in the public domain according to the copyright files of those packages: "The copyright for
the King James Version text of the Bible is expired", and of the Spanish one: "This work is not copyrighted.
It is in the Public Domain." Each chapter is its heading, an empty line and one verse a line, without verse
numbers, then `{eot}`. In the Spanish text the numbers of a concordance were left out, and the capitals that
open a chapter made small. {held_out:.0%} of each book's chapters, drawn by the seed, were seen neither in
training nor by the tokenizer.

## Model

`qwen3_moe` of mlx-lm: {num_hidden_layers} layers, all MoE, of {num_experts} experts, {num_experts_per_tok}
for each token; width {hidden_size}, {moe_intermediate_size} in an expert; {num_attention_heads} heads
({num_key_value_heads} for keys and values) of {head_dim}; tied embeddings. {params_m:.2f} M parameters, of
which a token uses {active_m:.2f} M. Byte-level BPE of {vocab_size} tokens with all 256 bytes among them, so
any UTF-8 text comes back as it was. Affine 4 bits in groups of {group} (routers: 8 bits); scales, biases
and norms in float32. {size_mb:.2f} MB with tokenizer and this card.

## Training

{steps} steps of {batch} windows of {max_position_embeddings} tokens ({tokens_m:.1f} M tokens),
{english_share:.0%} of them English; half of the windows begin where a verse begins. Muon for attention and
experts (rate {matrix_lr}), AdamW for the rest (rate {other_lr}), weight decay {weight_decay}, gradients
clipped at {clip}; {warmup_steps} steps of warm-up, half a cosine down to zero over the last {decay_steps}
steps. Load-balancing loss {balance} a layer. The last {rounded_steps} steps compute with the weights as 4
bits store them, so that little is lost by storing them so. Mean loss of the last 100 steps: {loss:.3f} nats
a token.

## Held-out bits per byte

| | float32 | 4 bits, as stored |
| --- | --- | --- |
{bits}

Windows of {max_position_embeddings} tokens overlap by half, each token is counted once; the stored model is
measured by mlx-lm. On the held-out text {load} (equal would be {equal:.2%}).

## Samples

Temperature 0.7, seed 0, {sample_tokens} tokens, no second try:

{samples}
"""


def card(recipe: Recipe, data: Data, measured: Measured, loss: float, size_bytes: int) -> str:
    """The model card; `loss` is the training's last, `size_bytes` that of the whole folder."""
    rows = [
        f"| {t.title} | `{t.packages}` | {sum(len(c.encode()) for c in t.train):,} | {len(s.tokens):,} "
        f"| {len(t.held_out)} of {len(t.held_out) + len(t.train)} |"
        for t, s in zip(data.texts, data.streams, strict=True)
    ]
    pairs = zip(data.texts, measured.bits, strict=True)
    bits = [f"| {text.title} | {full:.3f} | {stored:.3f} |" for text, (full, stored) in pairs]
    quoted = ["\n".join(f"> {line}  " for line in sample.splitlines()) for sample in measured.samples]
    rest = {
        "eot": EOT,
        "group": GROUP,
        "equal": 1 / SHAPE["num_experts"],
        "sample_tokens": SAMPLE_TOKENS,
        "tokens_m": recipe.steps * recipe.batch * CONTEXT / 1e6,
        "versions": ", ".join(f"{name} {version(name)}" for name in ("torch", "mlx", "mlx-lm", "tokenizers")),
        "params_m": measured.parameters / 1e6,
        "active_m": measured.active / 1e6,
        "load": measured.load,
        "loss": loss,
        "size_mb": size_bytes / 1e6,
        "data": "\n".join(rows),
        "bits": "\n".join(bits),
        "samples": "\n\n".join(quoted),
    }
    return CARD.format(**{**SHAPE, **asdict(recipe), **rest})


def publish(model: DemoModel, data: Data, recipe: Recipe, loss: float, out: Path) -> None:
    """Stores, measures and describes `model` in a folder beside `out`, then moves the files into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        folder = Path(name)
        export(model, data.tokenizer, folder)
        measured = measure(model, data.exams, folder)
        size = sum(f.stat().st_size for f in folder.iterdir())
        size += len(card(recipe, data, measured, loss, size).encode())  # as long for any size under 10 MB
        assert size <= MOST_BYTES, f"the folder would be {size / 1e6:.2f} MB"
        (folder / "README.md").write_text(card(recipe, data, measured, loss, size), "utf-8")
        for file in folder.iterdir():
            os.replace(file, out / file.name)
    bits = ", ".join(f"{full:.4f} and {stored:.4f}" for full, stored in measured.bits)
    print(f"{out}: {size / 1e6:.2f} MB, bits per byte in float32 and in 4 bits {bits}; {measured.load}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--steps", type=int, default=Recipe.steps, help=f"default {Recipe.steps}")
    parser.add_argument("--threads", type=int, default=Recipe.threads, help=f"default {Recipe.threads}")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "mlxmoe" / "demo")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(tempfile.gettempdir()) / "train_demo.pt",
        help="kept every 50 steps, taken up by the next run, removed when the model is in --out",
    )
    args = parser.parse_args()
    recipe = Recipe(seed=args.seed, steps=args.steps, threads=args.threads)
    torch.set_num_threads(1)  # each thread of Training computes alone
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # no buffer is read before it is written
    data = make_data(recipe.seed, recipe.held_out)
    model = DemoModel(recipe.seed)
    loss = train(model, data, recipe, args.checkpoint)
    publish(model, data, recipe, loss, args.out)
    args.checkpoint.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
