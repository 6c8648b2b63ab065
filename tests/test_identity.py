"""Whose a state is: what tells a model from any other, and that what was loaded is still there to be asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from tiny import make_adapter

from mlxmoe import CheckpointError, load
from mlxmoe.experts.safetensors import FileState, read_checkpoint
from mlxmoe.identity import ModelIdentity, identify, source_states

CODE = "from mlx_lm.models.qwen3_moe import *  # as it is\n"


@pytest.fixture
def own(tiny: Path, tmp_path: Path) -> Path:
    """A model that brings its own code."""
    folder = Path(shutil.copytree(tiny, tmp_path / "own"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "own.py"}))
    (folder / "own.py").write_text(CODE)
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter")


def states(folder: Path, adapter: Path | None = None) -> dict[Path, FileState]:
    return {**read_checkpoint(folder).files, **source_states(folder, adapter)}


def identity(folder: Path, adapter: Path | None = None) -> ModelIdentity:
    return identify(folder, adapter, states(folder, adapter))


@pytest.mark.parametrize("name", ["config.json", "own.py", "adapter_config.json", "adapters.safetensors"])
def test_a_model_of_which_anything_has_changed_since_it_was_loaded_saves_nothing(
    own: Path, adapter: Path, tmp_path: Path, name: str
) -> None:
    file = next(folder / name for folder in (own, adapter) if (folder / name).exists())
    with load(own, adapter=adapter, trust_remote_code=True) as engine:
        if file.suffix == ".safetensors":
            tensors = {key: value * 2 for key, value in mx.load(str(file)).items()}
            mx.eval(tensors)
            mx.save_safetensors(str(file), tensors)
        else:
            file.write_text(file.read_text() + "\n")
        with pytest.raises(CheckpointError, match=rf"{name} has changed since the model was loaded"):
            engine.session().save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with load(own, adapter=adapter, trust_remote_code=True) as engine:
        engine.session().save(tmp_path / "saved")


def test_a_weight_file_that_came_later_is_a_change(own: Path) -> None:
    before = states(own)
    mx.save_safetensors(str(own / "model-more.safetensors"), {"more": mx.ones(3)})
    with pytest.raises(CheckpointError, match=r"model-more\.safetensors has changed since"):
        identify(own, None, before)


def test_files_that_are_gone_are_named(own: Path, adapter: Path) -> None:
    for file in (own / "own.py", adapter / "adapter_config.json", own / "config.json"):
        before = states(own, adapter)
        kept = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=file.name):
            identify(own, adapter, before)
        file.write_bytes(kept)


def test_a_models_own_code_is_part_of_its_identity(own: Path) -> None:
    one = identity(own)
    (own / "own.py").write_text(CODE.replace("as it is", "another"))
    assert identity(own).digest != one.digest
    (own / "own.py").write_text(CODE)
    assert identity(own).digest == one.digest


def test_an_adapters_config_is_part_of_its_identity(own: Path, adapter: Path) -> None:
    one = identity(own, adapter)
    (adapter / "adapter_config.json").write_text("{}")
    assert identity(own, adapter).digest != one.digest
