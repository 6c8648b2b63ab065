"""All banks of one model, resized while it runs: the same bits, the bytes it says, and nothing left in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.switch_layers import SwitchGLU
from tiny import QWEN3_MOE, make_tiny

from mlxmoe.decode import Decoder
from mlxmoe.errors import CheckpointReadError, UnsupportedModelError
from mlxmoe.experts.switch import switch_modules
from mlxmoe.loading import LoadedModel, load_folder
from mlxmoe.memory.experts import divide_slots

TOKENS = list(range(7, 47))
WIDE = {**QWEN3_MOE, "hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32}


@contextmanager
def loaded(folder: Path, experts: int | float | str) -> Iterator[tuple[LoadedModel, Decoder]]:
    model = load_folder(folder, experts=experts, memory_bytes=2**62)
    try:
        yield model, Decoder(model.model, model.experts, chunk_tokens=16)
    finally:
        model.experts.close()


@pytest.fixture(scope="module")
def stock(tiny: Path) -> list[mx.array]:
    """The logits of a prompt, and then of each token of a fixed text."""
    with loaded(tiny, "all") as (_, decoder):
        cache = decoder.new_cache()
        rows = [decoder.logits(TOKENS, cache)]
        return rows + [decoder.logits([token], cache) for token in TOKENS]


@pytest.mark.slow
@settings(max_examples=20)
@given(
    start=st.sampled_from(["25%", "50%", "all"]),
    sizes=st.lists(st.integers(0, 24), min_size=1, max_size=len(TOKENS)),
    uneven=st.booleans(),
)
def test_logits_are_bit_identical_while_the_banks_are_resized(
    tiny: Path, stock: list[mx.array], start: str, sizes: list[int], uneven: bool
) -> None:
    with loaded(tiny, start) as (model, decoder):
        experts = model.experts
        expert_bytes = experts.layers[0].expert_bytes
        cache = decoder.new_cache()
        assert mx.array_equal(decoder.logits(TOKENS, cache), stock[0])
        for position, token in enumerate(TOKENS):
            assert mx.array_equal(decoder.logits([token], cache), stock[1 + position])
            size = sizes[position % len(sizes)]
            if uneven:
                slots = experts.shrunk(size * expert_bytes)
            else:
                slots = divide_slots(max(6, size) * expert_bytes, experts.layers)
            experts.resize(slots)
            assert experts.slots == slots
            assert experts.nbytes == sum(slots.values()) * expert_bytes
            if uneven and position % 3 == 2:
                experts.resize({layer.path: layer.num_experts for layer in experts.layers})


def test_a_layer_with_all_its_experts_is_stock_code(tiny: Path, stock: list[mx.array]) -> None:
    with loaded(tiny, "all") as (model, decoder):
        experts = model.experts
        everything = experts.slots
        assert not experts.streams
        experts.resize(dict.fromkeys(everything, 3))
        assert set(experts.streams) == set(everything)
        assert mx.array_equal(decoder.logits(TOKENS, decoder.new_cache()), stock[0])
        experts.resize(everything)
        assert not experts.streams
        assert all(type(module) is SwitchGLU for module in switch_modules(model.model).values())
        misses = experts.lookups()[1]
        assert mx.array_equal(decoder.logits(TOKENS, decoder.new_cache()), stock[0])
        assert experts.lookups()[1] == misses, "a resident layer counts nothing, and what was counted is kept"
        assert misses > 0


def test_what_was_not_used_for_the_longest_goes_first(tiny: Path) -> None:
    with loaded(tiny, "75%") as (model, decoder):
        experts = model.experts
        decoder.logits(TOKENS, decoder.new_cache())
        cold = experts.layers[1]
        for _ in range(3):
            for layer in experts.layers:
                bank = experts.streams[layer.path].bank
                wanted = list(bank.resident)[-1:] if layer == cold else list(bank.resident)
                assert len(bank.want(wanted, len(wanted))) == 1, "all are there"
                bank.used()
        before = experts.slots
        after = experts.shrunk(3 * cold.expert_bytes)
        assert after == {**before, cold.path: before[cold.path] - 3}
        hot = list(experts.streams[cold.path].bank.resident)[-3:]
        experts.resize(after)
        assert list(experts.streams[cold.path].bank.resident) == hot
        assert experts.shrunk(2**40) == {layer.path: layer.top_k for layer in experts.layers}, "the floor is kept"


def test_equally_cold_layers_give_the_same_share(tiny: Path) -> None:
    with loaded(tiny, "all") as (model, _):
        slots = model.experts.shrunk(9 * model.experts.layers[0].expert_bytes)
        assert set(slots.values()) == {5}


def test_a_resident_layer_gives_its_part_beside_streaming_ones(tiny: Path) -> None:
    with loaded(tiny, "95%") as (model, decoder):
        experts = model.experts
        decoder.logits(TOKENS, decoder.new_cache())
        assert sorted(experts.slots.values()) == [7, 7, 8]
        slots = experts.shrunk(9 * experts.layers[0].expert_bytes)
        assert max(slots.values()) - min(slots.values()) <= 2, slots


def test_shrinking_gives_the_memory_back_and_needs_little_meanwhile(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "wide", WIDE)
    with loaded(folder, "all") as (model, _):
        experts = model.experts
        before, layer_bytes = mx.get_active_memory(), experts.layers[0].nbytes
        mx.reset_peak_memory()
        experts.resize(dict.fromkeys(experts.slots, 8))
        assert mx.get_peak_memory() - before <= layer_bytes // 2
        assert mx.get_active_memory() - before == pytest.approx(-experts.layers[0].nbytes * 3 * 24 / 32, rel=0.02)
        assert mx.get_cache_memory() < layer_bytes // 10
        mx.reset_peak_memory()
        now = mx.get_active_memory()
        experts.resize(dict.fromkeys(experts.slots, 16))
        assert mx.get_peak_memory() - now <= 3 * 8 * experts.layers[0].expert_bytes + layer_bytes // 2


def test_a_read_that_fails_while_a_layer_becomes_whole_leaves_it_streaming(tiny: Path, stock: list[mx.array]) -> None:
    with loaded(tiny, "50%") as (model, decoder):
        experts = model.experts
        reader, everything = experts._reader, {layer.path: layer.num_experts for layer in experts.layers}
        preadv, reader._queue._preadv = reader._queue._preadv, lambda *_: 0
        with pytest.raises(CheckpointReadError, match="ended"):
            experts.resize(everything)
        reader._queue._preadv = preadv
        assert experts.streams
        assert mx.array_equal(decoder.logits(TOKENS, decoder.new_cache()), stock[0])
        experts.resize(everything)
        assert not experts.streams
        assert mx.array_equal(decoder.logits(TOKENS, decoder.new_cache()), stock[0])


def test_experts_that_cannot_be_read_in_place_are_not_shrunk(tiny: Path) -> None:
    with loaded(tiny, "all") as (model, _):

        def unreadable() -> dict[str, dict[str, object]]:
            raise UnsupportedModelError("stored transposed")

        model.experts._locate = unreadable  # type: ignore[assignment]
        before = model.experts.slots
        with pytest.raises(UnsupportedModelError, match="transposed"):
            model.experts.resize(dict.fromkeys(before, 4))
        assert model.experts.slots == before


def test_a_closed_cache_holds_nothing(tiny: Path) -> None:
    with loaded(tiny, "50%") as (model, _):
        model.experts.close()
        assert model.experts.nbytes == 0
        assert set(model.experts.slots.values()) == {0}
