"""The model of speed, held against what people published; and the curves of hits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache as once
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_facts import CONFIGS, PUBLISHED, PublishedDecode

from mlxmoe.memory.experts import divide_slots
from mlxmoe.memory.plan import Plan
from mlxmoe.opening import open_folder
from mlxmoe.tuning.outline import outlined
from mlxmoe.tuning.roofline import Prompt, Rates, Step, curve_through, decode_s, default_hit_curve, prefill_s
from mlxmoe.tuning.workload import Workload

SSD_BYTES_PER_S = 2_400_000_000


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Workload]:
    @once
    def of(model: str, bits: int) -> Workload:
        file: Path = tmp_path_factory.mktemp(model) / "config.json"
        file.write_text(json.dumps(CONFIGS[model]))
        with outlined(file, None, bits) as outline:
            return Workload.of(open_folder(outline.folder))

    return of


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: f"{p.model}, {p.machine}")
def test_published_decode_rates_are_met(published: PublishedDecode, workload: Callable[[str, int], Workload]) -> None:
    """Within 35 %: runtimes, quantisations and texts differ, and only the bandwidth is known of most machines."""
    work = workload(published.model, published.bits)
    layers = work.opened.layers
    slots = {layer.path: layer.num_experts for layer in layers}
    if published.slots_bytes is not None:
        slots = divide_slots(published.slots_bytes, layers)
    plan = Plan(0, 0, 0, 0, 0, 0, 0, None, None, 512, slots)
    curves = {
        layer.path: default_hit_curve(layer.num_experts, layer.top_k)
        if published.miss_rate is None
        else curve_through([(share, 1 - published.miss_rate) for share in (0.01, 0.999)])
        for layer in layers
    }
    rates = Rates(published.bandwidth_bytes_per_s, read_bytes_per_s=SSD_BYTES_PER_S)
    predicted = 1 / decode_s(work.step(plan, curves, 512), rates)
    print(f"{published.model}, {published.machine}: predicted {predicted:.1f}, published {published.tokens_per_s}")
    assert predicted == pytest.approx(published.tokens_per_s, rel=0.35)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "share", "seen"),
    [
        (32, 4, 8 / 32, 0.60), (32, 4, 12 / 32, 0.76), (32, 4, 16 / 32, 0.87), (32, 4, 20 / 32, 0.93),
        (32, 4, 24 / 32, 0.96), (128, 6, 0.5, 0.90), (128, 2, 0.5, 0.72), (256, 8, 0.47, 0.917),
    ],
)  # fmt: skip
def test_the_default_curve_is_near_what_was_replayed(num_experts: int, top_k: int, share: float, seen: float) -> None:
    assert default_hit_curve(num_experts, top_k)(share) == pytest.approx(seen, abs=0.05)


@given(num_experts=st.integers(1, 512), top_k=st.integers(1, 16), shares=st.lists(st.floats(0, 1), min_size=2))
def test_more_slots_never_hit_less(num_experts: int, top_k: int, shares: list[float]) -> None:
    curve = default_hit_curve(num_experts, top_k)
    rates = [curve(share) for share in sorted(shares)]
    assert rates == sorted(rates)
    assert all(0 <= rate <= 1 for rate in rates)
    assert curve(1.0) == 1


def test_a_measured_curve_goes_through_its_points() -> None:
    curve = curve_through([(0.5, 0.9), (0.25, 0.6)])
    assert [curve(share) for share in (0, 0.25, 0.5, 1)] == pytest.approx([0, 0.6, 0.9, 1])
    assert curve(0.375) == pytest.approx(0.75)


def test_each_term_counts() -> None:
    rates = Rates(100e9, 1e12, 2e9, efficiency=0.5, layer_s=1e-3, sync_s=2e-3, miss_s=3e-3, prefill_efficiency=0.5)
    assert decode_s(Step(50e9, layers=10), rates) == pytest.approx(1 + 0.01)
    assert decode_s(Step(50e9, 10, missing_bytes=4e9, misses=2, syncs=5), rates) == pytest.approx(3.026)
    assert prefill_s(Prompt(1e12, read_bytes=2e9, chunks=2, syncs=5), rates) == pytest.approx(2 + 1 + 0.02)
    assert prefill_s(Prompt(1e12), replace(rates, flops_per_s=None)) is None
