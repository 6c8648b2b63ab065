"""What prefill needs is predicted without evaluating anything, and is what MLX then uses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from definitions import DEFINITIONS
from hypothesis import given
from hypothesis import strategies as st
from tiny import QWEN3_MOE, make_tiny

from mlxmoe import load
from mlxmoe.decode import Decoder
from mlxmoe.hub import demo_folder
from mlxmoe.kv.positions import Rotation
from mlxmoe.kv.settings import KVSettings
from mlxmoe.loading import LoadedModel, load_folder
from mlxmoe.memory.plan import KVBytes
from mlxmoe.opening import OpenedModel, open_folder
from mlxmoe.transients import PrefillTransients
from mlxmoe.transients.caches import arrays_of, seen_caches
from mlxmoe.transients.evaluation import peak_of
from mlxmoe.transients.graph import Node, Step, TracedChunk, Value
from mlxmoe.transients.layout import contiguous, row_strides, view_strides

DECODED = 3


def predicted_bytes(folder: Path, loaded: LoadedModel, chunk: int, context: int) -> int:
    """Of everything: trunk, banks, KV cache, and prefill; of a context with few tokens after its whole chunks."""
    opened = open_folder(folder, kv_settings=loaded.kv_choice.settings)
    make_caches = opened.kv_choice.caches
    transients = PrefillTransients(opened.model, opened.modules, opened.kv, loaded.plan.slots, make_caches)
    plan = loaded.plan
    chunk = min(chunk, context)
    seen = max(0, (context - 1) // chunk - 1) * chunk  # before the last whole chunk
    return plan.trunk_bytes + plan.bank_bytes + opened.kv.of(seen + chunk) + transients.of(chunk, seen).nbytes


def measured_bytes(loaded: LoadedModel, chunk: int, context: int) -> int:
    """The peak of a prompt's prefill and a few decoded tokens, by what MLX counts above what was there before."""
    decoder = Decoder(loaded.model, loaded.experts, chunk_tokens=chunk, kv_choice=loaded.kv_choice)
    cache = decoder.new_cache()
    prompt = [(17 * n * n + 5 * n) % 2000 for n in range(context - DECODED)]
    mx.clear_cache()
    before = mx.get_active_memory() - loaded.plan.trunk_bytes - loaded.plan.bank_bytes
    mx.reset_peak_memory()
    decoder.logits(prompt[:1], decoder.new_cache())  # what the machine compiles at first use
    decoder.prefill(prompt[:-1], cache)
    for token in prompt[-1:] * DECODED:
        decoder.logits([token], cache)
    return mx.get_peak_memory() - before


def ratio(folder: Path, experts: str, chunk: int, context: int, kv_settings: KVSettings = KVSettings()) -> float:  # noqa: B008  # frozen
    loaded = load_folder(folder, experts=experts, memory_bytes=2**62, kv_settings=kv_settings)
    try:
        return predicted_bytes(folder, loaded, chunk, context) / measured_bytes(loaded, chunk, context)
    finally:
        loaded.experts.close()


