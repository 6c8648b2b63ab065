"""Traces: what is recorded is what was asked for, whatever is resident; the file; what a trace says in numbers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from definitions import DEFINITIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.utils import load_model
from tiny import QWEN3_MOE, make_tiny

from mlxmoe import Engine, EngineClosedError, RequestError, SavedStateError, Trace, load, routing_stats
from mlxmoe.experts.recording import Recording, noting
from mlxmoe.experts.trace import NO_EXPERT, layer_numbers
from mlxmoe.memory.experts import MoeLayer

PROMPT = list(range(7, 27))
SHARED_TRACES = Path(__file__).parent.parent.parent / "shared" / "traces"


@pytest.fixture
def half(tiny: Path) -> Iterator[Engine]:
    with load(tiny, experts="50%") as engine:
        yield engine


def heard_by_stock(folder: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    """What stock mlx-lm's switch layers are handed for `tokens`, found without any of our code."""
    heard: list[mx.array] = []
    stock = SwitchGLU.__call__

    def listen(self: SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
        heard.append(indices)
        return stock(self, x, indices)

    with monkeypatch.context() as patch:
        patch.setattr(SwitchGLU, "__call__", listen)
        mx.eval(load_model(folder)[0](mx.array([tokens])), heard)
    return np.stack([np.array(indices).reshape(len(tokens), -1) for indices in heard], axis=1)


def trace_of(experts: list[list[list[int]]], num_experts: int) -> Trace:
    array = np.array(experts, np.uint16)
    return Trace(array, (num_experts,) * array.shape[1])


# --- recording --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["25%", "all"])
def test_a_recording_is_what_stock_layers_are_asked_for(
    tiny: Path, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny, experts=experts) as engine:
        unrecorded = [chunk.token for chunk in engine.stream(PROMPT, max_tokens=12)]
        with engine.record() as recording:
            tokens = [chunk.token for chunk in engine.stream(PROMPT, max_tokens=12)]
        assert tokens == unrecorded, "recording changes no token"
        trace = recording.trace
        engine.generate(PROMPT, max_tokens=2)
        assert recording.tokens == trace.tokens == len(PROMPT) + 11, (
            "the last token is not fed; nothing after its end"
        )
    assert trace.num_experts == (8, 8, 8)
    assert trace.layers == (0, 1, 2)
    assert np.array_equal(trace.experts, heard_by_stock(tiny, [*PROMPT, *tokens[:-1]], monkeypatch))


def test_layers_may_become_resident_and_stream_again_while_recorded(half: Engine) -> None:
    whole, parts = [], []
    with half.record() as recording:
        for sizes in ([], ["all", "25%", "50%"]):
            before = recording.tokens
            for chunk in half.stream(PROMPT, max_tokens=10):
                if chunk.generated_tokens % 3 == 0 and sizes:
                    half.resize(sizes.pop(0))
            (parts if whole else whole).append(recording.trace.experts[before:])
    assert np.array_equal(whole[0], parts[0])
    half.resize("all")
    assert {type(module) for module in half.model.modules() if isinstance(module, SwitchGLU)} == {SwitchGLU}
    assert not any("heard" in key for module in half.model.modules() for key in module)


def test_streams_are_recorded_in_the_order_of_their_passes(half: Engine) -> None:
    alone = []
    for prompt in ([5, 6, 7], [50, 51, 52, 53]):
        with half.record() as recording:
            half.generate(prompt, max_tokens=4)
        alone.append(recording.trace.experts)
    with half.record() as outer, half.record() as recording:
        streams = [half.stream([5, 6, 7], max_tokens=4), half.stream([50, 51, 52, 53], max_tokens=4)]
        for _ in itertools.chain.from_iterable(zip(*streams, strict=True)):
            pass
    first, second = alone
    expected = [first[:3], second[:4], *(part[n : n + 1] for n in range(3) for part in (first[3:], second[4:]))]
    assert np.array_equal(recording.trace.experts, np.concatenate(expected))
    assert np.array_equal(outer.trace.experts, recording.trace.experts)


def test_a_batch_is_recorded_row_by_row(half: Engine) -> None:
    with half.record() as recording:
        half.model(mx.array([[5, 6, 7], [50, 51, 52]]))
        half.model(mx.array([[5, 6, 7]]))
        half.model(mx.array([[50, 51, 52]]))
    experts = recording.trace.experts
    assert np.array_equal(experts[:6], experts[6:])


def test_layers_with_another_top_k_are_filled_up(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "hunyuan", DEFINITIONS["hunyuan"])
    with load(folder, experts="50%") as engine, engine.record() as recording:
        engine.generate(PROMPT, max_tokens=3)
    trace = recording.trace
    assert trace.top_k == 3
    assert [(column != NO_EXPERT).sum(axis=-1).max() for column in trace.experts.swapaxes(0, 1)] == [2, 1, 3, 2]
    assert routing_stats(trace).top_k == 3
    assert np.array_equal(Trace.load(trace.save(tmp_path / "t.npz")).experts, trace.experts)


class Switch(nn.Module):
    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return x


def test_a_layer_that_a_pass_leaves_out_has_no_expert_there() -> None:
    layers = [MoeLayer("a", 8, 2, 1), MoeLayer("b", 4, 1, 1), MoeLayer("c", 8, 2, 1)]
    modules = {layer.path: Switch() for layer in layers}
    recording = Recording(layers, 100)
    with noting(modules, [recording]):
        modules["a"](mx.zeros(3), mx.array([[[1, 2], [3, 4], [5, 6]]]))
        modules["b"](mx.zeros(3), mx.array([[3]]))  # the last token alone
    with noting(modules, [recording]):
        pass
    with contextlib.suppress(KeyboardInterrupt), noting(modules, [recording]):
        modules["a"](mx.zeros(3), mx.array([[1, 2]]))
        raise KeyboardInterrupt
    none = NO_EXPERT
    assert recording.trace.experts.tolist() == [
        [[1, 2], [none, none], [none, none]],
        [[3, 4], [none, none], [none, none]],
        [[5, 6], [3, none], [none, none]],
    ]
    assert recording.trace.num_experts == (8, 4, 8)
    assert recording.trace.layers is None, "paths without numbers"
    assert {type(module) for module in modules.values()} == {Switch}
    assert layer_numbers(["model.layers.3.mlp", "model.layers.11.mlp"]) == (3, 11)
    assert layer_numbers(["model.layers.3.a", "model.layers.3.b"]) is None


def test_a_recording_is_bounded(half: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with half.record(max_tokens=21) as recording:
        half.generate(PROMPT, max_tokens=6)
    assert recording.full
    assert recording.tokens == recording.trace.tokens == 21
    assert "the first 21 are kept" in caplog.text


def test_what_cannot_be_recorded_is_refused(tmp_path: Path, half: Engine) -> None:
    for bad in (0, True, 1.5):
        with pytest.raises(RequestError, match="1 or more"), half.record(max_tokens=bad):  # type: ignore[arg-type]
            pass
    with half.record() as recording:
        pass
    assert recording.trace.tokens == 0
    with pytest.raises(ValueError, match="no token"):
        routing_stats(recording.trace)
    half.close()
    with pytest.raises(EngineClosedError), half.record():
        pass
    dense = {key: value for key, value in QWEN3_MOE.items() if "expert" not in key} | {"model_type": "qwen3"}
    with (
        load(make_tiny(tmp_path / "dense", dense)) as engine,
        pytest.raises(RequestError, match="no routed experts"),
        engine.record(),
    ):
        pass


# --- the file ---------------------------------------------------------------------------------------------


def test_a_trace_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    experts = np.array([[[1, 2], [0, NO_EXPERT]], [[7, 0], [3, 1]]], np.uint16)
    trace = Trace(experts, (8, 4), (2, 5), np.array([[[0.5, 0.5], [1, 0]]] * 2, np.float16))
    back = Trace.load(trace.save(tmp_path / "trace"))
    assert np.array_equal(back.experts, experts)
    assert (back.num_experts, back.layers) == ((8, 4), (2, 5))
    assert np.array_equal(back.weights, trace.weights)  # type: ignore[arg-type]
    assert trace.counts() == [[1, 1, 1, 0, 0, 0, 0, 1], [1, 1, 0, 1]]
    with np.load(Trace(experts, (8, 8)).save(tmp_path / "trace")) as stored:
        assert {name: (stored[name].dtype, stored[name].shape) for name in stored.files} == {
            "experts": (np.uint16, (2, 2, 2)),
            "num_experts": (np.int64, ()),
        }
    assert [file.name for file in tmp_path.iterdir()] == ["trace"]


def test_what_is_no_whole_trace_is_refused(tmp_path: Path) -> None:
    path = trace_of([[[1, 2], [3, 4]]] * 50, 8).save(tmp_path / "trace.npz")
    whole = path.read_bytes()
    for length in range(0, len(whole), 13):
        path.write_bytes(whole[:length])
        with pytest.raises(SavedStateError, match=r"trace\.npz"):
            Trace.load(path)
    for position in range(0, len(whole), 5):  # altered: refused, or a trace still
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        with contextlib.suppress(SavedStateError):
            Trace.load(path)
    good = {"experts": np.zeros((1, 2, 2), np.uint16), "num_experts": np.int64(8)}
    for bad, says in (
        ({"experts": good["experts"]}, "no num_experts"),
        ({**good, "experts": np.full((1, 2, 2), 8, np.uint16)}, "asks layer 0 for expert 8, which has 8"),
        ({**good, "experts": np.zeros((1, 2, 2), np.int64)}, "experts is int64"),
        ({**good, "experts": np.zeros((2, 2), np.uint16)}, r"experts is uint16 \[2, 2\]"),
        ({**good, "experts": np.zeros((2, 0, 2), np.uint16)}, "0 layers"),
        ({**good, "num_experts": np.array([8, 8, 8])}, "no whole trace"),
        ({**good, "num_experts": np.int64(-1)}, "num_experts"),
        ({**good, "layers": np.array([1])}, "1 numbers for 2 layers"),
        ({**good, "weights": np.zeros((1, 2, 1), np.float16)}, "weights has shape"),
        ({**good, "experts": np.array([{}], object)}, "no whole trace"),
    ):
        np.savez(path, **bad)
        with pytest.raises(SavedStateError, match=says):
            Trace.load(path)
    with pytest.raises(SavedStateError, match="cannot be read"):
        Trace.load(tmp_path / "nowhere.npz")
    with pytest.raises(SavedStateError, match="cannot be written"):
        trace_of([[[1]]], 2).save(tmp_path / "no" / "folder.npz")


# --- what it says -----------------------------------------------------------------------------------------


def lru_hits(uses: list[list[int]], capacity: int) -> int:
    """Hits of an LRU cache that is told so token by token; within one token the last expert is the most recent."""
    stack: list[int] = []
    hits = 0
    for asked in uses:
        last = list(dict.fromkeys(reversed(asked)))[::-1]
        hits += sum(expert in stack[:capacity] for expert in last)
        stack = [*reversed(last), *(expert for expert in stack if expert not in last)]
    return hits


@settings(max_examples=60)
@given(data=st.data(), num_experts=st.integers(1, 9), top_k=st.integers(1, 4), tokens=st.integers(1, 25))
def test_the_curve_is_that_of_an_lru_cache_at_every_size(
    data: st.DataObject, num_experts: int, top_k: int, tokens: int
) -> None:
    expert = st.one_of(st.integers(0, num_experts - 1), st.just(NO_EXPERT))
    row = st.lists(expert, min_size=top_k, max_size=top_k)
    experts = data.draw(st.lists(st.lists(row, min_size=2, max_size=2), min_size=tokens, max_size=tokens))
    experts[0][0][0] = experts[0][1][0] = 0
    stats = routing_stats(trace_of(experts, num_experts))
    hits = np.zeros(num_experts + 1)
    uses = 0
    for column, layer in enumerate(stats.layers):
        asked = [[e for e in token[column] if e != NO_EXPERT] for token in experts]
        count = sum(len(set(token)) for token in asked)
        for capacity in range(num_experts + 1):
            expected = lru_hits(asked, capacity)
            hits[capacity] += expected
            assert layer.hit_rates[capacity] == pytest.approx(expected / count)
        uses += count
    assert stats.hit_rates == pytest.approx((hits / uses).tolist())
    assert list(stats.hit_rates) == sorted(stats.hit_rates), "more slots never hit less"


def test_balance_and_reuse_in_a_routing_that_one_can_count() -> None:
    experts = [[[0, 1]], [[0, 2]], [[0, 1]], [[3, 2]]]
    (layer,) = routing_stats(trace_of(experts, 5), {0: 0.75}).layers
    assert layer.shares == (3 / 8, 2 / 8, 2 / 8, 1 / 8, 0)
    assert layer.share_std == pytest.approx(np.std([3, 2, 2, 1, 0]) / 8)
    assert layer.dead_experts == (4,)
    assert (layer.longest_burst, layer.burst_expert) == (3, 0)
    assert layer.reuse_tokens == 1.5, "0 after 1 and 1 tokens, 1 and 2 after 2 each"
    assert (layer.reused_next, layer.reused_within_8) == (2 / 8, 4 / 8)
    assert layer.lookahead_recall == 0.75
    assert routing_stats(trace_of(experts, 5)).layers[0].lookahead_recall is None
    (once,) = routing_stats(trace_of([[[3]]], 4)).layers
    assert (once.reuse_tokens, once.hit_rates) == (None, (0, 0, 0, 0, 0))


def test_layers_of_different_sizes_each_have_their_own_curve() -> None:
    trace = Trace(np.array([[[1], [6]]] * 3, np.uint16), (2, 8), (4, 7))
    stats = routing_stats(trace)
    assert [len(layer.hit_rates) for layer in stats.layers] == [3, 9]
    assert [layer.layer for layer in stats.layers] == [4, 7]
    assert stats.hit_rates == pytest.approx((0, *[2 / 3] * 8))
    assert stats.as_dict()["layers"][1]["num_experts"] == 8


@pytest.mark.skipif(not SHARED_TRACES.is_dir(), reason="needs recorded traces of real models")
@pytest.mark.parametrize(
    ("name", "hits"),
    [("gpt-oss-20b-0", {8: 0.59, 16: 0.86, 24: 0.97}), ("Qwen3-30B-A3B", {64: 0.91}), ("gpt-oss-120b", {64: 0.72})],
)
def test_traces_of_real_models_give_the_known_hit_rates(name: str, hits: dict[int, float]) -> None:
    stats = routing_stats(Trace.load(SHARED_TRACES / f"{name}.npz"))
    assert {slots: round(stats.hit_rates[slots], 2) for slots in hits} == hits
