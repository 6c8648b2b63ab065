"""Trains the built-in demo model, a small bilingual Mixture-of-Experts, into an mlx-lm checkpoint.

Owns everything about that model: where its text comes from, its tokenizer, shape, training and model card.
Knows nothing of the package: PyTorch trains; mlx-lm defines, quantises, saves and measures.

    python tools/train_demo.py        # about an hour on two cores; the same seed gives the same weights
    python tools/train_demo.py --steps 60 --out demo-try

Axes: B windows, L tokens of a window, T = B * L tokens, D width, F width of an expert, E experts, K = top-k,
N = T * K rows sent to experts, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm import load, stream_generate
from mlx_lm.models import qwen3_moe
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Optimizer

EOT = "<|endoftext|>"
ENGLISH_PACKAGES = "bible-kjv bible-kjv-text"
SPANISH_PACKAGES = "diatheke sword-text-sparv"
PROMPTS = ("In the beginning", "And Jesus said unto", "En el principio")
SAMPLE_TOKENS = 120
MOST_BYTES = 6_000_000  # of the whole folder
CONTEXT = 256
GROUP = 64  # weights that share one scale and one bias
SHAPE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "vocab_size": 2048,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Recipe:
    """How the model is trained. Up to `steady_steps` a run depends on everything here but `steps`."""

    seed: int = 0
    steps: int = 2400
    threads: int = 2
    batch: int = 16  # windows of CONTEXT tokens
    english_share: float = 2 / 3  # of the windows
    held_out: float = 0.02  # of the chapters
    matrix_lr: float = 0.01  # Muon: attention and experts
    other_lr: float = 0.004  # AdamW: embeddings, routers, norms
    weight_decay: float = 0.1
    balance: float = 0.01  # weight of each layer's load-balancing loss
    clip: float = 1.0
    warmup_steps: int = 100
    decay_steps: int = 1000  # the last steps, where the rates fall to zero
    rounded_steps: int = 300  # the last steps, trained on weights rounded to 4 bits

    def __post_init__(self) -> None:
        if self.steps < 1 or self.threads < 1 or self.batch % self.threads:
            problem = f"--steps {self.steps} --threads {self.threads}"
            sys.exit(f"{problem}: steps must be 1 or more, threads divide {self.batch} windows.")

    @property
    def steady_steps(self) -> int:
        """Steps before the rates fall and, after that, the weights are rounded."""
        return max(0, self.steps - self.decay_steps)


# ---------------------------------------------------------------------------------------------- text


def run_text_tool(command: list[str], packages: str) -> str:
    """What a Debian text program prints; exits naming the packages to install where it is absent."""
    if shutil.which(command[0]) is None:
        sys.exit(f"'{command[0]}' is missing; the demo's text is in Debian: apt-get install {packages}")
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    text = done.stdout.decode("utf-8")
    if done.returncode != 0 or text.count("\n") < 30_000:
        sys.exit(f"'{' '.join(command)}' gave no whole Bible: apt-get install {packages}")
    return text


def english_chapters() -> list[str]:
    """The King James Version, a chapter a string: heading, blank line, one verse a line."""
    command = ["bible", "-l100000", "Genesis 1:1-Revelation 22:21"]
    chapters: list[list[str]] = []
    for line in run_text_tool(command, ENGLISH_PACKAGES).splitlines():
        if verse := re.match(r"\s+\d+ (.*)", line):
            chapters[-1].append(" ".join(verse[1].split()))
        elif line.strip():
            chapters.append([line.strip(), ""])
    return ["\n".join(lines) for lines in chapters]


def spanish_chapters() -> list[str]:
    """The Reina-Valera of 1909 in the form of `english_chapters`, without its concordance numbers."""
    command = ["diatheke", "-b", "spaRV1909eb", "-l", "es", "-f", "plain", "-k", "Gen-Rev"]
    output = re.sub(r"<[GH]\d+>", " ", run_text_tool(command, SPANISH_PACKAGES))
    words = Counter(re.findall(r"\w+", output))
    chapters: dict[str, list[str]] = {}
    for chapter, number, text in re.findall(r"^(.+ \d+):(\d+): (.*)$", output, re.MULTILINE):
        text = re.sub(r" ([,.;:?!)])", r"\1", " ".join(text.split()))
        if number == "1":
            text = without_capitals(text, words)
        if text:
            chapters.setdefault(chapter, [chapter, ""]).append(text)
    return ["\n".join(lines) for lines in chapters.values()]


def without_capitals(verse: str, words: Counter[str]) -> str:
    """Chapters open in capitals (`EN el principio`, `Y VIENDO Jacob`): writes them as `words` mostly does."""

    def lower(match: re.Match[str]) -> str:
        word = match[0].capitalize().replace("Jehova", "Jehová")
        opens = match.start() == 0 or verse[: match.start()].rstrip("¡¿( ")[-1:] in (".", "!", "?", ":", "")
        return word.lower() if not opens and words[word.lower()] >= words[word] else word

    return re.sub(r"\b[A-ZÁÉÍÓÚÑÜÂÊÎÔÛ]{2,}\b", lower, verse)


@dataclass(frozen=True)
class Text:
    """The chapters of one book, divided: `train` is learned, `held_out` only measured."""

    title: str
    packages: str  # of Debian
    train: list[str]
    held_out: list[str]


def read_texts(recipe: Recipe) -> list[Text]:
    books = [
        ("English: King James Version", ENGLISH_PACKAGES, english_chapters()),
        ("Spanish: Reina-Valera 1909", SPANISH_PACKAGES, spanish_chapters()),
    ]
    texts = []
    for i, (title, packages, chapters) in enumerate(books):
        order = np.random.default_rng([recipe.seed, i]).permutation(len(chapters))
        held = set(order[: round(recipe.held_out * len(chapters))].tolist())
        train = [c for n, c in enumerate(chapters) if n not in held]
        texts.append(Text(title, packages, train, [chapters[n] for n in sorted(held)]))
    return texts


def make_tokenizer(texts: list[Text]) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are tokens, so every UTF-8 text comes back as it was."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((chapter for text in texts for chapter in text.train), trainer)
    assert tokenizer.token_to_id(EOT) == SHAPE["eos_token_id"], "config.json names the token that ends a text"
    return tokenizer


@dataclass(frozen=True)
class Stream:
    """One language as tokens: every chapter followed by EOT. `starts`: where a chapter or a verse begins."""

    tokens: np.ndarray
    starts: np.ndarray

    def windows(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Windows of CONTEXT + 1 tokens for ever, a pass over the text after another, in a new order each.

        Half of the windows are moved back to where a verse begins.
        """
        last = len(self.tokens) - CONTEXT - 1
        while True:
            begins = np.arange(rng.integers(CONTEXT), last, CONTEXT)
            verse = self.starts[np.searchsorted(self.starts, begins, side="right") - 1]
            begins = rng.permutation(np.where(rng.random(len(begins)) < 0.5, verse, begins))
            for begin in begins:
                yield self.tokens[begin : begin + CONTEXT + 1]


