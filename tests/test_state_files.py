"""Files of cache states: what is written when, and what is refused before memory is taken for it."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlxmoe import SavedStateError, TornStateError, writing
from mlxmoe.kv import file as files
from mlxmoe.kv.file import read_facts, read_states, write_states
from mlxmoe.kv.packing import Packing
from mlxmoe.kv.positions import Positions, Rotation
from mlxmoe.kv.state import CacheState, form, join, put, take
from mlxmoe.kv.window import SCHEME, SlidingWindowKVCache

POSITIONS = Positions.within(64, 16, 4)


def seen(tokens: int = 6) -> list[CacheState]:
    cache = KVCache()
    cache.update_and_fetch(mx.random.normal((1, 2, tokens, 4)), mx.random.normal((1, 2, tokens, 4)))
    return take([cache])


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a file with another header, which says as many bytes."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    target = path.with_name("edited")
    target.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return target


# --- writing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What was put on the drive, in order: "file" or "folder", and whether the file had its name then."""
    log: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        named = os.readlink(f"/proc/self/fd/{descriptor}") if os.path.isdir("/proc") else ""
        log.append((kind, not named.endswith(".part")))

    monkeypatch.setattr(writing.os, "fsync", fsync)
    monkeypatch.delattr(writing.fcntl, "F_FULLFSYNC", raising=False)
    return log


def test_a_durable_file_is_on_the_drive_before_it_has_its_name_and_then_its_name_is(
    tmp_path: Path, synced: list[tuple[str, bool]]
) -> None:
    write_states(tmp_path / "state", {}, seen())
    assert [kind for kind, _ in synced] == ["file", "folder"]
    if os.path.isdir("/proc"):
        assert synced[0] == ("file", False), "before it took its place"
    del synced[:]
    write_states(tmp_path / "state", {}, seen(), durable=False)
    assert synced == []


def test_a_folder_that_cannot_be_put_on_the_drive_is_no_file_that_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(writing.os, "fsync", fsync)
    monkeypatch.delattr(writing.fcntl, "F_FULLFSYNC", raising=False)
    with pytest.raises(SavedStateError, match=r"is written and took its place, but .* \(Input/output error\)"):
        write_states(tmp_path / "state", {"what": "new"}, seen())
    assert read_states(tmp_path / "state")[0] == {"what": "new"}


def test_a_file_is_written_through_a_link_to_where_it_leads(tmp_path: Path, synced: list[tuple[str, bool]]) -> None:
    (tmp_path / "elsewhere").mkdir()
    real, link, second = tmp_path / "elsewhere" / "real", tmp_path / "link", tmp_path / "second"
    second.symlink_to("link")
    link.symlink_to("elsewhere/real")
    for what in ("first", "then"):  # where there is nothing yet, and over a file
        write_states(second, {"what": what}, seen())
        assert link.is_symlink()
        assert second.is_symlink()
        assert not real.is_symlink()
        assert read_states(real)[0] == read_states(second)[0] == {"what": what}
    assert [kind for kind, _ in synced] == ["file", "folder"] * 2
    assert [file.name for file in real.parent.iterdir()] == ["real"]


def test_what_is_no_regular_file_is_not_replaced_and_not_waited_for(tmp_path: Path) -> None:
    pipe, loop, folder = tmp_path / "pipe", tmp_path / "loop", tmp_path / "folder"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    folder.mkdir()
    (tmp_path / "to_pipe").symlink_to(pipe)
    for path, says in {
        pipe: "It is no regular file",
        tmp_path / "to_pipe": "It is no regular file",
        Path("/dev/null"): "It is no regular file",
        loop: "Too many levels of symbolic links",
        folder: "Is a directory",
    }.items():
        before = path.lstat()
        with pytest.raises(SavedStateError, match=f"cannot be written: {says}. Choose another place"):
            write_states(path, {}, seen())
        for read in (read_states, read_facts):
            with pytest.raises(SavedStateError, match=f"cannot be read: {says}"):
                read(path)
        assert path.lstat() == before or path == Path("/dev/null")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "loop", "pipe", "to_pipe"]


