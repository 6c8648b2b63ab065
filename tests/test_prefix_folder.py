"""A prefix store's folder and its forest: what is given up, and that no file's fate fails a request."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import InterruptAt
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from mlxmoe import PrefixStore
from mlxmoe.kv import file as files
from mlxmoe.kv.file import write_states
from mlxmoe.kv.folder import HEADER_BYTES, StateFolder
from mlxmoe.kv.forest import Forest, Node
from mlxmoe.kv.prefix import Prefixes
from mlxmoe.kv.state import CacheState, take

KEYS = [str(number) * 64 for number in range(6)]
TOKEN_BYTES = 2 * 4 * 4


def states(begin: int = 0, end: int = 8) -> list[CacheState]:
    """Of a cache that has seen `end` tokens, what the last of them added."""
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, end, 4)), mx.ones((1, 1, end, 4)))
    return take([cache], (begin, end))


def feed(prefixes: Prefixes, prompt: list[int]) -> int:
    """Let a cache see `prompt` as a prefill would; how much of it was reused."""
    cache: list[Any] = [KVCache()]
    run = prefixes.begin(prompt, cache)
    reused = run.seen
    while run.seen < len(prompt) - 1:
        chunk = prompt[run.seen : min(run.seen + prefixes.chunk_tokens, len(prompt) - 1)]
        cache[0].update_and_fetch(*(mx.array(chunk, mx.float32).reshape(1, 1, -1, 1) * mx.ones(4) for _ in range(2)))
        mx.eval(cache[0].state)
        run.note(chunk, cache)
    held = cache[0].keys[0, 0, : cache[0].offset, 0].tolist() if cache[0].offset else []
    assert held == prompt[:-1], "the very tokens, in their places"
    return reused


# --- files --------------------------------------------------------------------------------------------------------


def test_the_file_that_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, 3 * (HEADER_BYTES + states()[0].nbytes))
    size = 0
    for number, key in enumerate(KEYS[:3]):
        assert folder.write(key, {}, states())
        os.utime(tmp_path / f"{key}.prefix", ns=(number, number))
        size = (tmp_path / f"{key}.prefix").stat().st_size
    folder._limit_bytes = HEADER_BYTES + states()[0].nbytes + 2 * size
    folder.touch(KEYS[:1])
    assert folder.write(KEYS[3], {}, states())
    assert sorted(file.stem for file in tmp_path.iterdir()) == [KEYS[0], *KEYS[2:4]]


@pytest.mark.parametrize("when", ["before it is looked at", "after"])
def test_a_folder_that_is_removed_fails_no_request(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = PrefixStore("1MB", folder=tmp_path / "states")
    prefixes = Prefixes(store, {}, 8)
    if when == "after":
        feed(prefixes, list(range(20)))
    shutil.rmtree(tmp_path / "states")
    assert feed(prefixes, list(range(50, 70))) == 0
    assert "not kept on disk" in caplog.text
    assert feed(prefixes, list(range(50, 70))) == 19, "memory has it all the same"
    store.shrink()
    assert feed(prefixes, list(range(20))) == 0, "and what was on disk alone is prefilled again"


def test_a_torn_file_that_cannot_be_removed_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{KEYS[0]}.prefix").write_bytes(b"torn")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    folder = StateFolder(tmp_path, 10**6)
    assert folder.facts() == {}
    assert folder.read(KEYS[0]) is None
    assert "cannot be removed" in caplog.text


def test_a_file_that_cannot_be_read_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = StateFolder(tmp_path, 10**6)
    folder.write(KEYS[0], {}, states())

    def too_many(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "open", too_many)
        assert folder.facts() == {}
        assert folder.read(KEYS[0]) is None
        assert "is not used" in caplog.text
    assert folder.facts().keys() == {KEYS[0]}
    assert folder.read(KEYS[0])


def test_a_name_that_is_no_file_is_neither_waited_for_nor_touched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder, a pipe, a link to itself, to nowhere and to elsewhere under a state's name; and a limit is kept."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    path = tmp_path / "states"
    path.mkdir()
    odd = [path / f"{key}.prefix" for key in KEYS[:5]]
    odd[0].mkdir()
    os.mkfifo(odd[1])
    odd[2].symlink_to(odd[2])
    odd[3].symlink_to(tmp_path / "nowhere")
    odd[4].symlink_to(outside)
    for one in odd:
        os.utime(one, (1, 1), follow_symlinks=False)  # the oldest: to be removed first if they were states
    folder = StateFolder(path, HEADER_BYTES + states()[0].nbytes)
    assert folder.facts() == {}
    for says in ("Is a directory", "It is no regular file", "Too many levels of symbolic links"):
        assert f"cannot be read: {says}" in caplog.text
    for key in KEYS[:5]:
        assert folder.read(key) is None
        assert not folder.write(key, {}, states())
    for key in (KEYS[5], "a" * 64):
        assert folder.write(key, {}, states()), "the others are kept as ever"
    assert not (path / f"{KEYS[5]}.prefix").exists(), "within the limit"
    assert odd[0].is_dir()
    assert odd[1].is_fifo()
    assert all(one.is_symlink() for one in odd[2:])
    assert outside.read_bytes() == b"precious"
    assert not (tmp_path / "nowhere").exists()


def test_one_file_that_cannot_be_removed_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, size = StateFolder(tmp_path, 3 * HEADER_BYTES), 0
    for number, key in enumerate(KEYS[:2]):
        assert folder.write(key, {}, states())
        os.utime(tmp_path / f"{key}.prefix", ns=(number, number))
        size = (tmp_path / f"{key}.prefix").stat().st_size
    folder._limit_bytes = HEADER_BYTES + states()[0].nbytes + size  # one file beside what a new one may take
    unlink, refused = Path.unlink, KEYS[:1]

    def refuse(file: Path, missing_ok: bool = False) -> None:
        if file.stem in refused:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(file, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert folder.write(KEYS[2], {}, states())
    assert sorted(file.stem for file in tmp_path.iterdir()) == [KEYS[0], KEYS[2]]
    refused += KEYS[1:]
    assert not folder.write(KEYS[3], {}, states()), "the limit is kept where nothing can be removed"
    assert "not kept on disk. [Errno 1] Operation not permitted" in caplog.text


def test_a_stray_that_cannot_be_removed_is_no_reason_to_do_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = tmp_path / f".{KEYS[0]}.prefix.{2**30}-1.part"
    stray.write_bytes(b"half")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert StateFolder(tmp_path, 10**6).facts() == {}
    assert stray.exists()


def test_a_file_of_another_version_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = StateFolder(tmp_path, 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(files, "FORMAT", "2")
        folder.write(KEYS[0], {}, states())
    assert folder.facts() == {}
    assert folder.read(KEYS[0]) is None
    assert "in version 2" in caplog.text
    assert [file.stem for file in tmp_path.iterdir()] == KEYS[:1]


def test_what_killed_processes_left_half_written_is_swept_whatever_it_was_to_be(tmp_path: Path) -> None:
    gone, alive = (
        tmp_path / f".{KEYS[0]}.prefix.{2**30}-1.part",
        tmp_path / f".{KEYS[1]}.prefix.{os.getppid()}-1.part",
    )
    other = tmp_path / f".model.{2**30}-1.part"
    for part in (gone, alive, other):
        part.write_bytes(b"half")
    PrefixStore("1MB", folder=tmp_path)
    assert [part.exists() for part in (gone, alive, other)] == [False, True, True]


def test_a_renamed_file_is_not_hung_under_its_new_name(tmp_path: Path) -> None:
    root = Forest(10**6, StateFolder(tmp_path, 10**6)).root({})
    for name in (KEYS[0], KEYS[1]):
        write_states(
            tmp_path / f"{name}.prefix", {"parent": root.key, "tokens": [1, 2], "grows": True, "key": name}, states()
        )
    assert list(Forest(10**6, StateFolder(tmp_path, 10**6)).root({}).children) == []


def test_a_file_read_under_a_name_that_is_not_its_own_is_no_state(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, 10**6)
    folder.write(KEYS[0], {}, states())
    (tmp_path / f"{KEYS[0]}.prefix").rename(tmp_path / f"{KEYS[1]}.prefix")
    assert folder.read(KEYS[1]) is None


# --- the forest ---------------------------------------------------------------------------------------------------


@given(
    paths=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=25),
    limit=st.integers(8, 60),
    on_disk=st.booleans(),
)
def test_what_is_given_up_has_nothing_hanging_on_it(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[int]], limit: int, on_disk: bool
) -> None:
    """No state in memory is ever lost with another one, because what one hangs on counts as used after it."""
    folder = StateFolder(tmp_path_factory.mktemp("states"), 10**6) if on_disk else None
    forest = Forest(limit * TOKEN_BYTES, folder)
    root = forest.root({})
    forget = forest._forget

    def watched(node: Node) -> None:
        assert [one for one in node.below if one.states is not None] == [node], "a leaf, as far as memory goes"
        forget(node)

    forest._forget = watched  # type: ignore[method-assign]
    for path in paths:
        node = root
        for step in path:
            found = node.child((step,) * 8)
            if found is not None and forest.states(found) is None:
                break
            made = found or forest.add(node, (step,) * 8, states(node.end, node.end + 8))
            if made is None:
                break
            forest.touch(made)
            node = made
        for one in forest:
            assert one.parent is not None
            assert one.parent is root or one.parent.used > one.used
        assert forest.nbytes == sum(one.nbytes for one in forest) <= forest.limit_bytes
    forest.evict(0)
    assert forest.nbytes == 0


def test_a_beginning_counts_as_used_with_what_goes_on_from_it() -> None:
    forest = Forest(3 * 8 * TOKEN_BYTES, None)
    root = forest.root({})
    begin = forest.add(root, (1,) * 8, states())
    assert begin is not None
    other = forest.add(root, (2,) * 8, states())
    assert other is not None
    forest.add(begin, (3,) * 8, states(8, 16))
    forest.add(root, (4,) * 8, states())
    assert other.lost, "the oldest"
    assert not begin.lost


def test_files_of_a_chain_go_from_its_end(tmp_path: Path) -> None:
    forest = Forest(10**6, StateFolder(tmp_path, 10**6))
    root = forest.root({})
    begin = forest.add(root, (1,) * 8, states())
    assert begin is not None
    end = forest.add(begin, (2,) * 8, states(8, 16))
    assert end is not None
    times = {file.stem: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert times[begin.key] > times[end.key]


def test_what_was_given_up_is_lost_with_all_that_hangs_on_it() -> None:
    forest = Forest(10**6, None)
    begin = forest.add(forest.root({}), (1,) * 8, states())
    assert begin is not None
    end = forest.add(begin, (2,) * 8, states(8, 16))
    assert end is not None
    assert not end.lost
    forest._forget(begin)
    assert begin.lost
    assert end.lost
    assert forest.add(end, (3,) * 8, states(16, 24)) is None


# --- interrupts ---------------------------------------------------------------------------------------------------

INTERRUPTED = ("kv/forest.py", "kv/folder.py", "kv/file.py", "kv/prefix.py", "mlxmoe/writing.py")


def check(store: PrefixStore) -> None:
    """What the store says is in memory is what can be found and given up there."""
    held = [state.nbytes for node in store._forest for state in node.states or ()]
    assert store.stats().nbytes == sum(held) <= store.limit_bytes
    for node in store._forest:
        assert node.parent is not None
        assert not node.lost
        assert node.parent.parent is None or node.parent.used >= node.used


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("prompt", [range(14), range(50, 64)], ids=["known", "new"])
def test_an_interrupt_at_any_line_leaves_a_store_that_holds_what_it_says(
    tmp_path: Path, prompt: range, on_disk: bool
) -> None:
    """A Ctrl-C while a store with room for one state looks up, reads, writes, keeps and gives up."""
    interrupted = 0
    for nth in itertools.count(1):
        folder = tmp_path / str(nth)
        limit = 14 * TOKEN_BYTES
        store = PrefixStore(limit, folder=folder if on_disk else None, folder_limit=HEADER_BYTES + limit)
        prefixes = Prefixes(store, {}, 16)
        feed(prefixes, list(range(14)))
        if on_disk and prompt == range(14):
            store.shrink()  # it will be read
        sys.settrace(InterruptAt.in_files(nth, *INTERRUPTED))
        try:
            feed(prefixes, list(prompt))
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
        finally:
            sys.settrace(None)
        check(store)
        held = store.stats().nbytes
        assert store.shrink() == held, "all can be given up"
        assert store.stats().nbytes == 0
        feed(prefixes, list(range(80, 94)))
        assert feed(prefixes, list(range(80, 94))) == 13, "and as much is kept as ever"
        check(store)
        if on_disk:
            assert list(folder.glob(".*")) == [], "nothing half written is left"
            shutil.rmtree(folder)
    assert interrupted > 30


# --- the store ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fact", ["mlx", "device"])
def test_what_another_mlx_or_device_made_is_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    prompt = list(range(20))
    feed(Prefixes(PrefixStore("1MB", folder=tmp_path), {}, 8), prompt)
    with monkeypatch.context() as patch:
        if fact == "mlx":
            patch.setattr("mlxmoe.kv.prefix.version", lambda _: "0.99")
        else:
            patch.setattr("mlxmoe.kv.prefix.mx.device_info", lambda: {"architecture": "another"})
        assert feed(Prefixes(PrefixStore("1MB", folder=tmp_path), {}, 8), prompt) == 0
    assert feed(Prefixes(PrefixStore("1MB", folder=tmp_path), {}, 8), prompt) == 19


def test_a_chunk_that_does_not_begin_where_a_fresh_prefills_would_is_not_kept() -> None:
    """It ends at the prompt's end as a fresh one's last chunk does, but has another beginning."""
    store = PrefixStore("1MB")
    prefixes, prompt = Prefixes(store, {}, 8), list(range(14))
    cache: list[Any] = [KVCache()]
    run = prefixes.begin(prompt, cache)
    for chunk in (prompt[:8], prompt[8:10], prompt[10:13]):
        cache[0].update_and_fetch(mx.ones((1, 1, len(chunk), 4)), mx.ones((1, 1, len(chunk), 4)))
        mx.eval(cache[0].state)
        run.note(chunk, cache)
    assert store.stats().states == 1
    run = prefixes.begin(prompt, [KVCache()])
    assert run.seen == 8
    run.seen = 10  # as if the next chunk began there
    run.note(prompt[10:13], cache)
    assert store.stats().states == 1


def test_a_store_is_one_callers_at_a_time() -> None:
    """Two engines and whoever shrinks it: while one is in the forest, the others wait."""
    store = PrefixStore(20 * 8 * TOKEN_BYTES)
    forest = store._forest
    busy: list[int] = []  # the threads that are in the forest
    failures: list[object] = []
    pause = threading.Event()

    def counted(do: Any) -> Any:
        def within(*arguments: Any, **options: Any) -> Any:
            me = threading.get_ident()
            failures.extend(thread for thread in busy if thread != me)
            busy.append(me)
            try:
                pause.wait(0.001)  # lets other threads run
                return do(*arguments, **options)
            finally:
                busy.remove(me)

        return within

    for name in ("root", "states", "touch", "add", "_hold", "evict"):
        setattr(forest, name, counted(getattr(forest, name)))

    def stream(first: int) -> None:
        prefixes = Prefixes(store, {"model": first % 2}, 8)
        for number in range(8):
            try:
                feed(prefixes, [first, *range(number, number + 20)])
            except Exception as error:
                failures.append(error)

    def shrink() -> None:
        for _ in range(20):
            store.shrink_step()
            store.stats()

    threads = [threading.Thread(target=stream, args=(first,)) for first in range(3)]
    threads.append(threading.Thread(target=shrink))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert forest.nbytes == sum(node.nbytes for node in forest) <= forest.limit_bytes


def test_a_signal_handler_may_ask_for_stats_while_its_thread_holds_the_store() -> None:
    store, told = PrefixStore("1MB"), threading.Event()

    def hold_and_ask() -> None:
        with store._lock:
            store.stats()
            told.set()

    threading.Thread(target=hold_and_ask, daemon=True).start()
    assert told.wait(10)
