"""Headers are believed only when they fit their file."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.errors import CheckpointError, MlxMoeError
from mlxmoe.experts.safetensors import read_checkpoint, read_header


def write(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_offsets_point_at_what_mlx_wrote(tmp_path: Path) -> None:
    a, b = mx.arange(6, dtype=mx.float32).reshape(2, 3), mx.arange(5).astype(mx.uint8)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": a, "b": b})
    tensors = read_checkpoint(tmp_path).tensors
    raw = (tmp_path / "model.safetensors").read_bytes()
    for name, array in (("a", a), ("b", b)):
        info = tensors[name]
        assert raw[info.offset : info.offset + info.nbytes] == bytes(memoryview(array))
        assert info.shape == array.shape


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"not json at all", "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        ({"x": 3}, "malformed"),
        ({"x": {"dtype": "F32", "shape": [2]}}, "malformed"),
        ({"x": entry(shape=[-2])}, "malformed"),
        ({"x": entry(shape=["2"])}, "malformed"),
        ({"x": entry(shape=[True], offsets=(0, 4))}, "malformed"),
        ({"x": entry(offsets=(0, 7))}, "needs 8 bytes"),
        ({"x": entry(offsets=(-8, 0))}, "needs 8 bytes"),
        ({"x": entry(dtype="F4")}, "dtype F4"),
        ({"x": entry(offsets=(100, 108))}, "truncated"),
    ],
)
def test_a_bad_header_is_refused_by_name(tmp_path: Path, header: object, says: str) -> None:
    path = write(tmp_path / "model.safetensors", header, b"\0" * 8)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"1234", struct.pack("<Q", 2**63), struct.pack("<Q", 1) + b"{"])
def test_a_stump_of_a_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="no whole safetensors file"):
        read_header(path)


@given(raw=st.binary(max_size=200))
def test_random_bytes_never_escape_as_another_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", max(0, len(raw) - 8)) + raw)
    with contextlib.suppress(MlxMoeError):
        read_header(path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00003.safetensors", {})
    write(tmp_path / "model-00003-of-00003.safetensors", {})
    with pytest.raises(CheckpointError, match=r"1 of 3 .* model-00002-of-00003"):
        read_checkpoint(tmp_path)


def test_a_shard_that_only_the_index_knows_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model-a.safetensors", {})
    index = {"weight_map": {"x": "model-a.safetensors", "y": "model-b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-b\.safetensors"):
        read_checkpoint(tmp_path)


def test_a_tensor_that_the_index_promises_and_no_file_has_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"x": entry()}, b"\0" * 8)
    index = {"weight_map": {"x": "model.safetensors", "y": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="first is y"):
        read_checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"x": entry()}, b"\0" * 8)
    write(tmp_path / "model2.safetensors", {"x": entry()}, b"\1" * 8)
    with pytest.raises(CheckpointError, match=r"tensor x is in two files, model\.safetensors and model2"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    write(tmp_path / "model.safetensors", {})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        read_checkpoint(tmp_path)


def test_a_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="link to a file that is gone"):
        read_checkpoint(tmp_path)


def test_a_folder_without_weights_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mlx_lm\.convert"):
        read_checkpoint(tmp_path)
