"""Saved sessions and KV caches: they go on bit-identically, and no file but a whole one of this model is read."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import watch_passes
from definitions import DEFINITIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.utils import load_model
from tiny import make_adapter, make_tiny

from mlxmoe import (
    CheckpointError,
    Engine,
    EngineClosedError,
    MemoryBudgetError,
    PrefixStore,
    PromptError,
    RequestError,
    SavedStateError,
    load,
)
from mlxmoe.balance import Lease
from mlxmoe.decode import Decoder
from mlxmoe.experts.cache import ExpertCache
from mlxmoe.kv.choose import choose
from mlxmoe.kv.file import read_states, write_states
from mlxmoe.kv.settings import KVSettings
from mlxmoe.kv.state import put, take
from mlxmoe.kv.window import SlidingWindowKVCache

PREFILL = list(range(5, 45))  # past every tiny window and chunk
DECODE = [900, 17, 333]
MORE = [64, 1200, 7, 8, 9, 10, 11]
LONG = [(31 * i * i + 7 * i) % 2000 + 3 for i in range(700)]


def saved_and_read(path: Path, cache: list[Any]) -> list[Any]:
    write_states(path, {}, take(cache))
    facts, states = read_states(path)
    assert facts == {}
    return states


# --- caches -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels_without_metal")
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_caches_of_every_definition_go_on_bit_identically(tmp_path: Path, name: str) -> None:
    model, _ = load_model(make_tiny(tmp_path / name, DEFINITIONS[name]))
    decoder = Decoder(model, ExpertCache.of_nothing(), chunk_tokens=24)

    def grown() -> list[Any]:
        cache = decoder.new_cache()
        for tokens in (PREFILL, *([token] for token in DECODE)):
            decoder.logits(tokens, cache)
        return cache

    states = saved_and_read(tmp_path / "cache", grown())
    for following in ([MORE], [[token] for token in MORE]):  # several tokens at once, and one by one
        restored, kept = decoder.restored_cache(states), grown()
        for tokens in following:
            expected = decoder.logits(tokens, kept)
            assert mx.all(mx.isfinite(expected)), "a comparison of NaN proves nothing"
            assert mx.array_equal(decoder.logits(tokens, restored), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_caches_go_on_bit_identically(tmp_path: Path, tiny: Path, bits: int) -> None:
    model, _ = load_model(tiny)
    decoder = Decoder(model, ExpertCache.of_nothing(), chunk_tokens=24)
    decoder.new_cache = lambda: [QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers]  # type: ignore[method-assign]
    cache = decoder.new_cache()
    decoder.logits(PREFILL, cache)
    restored = decoder.restored_cache(saved_and_read(tmp_path / "cache", cache))
    assert mx.array_equal(decoder.logits(MORE, restored), decoder.logits(MORE, cache))


LOSSY = [KVSettings(48), KVSettings(48, kv_bits=8), KVSettings(48, 0, kv_bits=4), KVSettings(kv_bits=8)]


@pytest.mark.parametrize("seen", [0, 40, 200, 500], ids=lambda seen: f"{seen} tokens")
@pytest.mark.parametrize("kv_settings", LOSSY, ids=str)
def test_a_lossy_cache_goes_on_bit_identically(
    tmp_path: Path, tiny: Path, kv_settings: KVSettings, seen: int
) -> None:
    """Before the text outgrew the window, after it, and past what the model was made for, and a step further."""
    model, _ = load_model(tiny)
    kv_choice = choose(model, kv_settings, 256)
    decoder = Decoder(model, ExpertCache.of_nothing(), chunk_tokens=24, kv_choice=kv_choice)
    cache = decoder.new_cache()
    for tokens in (LONG[:seen], *([token] for token in DECODE)):
        decoder.prefill(tokens, cache)
    states = saved_and_read(tmp_path / "cache", cache)
    for following in ([LONG[:200]], [[token] for token in LONG[:70]]):
        restored, kept = decoder.restored_cache(states), copy.deepcopy(cache)
        for tokens in following:
            assert mx.array_equal(decoder.logits(tokens, restored), decoder.logits(tokens, kept))
        assert [entry.nbytes for entry in restored] == [entry.nbytes for entry in kept]


def test_caches_that_have_seen_nothing_or_were_trimmed(tmp_path: Path, tiny: Path) -> None:
    decoder = Decoder(load_model(tiny)[0], ExpertCache.of_nothing(), chunk_tokens=24)
    restored = decoder.restored_cache(saved_and_read(tmp_path / "cache", decoder.new_cache()))
    cache = decoder.new_cache()
    assert mx.array_equal(decoder.logits(MORE, restored), decoder.logits(MORE, cache))
    for entry in cache:
        entry.trim(3)
    restored = decoder.restored_cache(saved_and_read(tmp_path / "cache", cache))
    assert mx.array_equal(decoder.logits(DECODE, restored), decoder.logits(DECODE, cache))


def test_a_state_is_not_changed_by_the_caches_that_it_came_from_and_went_to(tiny: Path) -> None:
    decoder = Decoder(load_model(tiny)[0], ExpertCache.of_nothing(), chunk_tokens=24)
    cache = decoder.new_cache()
    decoder.logits(PREFILL, cache)
    states = take(cache)
    before = [mx.array(array) for state in states for array in state.arrays()]
    mx.eval(before)
    decoder.logits(MORE, cache)
    one, two = decoder.restored_cache(states), decoder.restored_cache(states)
    decoder.logits(DECODE, one)
    assert all(mx.array_equal(a, b) for a, b in zip(before, (a for s in states for a in s.arrays()), strict=True))
    assert mx.array_equal(decoder.logits(MORE, two), decoder.logits(MORE, decoder.restored_cache(states)))


def test_a_state_holds_no_more_memory_than_it_says() -> None:
    before = mx.get_active_memory()
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 2, 4096, 64)), mx.ones((1, 2, 4096, 64)))
    mx.eval(cache.state)
    whole = mx.get_active_memory() - before
    shared = take([cache])
    assert mx.get_active_memory() - before == whole, "nothing is copied until somebody writes"
    part = take([cache], (4032, 4096))
    del cache, shared
    assert mx.get_active_memory() - before == part[0].nbytes == whole // 64


def test_a_cache_class_that_is_not_known_is_refused_by_name() -> None:
    class Sub(KVCache):
        pass

    for caches in ([KVCache(), Sub()], [KVCache(), CacheList(KVCache(), Sub())]):
        with pytest.raises(SavedStateError, match=r"cache 1 in a \S*Sub, whose state is not known.*RotatingKVCache"):
            take(caches)


@pytest.mark.parametrize(
    ("here", "says"),
    [
        ([RotatingKVCache(32)], "saved with max_size=16, but this engine has max_size=32"),
        ([KVCache()], "saved as a RotatingKVCache, but this engine has a KVCache"),
        ([RotatingKVCache(16)] * 2, "has 1 caches, but the model makes 2"),
        ([SlidingWindowKVCache(16)], "saved as a RotatingKVCache, but this engine has a SlidingWindowKVCache"),
    ],
)
def test_a_state_of_another_form_is_refused(here: list[Any], says: str) -> None:
    with pytest.raises(SavedStateError, match=says):
        put(take([RotatingKVCache(16)]), here)


@settings(max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=4),
    dtype=st.sampled_from([mx.bool_, mx.uint8, mx.int32, mx.float16, mx.bfloat16, mx.float32, mx.complex64]),
    numbers=st.lists(st.none() | st.integers() | st.floats(allow_nan=False) | st.text(), max_size=3),
)
def test_every_array_and_number_comes_back(
    tmp_path: Path, shapes: list[list[int]], dtype: mx.Dtype, numbers: list[Any]
) -> None:
    arrays = [(mx.random.normal(shape) * 9).astype(dtype) for shape in shapes]
    mx.eval(arrays)
    cache = KVCache()
    cache.keys, cache.values, cache.offset = arrays, (tuple(numbers), arrays), 5
    (state,) = saved_and_read(tmp_path / "state", [cache])
    keys, values, offset = state.values[0]
    assert (values[0], offset) == (tuple(numbers), 5)
    for found in (keys, values[1]):
        assert [(a.dtype, a.shape) for a in found] == [(a.dtype, a.shape) for a in arrays]
        assert all(mx.array_equal(a, b, equal_nan=True) for a, b in zip(found, arrays, strict=True))


# --- sessions -------------------------------------------------------------------------------------------------


def test_a_restored_session_goes_on_bit_identically(demo: Engine, tmp_path: Path) -> None:
    session = demo.session()
    session.generate("In the beginning", max_tokens=9)
    session.save(tmp_path / "saved")
    restored = demo.restore(tmp_path / "saved")
    assert restored.messages == session.messages
    one, two = (list(s.stream(" And God", max_tokens=20, temperature=0.8, seed=3)) for s in (session, restored))
    assert [(c.token, c.logprob, c.text) for c in one] == [(c.token, c.logprob, c.text) for c in two]
    assert restored.messages == session.messages


def test_a_restored_session_prefills_only_what_is_new(
    demo: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = demo.session()
    session.generate("In the beginning God created the heaven", max_tokens=4)
    session.save(tmp_path / "saved")
    passes = watch_passes(demo, monkeypatch)
    demo.restore(tmp_path / "saved").generate(" and", max_tokens=1)
    assert sum(passes) == 1 + len(demo.tokenizer.encode(" and"))


ANOTHER_PROCESS = """
import sys
from mlxmoe import load
with load(experts="50%") as engine:
    for chunk in engine.restore(sys.argv[1]).stream(" And God", max_tokens=20):
        print(chunk.token, chunk.logprob.hex())