@pytest.mark.parametrize("name", ["n" * 255, "n" * 201, "é" * 127, "n" * 40 + "é" * 100])
def test_a_name_as_long_as_the_file_system_takes_is_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with writing.replacing(path):
        (part,) = tmp_path.iterdir()
    path.unlink()
    dead = re.sub(r"\.\d+-", f".{2**30}-", part.name)
    (tmp_path / dead).write_bytes(b"half")
    (tmp_path / re.sub("~.", "~x", dead)).write_bytes(b"half")  # of another name that begins as this one does
    write_states(path, {}, seen())
    assert read_facts(path) == {"caches": read_facts(path)["caches"]}
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([re.sub("~.", "~x", dead), name])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SavedStateError, match=f"the folder {tmp_path}/absent does not exist. Make it") as told:
        write_states(tmp_path / "absent" / "saved", {}, seen())
    assert "Free" not in str(told.value)


def test_what_a_living_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    parts = [tmp_path / f".state.{os.getppid()}-1.part", tmp_path / f".other.{2**30}-1.part", tmp_path / ".x.part"]
    for part in parts:
        part.write_bytes(b"half")
    gone = tmp_path / f".state.{2**30}-1.part"
    gone.write_bytes(b"half")
    write_states(tmp_path / "state", {}, seen())
    assert not gone.exists(), "no process has that number"
    assert all(part.exists() for part in parts), "of another file, or of a process that lives"


# --- reading ------------------------------------------------------------------------------------------------------


def test_entries_of_the_same_size_and_another_meaning_are_noticed(tmp_path: Path) -> None:
    write_states(tmp_path / "state", {}, seen())

    def as_integers(header: dict[str, Any]) -> None:
        header["0"]["dtype"] = "I32"

    def transposed(header: dict[str, Any]) -> None:
        header["0"]["shape"].reverse()

    for change in (as_integers, transposed):
        with pytest.raises(TornStateError, match="digest"):
            read_states(edited(tmp_path / "state", change))


def test_the_version_is_looked_at_before_anything_it_could_mean(tmp_path: Path) -> None:
    write_states(tmp_path / "state", {}, seen())

    def of_tomorrow(header: dict[str, Any]) -> None:
        header["__metadata__"]["mlxmoe"] = "2"
        header["0"] = {"of": "a kind that is not known here"}

    for read in (read_facts, read_states):
        with pytest.raises(SavedStateError, match="in version 2 of the format") as caught:
            read(edited(tmp_path / "state", of_tomorrow))
        assert not isinstance(caught.value, TornStateError)


@pytest.mark.parametrize("forms", [[5], [{}], [None], ["x"], [{"kind": "x", "fixed": 5}], [[]]], ids=str)
def test_a_whole_file_whose_forms_make_no_sense_is_refused(tmp_path: Path, forms: list[Any]) -> None:
    path = tmp_path / "state"
    arrays = [array for state in seen() for array in state.arrays()]
    path.write_bytes(files._header(json.dumps({"caches": forms}), arrays) + b"".join(map(bytes, arrays)))
    with pytest.raises(SavedStateError, match="forms make no sense"):
        read_states(path)


def test_a_form_that_names_an_array_that_is_not_there_is_refused(tmp_path: Path) -> None:
    one = {"kind": "x", "fixed": {}, "span": None, "values": [{"array": 7}], "parts": []}
    (tmp_path / "state").write_bytes(files._header(json.dumps({"caches": [one]}), []))
    with pytest.raises(SavedStateError, match="forms make no sense"):
        read_states(tmp_path / "state")


def test_memory_is_taken_only_for_what_was_admitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_states(tmp_path / "state", {"tokens": 6}, seen())
    monkeypatch.setattr(files, "_read_array", lambda *_: pytest.fail("an array was read"))

    def refuse(facts: dict[str, Any], states: list[CacheState]) -> None:
        assert facts == {"tokens": 6}
        assert [state.kind.rpartition(".")[2] for state in states] == ["KVCache"]
        assert states[0].values == [(None, None, 6)]
        assert list(states[0].arrays()) == []
        raise SavedStateError("no room")

    with pytest.raises(SavedStateError, match="no room"):
        read_states(tmp_path / "state", refuse)


# --- what a file may say of a window ------------------------------------------------------------------------------


def windowed(
    positions: Positions | None = POSITIONS, bits: int | None = 8, part: Any = "keys", **rotation: Any
) -> SlidingWindowKVCache:
    facts = {"dims": 32, "traditional": False, "freqs": mx.ones(16), **rotation}
    return SlidingWindowKVCache(16, 4, kv_bits=bits, positions=positions, rotation=Rotation(part, **facts))


