"""Fixtures that several rooms' tests share: the models, and stock mlx-lm's answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as once
from pathlib import Path
from types import CodeType
from typing import Any

import mlx.core as mx
import mlx_lm.models.muse_spark
import pytest
from click.testing import Result
from definitions import DEFINITIONS, MUSE_SPARK_KERNELS
from hypothesis import HealthCheck, settings
from mlx_lm.utils import load as stock_load
from mlx_lm.utils import load_model
from tiny import make_tiny
from typer.testing import CliRunner

from mlxmoe import Engine, load
from mlxmoe.cli.commands import app
from mlxmoe.hub import demo_folder
from mlxmoe.tuning.bench import EngineBench

TOOLS = Path(__file__).parent.parent / "tools"

# Examples take as long as the model takes: a deadline would time the machine, not the code.
settings.register_profile("mlxmoe", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("mlxmoe")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is thorough is slow too: `-m "not slow"` takes the place of the `-m "not thorough"` of pyproject.toml."""
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """Also where the tests run in the background, which a shell starts with SIGINT ignored; Python leaves it so."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for the tests, and for the programs they run: what the user keeps in theirs changes no test."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def stock_demo() -> tuple[Any, Any]:
    """mlx-lm's own model and tokenizer of the built-in demo model."""
    model, tokenizer = stock_load(str(demo_folder()))
    return model, tokenizer


@pytest.fixture
def demo() -> Iterator[Engine]:
    """The demo model with a quarter of its experts in memory."""
    with load(experts="25%") as engine:
        yield engine


@pytest.fixture
def quick_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement of a tuning takes a few tokens, whatever time there is."""
    decode = EngineBench.decode
    monkeypatch.setattr(EngineBench, "decode", lambda bench, point, seconds: decode(bench, point, 0.0))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen3_moe, not to be modified."""
    return make_tiny(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def gigabyte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of 1 GB, made by the project's own tool."""
    folder = tmp_path_factory.mktemp("synthetic") / "gigabyte"
    run_tool("make_synthetic.py", str(folder), "--preset", "1gb")
    return folder


@pytest.fixture(scope="session")
def half_gigabyte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with half of the layers, where the size need only be much more than what else a process holds."""
    folder = tmp_path_factory.mktemp("synthetic") / "half"
    run_tool("make_synthetic.py", str(folder), "--preset", "1gb", "--layers", "8")
    return folder


@pytest.fixture
def registers_nothing() -> Iterator[None]:
    """What runs in this process as a program of a user's leaves no definition of its own for later tests."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("mlx_lm.models.") and sys.modules[name].__name__ != name:
            del sys.modules[name]


@pytest.fixture
def kernels_without_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's muse_spark has kernels for Metal only: elsewhere plain ones stand in, for stock and for us."""
    if not mx.metal.is_available():
        for name, kernel in MUSE_SPARK_KERNELS.items():
            monkeypatch.setattr(mlx_lm.models.muse_spark, name, kernel)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """mlx-lm's model of each definition, unquantised, made when it is first asked for."""

    @once
    def load(name: str) -> Any:
        folder: Path = make_tiny(tmp_path_factory.mktemp(name) / name, DEFINITIONS[name], bits=None)
        return load_model(folder)[0]

    return load


def run_tool(name: str, *arguments: str) -> None:
    """Run one of tools/ as a user would."""
    subprocess.run([sys.executable, str(TOOLS / name), *arguments], check=True, capture_output=True)


def command(*arguments: str | Path, stdin: str | None = None, **environment: str) -> Result:
    """What `mlxmoe` does with the arguments, in this process: a new one takes seconds to import what it needs."""
    return CliRunner(env={"COLUMNS": "80", **environment}).invoke(app, [*map(str, arguments)], input=stdin)


def watch_passes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, at_each: Callable[[], object] = lambda: None
) -> list[int]:
    """The number of tokens of each forward pass that the engine makes from here on; `at_each` is called in each."""
    watched = Watched(engine.model, at_each)
    monkeypatch.setattr(engine._decoder, "_model", watched)
    return watched.passes


class Watched:
    """A model that notes how many tokens each call has."""

    def __init__(self, model: Any, at_each: Callable[[], object]) -> None:
        self._model = model
        self._at_each = at_each
        self.passes: list[int] = []

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.passes.append(tokens.shape[1])
        self._at_each()
        return self._model(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group with the limit, or a skip that says why there is none."""
    folder = Path("/sys/fs/cgroup/memory") / f"mlxmoe-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no control group of version 1 with a memory limit can be made here: {error}")
    try:
        yield folder
    finally:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:  # its last process is not quite gone
                time.sleep(0.1)


class InterruptAt:
    """A trace function that raises KeyboardInterrupt at the nth line run in code of which `within` is true."""

    def __init__(self, nth: int, within: Callable[[CodeType], bool]) -> None:
        self.left = nth
        self.within = within

    @classmethod
    def in_files(cls, nth: int, *files: str) -> InterruptAt:
        """Of the lines of files whose paths end so."""
        return cls(nth, lambda code: code.co_filename.endswith(files))

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if not self.within(frame.f_code):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self