"""


def test_another_process_goes_on_bit_identically(demo: Engine, tmp_path: Path) -> None:
    session = demo.session()
    session.generate("In the beginning", max_tokens=9)
    session.save(tmp_path / "saved")
    child = subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS, str(tmp_path / "saved")], capture_output=True, text=True, check=True
    )
    here = [f"{chunk.token} {chunk.logprob.hex()}" for chunk in session.stream(" And God", max_tokens=20)]
    assert child.stdout.splitlines() == here


def test_a_session_that_has_said_nothing_is_saved_too(demo: Engine, tmp_path: Path) -> None:
    demo.session().save(tmp_path / "saved")
    restored = demo.restore(tmp_path / "saved")
    assert restored.messages == []
    assert restored.generate("In the", max_tokens=4) == demo.generate("In the", max_tokens=4)


def test_a_session_in_a_window_is_restored_with_the_same_window_only(tmp_path: Path) -> None:
    with load(window=64, kv_bits=8) as engine, load(window=64, kv_bits=8, experts="25%") as other:
        session = engine.session()
        for turn in ("In the beginning", " And God said"):
            session.generate(turn, max_tokens=150)  # in all more than the demo model was made for
        session.save(tmp_path / "saved")
        one, two = (s.generate(" And it", max_tokens=80) for s in (session, other.restore(tmp_path / "saved")))
        assert one == two
    says = r"saved with window=64, .* but this engine has window=65"
    with load(window=65, kv_bits=8) as engine, pytest.raises(SavedStateError, match=says):
        engine.restore(tmp_path / "saved")
    with pytest.warns(UserWarning, match="may lose the thread"):
        engine = load(context=2000)
    with engine, pytest.raises(SavedStateError, match="this engine has a KVCache there"):
        engine.restore(tmp_path / "saved")


def test_chat_messages_are_part_of_what_is_saved(demo: Engine, tmp_path: Path) -> None:
    demo.tokenizer.has_chat_template = True
    demo.tokenizer.apply_chat_template = lambda messages, **_: demo.tokenizer.encode(
        " ".join(message["content"] for message in messages)
    )
    session = demo.session(system="Thou shalt be brief.")
    session.generate("In the beginning", max_tokens=5)
    session.save(tmp_path / "saved")
    restored = demo.restore(tmp_path / "saved")
    assert restored.messages == session.messages
    assert restored.messages[0] == {"role": "system", "content": "Thou shalt be brief."}
    assert restored.generate("And God", max_tokens=8) == session.generate("And God", max_tokens=8)


def test_the_file_names_model_revision_versions_and_tokens(demo: Engine, tmp_path: Path) -> None:
    session = demo.session()
    session.generate("In the beginning", max_tokens=3)
    session.save(tmp_path / "saved.safetensors")
    _, metadata = mx.load(str(tmp_path / "saved.safetensors"), return_metadata=True)
    assert metadata["mlxmoe"] == "1"
    facts = json.loads(metadata["facts"])
    assert facts["model"].keys() == {"name", "revision", "adapter", "mlx_lm", "digest"}
    assert facts["model"]["name"] == "demo"
    assert facts["tokens"] == session._cached
    assert len(facts["caches"]) == len(demo.model.layers)


def test_a_stream_under_way_is_not_saved(demo: Engine, tmp_path: Path) -> None:
    session = demo.session()
    stream = session.stream("In the beginning", max_tokens=5)
    next(stream)
    for use in (session.save, session.become):
        with pytest.raises(RequestError, match="still streaming"):
            use(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
    for _ in stream:
        pass
    session.save(tmp_path / "saved")


def test_a_session_longer_than_the_context_is_refused(demo: Engine, tmp_path: Path) -> None:
    session = demo.session()
    session.generate("In the beginning", max_tokens=30)
    session.save(tmp_path / "saved")
    with load(context=20) as engine, pytest.raises(PromptError, match="context is 20 tokens"):
        engine.restore(tmp_path / "saved")


def test_a_session_that_cannot_be_had_takes_no_memory(
    demo: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose, how long, in what cache and whether there is room is seen before an array is read."""
    path = tmp_path / "saved"
    session = demo.session()
    session.generate("In the beginning", max_tokens=30)
    session.save(path)
    write_states(tmp_path / "prefix", {"what": "prefix"}, take([KVCache()]))
    monkeypatch.setattr("mlxmoe.kv.file._read_array", lambda *_: pytest.fail("an array was read"))
    with pytest.raises(SavedStateError, match="holds a prefix"):
        demo.restore(tmp_path / "prefix")
    with pytest.raises(SavedStateError, match="but this engine has a SlidingWindowKVCache"):
        demo.restore(path, kv_settings=KVSettings(64))
    with load(context=20) as engine, pytest.raises(PromptError, match="context is 20 tokens"):
        engine.restore(path)
    with monkeypatch.context() as patch:
        elsewhere = replace(demo._identify(), mlx_lm="0.99")
        patch.setattr(demo, "_identify", lambda: elsewhere)
        with pytest.raises(SavedStateError, match=r"mlx-lm 0\.99 is installed"):
            demo.restore(path)

    def refuse(lease: Lease, tokens: int) -> None:
        assert tokens == len(session._cached)
        raise MemoryBudgetError("no room")

    monkeypatch.setattr(Lease, "begin", refuse)
    with pytest.raises(MemoryBudgetError):
        demo.restore(path)