def fed(cache: SlidingWindowKVCache, tokens: int = 40) -> SlidingWindowKVCache:
    cache.update_and_fetch(mx.random.normal((1, 2, tokens, 32)), mx.random.normal((1, 2, tokens, 32)))
    mx.eval(cache.state)
    return cache


@pytest.mark.parametrize(
    "other",
    [
        windowed(Positions(64, POSITIONS.step - 1)),
        windowed(Positions(65, POSITIONS.step)),
        windowed(None),
        windowed(part="values"),
        windowed(dims=16, freqs=mx.ones(8)),
        windowed(traditional=True),
        windowed(steady=False),
    ],
    ids=["step", "trained", "no positions", "part", "dims", "traditional", "unsteady"],
)
def test_rows_that_stand_elsewhere_or_turn_otherwise_are_not_put_back(
    tmp_path: Path, other: SlidingWindowKVCache
) -> None:
    write_states(tmp_path / "state", {}, take([fed(windowed())]))
    _, states = read_states(tmp_path / "state")
    put(states, [windowed()])
    with pytest.raises(SavedStateError, match="saved with scheme="):
        put(states, [other])
    assert form([windowed()]) != form([other]), "and a prefix store keeps them apart"


def test_rows_of_another_scheme_are_not_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_states(tmp_path / "state", {}, take([fed(SlidingWindowKVCache(kv_bits=8))]))
    _, states = read_states(tmp_path / "state")
    before = form([windowed()])
    monkeypatch.setattr("mlxmoe.kv.window.SCHEME", SCHEME + 1)
    with pytest.raises(SavedStateError, match="saved with scheme="):
        put(states, [SlidingWindowKVCache(kv_bits=8)])
    assert form([windowed()]) != before


def test_a_file_says_nothing_of_what_the_maker_chose(tmp_path: Path) -> None:
    """Of the frequencies in particular: a state has what was seen, and nothing else."""
    write_states(tmp_path / "state", {}, take([fed(windowed())]))
    _, states = read_states(tmp_path / "state")
    mine = windowed(freqs=mx.full(16, 3.0))
    rotation, positions = mine.rotation, mine.positions
    put(states, [mine])
    assert (mine.rotation, mine.positions) == (rotation, positions)
    assert mine.rotation is rotation
    assert mine.seen == 40
    assert mine.kv_bits == 8
    assert {array.shape[:2] for array in states[0].arrays()} == {(1, 2)}, "rows, and no frequencies"


def test_the_scheme_is_raised_with_what_it_stands_for() -> None:
    """Where one of these changes on purpose, raise SCHEME with it: older files must not be put back."""
    packings = {(width, bits): Packing(width, bits) for width in (16, 64, 80, 96, 128) for bits in (4, 8)}
    found = {key: (packing.padded, packing.group, packing.rotated) for key, packing in packings.items()}
    cache, rows = SlidingWindowKVCache(6, 2), mx.arange(9.0).reshape(1, 1, 9, 1)
    cache.update_and_fetch(rows, rows)
    stands = Positions.within(64, 16, 4)
    assert (SCHEME, cache.keys.flatten().tolist(), [stands.back(token) for token in (63, 64, 111, 112)], found) == (
        1,
        [0, 1, 6, 7, 8, 5],
        [0, 48, 48, 96],
        {
            (16, 4): (32, 32, True), (16, 8): (32, 32, True), (64, 4): (64, 32, True), (64, 8): (64, 64, True),
            (80, 4): (96, 32, False), (80, 8): (96, 32, False), (96, 4): (96, 32, False), (96, 8): (96, 32, False),
            (128, 4): (128, 32, True), (128, 8): (128, 64, True),
        },
    )  # fmt: skip


def test_a_rotation_without_positions_is_none() -> None:
    cache = SlidingWindowKVCache(kv_bits=8, rotation=Rotation("keys", 32, False, mx.ones(16)))
    assert cache.rotation is None
    fed(cache, 5)
    (whole,) = take([cache])
    pieces = []
    again = SlidingWindowKVCache(kv_bits=8)
    for begin, end in ((0, 3), (3, 5)):
        rows = [mx.random.normal((1, 2, end - begin, 32)) for _ in range(2)]
        again.update_and_fetch(*rows)
        pieces.append(take([again], (begin, end))[0])
    assert pieces[1].nbytes * 3 == pieces[0].nbytes * 2
    assert [array.shape for array in join(pieces).arrays()] == [
        (*array.shape[:2], 5, array.shape[3]) for array in whole.arrays()
    ]
