"""Models from a hub: each case in a process of its own, against a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from hub_standin import StandIn
from tiny import copy_folder

from mlxmoe.hub import demo_folder, resolve

LOAD = """
import sys
from mlxmoe import MlxMoeError, load
from mlxmoe.hub import resolve
for model, _, revision in (name.partition("@") for name in sys.argv[1:]):
    seen = []
    try:
        folder = resolve(model, revision or None, lambda *report: seen.append(report))
        print("OK", sorted(p.name for p in folder.iterdir()))
        with load(folder, experts="50%") as engine:
            print(engine.generate([5, 6, 7], max_tokens=2, raw=True) is not None, seen[-1] if seen else None)
    except MlxMoeError as error:
        print(type(error).__name__, error)
"""


@pytest.fixture
def hub(tiny: Path) -> Iterator[StandIn]:
    with StandIn({"org/tiny": tiny}).running() as running:
        yield running


class Machine:
    """A user's machine: a cache folder and a hub address."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def load(self, hub_url: str, *models: str, **environment: str) -> str:
        """What a process says that loads one after the other: hub ids, with @revision behind them or not."""
        env = {
            **os.environ, "HF_HOME": str(self.home), "HF_ENDPOINT": hub_url, "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DISABLE_XET": "1", **environment,
        }  # fmt: skip
        command = [sys.executable, "-c", LOAD, *models]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "%|" not in done.stderr, "a library draws no progress bars of its own"
        return done.stdout


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "hf")


@pytest.mark.slow
def test_a_model_is_downloaded_once_then_read_offline(hub: StandIn, machine: Machine, tiny: Path) -> None:
    size = sum(file.stat().st_size for file in tiny.iterdir())
    out = machine.load(hub.url, "org/tiny")
    assert out.startswith("OK ['config.json', 'model.safetensors'")
    assert f"('download', {size}, {size})" in out
    sent = dict(hub.sent)
    assert machine.load(hub.url, "org/tiny").startswith("OK")
    assert machine.load("http://127.0.0.1:9", "org/tiny").startswith("OK"), "out of reach, but cached"
    assert machine.load(hub.url, "org/tiny", HF_HUB_OFFLINE="1").startswith("OK")
    assert dict(hub.sent) == sent, "nothing was sent twice"


@pytest.mark.slow
def test_an_interrupted_download_keeps_the_files_that_are_whole(
    hub: StandIn, machine: Machine, tiny: Path, tmp_path: Path
) -> None:
    folder = copy_folder(tiny, tmp_path / "shards")
    names = split_in_shards(folder, 3)
    hub.repos["org/shards"] = folder
    hub.broken_file = names[1]
    out = machine.load(hub.url, "org/shards")
    assert out.startswith("DownloadError Downloading org/shards stopped")
    assert "run it again" in out
    hub.broken_file = None
    assert machine.load(hub.url, "org/shards").startswith("OK")
    assert hub.sent[names[0]] == (folder / names[0]).stat().st_size, "what was whole was not sent again"


def split_in_shards(folder: Path, count: int) -> list[str]:
    """Cut a folder's one weight file into shards; their names."""
    tensors = dict(sorted(mx.load(str(folder / "model.safetensors")).items()))  # type: ignore[union-attr]
    mx.eval(tensors)
    (folder / "model.safetensors").unlink()
    keys = list(tensors)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    for number, name in enumerate(names):
        mx.save_safetensors(str(folder / name), {key: tensors[key] for key in keys[number::count]})
    return names


@pytest.mark.slow
def test_an_unreachable_hub_is_an_error_with_a_way_out(machine: Machine) -> None:
    out = machine.load("http://127.0.0.1:9", "org/tiny")
    assert out.startswith("DownloadError org/tiny is not")
    assert "cannot be reached" in out
    out = machine.load("http://127.0.0.1:9", "org/tiny", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in out


def test_a_hub_that_is_down_is_no_missing_model(hub: StandIn, machine: Machine) -> None:
    hub.status = 503
    assert machine.load(hub.url, "org/tiny").startswith("DownloadError")


def test_what_the_hub_does_not_have_is_named(hub: StandIn, machine: Machine) -> None:
    absent, revision = machine.load(hub.url, "org/absent", "org/tiny@v9").splitlines()
    assert absent.startswith("ModelNotFoundError The hub has no org/absent")
    assert revision.startswith("ModelNotFoundError The hub has no org/tiny at revision v9")


def test_a_revision_may_be_a_commit(hub: StandIn, machine: Machine) -> None:
    assert machine.load(hub.url, f"org/tiny@{'a' * 40}").startswith("OK")


def test_a_disk_too_small_is_said_before_the_download(hub: StandIn, machine: Machine) -> None:
    hub.pretend_sizes["model.safetensors"] = 10**16
    out = machine.load(hub.url, "org/tiny")
    assert out.startswith("DownloadError org/tiny needs 10000000.0 GB more on disk")
    assert "HF_HOME" in out
    assert hub.sent["model.safetensors"] == 0


def test_the_demo_needs_no_hub() -> None:
    assert resolve(None) == demo_folder()
    assert (demo_folder() / "config.json").exists()
