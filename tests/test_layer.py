"""One switch layer over a bank against the stock layer: the same bits, whatever the capacity and who calls when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlxmoe.experts.bank import ExpertBank
from mlxmoe.experts.checkpoint import ExpertTensor
from mlxmoe.experts.layer import ExpertStream, Passes, compute_from
from mlxmoe.experts.reader import ExpertReader
from mlxmoe.experts.safetensors import read_header
from mlxmoe.experts.switch import Listening, expert_arrays, expert_homes, switch_modules

EXPERTS, WIDTH, TOP_K = 8, 64, 3

KINDS: dict[str, tuple[type, dict[str, Any] | None, bool, mx.Dtype]] = {
    "4 bits": (SwitchGLU, {"bits": 4, "group_size": 32}, False, mx.float32),
    "8 bits, biases": (SwitchGLU, {"bits": 8, "group_size": 64}, True, mx.float32),
    "mxfp4": (SwitchGLU, {"bits": 4, "group_size": 32, "mode": "mxfp4"}, True, mx.float32),
    "nvfp4": (SwitchGLU, {"bits": 4, "group_size": 16, "mode": "nvfp4"}, False, mx.float32),
    "3 bits, bfloat16": (SwitchGLU, {"bits": 3, "group_size": 32}, False, mx.bfloat16),
    "float32": (SwitchGLU, None, True, mx.float32),
    "two matrices": (SwitchMLP, {"bits": 4, "group_size": 32}, False, mx.float32),
    "two matrices, float32": (SwitchMLP, None, True, mx.float32),
}


def make(kind: str) -> nn.Module:
    switch, quantization, bias, dtype = KINDS[kind]
    mx.random.seed(3)
    module = switch(WIDTH, 2 * WIDTH, EXPERTS, bias=bias)
    module.update(
        tree_unflatten([(k, mx.random.normal(v.shape).astype(dtype)) for k, v in tree_flatten(module.parameters())])
    )
    if quantization is not None:
        nn.quantize(module, **quantization)
    mx.eval(module.parameters())
    return module


def streamed(kind: str, folder: Path, slots: int) -> nn.Module:
    """The same layer, computing from a bank of `slots` over a file that holds its arrays."""
    module = make(kind)
    arrays = expert_arrays(module)
    assert arrays.keys() == dict(tree_flatten(module.parameters())).keys()
    path = folder / f"{kind}.safetensors"
    if not path.exists():
        mx.save_safetensors(str(path), arrays)
    state, infos = read_header(path)
    tensors = {name: ExpertTensor.stacked(path, info.offset, info.nbytes, EXPERTS) for name, info in infos.items()}
    bank = ExpertBank(tensors, expert_homes(module), slots, ExpertReader({path: state}))
    compute_from(module, ExpertStream(bank, Passes()))
    return module


def inputs(tokens: int, seed: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(seed))
    x = mx.random.normal((1, tokens, WIDTH), key=keys[0]).astype(dtype)
    indices = mx.argsort(mx.random.uniform(shape=(1, tokens, EXPERTS), key=keys[1]), axis=-1)[..., :TOP_K]
    return x, indices


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, 3, 5, 7, 8])
def test_output_is_bit_identical_at_every_capacity(kind: str, slots: int, tmp_path: Path) -> None:
    stock, ours = make(kind), streamed(kind, tmp_path, slots)
    for seed, tokens in enumerate((1, 1, 2, 21, 22, 40, 1)):
        x, indices = inputs(tokens, seed, KINDS[kind][3])
        assert mx.array_equal(ours(x, indices), stock(x, indices)), f"{tokens} tokens"


@settings(max_examples=50)
@given(
    calls=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 99)), min_size=2, max_size=8), slots=st.integers(1, 8)
)
def test_results_that_nobody_evaluated_survive_later_overwrites(
    tmp_path: Path, calls: list[tuple[int, int]], slots: int
) -> None:
    stock, ours = make("4 bits"), streamed("4 bits", tmp_path, slots)
    waiting = [(ours(*inputs(tokens, seed, mx.float32)), tokens, seed) for tokens, seed in calls]
    for out, tokens, seed in waiting:
        assert mx.array_equal(out, stock(*inputs(tokens, seed, mx.float32)))


def test_flattened_tokens_are_handled(tmp_path: Path) -> None:
    stock, ours = make("4 bits"), streamed("4 bits", tmp_path, 3)
    x, indices = inputs(30, 0, mx.float32)
    assert mx.array_equal(ours(x[0], indices[0]), stock(x[0], indices[0]))


def test_one_flipped_byte_is_seen(tmp_path: Path) -> None:
    stock, ours = make("4 bits"), streamed("4 bits", tmp_path, 7)
    x, indices = inputs(4, 0, mx.float32)
    assert mx.array_equal(ours(x, indices), stock(x, indices))
    bank = ours.expert_stream.bank
    expert = int(indices[0, 0, 0].item())
    view = bank.view("up_proj.weight", bank.resident[expert])
    view[0] ^= 0x80
    assert not mx.array_equal(ours(x, indices), stock(x, indices))


def test_listening_hears_top_k_and_restores_the_module() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [make("4 bits") for _ in range(11)]

    block = Block()
    modules = switch_modules(block)
    assert list(modules) == [f"layers.{n}" for n in range(11)], "layer 10 comes behind layer 9"
    with Listening(modules) as heard:
        out = modules["layers.0"](*inputs(2, 0, mx.float32))
        assert out.shape == (1, 2, TOP_K, WIDTH)
    assert heard.top_k == {"layers.0": TOP_K}
    assert type(modules["layers.0"]) is SwitchGLU
