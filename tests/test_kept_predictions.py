"""What prefill was predicted to need is kept for later loads: they do not predict again, and plan the same."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny import QWEN3_MOE, make_tiny

from mlxmoe import RequestError, load
from mlxmoe.dividing import PrefillRoom
from mlxmoe.memory.plan import Plan
from mlxmoe.opening import open_folder
from mlxmoe.transients import PrefillTransients
from mlxmoe.transients.kept import KeptPredictions


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of predictions in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlxmoe" / "predictions"


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(chunk, context) of each prediction that is really made."""
    asked: list[tuple[int, int]] = []
    of = PrefillTransients.of

    def noting(self: PrefillTransients, chunk_tokens: int, context: int) -> int:
        asked.append((chunk_tokens, context))
        return of(self, chunk_tokens, context)

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
        b"", b"{", b"[]", b'{"format": 1}', b'{"format": 99, "bytes": {}}', b'{"format": 1, "bytes": [1]}',
        b'{"format": 1, "bytes": {"a": -1}}', b'{"format": 1, "bytes": {"a": true}}', b"\xff\xfe",
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


def test_two_processes_that_keep_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    one, other = KeptPredictions("model", tmp_path), KeptPredictions("model", tmp_path)
    one.of("a", lambda: 1)
    other.of("b", lambda: 2)
    one.save()
    other.save()
    assert KeptPredictions("model", tmp_path).of("b", lambda: 3) == 2
