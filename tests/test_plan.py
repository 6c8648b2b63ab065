"""Dividing a budget: never more than it, never less than one token needs, nothing rounded in the user's disfavour."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlxmoe.errors import MemoryBudgetError
from mlxmoe.memory.experts import MoeLayer, divide_slots, expert_budget
from mlxmoe.memory.plan import KVBytes, Rows, make_plan, replan
from mlxmoe.memory.sizes import format_bytes, parse_bytes


@st.composite
def model_layers(draw: st.DrawFn) -> list[MoeLayer]:
    """Of any sizes, their hits known or not."""
    measured, layers = draw(st.booleans()), []
    for number in range(draw(st.integers(1, 6))):
        experts = draw(st.integers(1, 40))
        rates = (
            sorted(draw(st.lists(st.floats(0, 1), min_size=experts + 1, max_size=experts + 1))) if measured else ()
        )
        top_k, nbytes = draw(st.integers(1, experts)), draw(st.integers(1, 1000))
        layers.append(MoeLayer(f"layers.{number}", experts, top_k, nbytes, tuple(rates)))
    return layers


@given(layers=model_layers(), share=st.floats(0, 1))
def test_slots_keep_to_the_budget_and_to_one_tokens_need(layers: list[MoeLayer], share: float) -> None:
    floor, total = sum(layer.floor_bytes for layer in layers), sum(layer.nbytes for layer in layers)
    budget = floor + round(share * (total - floor))
    slots = divide_slots(budget, layers)
    assert all(layer.top_k <= slots[layer.path] <= layer.num_experts for layer in layers)
    used = sum(slots[layer.path] * layer.expert_bytes for layer in layers)
    assert used <= budget
    room = budget - used
    assert all(slots[x.path] == x.num_experts or x.expert_bytes > room for x in layers), "no slot's worth is wasted"


@given(layers=model_layers())
def test_the_whole_budget_makes_every_layer_resident(layers: list[MoeLayer]) -> None:
    slots = divide_slots(sum(layer.nbytes for layer in layers), layers)
    assert all(slots[layer.path] == layer.num_experts for layer in layers)


@given(count=st.integers(2, 64), layers=st.integers(1, 8))
def test_equal_layers_get_equal_shares(count: int, layers: int) -> None:
    model = [MoeLayer(f"layers.{n}", count, 1, 1000) for n in range(layers)]
    assume(count * 1000 * layers // 2 >= layers * 1000)
    slots = divide_slots(count * 1000 * layers // 2, model).values()
    assert max(slots) - min(slots) <= 1


def by_hits(budget: int, *hit_rates: tuple[float, ...], nbytes: Sequence[int] = (1, 1, 1)) -> list[int]:
    """Slots of layers of four experts, two of them for each token."""
    sizes = zip(nbytes, hit_rates, strict=False)
    return list(divide_slots(budget, [MoeLayer(str(n), 4, 2, size, r) for n, (size, r) in enumerate(sizes)]).values())


def test_slots_go_where_they_bring_most_hits() -> None:
    flat, steep, late = (0, 0.1, 0.5, 0.5, 0.5), (0, 0.1, 0.5, 0.9, 1.0), (0, 0.1, 0.2, 0.2, 0.9)
    assert by_hits(7, flat, steep, late) == [2, 3, 2], "one more: where it brings most at once"
    assert by_hits(8, flat, steep, late) == [2, 3, 3], "the way to a rise that lies further off"
    assert by_hits(9, flat, steep, late) == [2, 3, 4]
    assert by_hits(11, flat, steep, late) == [3, 4, 4], "what brings no hit anywhere goes to the smallest share"
    assert by_hits(26, steep, steep, nbytes=(1, 10)) == [4, 2], "as many hits of smaller experts cost less"


def test_hits_decide_from_half_of_the_experts_on_and_where_all_are_known() -> None:
    flat, steep = (0, 0.1, 0.5, 0.5, 0.5), (0, 0.1, 0.5, 0.9, 1.0)
    eight = [MoeLayer(str(n), 8, 2, 1, (0, 0.1, *([rate] * 7))) for n, rate in enumerate((0.5, 0.6))]
    eight[1] = dataclasses.replace(eight[1], hit_rates=(0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8))
    assert list(divide_slots(7, eight).values()) != [2, 5], "less than half: equal shares"
    assert list(divide_slots(8, eight).values()) == [2, 6]
    assert by_hits(6, flat, steep) == [2, 4]
    assert by_hits(6, flat, ()) == [3, 3]


def test_a_plan_and_what_follows_it_divide_by_hits() -> None:
    flat, steep = (0, 0.1, *[0.2] * 7), tuple(n / 8 for n in range(9))
    layers = [dataclasses.replace(m, hit_rates=rates) for m, rates in zip(LAYERS, (steep, flat) * 2, strict=True)]
    made = plan(layers, memory_bytes=23_000)
    assert list(plan(memory_bytes=23_000).slots.values()) == [5, 5, 5, 5]
    assert list(made.slots.values()) == [8, 2, 8, 2]
    assert list(replan(made, layers, "50%").slots.values()) == [8, 2, 4, 2]
    assert list(replan(made, layers, "25%").slots.values()) == [2, 2, 2, 2]


LAYERS = [MoeLayer(f"layers.{n}", 8, 2, 1000) for n in range(4)]


@pytest.mark.parametrize(
    ("experts", "grant"),
    [
        ("auto", 9000),
        ("all", 32000),
        ("25%", 8000),
        (0.5, 16000),
        ("0.5", 16000),
        (12345, 12345),
        ("12kB", 12000),
        ("1TB", 32000),
    ],
)
def test_what_experts_grants(experts: Any, grant: int) -> None:
    assert expert_budget(experts, LAYERS, auto_bytes=9000) == grant


def test_too_small_a_budget_says_what_one_token_needs() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        expert_budget("7kB", LAYERS, auto_bytes=0)
    assert str(caught.value) == (
        "Expert budget is 7.0 kB, but one token needs 8.0 kB (2 experts x 4 layers). "
        "Raise experts= to 8000 bytes or 25% or more."
    )


def plan(layers: Sequence[MoeLayer] | None = None, **options: Any) -> Any:
    return make_plan(
        LAYERS if layers is None else layers,
        **{
            "trunk_bytes": 1000,
            "kv": KVBytes(step_bytes=500),
            "prefill": lambda chunk, context: 500,
            "pool_bytes": 0,
            "context": 64,
            "model_context": None,
            "experts": "auto",
        }
        | options,
    )


@given(memory=st.integers(0, 50_000))
def test_a_plan_keeps_to_its_memory_or_is_refused(memory: int) -> None:
    if memory < 10_250:
        with pytest.raises(MemoryBudgetError, match="one token's experts"):
            plan(memory_bytes=memory)
    else:
        made = plan(memory_bytes=memory)
        assert made.total_bytes <= memory
        assert made.pool_bytes == 250
        assert made.bank_bytes == sum(slots * 1000 for slots in made.slots.values())


def test_experts_that_do_not_fit_the_memory_are_refused_with_what_would() -> None:
    with pytest.raises(MemoryBudgetError, match=r"20\.0 kB, but .* 32\.0 kB for experts='all' need 34\.3 kB"):
        plan(memory_bytes=20_000, experts="all")


def test_the_context_is_the_models_where_it_fits() -> None:
    assert plan(memory_bytes=100_000, context=None, model_context=4096).context == 4096
    assert plan(memory_bytes=100_000, context=None, model_context=None).context is None


def test_while_all_experts_fit_nothing_else_is_asked_what_a_prefill_takes() -> None:
    def refuse(chunk: int, context: int | None) -> int:
        raise AssertionError("asked for experts that come and go")

    made = plan(memory_bytes=60_000, prefill=refuse, resident_prefill=lambda chunk, context: 700)
    assert (made.prefill_bytes, made.bank_bytes) == (700, 32_000)
    asked = []
    made = plan(
        memory_bytes=20_000,
        prefill=lambda chunk, context: asked.append(chunk) or 300,
        resident_prefill=lambda chunk, context: 700,
    )
    assert made.prefill_bytes == 300
    assert made.bank_bytes < 32_000
    assert asked


@given(memory=st.integers(10_500, 60_000), model_context=st.integers(300, 100_000))
def test_a_context_that_nobody_asked_for_shrinks_to_what_fits(memory: int, model_context: int) -> None:
    made = plan(memory_bytes=memory, context=None, model_context=model_context)
    assert made.total_bytes <= memory
    assert made.context <= model_context
    assert made.bank_bytes >= 8000
    if made.context < model_context:
        room = memory - 1000 - 8000
        assert made.kv_bytes <= max(500, room // 4)
        assert made.kv_bytes + 500 > room // 4, "as much as fits"


def test_prefill_chunks_are_mlx_lms_where_all_experts_fit_or_they_take_a_quarter_at_most() -> None:
    asked: list[tuple[int, int]] = []

    def prefill(chunk: int, context: int) -> int:
        asked.append((chunk, context))
        return chunk * 4

    roomy = {"context": 4096, "prefill": prefill, "kv": KVBytes(step_bytes=10)}
    made = plan(memory_bytes=60_000, **roomy)
    assert (made.chunk_tokens, made.prefill_bytes, made.bank_bytes) == (2048, 8192, 32_000)
    assert asked == [(2048, 4096)], "one look is enough"
    assert plan(memory_bytes=40_000, **roomy).chunk_tokens == 512, "a smaller chunk, and all experts"
    made = plan(memory_bytes=30_000, **roomy)
    assert (made.chunk_tokens, made.prefill_bytes) == (512, 2048)
    assert made.bank_bytes < 32_000
    assert plan(memory_bytes=12_000, **roomy).chunk_tokens == 128
    assert plan(memory_bytes=60_000, **{**roomy, "context": 100}).chunk_tokens == 2048
    assert asked[-1] == (100, 100), "no chunk is longer than the context"


def test_a_chunk_takes_no_more_than_the_kv_cache_leaves() -> None:
    options = {"context": 4096, "prefill": lambda chunk, context: 4 * chunk}
    made = plan(memory_bytes=60_000, kv=KVBytes(fixed_bytes=47_000), **options)
    assert made.chunk_tokens == 512, "2048 is a quarter of 51,000 bytes at most, but only 4,000 are left"


def test_a_cache_of_any_length_that_does_not_fit_is_refused_with_what_would() -> None:
    asked: list[tuple[int, int | None]] = []

    def prefill(chunk: int, context: int | None) -> int:
        asked.append((chunk, context))
        return 500

    kv = KVBytes(rows=(Rows(10, "sliding", 1_000_000),))
    with pytest.raises(MemoryBudgetError, match=r"any number of tokens.* context=1024, or a smaller window="):
        plan(memory_bytes=60_000, kv=kv, prefill=prefill, context=None)
    assert asked == [(128, None), (1024, 1024)], "of what cannot be, the smallest chunk is enough"
    assert plan(memory_bytes=60_000, kv=kv, context=1024).total_bytes <= 60_000


def test_a_context_that_nobody_asked_for_shrinks_for_what_its_prefill_takes_too() -> None:
    def scores(chunk: int, context: int) -> int:
        return chunk * context // 100

    made = plan(memory_bytes=40_000, prefill=scores, context=None, model_context=2**17, kv=KVBytes(step_bytes=1))
    assert 256 <= made.context < 2**17
    assert made.prefill_bytes + made.pool_bytes <= (40_000 - 1000 - 8000) // 4
    assert made.prefill_bytes == scores(made.chunk_tokens, made.context)


def test_replanning_changes_the_experts_only() -> None:
    made = plan(memory_bytes=30_000)
    smaller = replan(made, LAYERS, "25%")
    assert smaller == dataclasses.replace(made, bank_bytes=8000, slots={layer.path: 2 for layer in LAYERS})
    assert replan(smaller, LAYERS, "auto") == made
    with pytest.raises(MemoryBudgetError, match=r"32\.0 kB, but the memory budget of 30\.0 kB has 27\.\d kB"):
        replan(made, LAYERS, "all")


def test_a_kv_cache_with_windows_stops_growing() -> None:
    kv = KVBytes(fixed_bytes=10, step_bytes=100, rows=(Rows(30, "window", 300), Rows(7, "tokens", 4)))
    assert [kv.of(tokens) for tokens in (None, 1, 256, 257, 1024, 2560)] == [7797, 7797, 9138, 9238, 9438, 10038]
    assert kv.tokens_in(9238) == 512
    assert kv.tokens_in(9137) == 0


def test_a_refusal_names_the_nearest_that_would_fit() -> None:
    kv = KVBytes(step_bytes=1000)
    with pytest.raises(MemoryBudgetError, match="What would fit: experts='auto' with context=2048") as caught:
        plan(memory_bytes=18_000, kv=kv, context=4096)
    assert "16.0 kB KV cache for 4096 tokens" in str(caught.value)
    assert plan(memory_bytes=18_000, kv=kv, context=2048).context == 2048
    with pytest.raises(MemoryBudgetError, match="What would fit: experts='auto' with context=64"):
        plan(memory_bytes=18_000, experts="all")
    with pytest.raises(MemoryBudgetError, match=r"least that would do is memory=1MB .* context=256: give it more"):
        plan(memory_bytes=1000, context=300)
    least = plan(memory_bytes=10**6, context=256)
    assert least.context == 256


@pytest.mark.parametrize(
    ("text", "count"),
    [("12GB", 12 * 10**9), ("1.5 GiB", 3 * 2**29), ("100", 100), (" 7kb ", 7000), (5, 5), ("0.5M", 500_000)],
)
def test_sizes_are_read_as_people_write_them(text: int | str, count: int) -> None:
    assert parse_bytes(text, "memory") == count


@pytest.mark.parametrize("text", ["", "GB", "12 parsecs", "-1GB", "1e9", "0", 0, -5, None, 1.5, True, "1,5GB", "٣GB"])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(MemoryBudgetError, match="memory="):
        parse_bytes(text, "memory")


def test_sizes_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 12_345_678, 22_100_000_000)] == [
        "0 bytes", "999 bytes", "1.0 kB", "12.3 MB", "22.1 GB",
    ]  # fmt: skip
