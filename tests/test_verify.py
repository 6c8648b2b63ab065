"""verify: everything is compared, and the check can fail."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import QWEN3_MOE, make_tiny

from mlxmoe import UnsupportedModelError
from mlxmoe.experts.safetensors import read_checkpoint
from mlxmoe.loading import LoadedModel, load_folder
from mlxmoe.verify import VerifyRow, verify
from mlxmoe.verify.logits import DECODE_TOKENS, PREFILL_TOKENS
from mlxmoe.verify.report import difference, probe_tokens


def flip_a_byte(loaded: LoadedModel) -> None:
    """Read some experts, then damage one of the last layer's slots; nothing where all layers are resident."""
    if not loaded.experts.streams:
        return
    loaded.model(mx.array([probe_tokens(2048, 1)]))  # what verify will run first
    bank = list(loaded.experts.streams.values())[-1].bank
    slot = next(reversed(bank.resident.values()))
    bank.view("down_proj.weight", slot)[0] ^= 0x40


def load_damaged(*args: Any, **options: Any) -> LoadedModel:
    loaded = load_folder(*args, **options, lookahead=False)  # whose guesses may take the damaged slot
    flip_a_byte(loaded)
    return loaded


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model that verify loads for streaming has one damaged slot."""
    monkeypatch.setattr("mlxmoe.verify.logits.load_folder", load_damaged)
    monkeypatch.setattr("mlxmoe.verify.layers.load_folder", load_damaged)


@pytest.mark.slow
def test_the_demo_model_is_identical_at_every_capacity() -> None:
    rows: list[VerifyRow] = []
    report = verify(on_row=rows.append)
    assert report.identical
    assert report.whole
    assert tuple(rows) == report.rows
    assert {row.experts: row.slots for row in rows} == {
        "top_k": (4, 4), "50%": (8, 8), "75%": (12, 12), "all": (16, 16),
    }  # fmt: skip
    assert all(row.bound == 0 for row in rows), "on the CPU nothing may differ"
    per_capacity = (sum(PREFILL_TOKENS) + DECODE_TOKENS) * 2048
    assert report.values == 4 * per_capacity
    decode = next(row for row in rows if row.experts == "top_k" and row.part.startswith("decode"))
    assert decode.evictions > 64, "decode is compared while slots change hands"


@pytest.mark.usefixtures("damaged")
def test_one_flipped_byte_of_one_slot_is_found(tiny: Path) -> None:
    report = verify(tiny)
    assert not report.identical
    assert not report.passed
    assert all(row.differing == 0 for row in report.rows if row.experts == "all")
    assert any(row.differing for row in report.rows if row.experts == "top_k")


def test_layer_by_layer_finds_the_same(tiny: Path) -> None:
    report = verify(tiny, layer_by_layer=True)
    assert report.identical
    assert not report.whole
    assert {row.part for row in report.rows} == {f"model.layers.{n}.mlp.switch_mlp" for n in range(3)}
    assert all(row.misses for row in report.rows)


@pytest.mark.usefixtures("damaged")
def test_layer_by_layer_names_the_layer_that_differs(tiny: Path) -> None:
    broken = verify(tiny, layer_by_layer=True)
    assert {row.part for row in broken.rows if row.differing} == {"model.layers.2.mlp.switch_mlp"}


def test_a_model_too_large_to_hold_whole_is_compared_layer_by_layer(tiny: Path) -> None:
    assert not verify(tiny, memory="500kB").whole


def test_nothing_compared_is_no_proof(tmp_path: Path) -> None:
    dense = {key: value for key, value in QWEN3_MOE.items() if "expert" not in key} | {"model_type": "qwen3"}
    folder = make_tiny(tmp_path / "dense", dense)
    for layer_by_layer in (True, False):
        with pytest.raises(UnsupportedModelError, match="no routed experts"):
            verify(folder, layer_by_layer=layer_by_layer)


def test_a_model_whose_tokens_need_all_experts_has_nothing_to_stream(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "all", {**QWEN3_MOE, "num_experts_per_tok": 8})
    with pytest.raises(UnsupportedModelError, match="needs all its experts"):
        verify(folder)


def test_difference_compares_bits() -> None:
    a = mx.array([0.0, 1.0, float("nan"), 2.0])
    assert difference(a, mx.array(a)) == (0, 0.0)
    assert difference(a, mx.array([-0.0, 1.0, float("nan"), 2.5])) == (2, 0.5)
    assert difference(a[:2], a)[0] == 4
    assert difference(a.astype(mx.bfloat16), a)[0] == 4


def test_on_metal_a_prefill_has_a_bound_and_decode_has_none(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxmoe.verify.logits.mx.metal.is_available", lambda: True)
    rows = verify(tiny).rows
    assert all((row.bound > 0) == (row.part.startswith("prefill") and row.part != "prefill 1") for row in rows)


def test_a_difference_beyond_the_bound_fails() -> None:
    row = VerifyRow("25%", (2, 2), "prefill 64", 10, differing=1, largest=0.5, bound=0.4, misses=0, evictions=0)
    assert not row.passed
    assert VerifyRow("25%", (2, 2), "prefill 64", 10, 1, 0.3, 0.4, 0, 0).passed


def test_no_two_engines_are_in_memory_at_once(tiny: Path) -> None:
    gc.collect()
    before, checkpoint = mx.get_active_memory(), read_checkpoint(tiny).nbytes
    peaks: list[int] = []
    verify(tiny, on_row=lambda row: peaks.append(mx.get_active_memory() - before))
    outputs = 4 * 2048 * (sum(PREFILL_TOKENS) + DECODE_TOKENS)
    assert max(peaks) <= 2 * checkpoint + 3 * outputs
