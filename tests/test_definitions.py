"""Every definition of mlx-lm with routed experts, with its own traits switched on, against stock: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from definitions import ALIASES, DEFINITIONS, REFUSED, definition_file, moe_model_files
from mlx_lm.utils import load_model
from tiny import make_tiny

from mlxmoe import UnsupportedModelError
from mlxmoe.decode import Decoder
from mlxmoe.experts.cache import ExpertCache
from mlxmoe.loading import LoadedModel, load_folder
from mlxmoe.opening import open_folder
from mlxmoe.registry import SPECS

pytestmark = pytest.mark.slow

PREFILL = list(range(5, 45))  # past every tiny window and chunk, and past the 64 pairs where mlx-lm begins to sort
DECODE = [900, 17, 333, 1200, 64]
CHUNK = 24


def logits(decoder: Decoder) -> mx.array:
    """Of a prefill in two chunks and a few decode steps."""
    cache = decoder.new_cache()
    rows = mx.concatenate([decoder.logits(PREFILL, cache), *(decoder.logits([token], cache) for token in DECODE)])
    mx.eval(rows)
    return rows


def capacities(folder: Path) -> Iterator[LoadedModel]:
    """At one token's need, half-way, and whole."""
    layers = open_folder(folder).layers
    floor, total = sum(layer.floor_bytes for layer in layers), sum(layer.nbytes for layer in layers)
    for size in (floor, (floor + total) // 2, total):
        loaded = load_folder(folder, experts=size, memory_bytes=2**62, chunk_tokens=CHUNK)
        yield loaded
        loaded.experts.close()


@pytest.mark.usefixtures("kernels_without_metal")
@pytest.mark.parametrize("name", [*DEFINITIONS, *ALIASES])
def test_definitions_are_bit_identical(tmp_path: Path, name: str) -> None:
    config: dict[str, Any] = DEFINITIONS.get(name) or ALIASES[name]
    folder = make_tiny(tmp_path / name, config)
    stock, _ = load_model(folder)
    expected = logits(Decoder(stock, ExpertCache.of_nothing(), chunk_tokens=CHUNK))
    assert mx.all(mx.isfinite(expected)), "a comparison of NaN proves nothing"
    assert mx.any(expected[0] != expected[-1])
    misses = []
    for loaded in capacities(folder):
        decoder = Decoder(loaded.model, loaded.experts, chunk_tokens=CHUNK)
        found = in_another_thread(lambda decoder=decoder: logits(decoder))
        assert mx.array_equal(found, expected), f"slots {loaded.plan.slots}"
        misses.append(sum(c.misses for c in loaded.experts.counters.values()))
    assert misses[0] > misses[-1] == 0, "fewer slots, more misses; none where all is resident"


def in_another_thread(run: Callable[[], mx.array]) -> mx.array:
    """A model may be loaded in one thread and run in another: nothing of it may have stayed lazy."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def test_dbrx_is_refused_by_name(tmp_path: Path) -> None:
    config = {
        "model_type": "dbrx", "vocab_size": 64, "d_model": 64, "n_layers": 1, "n_heads": 2,
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"dbrx.* says moe_num_experts=4, but mlx-lm's definition holds"):
        load_folder(make_tiny(tmp_path / "dbrx", config), memory_bytes=2**62)


def test_every_model_file_is_a_case_or_a_named_refusal() -> None:
    assert moe_model_files() == set(DEFINITIONS) | set(REFUSED)
    assert not set(DEFINITIONS) & set(REFUSED)


def test_aliases_lead_to_a_definition() -> None:
    for config in ALIASES.values():
        assert definition_file(config) in DEFINITIONS


def test_the_registry_lists_what_is_tested_here_and_nothing_else() -> None:
    assert {spec.model_type for spec in SPECS} == set(DEFINITIONS)
    assert {alias for spec in SPECS for alias in spec.aliases} == set(ALIASES)
    assert all(definition_file(ALIASES[alias]) == spec.model_type for spec in SPECS for alias in spec.aliases)