@pytest.mark.parametrize("experts", ["25%", pytest.param("50%", marks=pytest.mark.thorough), "all"])
@pytest.mark.parametrize(("chunk", "context"), [(256, 256), (256, 520), (512, 600)])
def test_the_peak_of_the_demo_model_is_as_predicted(experts: str, chunk: int, context: int) -> None:
    assert ratio(demo_folder(), experts, chunk, context) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("experts", ["50%", pytest.param("all", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kv_settings", [KVSettings(128), KVSettings(128, kv_bits=8), KVSettings(kv_bits=8)], ids=str)
def test_the_peak_of_the_demo_model_with_a_lossy_cache_is_as_predicted(experts: str, kv_settings: KVSettings) -> None:
    """Rows that are handed out beside those that are stored among it."""
    assert ratio(demo_folder(), experts, 256, 520, kv_settings) == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kv_settings", [KVSettings(64), KVSettings(200, kv_bits=8)], ids=str)
def test_the_room_of_the_demo_model_without_an_end_is_that_of_a_long_text(kv_settings: KVSettings) -> None:
    loaded = load_folder(demo_folder(), experts="all", memory_bytes=100_000_000, kv_settings=kv_settings)
    plan = loaded.plan
    try:
        assert plan.context is None
        assert plan.chunk_tokens == 512, "as fits, and quick to measure"
        planned = plan.trunk_bytes + plan.bank_bytes + plan.kv_bytes + plan.prefill_bytes
        assert planned >= 0.97 * measured_bytes(loaded, plan.chunk_tokens, 3 * plan.chunk_tokens)
    finally:
        loaded.experts.close()


def test_a_large_window_is_planned_as_quickly_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sinks are turned for the steps within the two last chunks, however many there were before."""
    turned = []

    def moved(rotation: Rotation, rows: mx.array, by: int) -> mx.array:
        turned.append(by)
        return rows

    monkeypatch.setattr(Rotation, "moved", moved)
    counts, sizes = [], []
    for window in (5_000, 500_000):
        model = open_folder(demo_folder(), kv_settings=KVSettings(window))
        transients = PrefillTransients(model.model, model.modules, model.kv, None, model.kv_choice.caches)
        turned.clear()
        sizes.append(transients.of(512, -(-window // 512) * 512).nbytes)
        counts.append(len(turned))
    assert counts[0] == counts[1]
    assert sizes[0] < sizes[1], "there are as many more rows"


@pytest.mark.parametrize("kv_settings", [KVSettings(), KVSettings(100_000), KVSettings(64)], ids=str)
def test_a_model_with_states_never_sees_more_than_a_chunk_or_a_step(
    tmp_path: Path, kv_settings: KVSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph may be as long as the text; the keys and values of its other layers are as many all the same."""
    model = open_folder(make_tiny(tmp_path / "tiny", DEFINITIONS["granitemoehybrid"]), kv_settings=kv_settings)
    counts: list[int] = []
    monkeypatch.setattr(type(model.model), "__call__", counted(type(model.model).__call__, counts))
    found = seen_caches(model.kv_choice.caches(model.model), model.model, model.modules, 90_112, 512)
    assert counts == [256, 512]
    stored = sum(sum(array.nbytes for array in arrays_of([entry])) for entry in found)
    assert stored == pytest.approx(model.kv.of(90_112), rel=0.03), "and what a window holds during a chunk"


def counted(call: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    """`call`, which notes how many tokens each call has."""

    def run(model: Any, tokens: mx.array, *args: Any, **options: Any) -> Any:
        counts.append(tokens.shape[1])
        return call(model, tokens, *args, **options)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["25%", pytest.param("all", marks=pytest.mark.thorough)])
def test_the_peak_of_a_large_model_is_as_predicted(half_gigabyte: Path, experts: str) -> None:
    """With short chunks: a quantised matrix product of many tokens takes minutes on a processor."""
    assert ratio(half_gigabyte, experts, 32, 68) == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("kernels_without_metal")
@pytest.mark.parametrize("experts", ["50%", "all"])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_peak_of_every_definition_is_about_as_predicted(
    tmp_path: Path, name: str, experts: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Too much where the processor keeps up with the scheduling of such small operations, which differs by run."""
    folder = make_tiny(tmp_path / name, DEFINITIONS[name])
    with caplog.at_level(logging.DEBUG, "mlxmoe.transients"):
        found = ratio(folder, experts, 128, 260)
    assert 0.8 <= found <= 1.3
    assert "No graph" not in caplog.text, "each has one"


# What a definition repeats to be deep: a list of its layers' types, or their number alone.
DEEP = [
    ("granitemoehybrid", "layer_types"),
    ("nemotron_h", "hybrid_override_pattern"),
    pytest.param("qwen3_next", None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("experts", ["50%", "all"])
@pytest.mark.parametrize(("name", "listed"), DEEP)
def test_the_peak_of_a_deep_model_with_states_is_about_as_predicted(
    tmp_path: Path, name: str, listed: str | None, experts: str
) -> None:
    """What waits for the states of its layers is most of it, and is read off the first ones: a tenth is their mix."""
    config = DEFINITIONS[name]
    if listed is None:
        config = {**config, "num_hidden_layers": 32, "full_attention_interval": 4}
    else:
        config = {**config, listed: 8 * config[listed], "num_hidden_layers": 8 * len(config[listed])}
    assert 0.9 <= ratio(make_tiny(tmp_path / name, config), experts, 128, 260) <= 1.2


def opened(folder: Path) -> tuple[OpenedModel, dict[str, int]]:
    model = open_folder(folder)
    return model, {layer.path: layer.num_experts // 2 for layer in model.layers}


def test_nothing_is_evaluated_and_the_model_stays_as_it_was(tiny: Path) -> None:
    model, slots = opened(tiny)
    arrays = dict(model.model.named_modules())
    classes = {path: type(module) for path, module in arrays.items()}
    contiguous_of_mlx = mx.contiguous
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    PrefillTransients(model.model, model.modules, model.kv, slots).of(256, 512)
    assert mx.get_peak_memory() <= before + 10_000
    assert {path: type(module) for path, module in model.model.named_modules()} == classes
    assert mx.contiguous is contiguous_of_mlx
    with load(tiny) as engine:
        engine.logits([1, 2, 3])


def test_a_deep_model_is_read_off_its_first_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, slots = opened(make_tiny(tmp_path / "deep", {**QWEN3_MOE, "num_hidden_layers": 48}))
    for streamed in (slots, None):
        transients = PrefillTransients(model.model, model.modules, model.kv, streamed)
        start = time.perf_counter()
        few = transients.of(512, 1024).nbytes
        took_s = time.perf_counter() - start
        with monkeypatch.context() as patch:
            patch.setattr("mlxmoe.transients.few_layers._layers_to_trace", lambda model, layers: len(layers))
            whole = PrefillTransients(model.model, model.modules, model.kv, streamed).of(512, 1024).nbytes
        assert few == pytest.approx(whole, rel=0.02)
        assert took_s < 3, "0.2 s on a machine with nothing else to do"
    assert len(model.model.layers) == 48


def test_caches_that_are_views_count_with_what_they_are_views_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first chunk's values are a part of the product of queries, keys and values, which stays for each layer."""
    config = {**DEFINITIONS["bailing_moe"], "num_hidden_layers": 14}
    model, _ = opened(make_tiny(tmp_path / "deep", config))
    few = PrefillTransients(model.model, model.modules, model.kv).of(2048, 0).nbytes
    monkeypatch.setattr("mlxmoe.transients.few_layers._layers_to_trace", lambda model, layers: len(layers))
    assert few == pytest.approx(PrefillTransients(model.model, model.modules, model.kv).of(2048, 0).nbytes, rel=0.02)


def test_longer_chunks_and_contexts_need_more(tiny: Path) -> None:
    model, slots = opened(tiny)
    transients = PrefillTransients(model.model, model.modules, model.kv, slots)
    assert transients.of(256, 2048) < transients.of(512, 2048) < transients.of(2048, 2048)
    assert transients.of(256, 256) < transients.of(256, 4096)


def test_where_there_is_no_graph_the_size_is_estimated(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        """Wants values while it is built."""

        args: Any = None

        def make_cache(self) -> list[Any]:
            raise ValueError("no graph today")

    model, _ = opened(tiny)
    with caplog.at_level(logging.DEBUG, "mlxmoe.transients"):
        estimate = PrefillTransients(Broken(), model.modules, KVBytes()).of(256, 768)  # type: ignore[arg-type]
    assert "no graph today" in caplog.text
    assert not estimate.simulated
    assert estimate.nbytes >= PrefillTransients(model.model, model.modules, model.kv).of(256, 768).nbytes


def value(name: str, *shape: int) -> Value:
    return Value(name, shape, 4)


def chain(*kinds: str) -> TracedChunk:
    """Each node makes 1000 items from what the one before made."""
    values = [value(f"v{n}", 1000) for n in range(len(kinds) + 1)]
    nodes = [Node(kind, (values[n],), (values[n + 1],), ()) for n, kind in enumerate(kinds)]
    return TracedChunk(nodes=nodes, prior=values[:1], states=[values[-1].name])


def test_elementwise_operations_write_over_their_input() -> None:
    assert peak_of(chain("Exp", "Square", "Abs")).nbytes == 4000


def test_other_operations_need_both_until_the_computation_has_caught_up() -> None:
    assert peak_of(chain("Sort", "Sort")).nbytes == 12_000
    assert peak_of(chain(*["Sort"] * 500)).nbytes <= (2 + 110 // 2) * 4000


def test_each_evaluation_of_a_streaming_layer_waits() -> None:
    traced = chain(*["Sort"] * 6)
    whole = peak_of(traced).nbytes
    traced.steps.append(Step("v2", ("v3",), "v4", 2**21))
    assert peak_of(traced).nbytes < whole


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(shape=shapes, data=st.data())
def test_views_are_where_mlx_has_views(shape: list[int], data: st.DataObject) -> None:
    """A reshape of a transposed array copies exactly where NumPy's does."""
    import numpy as np

    axes = data.draw(st.permutations(range(len(shape))))
    source = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    turned = source.transpose(axes)
    strides = tuple(step // 4 for step in turned.strides)
    node = Node("Transpose", (value("a", *shape),), (value("b", *turned.shape),), (axes,))
    assert view_strides(node, node.inputs[0], row_strides(tuple(shape)), node.outputs[0]) == tuple(
        row_strides(tuple(shape))[axis] for axis in axes
    )
    assert contiguous(turned.shape, strides) == turned.flags.c_contiguous
    target = data.draw(st.permutations(shape)) if data.draw(st.booleans()) else [source.size]
    looked = turned.reshape(target)
    reshape = Node("Reshape", (value("b", *turned.shape),), (value("c", *target),), ())
    ours = view_strides(reshape, reshape.inputs[0], strides, reshape.outputs[0])
    assert (ours is not None) == np.shares_memory(looked, source)
