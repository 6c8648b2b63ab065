"""Which thread does what: nothing that one has left unevaluated is wanted by another, and close() is heard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from definitions import DEFINITIONS
from tiny import make_tiny

from mlxmoe import Engine, EngineClosedError, RequestError, load
from mlxmoe.kv.choose import choose
from mlxmoe.kv.settings import KVSettings

T = TypeVar("T")

WINDOWED = KVSettings(window=64, kv_bits=8)
PROMPT = [(31 * i * i + 7 * i) % 2000 + 3 for i in range(300)]  # the demo model was made for 256


def elsewhere(do: Callable[[], T]) -> T:
    """What `do` returns in a thread of its own, which is gone afterwards."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()


@pytest.mark.parametrize("options", [{"window": 64}, {"window": 64, "kv_bits": 8}, {"kv_bits": 8}], ids=str)
def test_a_windowed_engine_may_first_stream_in_another_thread(options: dict[str, Any]) -> None:
    with load(**options) as engine:
        prompt = PROMPT if "window" in options else PROMPT[:90]
        there = elsewhere(lambda: engine.generate(prompt, max_tokens=5))
        assert engine.generate(prompt, max_tokens=5) == there


def test_an_engine_may_be_loaded_in_a_thread_that_is_gone() -> None:
    with elsewhere(lambda: load(window=64)) as engine:
        assert engine.generate(PROMPT, max_tokens=5)


def test_a_session_may_be_made_in_one_thread_and_go_on_in_another(tmp_path: Path) -> None:
    with load() as engine:
        turn = "In the beginning God created the heaven and the earth. " * 9
        expected = engine.session(kv_settings=WINDOWED).generate(turn, max_tokens=5)
    with load() as engine:
        here = engine.session(kv_settings=WINDOWED)
        assert elsewhere(lambda: here.generate(turn, max_tokens=5)) == expected
        elsewhere(lambda: here.save(tmp_path / "saved"))
    with load() as engine:
        there = elsewhere(lambda: engine.session(kv_settings=WINDOWED))
        assert there.generate(turn, max_tokens=5) == expected
        again = elsewhere(lambda: engine.restore(tmp_path / "saved", kv_settings=WINDOWED))
        assert again.generate(" And", max_tokens=5) == elsewhere(lambda: there.generate(" And", max_tokens=5))


@pytest.mark.parametrize("scaling", ["yarn", "llama3", "linear", "dynamic"])
def test_no_rotation_is_left_to_the_thread_that_loaded(tmp_path: Path, scaling: str) -> None:
    kinds = {
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "llama3": {
            "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "linear": {"rope_type": "linear", "factor": 2.0},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    }  # fmt: skip
    config = {**DEFINITIONS["olmoe"], "max_position_embeddings": 64, "rope_scaling": kinds[scaling]}
    with load(make_tiny(tmp_path / "tiny", config), window=24) as engine:
        assert elsewhere(lambda: engine.generate(PROMPT[:90], max_tokens=5))


# --- kinds of session ---------------------------------------------------------------------------------------------


def test_threads_that_ask_for_one_kind_of_session_share_it(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def slowly(*arguments: Any) -> Any:
        made.append(arguments)
        time.sleep(0.05)
        return choose(*arguments)

    monkeypatch.setattr("mlxmoe.kinds.choose", slowly)
    with ThreadPoolExecutor(4) as pool:
        sessions = [pool.submit(demo.session, kv_settings=WINDOWED) for _ in range(4)]
    repliers = {id(session.result()._replier) for session in sessions}
    assert (len(made), len(repliers)) == (1, 1)
    demo.close()
    for session in sessions:
        with pytest.raises(EngineClosedError):
            session.result().generate("In the beginning")


def test_a_kind_that_is_being_made_while_the_engine_closes_is_closed_or_refused(
    demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def slowly(*arguments: Any) -> Any:
        begun.set()
        time.sleep(0.1)
        return choose(*arguments)

    monkeypatch.setattr("mlxmoe.kinds.choose", slowly)
    with ThreadPoolExecutor(1) as pool:
        session = pool.submit(demo.session, kv_settings=WINDOWED)
        begun.wait()
        demo.close()
    with pytest.raises(EngineClosedError):
        session.result().generate("In the beginning")
    with pytest.raises(EngineClosedError):
        demo._kinds.of(KVSettings(window=33))


def test_a_signal_handler_within_a_pass_is_refused_while_another_thread_waits_for_that_pass(demo: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        with demo._experts.passes.one():
            session = pool.submit(demo.session, kv_settings=WINDOWED)
            while demo._kinds._lock.acquire(blocking=False):
                demo._kinds._lock.release()
            with pytest.raises(RequestError, match="in the middle of a step"):
                demo.close()
            with pytest.raises(RequestError, match="in the middle of a step"):
                demo.session(kv_settings=KVSettings(kv_bits=4))
            assert demo.session(kv_settings=demo.kv_settings), "which is there"
        assert session.result().generate("In the beginning", max_tokens=1)
