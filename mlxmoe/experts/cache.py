"""All banks of one model: which layers stream, and how many slots each has. Knows nothing of pressure or requests.

A layer with a slot for each expert is resident: it is mlx-lm's own code, and no bank exists for it until it shrinks.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median_low
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxmoe.experts.bank import BankCounters, ExpertBank
from mlxmoe.experts.checkpoint import ExpertTensor
from mlxmoe.experts.layer import ExpertStream, Passes, compute_from, compute_whole, computes_from_bank
from mlxmoe.experts.lookahead import Lookahead, LookaheadMode, Trial, routing_blocks
from mlxmoe.experts.profile import RoutingProfile
from mlxmoe.experts.reader import ExpertReader
from mlxmoe.experts.recording import Recording, noting
from mlxmoe.experts.safetensors import FileState
from mlxmoe.experts.switch import Listening, expert_homes, mixed, settle
from mlxmoe.memory.experts import MoeLayer
from mlxmoe.memory.release import release_freed

Places = Mapping[str, Mapping[str, ExpertTensor]]  # module path -> array name -> where its experts lie


class _TakingTurns:
    """Mixed in before a model's class: calls take turns with the passes and resizes of its experts."""

    expert_cache: weakref.ref[ExpertCache]

    def __call__(self, *args: Any, **options: Any) -> Any:
        experts = self.expert_cache()
        if experts is None or experts.passes.mine:
            return super().__call__(*args, **options)  # type: ignore[misc]
        with experts.one_pass():
            return super().__call__(*args, **options)  # type: ignore[misc]