def test_a_session_that_turns_out_to_be_torn_holds_no_room(demo: Engine, tmp_path: Path) -> None:
    session, other = demo.session(), demo.session()
    session.generate("In the beginning", max_tokens=3)
    session.save(tmp_path / "saved")
    raw = bytearray((tmp_path / "saved").read_bytes())
    raw[-5] ^= 1
    (tmp_path / "torn").write_bytes(raw)
    with pytest.raises(SavedStateError, match="digest"):
        other.become(tmp_path / "torn")
    assert other._lease.nbytes == 0
    other.become(tmp_path / "saved")
    assert other._lease.nbytes > 0
    with pytest.raises(SavedStateError, match="digest"):
        other.become(tmp_path / "torn")
    assert other._lease.nbytes > 0, "of the conversation that it still is"
    assert other.generate(" And", max_tokens=3) == session.generate(" And", max_tokens=3)


def test_a_closed_engine_restores_nothing(demo: Engine, tmp_path: Path) -> None:
    session = demo.session()
    session.save(tmp_path / "saved")
    demo.close()
    with pytest.raises(EngineClosedError):
        demo.restore(tmp_path / "saved")


# --- files that are not read --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "saved"
    with load(tiny) as engine:
        session = engine.session()
        session.generate("In the beginning", max_tokens=3)
        session.save(path)
    return path


