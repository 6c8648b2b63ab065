"""The comparison of eviction policies: its bound is the bound, its policies keep the rules, and it runs."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import TOOLS
from hypothesis import given, settings
from hypothesis import strategies as st

EXPERTS, TOP_K = 6, 2
wanted = st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True)
NAMES = ["LRU", "LRU, frequency", "LFU", "LFU, halved", "S3-FIFO", "ARC", "LRFU", "successors", "Belady"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module("compare_eviction")
    finally:
        sys.path.remove(str(TOOLS))


def most_hits(tokens: list[list[int]], slots: int) -> int:
    """Of all ways to give slots away; each token's experts must be in slots together."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for now in map(frozenset, tokens):
        following: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            others = held - now
            room = min(len(others), slots - len(now))
            for stay in combinations(sorted(others), room):
                after = now | frozenset(stay)
                following[after] = max(following.get(after, 0), hits + len(held & now))
        best = following
    return max(best.values())


@given(tokens=st.lists(wanted, min_size=1, max_size=12), slots=st.integers(TOP_K, EXPERTS))
def test_belady_is_what_trying_everything_finds(tool: ModuleType, tokens: list[list[int]], slots: int) -> None:
    assert sum(tool.replay(tool.POLICIES["Belady"], tokens, slots)) == most_hits(tokens, slots)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(tokens=st.lists(wanted, min_size=1, max_size=40), slots=st.integers(TOP_K, EXPERTS))
def test_no_policy_is_better_than_the_bound(tool: ModuleType, name: str, tokens: list[list[int]], slots: int) -> None:
    hits = sum(tool.replay(tool.POLICIES[name], tokens, slots))
    assert hits <= sum(tool.replay(tool.POLICIES["Belady"], tokens, slots))
    if slots == EXPERTS:
        first = len({expert for token in tokens for expert in token})
        assert hits == TOP_K * len(tokens) - first, "with a slot for each only the first use misses"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(data=st.data(), slots=st.integers(TOP_K, EXPERTS))
def test_a_policy_gives_up_as_many_slots_as_asked_and_none_that_must_stay(
    tool: ModuleType, name: str, data: st.DataObject, slots: int
) -> None:
    tokens = data.draw(st.lists(wanted, min_size=1, max_size=30))
    policy, held = tool.POLICIES[name](slots, tokens), set[int]()
    for token in tokens:
        policy.count(token, TOP_K)
        missing = [expert for expert in token if expert not in policy]
        count = max(0, len(missing) + len(held) - slots)
        victims = policy.evict(count, set(token))
        assert len(set(victims)) == count
        assert set(victims) <= held - set(token)
        policy.touch(token)
        held = held - set(victims) | set(token)
        assert {expert for expert in range(EXPERTS) if expert in policy} == held


def test_every_policy_of_the_tool_is_tested(tool: ModuleType) -> None:
    assert list(NAMES) == list(tool.POLICIES)


def test_a_chunk_of_prefill_is_cut_as_a_bank_cuts_it(tool: ModuleType) -> None:
    tokens = [[0, 1], [2, 3], [4, 5], [4, 5], [0, 4]]
    for name in NAMES:
        hits = tool.replay(tool.POLICIES[name], tokens, slots=3, prefill=3)
        assert len(hits) == 2
        assert hits[0] >= 1, f"{name}: the last wave is in the bank"


def make_trace(folder: Path, name: str, seed: int) -> None:
    """40 tokens of 2 layers, each expert likelier the lower its number."""
    rng = np.random.default_rng(seed)
    chances = 1 / np.arange(1, 17)
    rows = [rng.choice(16, 2, replace=False, p=chances / chances.sum()) for _ in range(80)]
    experts = np.array(rows, dtype=np.uint16).reshape(40, 2, 2)
    np.savez_compressed(folder / f"{name}.npz", experts=experts, num_experts=np.int64(16))


def test_the_tool_prints_tables_and_a_line_of_json(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in enumerate(("one", "two")):
        make_trace(tmp_path, name, seed)
    tool.main([str(tmp_path), "--tuned", "one"])
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert {(row["trace"], row["share"]) for row in found["rows"]} == {
        (trace, share) for trace in ("one", "two") for share in ("1/8", "1/4", "1/2", "3/4")
    }
    assert list(found["policies"]) == list(NAMES)
    assert found["policies"]["Belady"]["gap"] == 0
    assert found["policies"]["LRU"]["gap"] >= 0
    assert found["at_least_lru"]["LRU"] is True
    assert "| two | 1/4: 4 |" in printed
    assert "mean gap to Belady" in printed


def test_the_tool_compares_slots_by_layer(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(2):
        make_trace(tmp_path, f"model-{seed}", seed)
    tool.main([str(tmp_path), "--layers"])
    printed = capsys.readouterr().out
    gains = json.loads(printed.splitlines()[-1])["gain"]
    assert {(row["curves"], row["share"]) for row in gains} == {
        (kind, share) for kind in ("first half", "other texts") for share in tool.LAYER_SHARES
    }
    assert "| model-1 | other texts | 7/8 |" in printed


def test_slots_by_hits_are_judged_on_what_they_were_not_made_of(tool: ModuleType) -> None:
    """Two layers, of which the first asks for two experts in turn and the second for eight: it wants the slots."""
    layers = [[[n % 2] for n in range(64)], [[n % 8] for n in range(64)]]
    trace = tool.Trace("one", 8, layers)
    five = next(row for row in tool.compare_layers(trace, "", traces=[trace]) if row.share == "5/8")
    assert (five.kind, five.by_curves) == ("first half", 1.0)
    assert five.equal < 0.9


def test_the_tool_says_when_there_is_nothing_to_compare(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path)])
    assert "no .npz" in capsys.readouterr().err
    make_trace(tmp_path, "one", 0)
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path), "--tuned", "two"])
    assert "not in the folder: two" in capsys.readouterr().err