class ExpertCache:
    """The expert cache of one model. Modifies the model's modules, one pass or one resize at a time.

    `modules`: those with routed experts by their path, `layers`: their sizes. `locate`: finds where the experts lie
    on disk; asked for once, when the first layer streams, and may raise UnsupportedModelError.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        layers: Sequence[MoeLayer],
        locate: Callable[[], Places],
        reader: ExpertReader,
    ) -> None:
        self.layers = tuple(layers)
        self.passes = Passes()
        self.streams: dict[str, ExpertStream] = {}
        self.counters = {layer.path: BankCounters() for layer in layers}
        self._modules = dict(modules)
        self._locate = locate
        self._places: Places | None = None
        self._reader = reader
        self._lookaheads: dict[str, Lookahead] = {}
        self._make_lookaheads: Callable[[], dict[str, Lookahead]] = dict
        self._trial: Trial | None = None
        self._recordings: tuple[Recording, ...] = ()
        self._recordings_lock = threading.Lock()
        self._closed = False

    @classmethod
    def of_nothing(cls) -> ExpertCache:
        """For a model that computes from its own arrays: only the turns."""
        return cls({}, (), dict, ExpertReader({}))

    @property
    def slots(self) -> dict[str, int]:
        """Slots of each layer now; none once this is closed."""
        return {layer.path: self._slots_and_bytes(layer)[0] for layer in self.layers}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, and of the layers that are resident."""
        return sum(self._slots_and_bytes(layer)[1] for layer in self.layers)

    @property
    def files(self) -> Mapping[Path, FileState]:
        """Each weight file's state when its header was read."""
        return self._reader.files

    def residents(self) -> tuple[tuple[bool, ...], ...]:
        """Of each layer, whether each expert is in memory: a look, maybe a step behind, from any thread."""
        streams = [(layer, self.streams.get(layer.path)) for layer in self.layers]
        return tuple((True,) * layer.num_experts if s is None else s.bank.is_resident for layer, s in streams)

    def lookups(self) -> tuple[int, int]:
        """Hits and misses of all layers so far."""
        return sum(c.hits for c in self.counters.values()), sum(c.misses for c in self.counters.values())

    @property
    def may_leave(self) -> bool:
        """Whether the pass at hand may leave work to MLX: no layer of it streams, and nobody records."""
        return not self.streams and not self._recordings

    @contextmanager
    def one_pass(self, following: mx.array | None = None) -> Iterator[None]:
        """The turn for one forward pass, which leaves nothing unevaluated behind in any bank.

        `following`: as of Passes.one.
        """
        with self._turn(following), noting(self._modules, r) if (r := self._recordings) else nullcontext():
            for stream in self.streams.values():  # of a pass that was cut short: nobody will ask for it
                stream.take_pending()
            start = time.perf_counter()
            try:
                yield
            finally:
                mx.eval([stream.take_pending() for stream in self.streams.values()])
                for stream in self.streams.values():
                    stream.bank.await_early()
                if self._trial is not None:
                    self._trial.note(time.perf_counter() - start)

    @contextmanager
    def _turn(self, following: mx.array | None = None) -> Iterator[None]:
        """The turn, with every module as it is between passes."""
        with self.passes.one(following):
            for module in self._modules.values():
                settle(module)
            yield

    def start_streaming(self, slots: Mapping[str, int]) -> None:
        """Before any weight was read: give every layer with fewer `slots` than experts a bank, not its arrays."""
        for layer in self.layers:
            if slots[layer.path] < layer.num_experts:
                self._stream(layer, slots[layer.path])

    def look_ahead(self, model: nn.Module, mode: LookaheadMode) -> None:
        """Have each layer's experts guessed and read early: True always, "auto" while it pays, False never."""
        with self._turn():
            trial = self._trial = Trial() if mode == "auto" else None

            def lookaheads() -> dict[str, Lookahead]:
                blocks = routing_blocks(model, list(self._modules))
                return {path: Lookahead(block, self._modules[path], trial) for path, block in blocks.items()}

            self._lookaheads, self._make_lookaheads = {}, lookaheads if mode else dict
            self._link()

    @property
    def unfilled_bytes(self) -> int:
        """What `fill` would read."""
        banks = [stream.bank for stream in self.streams.values()]
        return sum((bank.slots - len(bank.resident)) * bank.expert_bytes for bank in banks)

    def fill(self, profile: RoutingProfile | None, on_read: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read experts into every free slot: the most used by `profile`, else the first; a layer at a time.

        Nobody asked for them: the counters stay as they are. `on_read`: told the bytes read so far. Raises
        CheckpointReadError; however it ends, no slot claims bytes that it does not hold.
        """
        done = 0
        with self._turn():
            for path, stream in self.streams.items():
                counters = self.counters[path]
                before = counters.bytes_read
                stream.bank.fill(None if profile is None else profile.order(path))
                done += counters.bytes_read - before
                counters.bytes_read = before
                on_read(done)

    def resize(self, slots: Mapping[str, int]) -> None:
        """Have `slots` of each layer: those that shrink first. Waits for the pass under way.

        Beside the banks, one array of one layer is needed meanwhile. A layer that gets a slot for each expert reads
        the missing ones and is resident. Raises UnsupportedModelError, before anything changes, where experts cannot
        be read in place, and CheckpointReadError.
        """
        with self._turn():
            try:
                self._drop_residents()
                now = self.slots
                if slots == now and all(s.bank.slots < s.bank.num_experts for s in self.streams.values()):
                    return
                for layer in sorted(self.layers, key=lambda layer: slots[layer.path] - now[layer.path]):
                    count, streams = slots[layer.path], layer.path in self.streams
                    if count != now[layer.path] or (streams and count == layer.num_experts):
                        self._resize(layer, count)
            finally:
                self._link()
            release_freed()

    def shrunk(self, nbytes: int) -> dict[str, int]:
        """Slots of each layer with `nbytes` given back, as far as one token's experts are left.

        The layer whose slots were not used for the longest goes first; where that says nothing, the one with the
        largest share. Which of its experts give up theirs is the layer's own affair.
        Of a resident layer nothing is known: its experts are taken to be as old as the others are on average.
        """
        slots = self.slots
        if self._closed:
            return slots
        known = {path: stream.bank.ages for path, stream in self.streams.items()}
        unknown = median_low([age for ages in known.values() for age in ages] or [0])
        coldest: list[tuple[int, float, MoeLayer]] = []
        for layer in self.layers:
            ages = known.get(layer.path, [unknown] * layer.num_experts)
            for taken, age in enumerate(ages[: max(0, len(ages) - layer.top_k)]):
                share = (len(ages) - taken) / layer.num_experts
                coldest.append((age, share, layer))
        for _, _, layer in sorted(coldest, key=lambda item: (-item[0], -item[1])):
            if nbytes <= 0:
                break
            slots[layer.path] -= 1
            nbytes -= layer.expert_bytes
        return slots

    def grown(self, target: Mapping[str, int], nbytes: int) -> dict[str, int]:
        """Slots of each layer with at most `nbytes` more, never above `target`; the layer that lacks most first."""
        slots = self.slots
        while not self._closed:
            lacking = [m for m in self.layers if slots[m.path] < target[m.path] and m.expert_bytes <= nbytes]
            if not lacking:
                return slots
            layer = min(lacking, key=lambda layer: slots[layer.path] / target[layer.path])
            slots[layer.path] += 1
            nbytes -= layer.expert_bytes
        return slots

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The turn for passes that are never evaluated, in which the layers with experts compute nothing."""
        with self._turn(), Listening(self._modules):
            yield

    @contextmanager
    def recording(self, max_tokens: int) -> Iterator[Recording]:
        """Within this context every pass, whoever makes it, is recorded; from the next one on."""
        recording = Recording(self.layers, max_tokens)
        with self._recordings_lock:
            self._recordings += (recording,)
        try:
            yield recording
        finally:
            recording.end()
            with self._recordings_lock:
                self._recordings = tuple(other for other in self._recordings if other is not recording)

    def guard_calls(self, model: nn.Module) -> None:
        """Let every call of `model` from outside of a pass be one, so that no layer is resized within it."""
        model.expert_cache = weakref.ref(self)
        if not isinstance(model, _TakingTurns):
            model.__class__ = mixed(_TakingTurns, type(model))

    def close(self) -> None:
        """Let go of the model, end the reader's threads, close the files. May be called twice."""
        with self.passes.one():
            self._closed = True
            self._modules, self.streams, self._places, self._locate = {}, {}, None, dict
            self._lookaheads, self._make_lookaheads = {}, dict
            self._reader.close()

    def _slots_and_bytes(self, layer: MoeLayer) -> tuple[int, int]:
        if (stream := self.streams.get(layer.path)) is not None:
            return stream.bank.slots, stream.bank.nbytes
        return (layer.num_experts, layer.nbytes) if layer.path in self._modules else (0, 0)

    def _resize(self, layer: MoeLayer, slots: int) -> None:
        stream = self.streams.get(layer.path) or self._stream(layer, None)
        stream.bank.resize(slots)
        if slots == layer.num_experts:
            stream.bank.fill()
            compute_whole(self._modules[layer.path])
            self._drop_residents()

    def _drop_residents(self) -> None:
        """Forget banks of layers that compute whole, also those that an interrupt left between the two."""
        for path in [path for path in self.streams if not computes_from_bank(self._modules[path])]:
            del self.streams[path]
            self._modules[path].__dict__.pop("expert_stream", None)  # it holds the bank

    def _link(self) -> None:
        """Have each layer that streams guess for the next one that does."""
        if self.streams and not self._lookaheads:  # not sooner: it takes a look at every module
            self._lookaheads = self._make_lookaheads()
        ahead: Lookahead | None = None
        for layer in reversed(self.layers):
            stream, lookahead = self.streams.get(layer.path), self._lookaheads.get(layer.path)
            if lookahead is not None and stream is None:
                lookahead.follow(None)
            if lookahead is not None and stream is not None:
                lookahead.follow(stream.bank, stream.take_pending)
            if stream is not None:
                stream.ahead, stream.foretold, ahead = ahead, lookahead, lookahead

    def _stream(self, layer: MoeLayer, slots: int | None) -> ExpertStream:
        """Let `layer` compute from a bank: an empty one of `slots`, or of the arrays it has."""
        if self._places is None:
            self._places = self._locate()
        module = self._modules[layer.path]
        counters = self.counters[layer.path]
        bank = ExpertBank(self._places[layer.path], expert_homes(module), slots, self._reader, counters)
        stream = self.streams[layer.path] = ExpertStream(bank, self.passes)  # known to passes before it is used
        compute_from(module, stream)
        return stream
