"""Every definition of mlx-lm with routed experts, with its own traits switched on, against stock: the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from definitions import ALIASES, DEFINITIONS, REFUSED, definition_file, moe_model_files
from mlx_lm.utils import load_model
from tiny import make_tiny

from mlxmoe.decode import Decoder
from mlxmoe.experts.layer import Passes
from mlxmoe.loading import LoadedModel, load_folder, open_folder
from mlxmoe.registry import SPECS

PREFILL = list(range(5, 45))  # past every tiny window and chunk, and past the 64 pairs where mlx-lm begins to sort
DECODE = [900, 17, 333, 1200, 64]


def logits(decoder: Decoder) -> mx.array:
    """Of a prefill in two chunks and a few decode steps."""
    cache = decoder.new_cache()
    return mx.concatenate([decoder.logits(PREFILL, cache), *(decoder.logits([token], cache) for token in DECODE)])


def capacities(folder: Path) -> Iterator[LoadedModel]:
    """At one token's need, half-way, and whole."""
    layers = open_folder(folder).layers
    floor, total = sum(layer.floor_bytes for layer in layers), sum(layer.nbytes for layer in layers)
    for size in (floor, (floor + total) // 2, total):
        loaded = load_folder(folder, experts=size, memory_bytes=2**62)
        yield loaded
        loaded.reader.close()


# Stock itself needs a GPU for these: they run where Metal is, and are in no table until they did.
NEED_METAL = {"muse_spark"}


@pytest.mark.parametrize("name", [*DEFINITIONS, *ALIASES])
def test_definitions_are_bit_identical(tmp_path: Path, name: str) -> None:
    if name in NEED_METAL and not mx.metal.is_available():
        pytest.skip(f"mlx-lm's {name} has kernels for Metal only")
    config: dict[str, Any] = DEFINITIONS.get(name) or ALIASES[name]
    folder = make_tiny(tmp_path / name, config)
    stock, _ = load_model(folder)
    expected = logits(Decoder(stock, (), Passes(), chunk_tokens=24))
    assert mx.all(mx.isfinite(expected)), "a comparison of NaN proves nothing"
    assert mx.any(expected[0] != expected[-1])
    misses = []
    for loaded in capacities(folder):
        found = logits(Decoder(loaded.model, loaded.streams.values(), loaded.passes, chunk_tokens=24))
        assert mx.array_equal(found, expected), f"slots {loaded.plan.slots}"
        misses.append(sum(stream.bank.counters.misses for stream in loaded.streams.values()))
    assert misses[0] > misses[-1] == 0, "fewer slots, more misses; none where all is resident"


def test_every_model_file_is_a_case_or_a_named_refusal() -> None:
    assert moe_model_files() == set(DEFINITIONS) | set(REFUSED)
    assert not set(DEFINITIONS) & set(REFUSED)


def test_aliases_lead_to_a_definition() -> None:
    for config in ALIASES.values():
        assert definition_file(config) in DEFINITIONS


def test_the_registry_lists_what_is_tested_here_and_nothing_else() -> None:
    assert {spec.model_type for spec in SPECS} == set(DEFINITIONS) - NEED_METAL
    assert {alias for spec in SPECS for alias in spec.aliases} == set(ALIASES)
    assert all(definition_file(ALIASES[alias]) == spec.model_type for spec in SPECS for alias in spec.aliases)
