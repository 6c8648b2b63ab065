"""The demo model in PyTorch: its shape, its grouped experts, and its weights as 4 bits will store them.

Owns the forward pass that mlx-lm's `qwen3_moe` repeats on the stored weights, and what a token uses of them.
Knows nothing of how it is trained, measured or stored; of the text, only its vocabulary and context.

Axes: B windows, L tokens of a window, T = B * L tokens, D width, F width of an expert, E experts, K = top-k,
N = T * K rows sent to experts, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from demo_text import CONTEXT, EOT_ID, VOCABULARY
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe
from torch import Tensor
from torch.nn import functional

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
    "vocab_size": VOCABULARY,
    "eos_token_id": EOT_ID,
    "torch_dtype": "float32",
}


# --- grouped experts --------------------------------------------------------------------------------------


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


# --- 4 bits -----------------------------------------------------------------------------------------------


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


# --- the model --------------------------------------------------------------------------------------------


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


def parameter_counts(model: DemoModel) -> tuple[int, int]:
    """(all parameters, those one token uses: only K of E experts)."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    routed = sum(size for name, size in sizes.items() if "switch_mlp" in name)
    total = sum(sizes.values())
    return total, total - routed + routed * SHAPE["num_experts_per_tok"] // SHAPE["num_experts"]
