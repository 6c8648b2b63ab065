"""Trains the demo model: the recipe, the optimizers, and the loop with its checkpoints.

Owns every number of the training and all that one step changes. The same recipe gives the same weights.
Knows nothing of where the text comes from, nor of how the model is stored and described.

Axes: B windows, L tokens of a window, E experts.
"""

from __future__ import annotations

import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from demo_measure import load_range, torch_bits_per_byte
from demo_model import DemoModel
from demo_text import CONTEXT, Data, batches
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Optimizer


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


# --- optimizers -------------------------------------------------------------------------------------------


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


# --- the loop ---------------------------------------------------------------------------------------------


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
    endless = batches(data.streams, recipe.seed, recipe.batch, recipe.english_share)
    began, first, losses = time.perf_counter(), training.done, []
    for batch in islice(endless, first, recipe.steps):
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
