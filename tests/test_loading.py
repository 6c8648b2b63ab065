"""Loading a folder: what is wrong with it is said before anything large is read, and little memory is used."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import QWEN3_MOE, copy_folder, make_tiny, save

from mlxmoe import (
    CheckpointError,
    MemoryBudgetError,
    MlxMoeError,
    ModelError,
    ModelNotFoundError,
    PromptError,
    UnsupportedModelError,
    load,
    loading,
)


def weights(folder: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]


def config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(folder: Path, change: Callable[[dict[str, mx.array]], None]) -> None:
    tensors = weights(folder)
    mx.eval(tensors)
    change(tensors)
    save(folder, tensors, json.loads((folder / "config.json").read_text()))


UP = "model.layers.1.mlp.switch_mlp.up_proj"


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 50_000)


def break_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 5) + b"hello" + bytes(100))


def drop_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.__delitem__(f"{UP}.weight"))


def fewer_experts(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({f"{UP}.weight": tensors[f"{UP}.weight"][:5]}))


def signed_weight(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({f"{UP}.weight": tensors[f"{UP}.weight"].astype(mx.int32)}))


def integer_norm(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": mx.ones((64,), dtype=mx.int32)}))


BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], type[MlxMoeError], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ModelNotFoundError, "no config.json"),
    "config that is no JSON": (lambda f: (f / "config.json").write_text("{"), ModelError, "not readable JSON"),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]"), ModelError, "no model_type"),
    "config without a type": (lambda f: (f / "config.json").write_text("{}"), ModelError, "no model_type"),
    "unknown type": (lambda f: config(f, model_type="gpt9"), UnsupportedModelError, r"gpt9.*mlxmoe models"),
    "a type that is a path": (lambda f: config(f, model_type="../x"), UnsupportedModelError, "does not know"),
    "own code": (lambda f: config(f, model_file="x.py"), UnsupportedModelError, "trust_remote_code"),
    "too many experts a token": (lambda f: config(f, num_experts_per_tok=99), ModelError, "cannot compute"),
    "a number that is text": (lambda f: config(f, rope_theta="much"), ModelError, "cannot compute|could not build"),
    "a config too deep": (lambda f: (f / "config.json").write_text("[" * 200_000), ModelError, "not readable JSON"),
    "a config that lacks a key": (
        lambda f: (f / "config.json").write_text('{"model_type": "qwen3_moe"}'), ModelError, "could not build"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), CheckpointError, r"no model\*\.safetensors"),
    "truncated": (truncate, CheckpointError, r"truncated: its header describes \d+ bytes, the file has 50000"),
    "broken header": (break_header, CheckpointError, "not JSON"),
    "tensor missing": (drop_tensor, CheckpointError, f"no tensor '{UP}.weight'"),
    "other shape": (fewer_experts, CheckpointError, "not what its config.json says"),
    "other dtype": (signed_weight, CheckpointError, f"{UP}.weight is stored as int32"),
    "integer norm": (integer_norm, CheckpointError, "model.norm.weight is stored as int32"),
    "other number of layers": (lambda f: config(f, num_hidden_layers=4), CheckpointError, "layers.3"),
    "tokenizer missing": (lambda f: (f / "tokenizer.json").unlink(), ModelError, "tokenizer"),
    "tokenizer broken": (lambda f: (f / "tokenizer.json").write_text("{"), ModelError, "tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FOLDERS)
@pytest.mark.parametrize("experts", ["all", "50%"])
def test_a_bad_folder_is_refused_by_name(tiny: Path, tmp_path: Path, name: str, experts: str) -> None:
    damage, error, says = BAD_FOLDERS[name]
    folder = copy_folder(tiny, tmp_path / "model")
    damage(folder)
    threads = threading.active_count()
    with pytest.raises(error, match=says) as caught:
        load(folder, experts=experts)
    assert str(folder) in str(caught.value), "the message names the model"
    assert threading.active_count() == threads


def test_the_tokenizer_is_loaded_while_weights_are_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, threads = threading.Event(), threading.active_count()

    def once_weights_are_read(*args: Any) -> Any:
        assert read.wait(10), "nothing was read before it"
        return load_tokenizer(*args)

    load_tokenizer = loading._load_tokenizer
    monkeypatch.setattr(loading, "_load_tokenizer", once_weights_are_read)
    with load(tiny, progress=lambda stage, done, total: read.set()) as engine:
        assert engine.generate("a", max_tokens=1)
    assert threading.active_count() == threads


def test_a_broken_tokenizer_is_said_before_all_weights_are_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_folder(tiny, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{broken")
    failed, load_tokenizer = threading.Event(), loading._load_tokenizer
    reports: list[tuple[int, int]] = []

    def noting(*args: Any) -> Any:
        try:
            return load_tokenizer(*args)
        finally:
            failed.set()

    def progress(stage: str, done: int, total: int) -> None:
        reports.append((done, total))
        assert failed.wait(10)
        time.sleep(0.02)  # from there to the end of its thread's work

    monkeypatch.setattr(loading, "_load_tokenizer", noting)
    monkeypatch.setattr("mlxmoe.weights.STEP_BYTES", 1)  # each array is a step
    with pytest.raises(ModelError, match="tokenizer"):
        load(folder, progress=progress)
    done, total = reports[-1] if reports else (0, 1)
    assert done < total / 2


def test_where_no_thread_can_be_started_the_tokenizer_is_loaded_in_this_one(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("mlxmoe-tokenizer"):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with load(tiny) as engine:
        assert engine.generate("a", max_tokens=1)
    folder = copy_folder(tiny, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelError, match="tokenizer"):
        load(folder, progress=lambda *report: pytest.fail("nothing is read for it"))


def test_an_interrupt_while_weights_are_read_leaves_no_thread(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    threads = threading.active_count()
    monkeypatch.setattr(loading, "_load_tokenizer", lambda *args: time.sleep(0.2))
    with pytest.raises(KeyboardInterrupt):
        load(tiny, progress=interrupt)
    assert threading.active_count() == threads


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load(tmp_path)
    with pytest.raises(ModelNotFoundError, match="There is no folder"):
        load(tmp_path / "absent")
    with pytest.raises(ModelNotFoundError, match="There is no folder"):
        load("one-word")
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFoundError, match="is a file"):
        load(tmp_path / "file")
    with pytest.raises(ModelNotFoundError, match="revision="):
        load(tmp_path, revision="main")
    with pytest.raises(ModelNotFoundError, match="revision="):
        load(revision="main")
    for odd in (5, b"x", "a" * 300 + "/" + "b" * 300, "~nobody-of-that-name/x", "with\0nul"):
        with pytest.raises(ModelNotFoundError):
            load(odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [1, 0, -5, True, "8k", 3.5])
def test_a_context_that_makes_no_sense_is_refused(tiny: Path, context: Any) -> None:
    with pytest.raises(MemoryBudgetError, match="no number of tokens"):
        load(tiny, context=context)


def test_a_context_beyond_the_models_is_a_warning(tiny: Path) -> None:
    with pytest.warns(UserWarning, match="made for 512 tokens"), load(tiny, context=600) as engine:
        assert engine.plan.context == 600


def test_a_context_that_does_not_fit_is_cut_and_said(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load(tiny) as engine:
        plan = engine.plan
    assert plan.context == plan.model_context == 512
    with load(tiny, memory=plan.total_bytes - plan.prefill_bytes + 900_000) as engine:
        assert engine.plan.context == 256
    assert "made for 512 tokens of context; 256 fit" in caplog.text


def test_kv_bytes_are_those_of_real_caches(tiny: Path) -> None:
    for tokens in (1, 256, 257, 500):
        with load(tiny, context=max(2, tokens)) as engine:
            cache = engine._decoder.new_cache()
            engine._decoder.prefill(list(range(tokens)), cache)
            assert engine.plan.kv_bytes == sum(entry.nbytes for entry in cache)


def test_a_config_with_experts_and_a_model_without_is_refused(tmp_path: Path) -> None:
    dense = {**QWEN3_MOE, "model_type": "qwen3"}
    folder = make_tiny(tmp_path / "odd", dense)
    with pytest.raises(UnsupportedModelError, match="num_experts=8"):
        load(folder)


def test_a_dense_model_streams_without_the_expert_machinery(tmp_path: Path) -> None:
    dense = {key: value for key, value in QWEN3_MOE.items() if "expert" not in key} | {"model_type": "qwen3"}
    with load(make_tiny(tmp_path / "dense", dense)) as engine:
        assert len(list(engine.stream([1, 2, 3], max_tokens=4))) == 4
        assert engine.stats().layers == ()


def test_unaligned_data_is_read_right(tiny: Path, tmp_path: Path) -> None:
    """A header of any length: the data starts at an odd byte."""
    folder = copy_folder(tiny, tmp_path / "odd")
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    path.write_bytes(struct.pack("<Q", length + 1) + raw[8 : 8 + length] + b" " + raw[8 + length :])
    with load(tiny, experts="50%") as even, load(folder, experts="50%") as odd:
        assert mx.array_equal(even.logits(list(range(50))), odd.logits(list(range(50))))


def test_symlinked_folders_are_read_as_the_hub_cache_lays_them(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).symlink_to(file)
    with load(folder, experts="50%") as engine, load(tiny, experts="all") as whole:
        assert mx.array_equal(engine.logits([5, 6, 7]), whole.logits([5, 6, 7]))


def test_progress_ends_at_the_whole(tiny: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with load(tiny, progress=lambda *report: seen.append(report)) as engine:
        total = engine.plan.trunk_bytes + engine.plan.expert_bytes
    assert seen[-1] == ("load", total, total)


def test_tokens_beyond_the_models_vocabulary_are_refused(tiny: Path) -> None:
    with load(tiny) as engine, pytest.raises(PromptError, match="from 0 to 2047"):
        engine.stream([2048])


PEAK = """
import resource, sys
import mlx.core as mx
import mlx_lm, transformers
from mlxmoe import load
scale = 1024 if sys.platform == "linux" else 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
engine = load(sys.argv[1], experts=sys.argv[2])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
plan = engine.plan
print(peak - before, mx.get_peak_memory(), plan.trunk_bytes + plan.bank_bytes, plan.expert_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["12.5%", "50%", "all"])
def test_loading_never_holds_more_than_trunk_and_banks(half_gigabyte: Path, experts: str) -> None:
    """Of the process's own peak, in a process of its own; the bound is trunk + banks + 150 MB."""
    command = [sys.executable, "-c", PEAK, str(half_gigabyte), experts]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    process_bytes, mlx_bytes, planned_bytes, expert_bytes = map(int, out.split())
    assert expert_bytes > 3 * 150_000_000
    assert mlx_bytes <= planned_bytes + 1_000_000
    assert process_bytes <= planned_bytes + 150_000_000
