"""What prefill was predicted to need is kept for later loads: they do not predict again, and plan the same."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from mlx_lm.models import qwen3_moe
from tiny import QWEN3_MOE, copy_folder, make_tiny

from mlxmoe import RequestError, load, register
from mlxmoe.dividing import PrefillRoom, divide_memory
from mlxmoe.memory.plan import Plan
from mlxmoe.opening import open_folder
from mlxmoe.transients import Prediction, PrefillTransients, sources
from mlxmoe.transients.kept import MOST, KeptPredictions


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of predictions in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlxmoe" / "predictions"


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(chunk, tokens before it) of each prediction that is really made."""
    asked: list[tuple[int, int]] = []
    of = PrefillTransients.of

    def noting(self: PrefillTransients, chunk: int, seen: int) -> Prediction:
        asked.append((chunk, seen))
        return of(self, chunk, seen)

    monkeypatch.setattr(PrefillTransients, "of", noting)
    return asked


def plan_of(folder: Path, **options: Any) -> Plan:
    with load(folder, memory="1GB", context=512, **options) as engine:
        return engine.plan


def test_a_later_load_predicts_nothing_and_plans_the_same(
    tiny: Path, kept: Path, predicted: list[tuple[int, int]]
) -> None:
    first = plan_of(tiny, experts="50%")
    assert predicted
    predicted.clear()
    assert plan_of(tiny, experts="50%") == first
    assert predicted == []
    assert plan_of(tiny, experts="50%", chunk_tokens=64).chunk_tokens == 64
    assert {chunk for chunk, _ in predicted} == {64}, "only what was not asked before"
    predicted.clear()
    assert plan_of(tiny, experts="50%") == first, "and that was kept beside the rest"
    assert predicted == []


def test_other_caches_other_weights_and_another_config_are_predicted_for_themselves(
    tiny: Path, tmp_path: Path, kept: Path, predicted: list[tuple[int, int]]
) -> None:
    wider = make_tiny(tmp_path / "wider", {**QWEN3_MOE, "intermediate_size": 2 * QWEN3_MOE["intermediate_size"]})
    turned = make_tiny(tmp_path / "turned", {**QWEN3_MOE, "rope_theta": 5000.0})
    for number, (folder, options) in enumerate([(tiny, {}), (tiny, {"window": 64}), (wider, {}), (turned, {})], 1):
        predicted.clear()
        plan_of(folder, **options)
        assert predicted, (folder, options)
        assert len(list(kept.iterdir())) == number


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'{"format": 2}', b'{"format": 99, "bytes": {}}', b'{"format": 2, "bytes": [1]}',
        b'{"format": 2, "bytes": {"a": -1}}', b'{"format": 2, "bytes": {"a": true}}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_file_that_says_nothing_useful_is_made_anew(
    tiny: Path, kept: Path, predicted: list[tuple[int, int]], content: bytes
) -> None:
    first = plan_of(tiny)
    (file,) = kept.iterdir()
    good = file.read_bytes()
    file.write_bytes(content)
    predicted.clear()
    assert plan_of(tiny) == first
    assert predicted
    assert json.loads(file.read_bytes()) == json.loads(good)


