"""Banks filled at load, by a kept routing profile or in order: nothing changes but what is in the slots first."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny import QWEN3_MOE, copy_folder, make_tiny

from mlxmoe import CheckpointReadError, Engine, RequestError, Trace, load
from mlxmoe.errors import SavedStateError
from mlxmoe.experts.profile import CURVE_TOKENS, ProfileFolder, RoutingProfile
from mlxmoe.experts.reader import ExpertReader
from mlxmoe.keeping import user_cache
from mlxmoe.loading import load_folder
from mlxmoe.memory.experts import MoeLayer

TOKENS = list(range(7, 27))
LAYERS = tuple(f"model.layers.{n}.mlp.switch_mlp" for n in range(3))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlxmoe" / "profiles"


def held(engine: Engine) -> dict[str, list[int]]:
    """Who has a slot in each streaming layer, the first to give it up first."""
    return {path: list(stream.bank.resident) for path, stream in engine._experts.streams.items()}


def trace_that_prefers(experts: list[int]) -> Trace:
    """The first of `experts` is used most in every layer."""
    uses = [expert for rank, expert in enumerate(experts) for _ in range(len(experts) - rank)]
    return Trace(np.array([[[expert]] * 3 for expert in uses], np.uint16), (8, 8, 8))


def test_without_a_profile_the_first_experts_fill_the_slots(tiny: Path) -> None:
    with load(tiny, experts="50%") as warm, load(tiny, experts="50%", warm=False) as cold:
        assert {tuple(sorted(experts)) for experts in held(warm).values()} == {(0, 1, 2, 3)}
        assert set(map(len, held(cold).values())) == {0}
        stats = warm.stats()
        assert (stats.hits, stats.misses, stats.evictions, stats.bytes_read) == (0, 0, 0, 0)
        assert mx.array_equal(warm.logits(TOKENS), cold.logits(TOKENS))
        assert warm.stats().misses < cold.stats().misses


def test_with_a_profile_the_most_used_experts_do(tiny: Path, own_cache: Path, tmp_path: Path) -> None:
    with load(tiny, experts="all") as engine:
        file = engine.keep_profile(trace_that_prefers([6, 2, 7, 1, 3]))
        whole = engine.logits(TOKENS)
    assert list(own_cache.iterdir()) == [file]
    assert file.stat().st_size < 2_000
    for folder in (tiny, copy_folder(tiny, tmp_path / "elsewhere")):
        with load(folder, experts="50%") as engine:
            assert {path: sorted(experts) for path, experts in held(engine).items()} == {
                path: [1, 2, 6, 7] for path in LAYERS
            }
            assert mx.array_equal(engine.logits(TOKENS), whole)
    with load(tiny, experts="50%", warm=False) as engine:
        assert set(map(len, held(engine).values())) == {0}


def test_a_profile_of_its_own_text_has_every_expert_at_hand(tiny: Path) -> None:
    with load(tiny, experts="25%") as engine:
        with engine.record() as recording:
            engine.generate([11], max_tokens=2)  # two passes of one token
        engine.keep_profile(Trace(recording.trace.experts[:1], recording.trace.num_experts))
    with load(tiny, experts="25%", lookahead=False) as engine:  # whose wrong guesses take slots
        engine.generate([11], max_tokens=1)
        assert (engine.stats().hits, engine.stats().misses) == (6, 0)


def trace_that_wants_slots_in(busy: int, tokens: int = CURVE_TOKENS) -> Trace:
    """Layer `busy` asks for its eight experts in turn, two a token, the others for two experts again and again."""
    experts = np.tile(np.array([0, 1], np.uint16), (tokens, 3, 1))
    experts[:, busy, 0] = np.arange(0, 2 * tokens, 2) % 8
    experts[:, busy, 1] = np.arange(1, 2 * tokens + 1, 2) % 8
    return Trace(experts, (8, 8, 8))


def slots_of(engine: Engine) -> list[int]:
    return [engine.plan.slots[path] for path in LAYERS]


@pytest.mark.parametrize("busy", [0, 2])
def test_with_a_profile_slots_are_where_the_layers_want_them_and_the_bits_the_same(tiny: Path, busy: int) -> None:
    with load(tiny, experts="all") as engine:
        whole = engine.logits(TOKENS)
        reply = engine.generate([11], max_tokens=12)
        engine.keep_profile(trace_that_wants_slots_in(busy))
    with load(tiny, experts="50%") as engine:
        assert slots_of(engine) == [8 if n == busy else 2 for n in range(3)]
        assert mx.array_equal(engine.logits(TOKENS), whole)
        engine.resize("34%")  # too few for hits to say anything
        assert sorted(slots_of(engine)) == [2, 3, 3]
        engine.resize("60%")
        assert slots_of(engine) == [8 if n == busy else 3 for n in range(3)]
        assert [layer.slots for layer in engine.stats().layers] == slots_of(engine)
        assert mx.array_equal(engine.logits(TOKENS), whole)
        assert engine.generate([11], max_tokens=12) == reply
        engine.resize("all")
        engine.resize("50%")
        assert slots_of(engine) == [8 if n == busy else 2 for n in range(3)]
        assert mx.array_equal(engine.logits(TOKENS), whole)
    with load(tiny, experts="all") as engine:
        engine.resize("50%")
        assert slots_of(engine) == [8 if n == busy else 2 for n in range(3)]
    with load(tiny, experts="50%", warm=False) as engine:
        assert slots_of(engine) == [4, 4, 4]
    with load(tiny, experts="25%") as engine:
        assert slots_of(engine) == [2, 2, 2]


def test_a_short_profile_says_nothing_of_slots(tiny: Path) -> None:
    with load(tiny, experts="all") as engine:
        engine.keep_profile(trace_that_wants_slots_in(1, CURVE_TOKENS - 1))
    with load(tiny, experts="50%") as engine:
        assert slots_of(engine) == [4, 4, 4]


def test_a_profile_without_hit_rates_still_fills_the_slots(tiny: Path) -> None:
    """As they were written before there were any."""
    with load(tiny, experts="all") as engine:
        file = engine.keep_profile(trace_that_wants_slots_in(1))
    stored = json.loads(file.read_text())
    assert len(stored.pop("hit_rates")) == 3
    file.write_text(json.dumps(stored))
    with load(tiny, experts="50%") as engine:
        assert slots_of(engine) == [4, 4, 4]
        assert set(held(engine)[LAYERS[0]]) >= {0, 1}


def test_progress_counts_what_fills_the_slots(tiny: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with load(tiny, experts="50%", progress=lambda *report: seen.append(report)) as engine:
        total = engine.plan.trunk_bytes + engine.plan.bank_bytes
    done = [report[1] for report in seen]
    assert done == sorted(done)
    assert seen[-1] == ("load", total, total)
    assert len(seen) >= 1 + len(LAYERS)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_fill_that_is_cut_short_leaves_no_half_slot(tiny: Path, error: type[BaseException]) -> None:
    with load(tiny, experts="all") as engine:
        whole = engine.logits(TOKENS)
    for after in (0, 1, 5, 20):
        loaded = load_folder(tiny, experts="50%", memory_bytes=2**62)
        engine = Engine(loaded)
        breaking = _Breaking(after, error)
        for stream in loaded.experts.streams.values():
            reader = stream.bank._reader
        reader._queue._preadv = breaking
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else CheckpointReadError):
            loaded.experts.fill(None)
        reader._queue._preadv = os.preadv
        for path, experts in held(engine).items():
            bank = loaded.experts.streams[path].bank
            assert len(experts) in (0, bank.slots)
        assert mx.array_equal(engine.logits(TOKENS), whole)
        engine.close()


class _Breaking:
    def __init__(self, after: int, error: type[BaseException]) -> None:
        self.left = after
        self.error = error

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        self.left -= 1
        if self.left < 0:
            os.preadv(descriptor, [buffers[0][:1]], offset)
            raise self.error("broken")
        return os.preadv(descriptor, buffers, offset)


def test_an_interrupted_load_raises_and_closes(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: ExpertReader, pieces: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ExpertReader, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(tiny, experts="50%")
    with load(tiny, experts="all"):
        pass  # no bank, nothing to fill


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def set_count(file: Path) -> None:
    stored = json.loads(file.read_text())
    stored["counts"][LAYERS[0]][0] = -1
    file.write_text(json.dumps(stored))


def of_other_layers(file: Path) -> None:
    stored = json.loads(file.read_text())
    stored["counts"][LAYERS[0]].pop()
    file.write_text(json.dumps(stored))


def rates_that_fall(file: Path) -> None:
    stored = json.loads(file.read_text())
    stored["hit_rates"] = {path: [0, 0.5, 0.4, *[0.6] * 6] for path in LAYERS}
    file.write_text(json.dumps(stored))


def rates_that_are_no_number(file: Path) -> None:
    stored = json.loads(file.read_text())
    stored["hit_rates"] = {path: [float("nan")] * 9 for path in LAYERS}
    file.write_text(json.dumps(stored))


def rates_of_a_layer_only(file: Path) -> None:
    stored = json.loads(file.read_text())
    stored["hit_rates"] = {LAYERS[0]: [0.5] * 9}
    file.write_text(json.dumps(stored))


def rates_that_are_too_few(file: Path) -> None:
    stored = json.loads(file.read_text())
    stored["hit_rates"] = {path: [0.5] * 8 for path in LAYERS}
    file.write_text(json.dumps(stored))


def of_other_version(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))


def of_other_model(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "digest": "0" * 64}))


def other_json(text: str) -> Callable[[Path], None]:
    def harm(file: Path) -> None:
        file.write_text(text)

    return harm


def counts_of_another_kind(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "counts": [1, 2]}))


HARMS = [
    tear,
    set_count,
    of_other_layers,
    of_other_version,
    of_other_model,
    counts_of_another_kind,
    rates_that_fall,
    rates_that_are_no_number,
    rates_of_a_layer_only,
    rates_that_are_too_few,
]
OTHER_JSON = [other_json(text) for text in ("[]", "5", "null", '"abc"', "{}")]


@pytest.mark.parametrize(
    "harm",
    [*HARMS, *OTHER_JSON],
)
def test_a_profile_of_no_use_is_ignored_and_said(
    tiny: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with load(tiny, experts="all") as engine:
        harm(engine.keep_profile(trace_that_prefers([7, 6, 5, 4])))
    with load(tiny, experts="50%") as engine:
        assert {tuple(sorted(experts)) for experts in held(engine).values()} == {(0, 1, 2, 3)}
    assert "is of no use" in caplog.text


def test_without_a_home_folder_there_is_no_profile(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with load(tiny, experts="50%") as engine:
        assert {tuple(sorted(experts)) for experts in held(engine).values()} == {(0, 1, 2, 3)}
        with pytest.raises(RequestError, match="no home folder"):
            engine.keep_profile(trace_that_prefers([1]))


def test_another_models_profile_is_not_taken(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load(tiny, experts="all") as engine:
        engine.keep_profile(trace_that_prefers([7, 6, 5, 4]))
    fine_tune = make_tiny(tmp_path / "fine-tune", {**QWEN3_MOE, "rope_theta": 5000.0})
    with caplog.at_level(logging.INFO), load(fine_tune, experts="50%") as engine:
        assert {tuple(sorted(experts)) for experts in held(engine).values()} == {(0, 1, 2, 3)}
    assert "of another model with the same layers" in caplog.text


def test_no_digest_is_asked_for_where_there_is_no_profile(tmp_path: Path) -> None:
    def unasked() -> str:
        raise AssertionError("it takes reading")

    layers = [MoeLayer("a", 2, 1, 1)]
    folder = ProfileFolder(tmp_path / "profiles")
    assert folder.find(layers, unasked) is None
    folder.keep(RoutingProfile("other", "f" * 64, 1, {"b": [1, 1]}), [MoeLayer("b", 2, 1, 1)])
    assert folder.find(layers, unasked) is None


def test_what_is_no_profile_of_the_model_is_refused(tiny: Path, own_cache: Path) -> None:
    with load(tiny, experts="all") as engine:
        with pytest.raises(RequestError, match="the model's have"):
            engine.keep_profile(Trace(np.zeros((1, 2, 1), np.uint16), (8, 8)))
        with pytest.raises(RequestError, match="no token"):
            engine.keep_profile(Trace(np.zeros((0, 3, 1), np.uint16), (8, 8, 8)))
        own_cache.parent.mkdir(parents=True, exist_ok=True)
        own_cache.write_text("a file where the folder should be")
        with pytest.raises(SavedStateError, match="--no-save"):
            engine.keep_profile(trace_that_prefers([1]))
    with load(tiny, experts="50%"):
        pass


def test_the_cache_folder_is_where_the_system_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setattr("mlxmoe.keeping.sys.platform", "darwin")
    assert user_cache() == Path.home() / "Library/Caches"
    monkeypatch.setattr("mlxmoe.keeping.sys.platform", "linux")
    assert user_cache() == Path.home() / ".cache"
