"""A window and bits asked of load() and of the command line: what they change, and what they must not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from definitions import DEFINITIONS
from mlx_lm.models.cache import make_prompt_cache
from tiny import QWEN3_MOE, make_tiny

from mlxmoe import (
    Engine,
    EngineClosedError,
    MemoryBudgetError,
    PromptError,
    SavedStateError,
    Session,
    UnsupportedModelError,
    WindowError,
    load,
)
from mlxmoe.hub import demo_folder
from mlxmoe.kv.settings import KVSettings
from mlxmoe.kv.window import SlidingWindowKVCache
from mlxmoe.loading import load_folder
from mlxmoe.opening import open_folder

LONG = [(31 * i * i + 7 * i) % 2000 + 3 for i in range(700)]  # tokens; the demo model was made for 256


def cache_bytes(engine: Engine, tokens: int) -> int:
    """Of a cache of the engine's that has seen `tokens`."""
    cache = engine._decoder.new_cache()
    engine._decoder.prefill(LONG[:tokens], cache)
    return sum(entry.nbytes for entry in cache)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("window", [None, 100, 200, 256, 300, 512])
def test_the_plan_says_what_the_caches_take(tiny: Path, window: int | None, bits: int | None) -> None:
    with load(tiny, window=window, kv_bits=bits, context=256 if window is None else None) as engine:
        assert engine.plan.kv_bytes == cache_bytes(engine, 256 if window is None else 700)


def test_a_shorter_context_than_the_window_takes_less() -> None:
    with load(window=200, context=30) as engine, load(window=200) as roomy:
        assert engine.plan.kv_bytes == cache_bytes(engine, 30) == roomy.plan.kv_bytes
    with load(window=600, context=250) as engine:
        assert engine.plan.kv_bytes == cache_bytes(engine, 250)


def test_up_to_the_window_no_logit_changes() -> None:
    with load() as whole, load(window=64) as engine:
        assert mx.array_equal(engine.logits(LONG[:64]), whole.logits(LONG[:64]))
        assert not mx.array_equal(engine.logits(LONG[:80])[64:], whole.logits(LONG[:80])[64:])


@pytest.mark.parametrize("options", [{"window": 64}, {"window": 64, "kv_bits": 8}, {"kv_bits": 4}])
def test_streaming_experts_changes_no_logit_of_a_lossy_cache(options: dict[str, Any]) -> None:
    with load(experts="all", **options) as resident, load(experts="25%", **options) as engine:
        assert mx.array_equal(engine.logits(LONG[:200]), resident.logits(LONG[:200]))


def test_prefill_chunks_change_no_more_than_rounding() -> None:
    found = []
    for chunk_tokens in (7, 64, 2048):
        with Engine(
            load_folder(demo_folder(), memory_bytes=2**40, kv_settings=KVSettings(64)), chunk_tokens=chunk_tokens
        ) as e:
            found.append(e.logits(LONG[:480]))
    assert all(mx.abs(other - found[0]).max().item() < 1e-3 for other in found[1:])  # logits of 10, six layers


def test_a_text_may_outgrow_the_model_and_the_window() -> None:
    with load(window=64) as engine:
        assert engine.plan.context is None
        assert engine.plan.model_context == 256
        *_, last = engine.stream(LONG[:300], max_tokens=50)
        assert (last.prompt_tokens, last.generated_tokens, last.finish_reason) == (300, 50, "length")


def test_an_asked_context_still_binds() -> None:
    with load(window=64, context=100) as engine:
        *_, last = engine.stream(LONG[:90], max_tokens=50)
        assert last.generated_tokens == 10


def test_a_session_goes_on_in_its_window() -> None:
    with load(window=64) as engine:
        session = engine.session()
        for turn in ("In the beginning", " And God said", " And it came to pass"):
            assert session.generate(turn, max_tokens=60)
        (cache, *_) = session._cache or ()
        assert isinstance(cache, SlidingWindowKVCache)
        assert cache.seen > 180
        assert cache.size() == 64


def test_positions_that_cannot_move_keep_the_models_context(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**DEFINITIONS["deepseek_v2"], "max_position_embeddings": 64}
    with load(make_tiny(tmp_path / "tiny", config), window=24) as engine:
        assert engine.plan.context == 64
    assert "The positions of deepseek_v2 cannot be moved" in caplog.text


def test_a_definition_that_a_window_would_break_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", DEFINITIONS["minimax_m3_vl"])
    with pytest.raises(UnsupportedModelError, match=r"window=24 cannot be had with minimax_m3_vl"):
        load(folder, window=24)
    with pytest.raises(UnsupportedModelError, match="kv_bits=8 cannot be had"):
        load(folder, kv_bits=8)


