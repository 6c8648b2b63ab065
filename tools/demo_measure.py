"""What the demo model is worth: held-out bits per byte, the spread over its experts, samples.

Owns how the PyTorch model and its stored form are measured, the latter by mlx-lm alone.
Knows nothing of how the model came about, nor of what is written about it.

Axes: W windows of an exam, L tokens of a window, E experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from demo_model import DemoModel, parameter_counts
from demo_text import Exam
from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_model
from torch import Tensor
from torch.nn import functional

PROMPTS = ("In the beginning", "And Jesus said unto", "En el principio")
SAMPLE_TOKENS = 120


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


def stored_bits_per_byte(folder: Path, exams: list[Exam]) -> list[float]:
    """`bits_per_byte` of the checkpoint in `folder`, computed by mlx-lm."""
    model, _ = load_model(folder)
    return [bits_per_byte(e, lambda t: torch.from_numpy(np.array(model(mx.array(t.numpy()))))) for e in exams]


@torch.no_grad()
def held_out_load(model: DemoModel, exams: list[Exam]) -> Tensor:
    """How many rows each expert gets on the held-out text: `[layers, E]`."""
    parts = torch.from_numpy(np.concatenate([e.windows for e in exams])).split(16)
    return torch.stack([model(part[:, :-1])[2] for part in parts]).sum(0)


def load_range(load: Tensor) -> str:
    """The least and the most used expert of any layer, by their share of its layer's rows (equal: 1 / E)."""
    share = load / load.sum(-1, keepdim=True)
    return f"an expert's share {share.min():.1%} to {share.max():.1%}"


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


@dataclass(frozen=True)
class Measured:
    """What was found of a model and of its stored form."""

    parameters: int
    active: int  # of these, what one token uses
    load: str  # `load_range` on the held-out text
    bits: list[tuple[float, float]]  # per byte of each exam: in float32, as stored
    samples: list[str]  # one a prompt


def measure(model: DemoModel, exams: list[Exam], folder: Path) -> Measured:
    """Measures `model` and the checkpoint that `folder` holds of it: some minutes."""
    parameters, active = parameter_counts(model)
    floats = [torch_bits_per_byte(model, exam) for exam in exams]
    used = load_range(held_out_load(model, exams))
    bits = list(zip(floats, stored_bits_per_byte(folder, exams), strict=True))
    return Measured(parameters, active, used, bits, samples(folder))