@pytest.mark.parametrize("change", ["weights", "config", "adapter"])
def test_a_file_of_another_model_is_refused(saved: Path, tiny: Path, tmp_path: Path, change: str) -> None:
    other = Path(shutil.copytree(tiny, tmp_path / "other"))
    adapter = None
    if change == "weights":  # a fine-tune: the same names, shapes and sizes
        file = other / "model.safetensors"
        weights = mx.load(str(file))
        name = next(name for name in weights if name.endswith("self_attn.q_proj.scales"))
        weights[name] = weights[name] * 1.01
        mx.save_safetensors(str(other / "new.safetensors"), weights)
        (other / "new.safetensors").replace(file)
    elif change == "config":
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, "rope_theta": 20000.0}))
    else:
        adapter = make_adapter(tmp_path / "adapter")
    with load(other, adapter=adapter) as engine:
        with pytest.raises(SavedStateError, match=r"was saved with tiny \(\w{12}\), but .* is other.* \(\w{12}\)"):
            engine.restore(saved)
        assert list(engine.stream("In the", max_tokens=2))


def test_a_copy_of_the_model_elsewhere_is_the_same_model(saved: Path, tiny: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--its-name" / "snapshots" / "0123abc"
    shutil.copytree(tiny, snapshot)
    with load(snapshot, experts="50%") as engine, load(tiny) as original:
        assert str(engine._identify()).startswith("owner/its-name at revision 0123abc (")
        one, two = (e.restore(saved).generate(" And", max_tokens=5) for e in (engine, original))
        assert one == two


def test_a_model_that_changed_since_it_was_loaded_saves_nothing(tiny: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny, tmp_path / "other"))
    with load(other) as engine:
        os.utime(other / "model.safetensors", ns=(1, 1))
        with pytest.raises(CheckpointError, match="changed since the model was loaded"):
            engine.session().save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def edited(path: Path, target: Path, **changes: str) -> Path:
    """A copy of a saved file with other metadata."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"].update(changes)
    text = json.dumps(header).encode()
    target.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return target


def test_files_of_other_versions_and_other_things_are_refused(
    saved: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny) as engine:
        with pytest.raises(SavedStateError, match="in version 2 of the format, and this mlxmoe reads version 1"):
            engine.restore(edited(saved, tmp_path / "newer", mlxmoe="2"))
        facts = json.loads(mx.load(str(saved), return_metadata=True, format="safetensors")[1]["facts"])
        said = json.dumps({**facts, "messages": [{"role": "user", "content": "another"}]})
        with pytest.raises(SavedStateError, match="digest"):
            engine.restore(edited(saved, tmp_path / "edited", facts=said))
        assert engine.memory().kv_bytes == 0
        nameless = {key: value for key, value in facts.items() if key != "model"}
        models = [{**facts["model"], **other} for other in ({"licence": "MIT"}, {"digest": 5})]
        for other in (nameless, {**facts, "tokens": 5}, *({**facts, "model": model} for model in models)):
            with pytest.raises(SavedStateError, match="not known here"):
                engine.restore(edited(saved, tmp_path / "edited", facts=json.dumps(other)))
        with pytest.raises(SavedStateError, match="no whole saved state"):
            engine.restore(tiny / "model.safetensors")
        with pytest.raises(SavedStateError, match="cannot be read: No such file"):
            engine.restore(tmp_path / "absent")
        with pytest.raises(SavedStateError, match="cannot be read: Is a directory"):
            engine.restore(tmp_path)
        write_states(tmp_path / "prefix", {"what": "prefix"}, [])
        with pytest.raises(SavedStateError, match="holds a prefix, not a session"):
            engine.restore(tmp_path / "prefix")
        elsewhere = replace(engine._identify(), mlx_lm="0.99")
        monkeypatch.setattr(engine, "_identify", lambda: elsewhere)
        with pytest.raises(SavedStateError, match=r"mlx-lm 0\.32\.\d+, and mlx-lm 0\.99 is installed"):
            engine.restore(saved)


@settings(max_examples=200)
@given(data=st.data())
def test_a_file_that_was_cut_or_altered_is_refused(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(saved.read_bytes())
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    note = raw.find(b'"format": "mlx"')  # for other readers: it says nothing here
    places = st.integers(0, note - 1) | st.integers(note + 15, header - 1) | st.integers(header, len(raw) - 1)
    place = data.draw(places, label="place")
    if data.draw(st.booleans(), label="cut"):
        raw = raw[:place]
    else:
        raw[place] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    broken = tmp_path / "broken"
    broken.write_bytes(raw)
    with pytest.raises(SavedStateError, match="broken"):
        read_states(broken)


# --- writing ------------------------------------------------------------------------------------------------------

SAVE_OFTEN = """
import sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.models.cache import KVCache
from mlxmoe.kv.file import write_states
from mlxmoe.kv.state import take
cache = KVCache()
cache.state = (mx.ones((1, 4, 4096, 256)), mx.ones((1, 4, 4096, 256)), 4096)
states = take([cache])
print("ready", flush=True)
while True:
    write_states(Path(sys.argv[1]), {"what": "new"}, states)
