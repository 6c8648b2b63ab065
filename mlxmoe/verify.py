"""Proof on the user's own model that streaming changes nothing: every logit against stock mlx-lm, bit for bit.

The streaming side is the Decoder that `stream` runs. The other side is mlx-lm's model, loaded whole by mlx-lm. A
model too large to hold whole is compared layer by layer: each MoE layer's output, on the inputs that it really
had, against the stock layer with all its experts; where every layer's output is the same, so are the logits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxmoe.decode import Decoder
from mlxmoe.errors import UnsupportedModelError
from mlxmoe.experts.layer import ExpertStream, Forward, switch_modules
from mlxmoe.experts.safetensors import read_checkpoint
from mlxmoe.hub import resolve
from mlxmoe.loading import LoadedModel, load_folder, open_folder, vocab_size
from mlxmoe.memory.reading import usable_bytes
from mlxmoe.memory.sizes import parse_bytes

CHUNK_TOKENS = 128  # shorter than the engine's, so that a prompt longer than one chunk is still quick
PREFILL_TOKENS = (
    1,
    3,
    63,
    64,
    65,
    200,
)  # around the 64 pairs where mlx-lm begins to sort, and past one chunk
DECODE_TOKENS = 64
SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One comparison. `part`: what ran. `slots`: least and most of any layer. `values`: numbers compared.

    `differing`: how many of them were not bit-identical; `largest`: the largest absolute difference.
    `misses`, `evictions`: what the expert cache did meanwhile.
    """

    experts: str
    slots: tuple[int, int]
    part: str
    values: int
    differing: int
    largest: float
    misses: int
    evictions: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All rows. `whole`: logits against the whole stock model; otherwise layer by layer."""

    model: str
    whole: bool
    rows: tuple[VerifyRow, ...]

    @property
    def identical(self) -> bool:
        """Whether something was compared and nothing differed."""
        return bool(self.rows) and not any(row.differing for row in self.rows)

    @property
    def values(self) -> int:
        return sum(row.values for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical, "values": self.values}


def verify(
    model: str | Path | None = None,
    *,
    memory: int | str | None = None,
    layer_by_layer: bool | None = None,
    revision: str | None = None,
    on_row: Callable[[VerifyRow], None] = lambda row: None,
    before_run: Callable[[LoadedModel], None] = lambda loaded: None,
) -> VerifyReport:
    """Compare the streaming engine with stock mlx-lm at top_k, 25, 50, 75 and 100 % of the experts.

    `layer_by_layer`: None decides by whether the whole model fits `memory` beside the engine. `on_row` is told each
    row as it comes; `before_run` is handed each loaded model before it runs (for tests that break it on purpose).
    Raises what `load` raises, and UnsupportedModelError for a model without routed experts.
    """
    budget = usable_bytes() if memory is None else parse_bytes(memory, "memory")
    folder = resolve(model, revision)
    if layer_by_layer is None:
        layer_by_layer = 2 * read_checkpoint(folder).nbytes > budget
    compare = _compare_layers if layer_by_layer else _compare_logits
    rows = []
    for row in compare(folder, budget, before_run):
        rows.append(row)
        on_row(row)
    return VerifyReport(str(model or "built-in demo model"), not layer_by_layer, tuple(rows))


def probe_tokens(vocab: int, count: int) -> list[int]:
    """`count` tokens drawn evenly from the vocabulary, the same at every call: they spread over many experts."""
    return random.Random(0).choices(range(vocab), k=count)


def _compare_logits(folder: Path, budget: int, before_run: Callable[[LoadedModel], None]) -> Iterator[VerifyRow]:
    stock, config = load_model(folder)
    plain = Decoder(stock, (), chunk_tokens=CHUNK_TOKENS)
    vocab = vocab_size(config)
    prompts = [probe_tokens(vocab, count) for count in PREFILL_TOKENS]
    expected = [plain.logits(prompt, make_prompt_cache(stock)) for prompt in prompts]
    said, decoded = _decode_greedily(plain, prompts[-2], expected[-2])
    for label, loaded in _engines(folder, budget):
        try:
            before_run(loaded)
            decoder = Decoder(loaded.model, loaded.streams.values(), chunk_tokens=CHUNK_TOKENS)
            for prompt, logits in zip(prompts, expected, strict=True):
                watch = _Watch(loaded)
                found = decoder.logits(prompt, decoder.new_cache())
                yield watch.row(label, f"prefill {len(prompt)}", found, logits)
            watch = _Watch(loaded)
            found = _replay(decoder, prompts[-2], said)
            yield watch.row(label, f"decode {DECODE_TOKENS}", found, decoded)
        finally:
            loaded.reader.close()


def _decode_greedily(decoder: Decoder, prompt: Sequence[int], logits: mx.array) -> tuple[list[int], mx.array]:
    """The tokens that a model says after `prompt`, and the logits after each of them."""
    cache = decoder.new_cache()
    decoder.prefill(prompt, cache)
    said, rows = [_likeliest(logits[-1])], []
    for _ in range(DECODE_TOKENS):
        rows.append(decoder.logits(said[-1:], cache))
        said.append(_likeliest(rows[-1][-1]))
    return said[:-1], mx.concatenate(rows)


def _likeliest(logits: mx.array) -> int:
    return cast(int, mx.argmax(logits).item())


def _replay(decoder: Decoder, prompt: Sequence[int], said: Sequence[int]) -> mx.array:
    cache = decoder.new_cache()
    decoder.prefill(prompt, cache)
    return mx.concatenate([decoder.logits([token], cache) for token in said])


def _engines(folder: Path, budget: int) -> Iterator[tuple[str, LoadedModel]]:
    """The model at one token's need, at each share, and with all experts; each size once."""
    floor, total = _expert_sizes(folder)
    budgets = {"top_k": floor}
    for share in SHARES:
        if (size := round(share * total)) > max(budgets.values()):
            budgets[f"{share:.0%}" if share < 1 else "all"] = size
    for label, size in budgets.items():
        yield label, load_folder(folder, experts=size, memory_bytes=2**62)