def make_stream(chapters: list[str], tokenizer: Tokenizer) -> Stream:
    tokens: list[int] = []
    starts: list[int] = []
    newline = tokenizer.token_to_id("Ċ")
    for encoding in tokenizer.encode_batch(chapters):
        ids = np.array([*encoding.ids, SHAPE["eos_token_id"]])
        verses = np.flatnonzero((ids[:-2] == newline) & (ids[1:-1] != newline)) + 1
        starts += [len(tokens), *(len(tokens) + verses).tolist()]
        tokens += ids.tolist()
    return Stream(np.array(tokens, dtype=np.int64), np.array(starts))


def batches(streams: list[Stream], recipe: Recipe) -> Iterator[np.ndarray]:
    """`[B, L + 1]` token ids for ever; the same for the same seed, however many steps are asked for."""
    rng = np.random.default_rng([recipe.seed, 100])
    sources = [s.windows(np.random.default_rng([recipe.seed, 101 + i])) for i, s in enumerate(streams)]
    while True:
        languages = rng.random(recipe.batch) >= recipe.english_share
        yield np.stack([next(sources[int(language)]) for language in languages])


@dataclass(frozen=True)
class Exam:
    """Held-out chapters as windows that overlap by half: each token counts once, where `scored`."""

    windows: np.ndarray  # [W, L + 1]
    scored: np.ndarray  # [W, L] bool
    text_bytes: int