def test_where_nothing_can_be_written_the_load_goes_on(
    tiny: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept.parent.mkdir(parents=True)
    kept.write_text("a file where the folder should be")
    with caplog.at_level(logging.INFO, "mlxmoe"):
        assert plan_of(tiny).context == 512
    assert "predictions cannot be kept" in caplog.text


def test_a_user_without_a_home_folder_loads(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RequestError("no home folder")

    monkeypatch.setattr("mlxmoe.transients.kept.user_cache", homeless)
    with caplog.at_level(logging.INFO, "mlxmoe"):
        assert plan_of(tiny).context == 512
    assert "No predictions are kept" in caplog.text


def test_a_model_with_code_of_its_own_is_predicted_each_time(
    tiny: Path, kept: Path, predicted: list[tuple[int, int]]
) -> None:
    opened = open_folder(tiny)
    opened.config["model_file"] = "own.py"
    for _ in range(2):
        predicted.clear()
        with PrefillRoom(opened) as room:
            room.at_most(64, 512)
        assert predicted == [(64, 512), (64, 512)], "with half of the experts, and with all"
    assert not kept.exists()


def test_what_another_process_kept_meanwhile_stays_beside_it(tmp_path: Path) -> None:
    one, other = KeptPredictions("model", tmp_path), KeptPredictions("model", tmp_path)
    one.of("a", lambda: (1, True))
    other.of("b", lambda: (2, True))
    one.save()
    other.save()
    later = KeptPredictions("model", tmp_path)
    assert [later.of(name, lambda: (3, True)) for name in "abc"] == [1, 2, 3]


def test_a_file_holds_so_many_predictions_and_drops_the_oldest(tmp_path: Path) -> None:
    for start in (0, MOST // 2):
        some = KeptPredictions("model", tmp_path)
        for number in range(start, start + MOST):
            some.of(str(number), lambda number=number: (number, True))  # type: ignore[misc]
        some.save()
    (file,) = tmp_path.iterdir()
    assert list(json.loads(file.read_bytes())["bytes"]) == [str(n) for n in range(MOST // 2, MOST // 2 + MOST)]


def test_what_was_estimated_is_not_kept(
    tiny: Path, kept: Path, predicted: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_folder(tiny)

    def room_bytes() -> int:
        with PrefillRoom(opened) as room:
            assert room.at_most(64, 512) == room.at_most(64, 512), "it is remembered for this load"
            return room.at_most(64, 512)

    def fails(*args: Any, **options: Any) -> Any:
        raise MemoryError("this once")

    with monkeypatch.context() as patch:
        patch.setattr("mlxmoe.transients.trace_chunk", fails)
        estimated = room_bytes()
    assert not kept.exists()
    assert len(predicted) == 2
    simulated = room_bytes()
    assert simulated < estimated
    predicted.clear()
    assert room_bytes() == simulated
    assert predicted == []


def test_a_definition_that_was_registered_is_predicted_each_time(
    tiny: Path, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version of it may do anything, of the same weights and config."""
    folder = copy_folder(tiny, tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mine_of_a_test"}))
    monkeypatch.setitem(sys.modules, "mlx_lm.models.mine_of_a_test", own := ModuleType("mine_of_a_test"))
    own.ModelArgs = qwen3_moe.ModelArgs  # type: ignore[attr-defined]
    own.Model = type("Model", (qwen3_moe.Model,), {"__module__": own.__name__})  # type: ignore[attr-defined]
    register("mine_of_a_test", own)
    for name in (own.__name__, "mlx_lm.models.mine_of_a_test"):  # the second as if it were a file of mlx-lm
        own.Model.__module__ = name
        with PrefillRoom(open_folder(folder)) as room:
            room.at_most(64, 512)
        assert not kept.exists()


@pytest.mark.parametrize("file", ["mlx_lm/models/qwen3_moe.py", "mlx_lm/models/base.py", "mlxmoe/experts/layer.py"])
def test_other_code_is_predicted_for_itself(
    tiny: Path, kept: Path, predicted: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def edited(path: str) -> Iterator[tuple[str, Any]]:
        for found, state in states(path):
            at = state.st_mtime_ns + found.replace(os.sep, "/").endswith(file)
            yield found, SimpleNamespace(st_size=state.st_size, st_mtime_ns=at)

    states = sources._states
    plan_of(tiny)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_states", edited)
        predicted.clear()
        plan_of(tiny)
    assert predicted
    predicted.clear()
    plan_of(tiny)
    assert predicted == [], "the one before is there still"


def test_every_module_that_a_prediction_is_made_by_is_in_its_code() -> None:
    """All that the modules import which make it, but for what only reads, writes and complains."""
    package = Path(sources.__file__).parents[1]
    aside = {"beginning", "errors", "keeping", "writing", "version"}
    rooms, todo = set[str](), ["dividing"]
    while todo:
        room = todo.pop()
        rooms.add(room)
        files = [package / f"{room}.py"] if (package / f"{room}.py").exists() else (package / room).rglob("*.py")
        found = {other for file in files for other in re.findall(r"^from mlxmoe\.(\w+)", file.read_text(), re.M)}
        todo += found - rooms - aside
    assert {name.removesuffix(".py") for name in sources.OWN} == rooms


def test_little_more_or_less_memory_asks_for_the_same(
    tmp_path: Path, kept: Path, predicted: list[tuple[int, int]]
) -> None:
    """A context that is cut to the memory is another one each time; what its prefill takes is kept all the same."""
    long = {**QWEN3_MOE, "max_position_embeddings": 262_144, "num_attention_heads": 1, "head_dim": 512}
    opened = open_folder(make_tiny(tmp_path / "long", long))
    contexts = []
    for memory_bytes in (1_000_000_000, 1_010_000_000):
        asked_before = len(predicted)
        with PrefillRoom(opened) as room:
            plan = divide_memory(opened, room, experts="50%", memory_bytes=memory_bytes, chunk_tokens=128)
        contexts.append(plan.context)
    assert contexts[0] != contexts[1]
    assert len(predicted) == asked_before > 0, "only the first load asked anything"


def test_a_context_has_at_least_the_room_of_each_of_its_chunks(tiny: Path) -> None:
    """Also of the last one, which is no whole one and comes after all others, and of those that have caches grow."""
    opened = open_folder(tiny)
    exact = PrefillTransients(opened.model, opened.modules, opened.kv, None, opened.kv_choice.caches)
    room = PrefillRoom(opened)
    for context in (64, 65, 66, 100, 128, 640, 700, 1024, 1281, 1400):
        prompt, kv_bytes = context - 1, opened.kv.of(context)
        for seen in range(0, prompt, 64):
            chunk = min(64, prompt - seen)
            alive = exact.of(chunk, seen).nbytes + opened.kv.of(seen + chunk)
            assert alive <= kv_bytes + room.resident(64, context), (context, seen)
    assert room.resident(256, 2048) == exact.of(256, 1792).nbytes, "a round number is taken as it is"
    assert room.resident(256, 4400) == exact.of(256, 4352).nbytes == room.resident(256, 4608), "others for some more"