"""


@pytest.mark.slow
def test_a_process_killed_while_saving_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 8, 8)), mx.ones((1, 1, 8, 8)))
    mx.eval(cache.state)
    states = take([cache])
    torn = 0
    for attempt in range(4):
        write_states(path, {"what": "old"}, states)
        assert not list(tmp_path.glob(".*.part")), "what the killed process left is swept up"
        child = subprocess.Popen([sys.executable, "-c", SAVE_OFTEN, str(path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        while not list(tmp_path.glob(".*.part")):  # it has begun
            time.sleep(0.001)
        time.sleep(0.01 * attempt)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert read_states(path)[0]["what"] in ("old", "new")
        torn += bool(list(tmp_path.glob(".*.part")))
    assert torn, "at least once the file was half written"
    write_states(path, {"what": "last"}, states)
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 4, 4096, 64)), mx.ones((1, 4, 4096, 64)))
    mx.eval(cache.state)
    write_states(path, {"what": "old"}, [])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (2**20, limits[1])
    )  # the kernel refuses the write, as a full disk would
    try:
        with pytest.raises(SavedStateError, match=r"cannot be written: File too large.* needs 8\.4 MB, and .* free"):
            write_states(path, {"what": "new"}, take([cache]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
    assert read_states(path)[0] == {"what": "old"}


@pytest.mark.parametrize("path", ["", "a\0b", "~no_such_user/x", "\ud800", None, 5, b"x", ["x"]])
def test_what_can_be_no_path_is_refused(demo: Engine, path: Any) -> None:
    for refused in (demo.session().save, demo.restore, lambda path: PrefixStore(folder=path or "")):
        with pytest.raises(SavedStateError, match="is no path"):
            refused(path)


@pytest.mark.parametrize("odd", [object(), {"role": b"user"}, {("user",): "x"}, {"content": {1, 2}}])
def test_messages_that_a_file_could_not_give_back_are_refused(demo: Engine, tmp_path: Path, odd: Any) -> None:
    session = demo.session()
    session.generate("In the", max_tokens=2)
    session.save(tmp_path / "saved")
    before = (tmp_path / "saved").read_bytes()
    session.messages.append(odd)
    with pytest.raises(SavedStateError, match=r"messages cannot be saved: .*Keep to a list of what JSON has"):
        session.save(tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == before
    session.messages.pop()
    session.save(tmp_path / "saved")
    assert demo.restore(tmp_path / "saved").messages == session.messages


def test_messages_that_are_no_list_or_hold_themselves_are_refused(demo: Engine, tmp_path: Path) -> None:
    session = demo.session()
    whole: Any = session.messages
    whole.append(whole)
    for messages in (whole, "text", None):
        session.messages = messages
        with pytest.raises(SavedStateError, match="messages cannot be saved"):
            session.save(tmp_path / "saved")


def test_a_place_that_cannot_be_written_to_is_named(demo: Engine, tmp_path: Path) -> None:
    with pytest.raises(SavedStateError, match=r"cannot be written: the folder .*absent does not exist"):
        demo.session().save(tmp_path / "absent" / "saved")
    with pytest.raises(SavedStateError, match="cannot be written: Is a directory"):
        demo.session().save(tmp_path)