def make_exam(chapters: list[str], tokenizer: Tokenizer) -> Exam:
    windows, scored = [], []
    for encoding in tokenizer.encode_batch(chapters):
        ids = np.array([SHAPE["eos_token_id"], *encoding.ids])
        for begin in range(0, max(1, len(ids) - 1 - CONTEXT // 2), CONTEXT // 2):
            part = ids[begin : begin + CONTEXT + 1]
            target = np.arange(1, CONTEXT + 1)
            windows.append(np.pad(part, (0, CONTEXT + 1 - len(part))))
            scored.append((target < len(part)) & ((begin == 0) | (target > CONTEXT // 2)))
    return Exam(np.stack(windows), np.stack(scored), sum(len(c.encode()) for c in chapters))


@dataclass(frozen=True)
class Data:
    """All that comes from the texts; the lists have one entry a book."""

    texts: list[Text]
    tokenizer: Tokenizer
    streams: list[Stream]
    exams: list[Exam]


def make_data(recipe: Recipe) -> Data:
    texts = read_texts(recipe)
    tokenizer = make_tokenizer(texts)
    streams = [make_stream(text.train, tokenizer) for text in texts]
    return Data(texts, tokenizer, streams, [make_exam(text.held_out, tokenizer) for text in texts])


# --------------------------------------------------------------------------------------------- model


class RowsForExperts(torch.autograd.Function):
    """`x[order // K]`: rows of `x [T, D]` in expert order; backward gathers too, fast and repeatable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class RowsForTokens(torch.autograd.Function):
    """The sum over each token's K rows of `y [N, D]`, which are in expert order: `[T, D]`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return y[inverse].unflatten(0, (-1, top_k)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grad[order // ctx.top_k], None, None, None


class GroupedLinear(torch.autograd.Function):
    """`x [N, in]` in expert order times each expert's own `weight [E, out, in]`: one gemm an expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        y = x.new_empty(len(x), weight.shape[1])
        for rows, w, out in zip(x.split(counts), weight, y.split(counts), strict=True):
            torch.mm(rows, w.T, out=out)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grad_w = torch.empty_like(x), torch.empty_like(weight)
        parts = zip(grad.split(ctx.counts), x.split(ctx.counts), grad_x.split(ctx.counts), strict=True)
        for expert, (g, rows, out) in enumerate(parts):
            torch.mm(g, weight[expert], out=out)
            torch.mm(g.T, rows, out=grad_w[expert])
        return grad_x, grad_w, None


def as_stored(weight: Tensor) -> Tensor:
    """`weight` as MLX's affine 4-bit quantisation gives it back: a scale and a bias for GROUP weights.

    The gradient passes as if nothing was rounded (straight-through estimator, arXiv:1308.3432).
    """
    w = weight.detach().unflatten(-1, (-1, GROUP))
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    negative = low.abs() > high.abs()
    scale = ((high - low) / 15).clamp_min(1e-7)
    scale = torch.where(negative, scale, -scale)
    edge = torch.where(negative, low, high)
    steps = torch.round(edge / scale)
    scale = torch.where(steps != 0, edge / torch.where(steps != 0, steps, 1), scale)
    bias = torch.where(steps != 0, edge, 0)
    rounded = ((w - bias) / scale).round_().clamp_(0, 15).mul_(scale).add_(bias).flatten(-2)
    return weight + (rounded - weight.detach())


def rope_table() -> tuple[Tensor, Tensor]:
    half = SHAPE["head_dim"] // 2
    rates = SHAPE["rope_theta"] ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(CONTEXT, dtype=torch.float32)[:, None] * rates  # [L, half]
    return torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)


class DemoModel(torch.nn.Module):
    """mlx-lm's `qwen3_moe` of SHAPE in PyTorch; parameters bear mlx-lm's names (`.` written as `__`)."""

    def __init__(self, seed: int):
        super().__init__()
        self.rounded = False  # True: compute with the matrices as 4 bits will store them
        self.cos, self.sin = rope_table()
        rng = torch.Generator().manual_seed(seed)
        shapes = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(SHAPE)).parameters()
        for name, array in tree_flatten(shapes):
            if array.ndim == 1:
                value = torch.ones(array.shape)
            else:
                deviation = 0.02 if "embed" in name else 0.5 * array.shape[-1] ** -0.5
                value = torch.empty(array.shape).normal_(0, deviation, generator=rng)
            if "o_proj" in name or "down_proj" in name:
                value /= math.sqrt(2 * SHAPE["num_hidden_layers"])
            self.register_parameter(name.replace(".", "__"), torch.nn.Parameter(value))

    def weight(self, name: str) -> Tensor:
        value = getattr(self, name.replace(".", "__") + "__weight")
        stored_in_4_bits = value.ndim > 1 and not name.endswith("mlp.gate")
        return as_stored(value) if self.rounded and stored_in_4_bits else value

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight(name), SHAPE["rms_norm_eps"])

    def attention(self, x: Tensor, at: str) -> Tensor:
        windows, length, _ = x.shape
        heads, kv_heads, size = (SHAPE[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        weight = torch.cat([self.weight(f"{at}.{p}_proj") for p in "qkv"])
        q, k, v = functional.linear(x, weight).split([heads * size, kv_heads * size, kv_heads * size], -1)
        q = self.rope(self.norm(q.view(windows, length, heads, size), f"{at}.q_norm"))
        k = self.rope(self.norm(k.reshape(windows, length, kv_heads, size), f"{at}.k_norm"))
        v = v.reshape(windows, length, kv_heads, size)
        k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
        y = functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return functional.linear(y.transpose(1, 2).reshape(windows, length, -1), self.weight(f"{at}.o_proj"))

    def rope(self, x: Tensor) -> Tensor:
        length, half = x.shape[1], x.shape[-1] // 2
        swapped = torch.cat([x[..., half:], x[..., :half]], -1)
        return x * self.cos[:length, None] + swapped * self.sin[:length, None]

    def experts(self, x: Tensor, at: str) -> tuple[Tensor, Tensor, Tensor]:
        """`x [T, D]` -> its experts' sum `[T, D]`, balance loss (arXiv:2101.03961), load `[E]`."""
        experts, top_k = SHAPE["num_experts"], SHAPE["num_experts_per_tok"]
        probs = functional.linear(x, self.weight(f"{at}.gate")).softmax(-1)
        scores, ids = probs.topk(top_k)
        scores = scores / scores.sum(-1, keepdim=True)
        order = ids.flatten().argsort(stable=True)
        inverse = order.argsort()
        load = ids.flatten().bincount(minlength=experts)
        counts = load.tolist()
        rows = RowsForExperts.apply(x, order, inverse, top_k)
        gate = GroupedLinear.apply(rows, self.weight(f"{at}.switch_mlp.gate_proj"), counts)
        up = GroupedLinear.apply(rows, self.weight(f"{at}.switch_mlp.up_proj"), counts)
        # the score scales the F-wide hidden row, not the D-wide result: the same sum for less
        score = RowsForExperts.apply(scores.flatten()[:, None], order, inverse, 1)
        hidden = functional.silu(gate) * (up * score)
        y = GroupedLinear.apply(hidden, self.weight(f"{at}.switch_mlp.down_proj"), counts)
        balance = experts * (load / load.sum() * probs.mean(0)).sum()
        return RowsForTokens.apply(y, order, inverse, top_k), balance, load

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`tokens [B, L]` -> logits `[B, L, V]`, load-balancing loss, rows an expert got `[layers, E]`."""
        embedding = self.weight("model.embed_tokens")
        x = functional.embedding(tokens, embedding)
        balances, loads = [], []
        for i in range(SHAPE["num_hidden_layers"]):
            at = f"model.layers.{i}"
            x = x + self.attention(self.norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
            flat = self.norm(x, f"{at}.post_attention_layernorm").flatten(0, 1)
            y, balance, load = self.experts(flat, f"{at}.mlp")
            x = x + y.view_as(x)
            balances.append(balance)
            loads.append(load)
        logits = functional.linear(self.norm(x, "model.norm"), embedding)
        return logits, torch.stack(balances).sum(), torch.stack(loads)


# ------------------------------------------------------------------------------------------ training


class Muon(Optimizer):
    """Momentum, made orthogonal (Keller Jordan, 2024), for matrices `[..., out, in]`, each on its own.

    The update is scaled to the size an AdamW update has (arXiv:2502.16982, equation 4), so rates compare.
    """

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float, pool: ThreadPoolExecutor):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})
        self.pool = pool

    def step(self) -> None:
        for group in self.param_groups:
            list(self.pool.map(lambda p, group=group: self.update(p, group), group["params"]))

    @torch.no_grad()
    def update(self, p: Tensor, group: dict) -> None:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        moment = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
        update = orthogonal(p.grad.lerp(moment, group["momentum"]))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(update, alpha=group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:])))


def orthogonal(m: Tensor) -> Tensor:
    """Nearly the nearest orthogonal matrix to each of `m [..., rows, cols]`, by Newton-Schulz iterations."""
    wide = m if m.shape[-2] <= m.shape[-1] else m.mT
    x = (wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)).reshape(-1, *wide.shape[-2:])
    for _ in range(5):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    x = x.view(wide.shape)
    return x if m.shape[-2] <= m.shape[-1] else x.mT


def make_optimizers(model: DemoModel, recipe: Recipe, pool: ThreadPoolExecutor) -> list[Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for n, p in named if "_proj" in n]
    decayed = [p for n, p in named if "_proj" not in n and p.ndim > 1]
    norms = [p for _, p in named if p.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [
        Muon(matrices, recipe.matrix_lr, recipe.weight_decay, pool),
        AdamW(groups, recipe.other_lr, betas=(0.9, 0.95), eps=1e-10),
    ]


def rate_at(step: int, recipe: Recipe) -> float:
    """Share of the full rate: warm up, stay, then half a cosine to zero after `steady_steps`."""
    done = max(0.0, (step - recipe.steady_steps) / (recipe.steps - recipe.steady_steps))
    return min(1.0, (step + 1) / recipe.warmup_steps) * (0.5 + 0.5 * math.cos(math.pi * done))


def gradients(model: DemoModel, batch: np.ndarray, recipe: Recipe) -> tuple[float, Tensor, list[Tensor]]:
    """(cross-entropy in nats a token, load `[layers, E]`, each parameter's gradient) of `batch`."""
    tokens = torch.from_numpy(batch)
    logits, balance, load = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    grads = torch.autograd.grad(loss + recipe.balance * balance, list(model.parameters()))
    return loss.item(), load, list(grads)


class Training:
    """A model, its optimizers and its threads: one update at a time, kept on disk and taken up from there.

    Each thread takes its share of the windows; threads inside one small gemm mostly wait for each other.
    """

    def __init__(self, model: DemoModel, recipe: Recipe):
        self.model = model
        self.recipe = recipe
        self.done = 0  # steps
        self.pool = ThreadPoolExecutor(recipe.threads, initializer=torch.set_num_threads, initargs=(1,))
        self.optimizers = make_optimizers(model, recipe, self.pool)

    def step(self, batch: np.ndarray) -> tuple[float, Tensor]:
        """One update of the model; returns (cross-entropy in nats a token, load `[layers, E]`)."""
        recipe, model = self.recipe, self.model
        model.rounded = self.done >= recipe.steps - recipe.rounded_steps
        parts = np.split(batch, recipe.threads)
        results = list(self.pool.map(lambda part: gradients(model, part, recipe), parts))
        for p, *grads in zip(model.parameters(), *(grads for _, _, grads in results), strict=True):
            p.grad = torch.stack(grads).mean(0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * rate_at(self.done, recipe)
            optimizer.step()
        self.done += 1
        losses, loads, _ = zip(*results, strict=True)
        return float(np.mean(losses)), torch.stack(loads).sum(0)

    def save(self, checkpoint: Path) -> None:
        state = {
            "done": self.done,
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        beside = checkpoint.with_suffix(".new")
        torch.save(state, beside)
        os.replace(beside, checkpoint)

    def resume(self, checkpoint: Path) -> None:
        """Goes on from `checkpoint`; exits where this run would have made another."""
        state = torch.load(checkpoint, weights_only=True)
        made = Recipe(**state["recipe"])
        steady = min(made.steady_steps, self.recipe.steady_steps)
        other = replace(made, steps=self.recipe.steps) != self.recipe
        if other or (made != self.recipe and state["done"] > steady):
            sys.exit(f"{checkpoint} is of another run: {made}. Remove it or name another file.")
        self.model.load_state_dict(state["model"])
        for optimizer, part in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(part)
        self.done = state["done"]
        print(f"going on from {checkpoint}, {self.done} steps done")


def train(model: DemoModel, data: Data, recipe: Recipe, checkpoint: Path) -> float:
    """Trains `model` in place, with checkpoints; returns the mean loss of the last 100 steps."""
    training = Training(model, recipe)
    if checkpoint.exists():
        training.resume(checkpoint)
    began, first, losses = time.perf_counter(), training.done, []
    for batch in islice(batches(data.streams, recipe), first, recipe.steps):
        loss, load = training.step(batch)
        losses.append(loss)
        done = training.done
        if done % 50 == 0 or done == first + 10:
            took_s = time.perf_counter() - began
            print(
                f"step {done}/{recipe.steps}  loss {np.mean(losses[-50:]):.4f}  {took_s:.0f} s  "
                f"{(done - first) * batch.shape[0] * CONTEXT / took_s:.0f} tokens/s  {load_range(load)}",
                flush=True,
            )
        if done % 50 == 0 or done == recipe.steps:
            training.save(checkpoint)
        if done % 250 == 0:
            bits = ", ".join(f"{torch_bits_per_byte(model, e, limit=32):.4f}" for e in data.exams)
            print(f"step {done}  bits per byte of the first held-out windows: {bits}", flush=True)
    model.rounded = False
    return float(np.mean(losses[-100:])) if losses else math.nan


def load_range(load: Tensor) -> str:
    """The least and the most used expert of any layer, by their share of its layer's rows (equal: 1 / E)."""
    share = load / load.sum(-1, keepdim=True)
    return f"an expert's share {share.min():.1%} to {share.max():.1%}"


# ----------------------------------------------------------------------------- measuring and saving


def bits_per_byte(exam: Exam, logits_of: Callable[[Tensor], Tensor], limit: int | None = None) -> float:
    """What the held-out text costs, in bits a byte; `logits_of(tokens [W, L]) -> [W, L, V]`, float32."""
    windows, scored = torch.from_numpy(exam.windows[:limit]), torch.from_numpy(exam.scored[:limit])
    text_bytes = exam.text_bytes * scored.sum().item() / exam.scored.sum()
    nats = 0.0
    for part, counted in zip(windows.split(16), scored.split(16), strict=True):
        logits = logits_of(part[:, :-1])
        costs = functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        nats += costs[counted.flatten()].sum(dtype=torch.float64).item()
    return nats / math.log(2) / text_bytes


@torch.no_grad()
def torch_bits_per_byte(model: DemoModel, exam: Exam, limit: int | None = None) -> float:
    return bits_per_byte(exam, lambda tokens: model(tokens)[0], limit)


@torch.no_grad()
def held_out_load(model: DemoModel, exams: list[Exam]) -> Tensor:
    """How many rows each expert gets on the held-out text: `[layers, E]`."""
    parts = torch.from_numpy(np.concatenate([e.windows for e in exams])).split(16)
    return torch.stack([model(part[:, :-1])[2] for part in parts]).sum(0)


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


def samples(folder: Path) -> list[str]:
    """What the stored model makes of each prompt of PROMPTS, by mlx-lm, temperature 0.7."""
    model, tokenizer = load(str(folder))
    mx.random.seed(0)
    sampler = make_sampler(temp=0.7)
    texts = []
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt)
        replies = stream_generate(model, tokenizer, tokens, max_tokens=SAMPLE_TOKENS, sampler=sampler)
        # decoded as a whole, as a stream's first piece comes without its leading space
        texts.append(tokenizer.decode(tokens + [reply.token for reply in replies], skip_special_tokens=True))
    return texts


def stored_bits_per_byte(folder: Path, exams: list[Exam]) -> list[float]:
    """`bits_per_byte` of the checkpoint in `folder`, computed by mlx-lm."""
    model, _ = load_model(folder)
    return [bits_per_byte(e, lambda t: torch.from_numpy(np.array(model(mx.array(t.numpy()))))) for e in exams]


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


def card(recipe: Recipe, data: Data, measured: dict[str, Any]) -> str:
    """The model card; `measured` holds what `publish` found: sizes, loss, load, bits, samples."""
    rows = [
        f"| {t.title} | `{t.packages}` | {sum(len(c.encode()) for c in t.train):,} | {len(s.tokens):,} "
        f"| {len(t.held_out)} of {len(t.held_out) + len(t.train)} |"
        for t, s in zip(data.texts, data.streams, strict=True)
    ]
    pairs = zip(data.texts, measured["bits"], strict=True)
    bits = [f"| {text.title} | {full:.3f} | {stored:.3f} |" for text, (full, stored) in pairs]
    quoted = ["\n".join(f"> {line}  " for line in sample.splitlines()) for sample in measured["samples"]]
    rest = {
        "eot": EOT,
        "group": GROUP,
        "equal": 1 / SHAPE["num_experts"],
        "sample_tokens": SAMPLE_TOKENS,
        "tokens_m": recipe.steps * recipe.batch * CONTEXT / 1e6,
        "versions": ", ".join(f"{name} {version(name)}" for name in ("torch", "mlx", "mlx-lm", "tokenizers")),
        "data": "\n".join(rows),
        "bits": "\n".join(bits),
        "samples": "\n\n".join(quoted),
    }
    return CARD.format(**{**SHAPE, **asdict(recipe), **measured, **rest})


def parameter_counts(model: DemoModel) -> tuple[int, int]:
    """(all parameters, those one token uses: only K of E experts)."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    routed = sum(size for name, size in sizes.items() if "switch_mlp" in name)
    total = sum(sizes.values())
    return total, total - routed + routed * SHAPE["num_experts_per_tok"] // SHAPE["num_experts"]


def measure(model: DemoModel, data: Data, folder: Path) -> dict[str, Any]:
    """What the card says of `model` and of its stored form in `folder`."""
    total, active = parameter_counts(model)
    floats = [torch_bits_per_byte(model, exam) for exam in data.exams]
    return {
        "params_m": total / 1e6,
        "active_m": active / 1e6,
        "load": load_range(held_out_load(model, data.exams)),
        "bits": list(zip(floats, stored_bits_per_byte(folder, data.exams), strict=True)),
        "samples": samples(folder),
        "size_mb": 0.0,  # known once the card is written
    }


def publish(model: DemoModel, data: Data, recipe: Recipe, loss: float, out: Path) -> None:
    """Stores, measures and describes `model` in a folder beside `out`, then moves the files into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        folder = Path(name)
        export(model, data.tokenizer, folder)
        measured = measure(model, data, folder) | {"loss": loss}
        size = sum(f.stat().st_size for f in folder.iterdir()) + len(card(recipe, data, measured).encode())
        assert size <= MOST_BYTES, f"the folder would be {size / 1e6:.2f} MB"
        (folder / "README.md").write_text(card(recipe, data, measured | {"size_mb": size / 1e6}), "utf-8")
        for file in folder.iterdir():
            os.replace(file, out / file.name)
    bits = ", ".join(f"{full:.4f} and {stored:.4f}" for full, stored in measured["bits"])
    print(f"{out}: {size / 1e6:.2f} MB, bits per byte in float32 and in 4 bits {bits}; {measured['load']}")


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
    data = make_data(recipe)
    model = DemoModel(recipe.seed)
    loss = train(model, data, recipe, args.checkpoint)
    publish(model, data, recipe, loss, args.out)
    args.checkpoint.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