def _expert_sizes(folder: Path) -> tuple[int, int]:
    """Bytes of what one token needs, and of all routed experts. Raises UnsupportedModelError without any."""
    layers = open_folder(folder).layers
    if not layers:
        raise UnsupportedModelError(f"{folder.name} has no routed experts: there is nothing to stream and compare.")
    return sum(layer.floor_bytes for layer in layers), sum(layer.nbytes for layer in layers)


class _Watch:
    """Counts what a model's expert cache does from here to the row."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._slots = loaded.plan.slots.values()
        self._counters = [stream.bank.counters for stream in loaded.streams.values()]
        self._misses, self._evictions = self._sums()

    def row(self, experts: str, part: str, found: mx.array, expected: mx.array) -> VerifyRow:
        misses, evictions = self._sums()
        differing, largest = difference(found, expected)
        return VerifyRow(
            experts=experts,
            slots=(min(self._slots), max(self._slots)),
            part=part,
            values=expected.size,
            differing=differing,
            largest=largest,
            misses=misses - self._misses,
            evictions=evictions - self._evictions,
        )

    def _sums(self) -> tuple[int, int]:
        return sum(c.misses for c in self._counters), sum(c.evictions for c in self._counters)


def difference(found: mx.array, expected: mx.array) -> tuple[int, float]:
    """How many values of two arrays are not bit-identical, and the largest absolute difference.

    A shape that differs makes all of them differ. NaN equals NaN here, -0 does not equal 0: bits are compared.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return expected.size, float("inf")
    unsigned = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[found.dtype.size]
    unlike = found.view(unsigned) != expected.view(unsigned)
    count = cast(int, mx.sum(unlike).item())
    if not count:
        return 0, 0.0
    gap = mx.abs(found.astype(mx.float32) - expected.astype(mx.float32))
    return count, cast(float, mx.max(mx.where(unlike, gap, 0)).item())


@dataclass(frozen=True)
class _Recorded:
    """What a layer was given and what it made of it."""

    x: mx.array
    indices: mx.array
    out: mx.array


class _Recorder:
    """Stands in for a layer's ExpertStream and keeps what passes through."""

    def __init__(self, stream: ExpertStream) -> None:
        self.stream = stream
        self.calls: list[_Recorded] = []

    def __call__(self, x: mx.array, indices: mx.array, forward: Forward) -> mx.array:
        out = self.stream(x, indices, forward)
        mx.eval(x, indices, out)
        self.calls.append(_Recorded(x, indices, out))
        return out


def _compare_layers(folder: Path, budget: int, before_run: Callable[[LoadedModel], None]) -> Iterator[VerifyRow]:
    """One row a layer, at one token's need and at half of the experts or of the memory."""
    floor, total = _expert_sizes(folder)
    sizes = {"top_k": floor}
    if (more := min(total // 2, budget // 2)) > floor:
        sizes[f"{more / total:.0%}"] = more
    for label, size in sizes.items():
        loaded = load_folder(folder, experts=size, memory_bytes=2**62)
        try:
            before_run(loaded)
            yield from _compare_recorded(folder, label, loaded, _record(loaded))
        finally:
            loaded.reader.close()


def _record(loaded: LoadedModel) -> dict[str, list[_Recorded]]:
    """What each streamed layer did in a prefill and in a few decode steps."""
    modules = switch_modules(loaded.model)
    recorders = {path: _Recorder(stream) for path, stream in loaded.streams.items()}
    decoder = Decoder(loaded.model, loaded.streams.values(), chunk_tokens=CHUNK_TOKENS)
    for path, recorder in recorders.items():
        modules[path].expert_stream = recorder
    try:
        vocab = vocab_size(loaded.config)
        cache = decoder.new_cache()
        decoder.prefill(probe_tokens(vocab, 65), cache)
        for token in probe_tokens(vocab, 8):
            decoder.logits([token], cache)
    finally:
        for path, recorder in recorders.items():
            modules[path].expert_stream = recorder.stream
    return {path: recorder.calls for path, recorder in recorders.items()}


def _compare_recorded(
    folder: Path, label: str, loaded: LoadedModel, recorded: dict[str, list[_Recorded]]
) -> Iterator[VerifyRow]:
    """Each layer's record against the stock layer, whose experts are read, used and dropped before the next."""
    stock = switch_modules(load_model(folder, lazy=True)[0])
    for path, calls in recorded.items():
        bank = loaded.streams[path].bank
        differing, largest, values = 0, 0.0, 0
        for call in calls:
            count, gap = difference(call.out, _evaluated(stock[path](call.x, call.indices)))
            differing, largest, values = differing + count, max(largest, gap), values + call.out.size
        _drop_weights(stock[path])
        yield VerifyRow(
            label, (bank.slots, bank.slots), path, values, differing, largest, bank.counters.misses,
            bank.counters.evictions,
        )  # fmt: skip


def _evaluated(array: mx.array) -> mx.array:
    mx.eval(array)
    return array


def _drop_weights(module: nn.Module) -> None:
    module.update(tree_map(lambda _: mx.zeros(()), module.parameters()))
