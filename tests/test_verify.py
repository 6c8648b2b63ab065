"""verify: everything is compared, and the check can fail."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxmoe import UnsupportedModelError
from mlxmoe.loading import LoadedModel
from mlxmoe.verify import DECODE_TOKENS, PREFILL_TOKENS, VerifyRow, difference, probe_tokens, verify


def flip_a_byte(loaded: LoadedModel) -> None:
    """Read some experts, then damage one of the last layer's slots; nothing where all layers are resident."""
    if not loaded.streams:
        return
    loaded.model(mx.array([probe_tokens(2048, 1)]))  # what verify will run first
    for stream in loaded.streams.values():
        stream.settle()
        bank = stream.bank
    slot = next(reversed(bank.resident.values()))
    bank.view("down_proj.weight", slot)[0] ^= 0x40


def test_the_demo_model_is_identical_at_every_capacity() -> None:
    rows: list[VerifyRow] = []
    report = verify(on_row=rows.append)
    assert report.identical
    assert report.whole
    assert tuple(rows) == report.rows
    assert {row.experts: row.slots for row in rows} == {
        "top_k": (4, 4), "50%": (8, 8), "75%": (12, 12), "all": (16, 16),
    }  # fmt: skip
    per_capacity = (sum(PREFILL_TOKENS) + DECODE_TOKENS) * 2048
    assert report.values == 4 * per_capacity
    decode = next(row for row in rows if row.experts == "top_k" and row.part.startswith("decode"))
    assert decode.evictions > 64, "decode is compared while slots change hands"


def test_one_flipped_byte_of_one_slot_is_found(tiny: Path) -> None:
    report = verify(tiny, before_run=flip_a_byte)
    assert not report.identical
    assert all(row.differing == 0 for row in report.rows if row.experts == "all")
    assert any(row.differing for row in report.rows if row.experts == "top_k")


def test_layer_by_layer_finds_the_same(tiny: Path) -> None:
    report = verify(tiny, layer_by_layer=True)
    assert report.identical
    assert not report.whole
    assert {row.part for row in report.rows} == {f"model.layers.{n}.mlp.switch_mlp" for n in range(3)}
    assert all(row.misses for row in report.rows)
    broken = verify(tiny, layer_by_layer=True, before_run=flip_a_byte)
    assert {row.part for row in broken.rows if row.differing} == {"model.layers.2.mlp.switch_mlp"}


def test_a_model_too_large_to_hold_whole_is_compared_layer_by_layer(tiny: Path) -> None:
    assert not verify(tiny, memory="500kB").whole


def test_nothing_compared_is_no_proof(tmp_path: Path) -> None:
    from tiny import QWEN3_MOE, make_tiny

    dense = {key: value for key, value in QWEN3_MOE.items() if "expert" not in key} | {"model_type": "qwen3"}
    folder = make_tiny(tmp_path / "dense", dense)
    for layer_by_layer in (True, False):
        with pytest.raises(UnsupportedModelError, match="no routed experts"):
            verify(folder, layer_by_layer=layer_by_layer)


def test_difference_compares_bits() -> None:
    a = mx.array([0.0, 1.0, float("nan"), 2.0])
    assert difference(a, mx.array(a)) == (0, 0.0)
    assert difference(a, mx.array([-0.0, 1.0, float("nan"), 2.5])) == (2, 0.5)
    assert difference(a[:2], a)[0] == 4
    assert difference(a.astype(mx.bfloat16), a)[0] == 4