def test_a_dynamic_rotation_is_called_within_its_context(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    config = {**DEFINITIONS["olmoe"], "max_position_embeddings": 64, "rope_scaling": scaling}
    found = []
    for chunk_tokens in (7, 2048):
        loaded = load_folder(
            make_tiny(tmp_path / str(chunk_tokens), config), memory_bytes=2**40, kv_settings=KVSettings(24)
        )
        with Engine(loaded, chunk_tokens=chunk_tokens) as engine:
            found.append(engine.logits(LONG[:200]))
    assert mx.abs(found[0] - found[1]).max().item() < 1e-4


def test_without_window_and_bits_the_caches_are_mlx_lms() -> None:
    with load() as engine:
        theirs = make_prompt_cache(engine.model)
        assert [type(entry) for entry in engine._decoder.new_cache()] == [type(entry) for entry in theirs]


def test_values_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(WindowError, match="window=4"):
        load("no/such-model", window=4)
    with pytest.raises(WindowError, match="kv_bits=16"):
        load("no/such-model", kv_bits=16)


def test_bits_want_no_place_of_the_context(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", {**QWEN3_MOE, "max_position_embeddings": 4096})
    plans = {}
    for bits in (None, 8, 4):
        with load(folder, kv_bits=bits) as engine:
            plans[bits] = engine.plan.kv_bytes
    # tiny heads of 32 in one group, scales in float32: 8 and 4 bits a number and 2 of scale and bias
    assert plans[8] / plans[None] == (8 + 2) / 32
    assert plans[4] / plans[None] == (4 + 2) / 32


def test_a_session_may_have_a_window_of_its_own(tmp_path: Path) -> None:
    settings = KVSettings(window=64, kv_bits=8)
    turns = ["In the beginning God created the heaven", " And God said", " And it came to pass"]

    def talk(session: Session) -> list[tuple[int, float]]:
        return [(chunk.token, chunk.logprob) for turn in turns for chunk in session.stream(turn, max_tokens=40)]

    with load(window=64, kv_bits=8) as engine:
        expected = talk(engine.session())
    with load(experts="50%") as engine:
        whole, windowed = engine.session(), engine.session(kv_settings=settings)
        plain = talk(whole)
        assert talk(windowed) == expected != plain
        assert talk(engine.session()) == plain, "others are as they were"
        assert engine.session(kv_settings=KVSettings())._replier is engine._replier
        kept, all_kept = (sum(entry.nbytes for entry in session._cache or []) for session in (windowed, whole))
        assert 0 < kept < all_kept
        assert windowed._lease.nbytes >= kept, "and what one layer is handed while it computes"
        windowed.save(tmp_path / "kept")
        with load() as other, pytest.raises(SavedStateError, match="saved as a SlidingWindowKVCache"):
            other.restore(tmp_path / "kept")
        with load() as other:
            again = other.restore(tmp_path / "kept", kv_settings=settings)
            more = [chunk.token for chunk in again.stream(" And", max_tokens=20)]
        assert more == [chunk.token for chunk in windowed.stream(" And", max_tokens=20)]
        left = windowed.stream(" And")
        next(left)
        engine.close()
        with pytest.raises(EngineClosedError):
            next(left)


def test_a_session_may_be_without_the_engines_window() -> None:
    with load(window=64) as engine, load() as plain:
        assert engine.plan.context is None
        prompt = "In the beginning " * 30
        expected = plain.session().generate(prompt, max_tokens=10)
        session = engine.session(kv_settings=KVSettings())
        assert session.generate(prompt, max_tokens=10) == expected
        with pytest.raises(PromptError, match="context is 256"):
            session.stream("In the beginning " * 400)


def test_a_session_of_a_model_that_a_window_would_break_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "sparse", DEFINITIONS["deepseek_v32"])
    with load(folder, experts="50%") as engine:
        with pytest.raises(UnsupportedModelError, match="window=64"):
            engine.session(kv_settings=KVSettings(window=64))
        assert engine.session().generate("x", max_tokens=2)


@pytest.mark.parametrize("name", ["longcat_flash", "longcat_flash_ngram"])
def test_a_session_of_a_loaded_model_may_have_what_load_may(tmp_path: Path, name: str) -> None:
    folder = make_tiny(tmp_path / "tiny", DEFINITIONS[name])
    with load(folder, window=64) as engine:
        expected = engine.session().generate("In the beginning " * 30, max_tokens=3)
    with load(folder, experts="50%") as engine:
        session = engine.session(kv_settings=KVSettings(window=64))
        assert session.generate("In the beginning " * 30, max_tokens=3) == expected


def test_warnings_of_a_session_call_the_model_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    with load() as engine:
        engine.session(kv_settings=KVSettings(window=300))
    assert "window=300 is more than the 256 tokens qwen3_moe was made for" in caplog.text


def test_what_are_no_settings_is_refused(demo: Engine, tmp_path: Path) -> None:
    demo.session().save(tmp_path / "kept")
    others: list[Any] = ["x", 5, (64, 4, None), {"window": 64}, [1], 0, "", False, KVSettings]
    for settings in others:
        with pytest.raises(WindowError, match="is no KVSettings"):
            demo.session(kv_settings=settings)
        with pytest.raises(WindowError, match="is no KVSettings"):
            demo.restore(tmp_path / "kept", kv_settings=settings)


@pytest.mark.parametrize("sinks", [225, 255, 256, 1000, 2**31])
def test_sinks_that_leave_no_room_for_positions_are_refused(demo: Engine, sinks: int) -> None:
    said = f"sinks={sinks} are too many of the 256 tokens .* at most 224 can"
    with pytest.raises(WindowError, match=said):
        load(window=sinks + 2, sinks=sinks)
    with pytest.raises(WindowError, match=said):
        demo.session(kv_settings=KVSettings(sinks + 2, sinks))


def test_with_as_many_sinks_as_there_may_be_the_window_is_turned_now_and_then_only(demo: Engine) -> None:
    for window in (225, 300):
        cache = demo.session(kv_settings=KVSettings(window, 224))._replier.decoder.new_cache()[0]
        assert cache.positions.step == 256 // 8


def test_sinks_are_as_many_as_one_likes_where_no_position_moves(tmp_path: Path) -> None:
    config = {**DEFINITIONS["deepseek_v2"], "max_position_embeddings": 64}
    with load(make_tiny(tmp_path / "fixed", config), window=80, sinks=70) as engine:
        assert engine.plan.context == 64
    with load(window=None, sinks=1000, kv_bits=8) as engine:
        assert engine.plan.context == 256, "without a window there are no sinks"


def test_a_session_holds_room_for_no_more_than_its_text_has() -> None:
    prompt = "In the beginning " * 30
    with load() as engine:
        large, fitting = (engine.session(kv_settings=KVSettings(window)) for window in (10**9, 1000))
        assert large.generate(prompt, max_tokens=10) == fitting.generate(prompt, max_tokens=10)
        assert large._lease.nbytes == fitting._lease.nbytes < 4_000_000


def test_a_session_holds_room_for_the_rows_that_its_widest_layer_is_handed(tmp_path: Path) -> None:
    row_bytes = 2 * 32 * 4  # of a layer: a key and a value of a head of 32, in float32
    packed_bytes = row_bytes * 10 // 32  # 8 bits, and scale and bias
    with load(make_tiny(tmp_path / "tiny"), context=400) as engine:
        for settings, stored_bytes, handed in (
            (KVSettings(64, sinks=0), 3 * 64 * row_bytes, 64 + 400),  # a chunk is no longer than the context
            (KVSettings(3000, sinks=0), 3 * 1024 * row_bytes, 1024),
            (KVSettings(64, sinks=0, kv_bits=8), 3 * 64 * packed_bytes, 64 + 400),
            (KVSettings(64), 3 * 64 * row_bytes, 64 + 400 + 4),  # trained for 512, the next step is beyond the text
            (KVSettings(kv_bits=8), 3 * 1024 * packed_bytes, 1024),
        ):
            kind = engine._kinds.of(settings)
            assert kind.replier.decoder.chunk_tokens == 400
            held = kind.kv.of(800) - stored_bytes
            assert handed * row_bytes <= held <= (handed + 8) * row_bytes


@pytest.mark.parametrize("window", [10**7, 2**31 + 5, 2**64])
def test_a_window_that_fits_no_memory_is_refused_with_what_would_fit(window: int) -> None:
    opened = open_folder(demo_folder(), kv_settings=KVSettings(window))
    with pytest.raises(
        MemoryBudgetError, match=r"KV cache for any number of tokens, .* or a smaller window="
    ) as error:
        load(window=window, memory="300MB")
    found = re.search(r"context=(\d+)", str(error.value))
    assert found is not None
    assert 0 < opened.kv.of(int(found[1])) < 300_000_000
    with load(window=window, memory="300MB", context=int(found[1])) as engine:
        assert engine.plan.context == int(found[1]) > 1000


def test_a_window_longer_than_the_context_is_none() -> None:
    with load(context=250) as plain, load(window=10**9, context=250) as engine:
        assert engine.plan.prefill_bytes == plain.plan.prefill_bytes
        assert mx.array_equal(engine.logits(LONG[:250]), plain.logits(LONG[:250]))
