"""Reuse of prompts' beginnings: the bits of a fresh prefill, within its limits, whatever was stored and given up."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import watch_passes
from definitions import DEFINITIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import load_model
from tiny import make_tiny

from mlxmoe import Engine, MemoryBudgetError, PrefixStore, RequestError, SavedStateError, load
from mlxmoe.decode import Decoder
from mlxmoe.experts.cache import ExpertCache
from mlxmoe.hub import demo_folder
from mlxmoe.kv.choose import choose
from mlxmoe.kv.file import read_facts
from mlxmoe.kv.prefix import Prefixes
from mlxmoe.kv.settings import KVSettings
from mlxmoe.kv.state import put, take
from mlxmoe.loading import load_folder

CHUNK = 24
LONG = [(i * 37 + 5) % 2000 for i in range(60)]
OTHER = [*LONG[:50], *(7 + i for i in range(20))]  # parts from LONG in the third chunk
REPLY = [900, 17, 333]

# What another division of a prompt may change of float32 logits, as a share of the largest. Measured over all
# definitions: 1.7e-6 at most; on a GPU, or in bfloat16, more.
ROUNDING = 2e-5


def make_decoder(
    model: Any, store: PrefixStore | None, chunk_tokens: int = CHUNK, kv_settings: KVSettings | None = None
) -> Decoder:
    prefixes = None if store is None else Prefixes(store, {"digest": "x"}, chunk_tokens)
    kv_choice = None if kv_settings is None else choose(model, kv_settings, 256)
    return Decoder(model, ExpertCache.of_nothing(), chunk_tokens=chunk_tokens, kv_choice=kv_choice, prefixes=prefixes)


def answer(decoder: Decoder, prompt: list[int]) -> tuple[int, mx.array]:
    """How many tokens of `prompt` were reused, and the logits after it and along a fixed reply."""
    cache = decoder.new_cache()
    run = decoder.reuse(prompt, cache)
    seen = 0 if run is None else run.seen
    decoder.prefill(prompt[seen:-1], cache, run)
    rows = [decoder.logits([token], cache) for token in [prompt[-1], *REPLY]]
    if run is not None:
        decoder.note_reply(run, [prompt[-1], *REPLY], cache)
    return seen, mx.concatenate(rows)


@pytest.mark.usefixtures("kernels_without_metal")
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_definition_gives_the_bits_of_a_fresh_prefill(tmp_path: Path, name: str) -> None:
    model, _ = load_model(make_tiny(tmp_path / name, DEFINITIONS[name]))
    fresh, exact = make_decoder(model, None), make_decoder(model, PrefixStore("1GB"))
    near, disk = make_decoder(model, PrefixStore("1GB", exact=False)), PrefixStore("1GB", folder=tmp_path / "states")
    answer(near, LONG)
    answer(make_decoder(model, disk), LONG)
    reopened = make_decoder(model, PrefixStore("1GB", folder=tmp_path / "states"))
    for prompt, reused in ((LONG, 0), (OTHER, 48), (LONG, 59), (LONG[:55], 48), (OTHER, 69)):
        _, expected = answer(fresh, prompt)
        assert mx.all(mx.isfinite(expected)), "a comparison of NaN proves nothing"
        seen, found = answer(exact, prompt)
        assert seen == reused
        assert mx.array_equal(found, expected)
        seen, found = answer(reopened, prompt)
        assert seen >= reused
        assert mx.array_equal(found, expected), "from disk"
        seen, found = answer(near, prompt)
        assert seen >= reused
        assert mx.abs(found - expected).max() <= ROUNDING * mx.abs(expected).max()


@pytest.mark.parametrize(
    "kv_settings",
    [KVSettings(64), KVSettings(64, kv_bits=8), KVSettings(40, 0, kv_bits=4), KVSettings(kv_bits=8)],
    ids=str,
)
def test_a_lossy_cache_gives_the_bits_of_its_fresh_prefill(
    tmp_path: Path, tiny: Path, kv_settings: KVSettings
) -> None:
    """In prompts within the window, beyond it, and beyond the 256 tokens that the model is said to be made for."""
    model, _ = load_model(tiny)
    long = [(31 * i * i + 7 * i) % 2000 + 3 for i in range(400)]
    prompts = [long[:50], long[:40], long, [*long[:300], *OTHER], long[:390], [*long, 5, 6, 7]]
    store = PrefixStore("1GB", folder=tmp_path / "states")
    exact, fresh = make_decoder(model, store, CHUNK, kv_settings), make_decoder(model, None, CHUNK, kv_settings)
    for prompt, reused in zip(prompts, (0, 24, 48, 288, 384, 384), strict=True):
        seen, found = answer(exact, prompt)
        assert seen == reused
        assert mx.array_equal(found, answer(fresh, prompt)[1])
    again = make_decoder(model, PrefixStore("1GB", folder=tmp_path / "states"), CHUNK, kv_settings)
    seen, found = answer(again, prompts[-1])
    assert seen == len(prompts[-1]) - 1
    assert mx.array_equal(found, answer(fresh, prompts[-1])[1]), "from disk"
    other = make_decoder(model, store, CHUNK, KVSettings(100))
    assert answer(other, long)[0] == 0, "a store keeps different windows apart"


def test_quantised_rows_without_a_window_are_stored_once() -> None:
    model, _ = load_model(demo_folder())
    one, near = PrefixStore("1GB"), PrefixStore("1GB", exact=False)
    answer(make_decoder(model, one, CHUNK, KVSettings(kv_bits=8)), LONG)
    decoder = make_decoder(model, None, CHUNK, KVSettings(kv_bits=8))
    cache = decoder.new_cache()
    decoder.prefill(LONG[:-1], cache)
    assert one.stats().nbytes == sum(entry.row_bytes for entry in cache) * (len(LONG) - 1)
    answer(make_decoder(model, near, CHUNK, KVSettings(kv_bits=8)), LONG)
    seen, found = answer(make_decoder(model, near, CHUNK, KVSettings(kv_bits=8)), OTHER)
    assert seen == 50, "in the middle of what is stored"
    expected = answer(decoder, OTHER)[1]
    assert mx.abs(found - expected).max() <= 0.02 * mx.abs(expected).max()  # a rounded level of 8 bits may differ


def test_what_is_not_exact_begins_where_prompts_part_and_keeps_replies(tiny: Path) -> None:
    store = PrefixStore("1GB", exact=False)
    decoder = make_decoder(load_model(tiny)[0], store)
    answer(decoder, LONG)
    assert answer(decoder, OTHER)[0] == 50, "in the middle of what is stored"
    assert answer(decoder, [*OTHER, *REPLY, 5, 6, 7])[0] == len(OTHER) + len(REPLY), "the conversation so far"
    assert answer(decoder, [*LONG[:20], 3, 3])[0] == 0, "too short to be worth another division"


def test_what_cannot_be_taken_back_is_used_whole_or_not_at_all(tmp_path: Path) -> None:
    model, _ = load_model(make_tiny(tmp_path / "hybrid", DEFINITIONS["qwen3_next"]))
    decoder = make_decoder(model, PrefixStore("1GB", exact=False))
    answer(decoder, LONG)
    assert answer(decoder, OTHER)[0] == 48
    assert answer(decoder, [*LONG, *REPLY, 4])[0] == len(LONG) + len(REPLY)


@settings(max_examples=20)
@given(
    prompts=st.lists(st.lists(st.sampled_from([40, 50]), min_size=1, max_size=30), min_size=2, max_size=12),
    limit=st.sampled_from([30_000, 60_000, 10**9]),
    name=st.sampled_from(["qwen3_moe", "gpt_oss"]),
    exact=st.booleans(),
    on_disk=st.booleans(),
)
def test_any_prompts_in_any_order_within_any_limit(
    models: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
    limit: int,
    name: str,
    exact: bool,
    on_disk: bool,
) -> None:
    folder = tmp_path_factory.mktemp("states") if on_disk else None
    store = PrefixStore(limit, exact=exact, folder=folder, folder_limit=150_000)
    decoder, fresh = make_decoder(models[name], store, 8), make_decoder(models[name], None, 8)
    reused = 0
    for prompt in prompts:
        seen, found = answer(decoder, prompt)
        expected = answer(fresh, prompt)[1]
        if exact:
            assert seen % 8 == 0 or seen == len(prompt) - 1
            assert mx.array_equal(found, expected)
        else:
            assert mx.abs(found - expected).max() <= ROUNDING * mx.abs(expected).max()
        reused += seen
        stats = store.stats()
        assert stats.nbytes == sum(node.nbytes for node in store._forest) <= limit
        assert stats.reused_tokens == reused
        assert len({node.key for node in store._forest}) == stats.states
        if folder is not None:
            assert sum(file.stat().st_size for file in folder.iterdir()) <= 150_000
            assert not list(folder.glob(".*"))
    store.shrink()
    assert store.stats().nbytes == 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    return {name: load_model(make_tiny(folder / name, DEFINITIONS[name]))[0] for name in ("qwen3_moe", "gpt_oss")}


def test_an_exact_store_keeps_nothing_of_a_prompt_that_was_divided_otherwise(models: dict[str, Any]) -> None:
    """As when memory is short and chunks are smaller."""
    store = PrefixStore("1GB")
    prefixes = Prefixes(store, {"digest": "x"}, CHUNK)
    decoder = Decoder(models["gpt_oss"], ExpertCache.of_nothing(), chunk_tokens=16, prefixes=prefixes)
    answer(decoder, LONG)
    assert store.stats().states == 0
    assert answer(make_decoder(models["gpt_oss"], store), LONG)[0] == 0


# --- memory -----------------------------------------------------------------------------------------------------


def test_prompts_that_begin_alike_share_memory(models: dict[str, Any]) -> None:
    one, many = PrefixStore("1GB"), PrefixStore("1GB")
    answer(make_decoder(models["qwen3_moe"], one), [*LONG[:48], 1, 1])
    for number in range(5):
        answer(make_decoder(models["qwen3_moe"], many), [*LONG[:48], number, 1])
    token_bytes = sum(2 * 4 * 32 for _ in models["qwen3_moe"].layers)  # keys and values, float32, head_dim 32
    assert one.stats().nbytes == 49 * token_bytes
    assert many.stats().nbytes == (48 + 5) * token_bytes


def test_a_rotating_cache_is_stored_without_what_it_will_drop() -> None:
    for keep in (0, 4):
        cache = RotatingKVCache(max_size=16, keep=keep)
        mx.eval(cache.update_and_fetch(mx.random.normal((1, 1, 100, 8)), mx.random.normal((1, 1, 100, 8))))
        (state,) = take([cache], (76, 100))
        assert state.nbytes == 2 * 16 * 8 * 4
        for tokens in (1, 5):
            restored, original = RotatingKVCache(max_size=16, keep=keep), RotatingKVCache(max_size=16, keep=keep)
            put([state], [restored])
            put(take([cache]), [original])
            for _ in range(40):
                new = mx.random.normal((2, 1, 1, tokens, 8))
                for a, b in zip(restored.update_and_fetch(*new), original.update_and_fetch(*new), strict=True):
                    assert mx.array_equal(a, b)


def test_states_and_running_caches_share_memory_until_they_part(models: dict[str, Any]) -> None:
    store = PrefixStore("1GB")
    decoder = make_decoder(models["qwen3_moe"], store)
    answer(decoder, LONG)
    before = [mx.array(array) for node in store._forest for state in node.states or () for array in state.arrays()]
    mx.eval(before)
    for prompt in (OTHER, LONG, [*LONG, 1, 2, 3]):
        answer(decoder, prompt)
    after = [array for node in store._forest for state in node.states or () for array in state.arrays()]
    assert all(any(a.shape == b.shape and mx.array_equal(a, b) for b in after) for a in before)


def test_the_least_recently_used_goes_first(models: dict[str, Any]) -> None:
    token_bytes = sum(2 * 4 * 32 for _ in models["qwen3_moe"].layers)
    store = PrefixStore(3 * CHUNK * token_bytes)
    decoder = make_decoder(models["qwen3_moe"], store)
    one, two, three, four = ([start, *LONG[: CHUNK - 1], 1] for start in (11, 12, 13, 14))
    for prompt in (one, two, three, one, four):
        answer(decoder, prompt)
    assert store.stats().evictions == 1
    assert [answer(decoder, prompt)[0] for prompt in (one, three, four)] == [CHUNK] * 3
    assert answer(decoder, two)[0] == 0


def test_a_prompt_larger_than_the_store_keeps_its_beginning(models: dict[str, Any]) -> None:
    token_bytes = sum(2 * 4 * 32 for _ in models["qwen3_moe"].layers)
    store = PrefixStore(30 * token_bytes)
    decoder = make_decoder(models["qwen3_moe"], store)
    answer(decoder, LONG)
    assert (store.stats().states, store.stats().nbytes) == (1, CHUNK * token_bytes)
    assert answer(decoder, LONG)[0] == CHUNK


@pytest.mark.parametrize("limit", ["lots", 0, -1, "0GB"])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(MemoryBudgetError, match="limit="):
        PrefixStore(limit)


@pytest.mark.parametrize("exact", ["no", None, 1, 0])
def test_exact_is_true_or_false(exact: Any) -> None:
    with pytest.raises(RequestError, match=f"exact={exact!r} is not offered"):
        PrefixStore("1MB", exact=exact)


def test_the_store_is_part_of_the_memory_budget() -> None:
    with load() as engine:
        total, prefill_bytes = engine.plan.total_bytes, engine.plan.prefill_bytes
    load(memory=total - prefill_bytes // 3, experts="all").close()  # in smaller prefill chunks
    with pytest.raises(MemoryBudgetError):
        load(memory=total - prefill_bytes // 3, experts="all", prefixes="4MB")
    with load(memory=total + 10**6, experts="all", prefixes="1MB") as engine:
        assert engine.plan.total_bytes == total
    with pytest.raises(MemoryBudgetError, match=r"prefix store may take 1\.0 GB, but the whole budget is 500\.0 MB"):
        load(memory="500MB", prefixes="1GB")


# --- disk ---------------------------------------------------------------------------------------------------------


def test_states_on_disk_outlive_the_store_and_the_memory_limit(models: dict[str, Any], tmp_path: Path) -> None:
    token_bytes = sum(2 * 4 * 32 for _ in models["qwen3_moe"].layers)
    _, expected = answer(make_decoder(models["qwen3_moe"], None), LONG)
    small = PrefixStore(30 * token_bytes, folder=tmp_path)
    decoder = make_decoder(models["qwen3_moe"], small)
    answer(decoder, LONG)
    for store in (small, PrefixStore("1GB", folder=tmp_path)):
        seen, found = answer(make_decoder(models["qwen3_moe"], store), LONG)
        assert seen == len(LONG) - 1
        assert mx.array_equal(found, expected)
        assert store.stats().read_from_disk > 0
        assert store.stats().nbytes <= store.limit_bytes


def test_a_torn_state_on_disk_is_removed_and_prefilled_again(
    models: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = answer(make_decoder(models["qwen3_moe"], None), LONG)
    for damage in ("data", "header", "gone", "renamed"):
        answer(make_decoder(models["qwen3_moe"], PrefixStore("1GB", folder=tmp_path)), LONG)
        files = sorted(tmp_path.iterdir(), key=lambda file: len(read_facts(file)["tokens"]))
        assert len(files) == 3
        store = PrefixStore("1GB", folder=tmp_path)
        decoder = make_decoder(models["qwen3_moe"], store)
        decoder.reuse([1, 2], decoder.new_cache())  # the folder has been looked at
        raw = bytearray(files[-1].read_bytes())
        if damage == "gone":
            files[-1].unlink()
        elif damage == "renamed":
            files[-1].write_bytes(files[-2].read_bytes())
        else:
            raw[-5 if damage == "data" else 20] ^= 1
            files[-1].write_bytes(raw)
        seen, found = answer(decoder, LONG)
        assert seen in (0, CHUNK)
        assert mx.array_equal(found, expected)
    assert "of no use and is removed" in caplog.text


def test_other_files_in_the_folder_are_left_alone(models: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    store = PrefixStore("1GB", folder=tmp_path, folder_limit=30_000)
    answer(make_decoder(models["qwen3_moe"], store), LONG)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"
    (tmp_path / ("0" * 64 + ".prefix")).write_bytes(b"none of ours")
    answer(make_decoder(models["qwen3_moe"], PrefixStore("1GB", folder=tmp_path)), LONG)
    assert not (tmp_path / ("0" * 64 + ".prefix")).exists()


def test_a_folder_that_cannot_be_made_or_written_to(
    models: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SavedStateError, match="cannot be made"):
        PrefixStore("1GB", folder=tmp_path / "file")
    decoder = make_decoder(models["qwen3_moe"], PrefixStore("1GB", folder=tmp_path / "states"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    _, found = answer(decoder, LONG)
    assert mx.array_equal(found, answer(make_decoder(models["qwen3_moe"], None), LONG)[1])
    assert "not kept on disk" in caplog.text
    assert answer(decoder, LONG)[0] == len(LONG) - 1, "memory has it all the same"


# --- through the engine -------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tiny: Path) -> Iterator[Engine]:
    """A tiny engine that prefills 24 tokens at a time, with half its experts in memory and a store."""
    loaded = load_folder(tiny, experts="50%", memory_bytes=2**40)
    with Engine(loaded, prefixes=PrefixStore("1GB"), chunk_tokens=CHUNK) as engine:
        yield engine


def test_a_stream_prefills_only_what_is_new_and_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = list(engine.stream(LONG, max_tokens=4))
    assert {chunk.reused_tokens for chunk in first} == {0}
    passes = watch_passes(engine, monkeypatch)
    chunks = list(engine.stream(OTHER, max_tokens=3))
    assert passes == [len(OTHER) - 1 - 48, 1, 1, 1]
    assert {(chunk.prompt_tokens, chunk.reused_tokens) for chunk in chunks} == {(len(OTHER), 48)}
    assert chunks[0].prompt_tokens_per_s == pytest.approx((len(OTHER) - 48) / chunks[0].ttft_s)
    stats = engine.stats()
    assert stats.prefixes is not None
    assert (stats.prefixes.prompts, stats.prefixes.hits, stats.prefixes.reused_tokens) == (2, 1, 48)
    assert stats.as_dict()["prefixes"]["reused_tokens"] == 48


def test_streams_are_those_of_an_engine_without_a_store(engine: Engine, tiny: Path) -> None:
    loaded = load_folder(tiny, memory_bytes=2**40)
    with Engine(loaded, chunk_tokens=CHUNK) as plain:
        for prompt in (LONG, OTHER, LONG, LONG[:25], OTHER):
            one, two = (list(e.stream(prompt, max_tokens=12, temperature=0.9, seed=4)) for e in (engine, plain))
            assert [(c.token, c.logprob) for c in one] == [(c.token, c.logprob) for c in two]


def test_sessions_share_the_store(demo: Engine) -> None:
    loaded = load_folder(demo.path, memory_bytes=2**40)
    with Engine(loaded, prefixes=PrefixStore("1GB"), chunk_tokens=8) as engine:
        opening = "In the beginning God created the heaven and the earth, and the"
        tokens = len(engine.tokenizer.encode(opening))
        first, second = (list(engine.session().stream(opening, max_tokens=4)) for _ in range(2))
        assert [chunk.token for chunk in first] == [chunk.token for chunk in second]
        assert (first[0].reused_tokens, second[0].reused_tokens) == (0, tokens - 1)
        session = engine.session()
        session.generate(opening, max_tokens=4)
        (more,) = session.stream(" And", max_tokens=1)
        assert more.reused_tokens == tokens + 3, "a session's own cache counts as well"


def test_a_session_with_a_window_of_its_own_uses_the_store_too(demo: Engine) -> None:
    settings = KVSettings(window=16, kv_bits=8)
    with Engine(load_folder(demo.path, memory_bytes=2**40), prefixes=PrefixStore("1GB"), chunk_tokens=8) as engine:
        opening = "In the beginning God created the heaven and the earth, and the"
        tokens = len(engine.tokenizer.encode(opening))
        assert next(engine.stream(opening)).reused_tokens == 0
        first, second = (list(engine.session(kv_settings=settings).stream(opening, max_tokens=9)) for _ in range(2))
        assert (first[0].reused_tokens, second[0].reused_tokens) == (0, tokens - 1), "but not what is whole"
        assert [(chunk.token, chunk.logprob) for chunk in first] == [(chunk.token, chunk.logprob) for chunk in second]
        assert next(engine.stream(opening)).reused_tokens == tokens - 1


@pytest.mark.parametrize("exact", [True, False])
def test_closing_at_the_last_chunk_takes_nothing_from_a_whole_reply(
    tiny: Path, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="mlxmoe.reply")
    loaded = load_folder(tiny, memory_bytes=2**40)
    with Engine(loaded, prefixes=PrefixStore("1GB", exact=exact), chunk_tokens=CHUNK) as engine:
        session = engine.session()
        stream = session.stream("In the beginning", max_tokens=4)
        for chunk in stream:
            if chunk.finish_reason is not None:
                engine.close()
        assert session._cache is not None
        assert len(session.messages) == 2
        assert ("not kept for other prompts" in caplog.text) is not exact, "an exact store has nothing to keep of it"


def test_threads_share_the_store(engine: Engine, tiny: Path) -> None:
    prompts = [[*LONG[: 20 + 9 * number], number] for number in range(5)] * 4
    with Engine(load_folder(tiny, memory_bytes=2**40), chunk_tokens=CHUNK) as plain:
        expected = [[c.logprob for c in plain.stream(prompt, max_tokens=3)] for prompt in prompts]
    found: list[list[float]] = [[] for _ in prompts]

    def ask(part: int) -> None:
        for number in range(part, len(prompts), 3):
            found[number] = [chunk.logprob for chunk in engine.stream(prompts[number], max_tokens=3)]

    threads = [threading.Thread(target=ask, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_models_that_share_a_store_do_not_mix(tiny: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", bits=8)
    store = PrefixStore("1GB", folder=tmp_path / "states")
    engines = [
        Engine(load_folder(path, memory_bytes=2**40), prefixes=store, chunk_tokens=CHUNK) for path in (tiny, other)
    ]
    for engine in engines:
        with engine:
            assert next(engine.stream(LONG)).reused_tokens == 0
            assert next(engine.stream(LONG)).reused_tokens == len(LONG) - 1


def test_the_memory_guard_takes_the_store_before_any_expert(engine: Engine) -> None:
    engine.generate(LONG, max_tokens=1)
    spare = engine._balance.guard._reclaims[0]
    stats = engine.stats().prefixes
    assert stats is not None
    assert spare.name == "the prefix store"
    assert spare.everything() == stats.nbytes > 0
    assert next(engine.stream(LONG)).reused_tokens == 0


def test_a_stream_that_is_left_leaves_what_it_prefilled(engine: Engine) -> None:
    stream = engine.stream(LONG, max_tokens=50)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert next(engine.stream(OTHER)).reused_tokens == 48


def test_closing_gives_the_engines_own_store_back_but_not_the_callers() -> None:
    store = PrefixStore("10MB")
    for prefixes, left in (("10MB", False), (store, True)):
        engine = load(prefixes=prefixes)
        engine.generate("In the beginning", max_tokens=2)
        engine.close()
        stats = engine.stats().prefixes
        assert stats is not None
        assert (stats.nbytes > 0) is left


def test_a_cache_class_that_is_not_known_is_refused_when_loading(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sub(KVCache):
        pass

    loaded = load_folder(tiny, memory_bytes=2**40)
    monkeypatch.setattr(type(loaded.model), "make_cache", lambda self: [Sub() for _ in self.layers], raising=False)
    with pytest.raises(SavedStateError, match="Sub, whose state is not known"):
        Engine(loaded, prefixes=PrefixStore("1GB"))
    assert list(Engine(loaded).stream([5, 6], max_tokens=2))
    loaded.experts.close()


ANOTHER_PROCESS = """
import sys
from mlxmoe import Engine, PrefixStore
from mlxmoe.loading import load_folder
from pathlib import Path
store = PrefixStore("1GB", folder=sys.argv[2])
with Engine(load_folder(Path(sys.argv[1]), memory_bytes=2**40), prefixes=store, chunk_tokens=24) as engine:
    for chunk in engine.stream([int(token) for token in sys.argv[3:]], max_tokens=8):
        print(chunk.reused_tokens, chunk.token, chunk.logprob.hex())
"""


@pytest.mark.slow
def test_another_process_takes_over_what_is_on_disk(tiny: Path, tmp_path: Path) -> None:
    store = PrefixStore("1GB", folder=tmp_path)
    with Engine(load_folder(tiny, memory_bytes=2**40), prefixes=store, chunk_tokens=CHUNK) as here:
        here.generate(OTHER, max_tokens=8)
    with Engine(load_folder(tiny, memory_bytes=2**40), chunk_tokens=CHUNK) as plain:
        chunks = list(plain.stream(LONG, max_tokens=8))
    command = [sys.executable, "-c", ANOTHER_PROCESS, str(tiny), str(tmp_path), *map(str, LONG)]
    for reused in (48, 59):
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
        assert output[:-1] == [f"{reused} {chunk.token} {chunk.logprob.hex()}" for chunk in chunks]
