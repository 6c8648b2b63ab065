"""mlxmoe tune on small models: what is measured, kept, picked up, forgotten; interrupts; what makes no sense."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import Result
from definitions import DEFINITIONS
from tiny import QWEN3_MOE, copy_folder, make_tiny
from typer.testing import CliRunner

import mlxmoe
from mlxmoe import MemoryBudgetError, RequestError, SavedStateError, identity, load, tune
from mlxmoe.cli.commands import app
from mlxmoe.doctor.read_rate import ReadRate
from mlxmoe.identity import FolderIdentity
from mlxmoe.kv.settings import KVSettings
from mlxmoe.loading import load_folder
from mlxmoe.memory.reading import MemoryReader
from mlxmoe.tuned import TunedMachine, Tuning, TuningFolder, this_machine
from mlxmoe.tuning import tuner
from mlxmoe.tuning.bench import EngineBench, _stretched, pressed
from mlxmoe.tuning.fit import TimedStep, fit_rates
from mlxmoe.tuning.pace import Pace
from mlxmoe.tuning.roofline import Step, decode_s
from mlxmoe.tuning.search import Decoded
from mlxmoe.tuning.tuner import forget

TOKENS = list(range(7, 27))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlxmoe" / "tunings"


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def a_tuning(model: Path, **said: Any) -> Tuning:
    which = FolderIdentity(model, None).now()
    known: dict[str, Any] = {
        "model": "tiny", "digest": which.digest, "mlx_lm": which.mlx_lm,
        "machine": this_machine(MemoryReader().read()), "kv": KVSettings(), "experts": None, "context": 256,
        "chunk_tokens": None, "goal": "balanced", "tokens_per_s": 12.5,
    }  # fmt: skip
    return Tuning(**{**known, **said})


def test_the_demo_model_is_tuned_and_later_loads_take_what_was_kept(
    kept: Path, caplog: pytest.LogCaptureFixture, quick_tuning: None
) -> None:
    told: list[tuple[float, float, str]] = []
    report = tune(budget="20s", progress=lambda *said: told.append(said))
    assert report.ended == "complete"
    assert {row.context for row in report.rows} == {64, 128, 256}
    assert all(row.full_tokens_per_s > 0 and row.predicted_tokens_per_s for row in report.rows)
    assert all(row.plan.total_bytes <= report.budget_bytes for row in report.rows)
    assert len({row.plan.bank_bytes for row in report.rows}) >= 4
    assert {0 <= done <= total == 20 for done, total, _ in told} == {True}
    assert report.recommended is not None
    assert report.saved is not None
    assert [str(file) for file in kept.iterdir()] == [report.saved]
    with caplog.at_level(logging.INFO, "mlxmoe"), load() as engine:
        assert engine.plan.context == report.context
        assert engine.tuning is not None
    assert f"Tuned by {report.saved}: context={report.context}" in caplog.text
    assert eval(report.load_line, {"load": dict}) == report.arguments, "it can be pasted"
    json.dumps(report.as_dict(), allow_nan=False)


def test_what_is_named_wins_and_tuned_false_goes_without(tiny: Path) -> None:
    with load(tiny, tuned=False) as engine:
        nothing = engine.plan
    tuning = a_tuning(tiny, experts=nothing.expert_bytes // 2, context=200, chunk_tokens=64)
    TuningFolder().keep(tuning, tiny)
    with load(tiny) as engine:
        taken = engine.plan
        assert engine.tuning == tuning
        tuned_logits = engine.logits(TOKENS)
    assert (taken.context, taken.chunk_tokens) == (200, 64)
    assert taken.bank_bytes <= nothing.expert_bytes // 2
    with load(tiny, experts="all", context=100, chunk_tokens=32) as engine:
        assert (engine.plan.context, engine.plan.chunk_tokens) == (100, 32)
        assert engine.plan.bank_bytes == nothing.expert_bytes
        assert mx.array_equal(engine.logits(TOKENS), tuned_logits)
    with load(tiny, context=100) as engine:
        assert (engine.plan.context, engine.plan.chunk_tokens) == (100, 64)
        assert engine.plan.bank_bytes == taken.bank_bytes
    with load(tiny, tuned=False) as engine:
        assert (engine.plan.context, engine.plan.chunk_tokens) == (nothing.context, nothing.chunk_tokens)
        assert (engine.plan.bank_bytes, engine.tuning) == (nothing.bank_bytes, None)


def test_the_model_is_identified_once_for_its_tuning_its_profile_and_its_prefixes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TuningFolder().keep(a_tuning(tiny), tiny)
    with load(tiny, tuned=False) as engine, engine.record() as recording:
        engine.logits(TOKENS)
        engine.keep_profile(recording.trace)
    read: list[Path] = []
    own = identity.identify

    def counted(folder: Path, *rest: Any) -> identity.ModelIdentity:
        read.append(folder)
        return own(folder, *rest)

    monkeypatch.setattr(identity, "identify", counted)
    with load(tiny, experts="50%", prefixes="1MB") as engine:
        assert engine.tuning is not None
        session = engine.session()
        session.save(tmp_path / "saved")
    assert read == [tiny]


def test_a_tuning_that_does_not_fit_now_is_left_out(tiny: Path) -> None:
    plan = load_folder(tiny, memory_bytes=10**9, experts="50%").plan
    least = plan.total_bytes - plan.bank_bytes // 2
    for context, taken in ((256, True), (10**9, False)):
        loaded = load_folder(tiny, memory_bytes=least, tuning=a_tuning(tiny, experts=10**9, context=context))
        assert (loaded.tuning is not None) == taken
        assert loaded.plan.total_bytes <= least
        loaded.experts.close()


def _write(kept: Path, change: Callable[[dict[str, Any]], object]) -> None:
    (file,) = kept.iterdir()
    stored = json.loads(file.read_text())
    change(stored)
    file.write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda stored: stored.update(format=2), "version 2 of the format"),
        (lambda stored: stored.update(digest="0" * 64), "is of another model, tiny"),
        (lambda stored: stored["machine"].update(total_bytes=1), "of another machine"),
        (lambda stored: stored.update(mlx_lm="0.1"), "made with mlx-lm 0.1"),
        (lambda stored: stored["kv"].update(window=64), "holds for other caches"),
        (lambda stored: stored.update(context="long"), "its context is 'long'"),
        (lambda stored: stored.update(tokens_per_s=None), "its rate is None"),
        (lambda stored: stored.clear(), "format"),
        (lambda stored: stored.update(more=1), "more"),
    ],
)
def test_what_is_of_no_use_is_ignored_with_its_reason(
    tiny: Path, kept: Path, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    TuningFolder().keep(a_tuning(tiny), tiny)
    _write(kept, change)
    with load(tiny) as engine:
        assert engine.tuning is None
    assert says in caplog.text


def test_a_torn_file_another_machines_and_a_fine_tunes_are_ignored(
    tiny: Path, kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, mine, kv = TuningFolder(), this_machine(MemoryReader().read()), KVSettings()
    file = folder.keep(a_tuning(tiny), tiny)
    assert folder.find(FolderIdentity(copy_folder(tiny, tmp_path / "elsewhere"), None), mine, kv) is not None
    with caplog.at_level(logging.INFO, "mlxmoe"):
        assert folder.find(FolderIdentity(tiny, None), TunedMachine("M9", 1), kv) is None
        assert "is of another machine than M9 with 1 bytes" in caplog.text
        other = make_tiny(tmp_path / "other", bits=8)
        (other / "config.json").write_text((tiny / "config.json").read_text())
        assert folder.find(FolderIdentity(other, None), mine, kv) is None
        assert "a model with the same config, not of this one" in caplog.text
        file.write_bytes(file.read_bytes()[:40])
        assert folder.find(FolderIdentity(tiny, None), mine, kv) is None
        assert f"The tuning {file} is ignored" in caplog.text
    assert folder.find(FolderIdentity(tiny, None), mine, KVSettings(window=64)) is None


def test_forgetting_removes_this_models_alone(tiny: Path, kept: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", {**QWEN3_MOE, "num_hidden_layers": 2})
    for model in (tiny, other):
        TuningFolder().keep(a_tuning(model), model)
    TuningFolder().keep(a_tuning(tiny, machine=TunedMachine("M9", 1)), tiny)
    assert forget(tiny) == 2
    assert len(list(kept.iterdir())) == 1
    assert forget(tiny) == 0
    done = command("--forget", other)
    assert (done.exit_code, "1 kept tuning of" in done.stdout) == (0, True)
    assert list(kept.iterdir()) == []


def test_what_cannot_be_written_is_one_message(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SavedStateError, match="Make room there, or go without: mlxmoe tune --no-save"):
        TuningFolder(tmp_path / "file" / "folder").keep(a_tuning(tiny), tiny)


def test_what_was_measured_is_shown_though_it_cannot_be_kept(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    interrupted_at(monkeypatch, 2)
    done = command(tiny, "--budget", "20s")
    assert done.exit_code == 1
    assert "Take" in done.stdout
    assert "nothing was kept for later loads: The tuning cannot be kept as" in done.stdout


def interrupted_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    seen: list[object] = []

    def decode(bench: EngineBench, point: object, seconds: float) -> Decoded:
        if len(seen) == count:
            raise KeyboardInterrupt
        seen.append(point)
        return Decoded((0.1, 0.1))

    monkeypatch.setattr(EngineBench, "decode", decode)


def test_an_interrupt_keeps_what_was_measured_and_says_so(
    tiny: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_at(monkeypatch, 2)
    done = command(tiny, "--budget", "20s")
    assert done.exit_code == 0, done.output
    assert "Interrupted: this is what was measured until then." in done.stdout
    assert "Ctrl-C ended the measuring after 2 configurations" in done.stdout
    assert len(list(kept.iterdir())) == 1


def test_a_measuring_that_ends_early_shortens_no_later_load(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three contexts two were tried: the third may be as fast."""
    interrupted_at(monkeypatch, 2)
    report = tune(tiny, contexts=[64, 128, 256], budget="20s")
    assert {row.context for row in report.rows} == {64, 128}, "each context first"
    assert (report.context, report.arguments) == (None, {})
    assert any("256 were not reached" in note for note in report.notes)
    interrupted_at(monkeypatch, 3)
    assert tune(tiny, contexts=[64, 128, 256], budget="20s").context == 256


def test_an_interrupt_before_anything_was_measured_ends(
    tiny: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_at(monkeypatch, 0)
    done = command(tiny, "--budget", "20s")
    assert (done.exit_code, done.stdout) == (130, "")
    assert not kept.exists()


def test_a_speed_out_of_reach_keeps_nothing_and_shows_what_was_measured(
    tiny: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_at(monkeypatch, 3)
    done = command(tiny, "--budget", "20s", "--min-tps", "1e6")
    assert done.exit_code == 1
    assert "No configuration keeps 1000000.0 tokens/s" in done.stdout
    assert "Take" not in done.stdout
    assert not kept.exists()


def test_a_dense_model_is_tuned_by_its_contexts(tmp_path: Path, quick_tuning: None) -> None:
    dense = {key: value for key, value in QWEN3_MOE.items() if "expert" not in key} | {"model_type": "qwen3"}
    done = command(make_tiny(tmp_path / "dense", dense), "--budget", "10s", "--no-save", "--context", "64,128")
    assert done.exit_code == 0, done.output
    assert "the model is dense" in done.stdout
    assert "experts" not in done.stdout.split("\n\n")[1]


def test_a_window_is_measured_and_its_tuning_holds_for_it_alone(tiny: Path, quick_tuning: None) -> None:
    report = tune(tiny, window=64, contexts=[128], budget=10)
    assert "window=64" in report.load_line
    assert report.rows
    with load(tiny) as engine:
        assert engine.tuning is None
    with load(tiny, window=64) as engine:
        assert engine.tuning is not None


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--budget", "soon"], 2, "is no time. Write seconds, '90s', '5m' or '1h'"),
        (["--budget", "1s"], 2, "too short"),
        (["--budget", "0"], 2, "too short"),
        (["--goal", "cheap"], 2, "speed, context, balanced"),
        (["--min-tps", "0"], 2, "more than 0"),
        (["--min-tps", "nan"], 2, "more than 0"),
        (["--context", "4x"], 5, "no number of tokens"),
        (["--memory", "much"], 5, "is not a size"),
        (["--memory", "1MB"], 5, "The memory budget is 1.0 MB"),
        (["--kv-bits", "3"], 2, "kv_bits=3"),
        (["--plot", "/no/where.png"], 2, ""),
    ],
)
def test_what_makes_no_sense_is_one_message_and_a_code(options: list[str], code: int, says: str, kept: Path) -> None:
    done = command(*options)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not kept.exists()


def test_contexts_and_chunks_that_are_none_are_refused() -> None:
    with pytest.raises(RequestError, match="No context was named"):
        tune(contexts=[])
    with pytest.raises(RequestError, match="chunk_tokens=0 is no number of tokens"):
        load(chunk_tokens=0)
    with pytest.raises(MemoryBudgetError, match="no number of tokens"):
        tune(contexts=["long"])


def test_a_filled_cache_has_the_length_and_the_bytes_of_a_prefilled_one(tiny: Path) -> None:
    with load(tiny, context=400) as engine:
        bench = EngineBench(engine, [], lambda: None)
        filled, real = bench._filled(300), engine.decoder.new_cache()
        engine.decoder.prefill([token % 900 for token in range(300)], real)
        assert [cache.offset for cache in filled] == [cache.offset for cache in real] == [300] * 3
        assert all(f.keys.shape[2] >= r.keys.shape[2] for f, r in zip(filled, real, strict=True))
        keys = filled[0].keys
        assert mx.array_equal(keys[..., :16, :], keys[..., 16:32, :])
        logits = [engine.model(mx.array([[5]]), cache=cache) for cache in (filled, real)]
        assert all(mx.isfinite(values).all() for values in logits)


def test_no_configuration_reads_what_another_read(tiny: Path) -> None:
    with load(tiny, context=256) as engine:
        bench = EngineBench(engine, [], lambda: None)
        assert bench.seed() > 0
        read = [tuple(bench._text.take(20)) for _ in range(30)]
    assert len(set(read)) == len(read)
    assert all(0 <= token < QWEN3_MOE["vocab_size"] for tokens in read for token in tokens)


def test_a_host_sync_is_measured_by_itself_and_taken_off_before_the_fit(tiny: Path) -> None:
    with load(tiny, context=256) as engine:
        ticks = count()
        assert EngineBench(engine, [], lambda: None, lambda: next(ticks) * 1e-3).sync() == pytest.approx(1e-3)
    steps = [TimedStep(Step(1e6, layers=4, misses=n, syncs=4), 0.1 + n * 0.01) for n in range(4)]
    rates = fit_rates(steps, 2e-3)
    assert rates.sync_s == pytest.approx(2e-3), "all rows have as many, and cannot tell"
    assert 1e6 / rates.bandwidth_bytes_per_s == pytest.approx(0.1 - 4 * 2e-3)
    assert all(decode_s(timed.step, rates) == pytest.approx(timed.seconds) for timed in steps)
    absurd = fit_rates(steps, 1.0)
    assert 0 < absurd.bandwidth_bytes_per_s < float("inf"), "a sync that was held up leaves time for the rest"


def test_a_full_rotating_cache_is_filled_as_it_would_be() -> None:
    from mlx_lm.models.cache import RotatingKVCache

    cache, seed = RotatingKVCache(64, keep=2), RotatingKVCache(64, keep=2)
    seed.update_and_fetch(mx.zeros((1, 1, 16, 8)), mx.zeros((1, 1, 16, 8)))
    cache.state = _stretched(cache, seed.state, 16, 300)
    keys, _ = cache.update_and_fetch(mx.ones((1, 1, 1, 8)), mx.ones((1, 1, 1, 8)))
    assert (cache.offset, keys.shape[2]) == (301, 64)
    assert keys[0, 0, 2, 0] == 1, "the oldest after the sinks gave way"


def test_only_a_lack_of_memory_stops_a_measurement() -> None:
    def event(action: str, pressure: str) -> mlxmoe.MemoryEvent:
        return mlxmoe.MemoryEvent(0.0, pressure, action, 0, f"{action} at {pressure}")  # type: ignore[arg-type]

    assert pressed([event("resize", "normal"), event("pressure", "normal"), event("grow", "normal")]) is None
    assert pressed([event("resize", "normal"), event("pressure", "warning")]) == "pressure at warning"
    assert pressed([event("pressure", "warning"), event("shrink", "warning")]) == "shrink at warning"


def test_pressure_while_measuring_stops_that_configuration(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[mlxmoe.MemoryEvent] = []
    with load(tiny, context=256) as engine:
        bench = EngineBench(engine, events, lambda: None)
        point = tuner.Point(256, engine.plan)
        calm = bench.decode(point, 0.1)
        told = mlxmoe.MemoryEvent(0.0, "warning", "shrink", 1, "slots were given back")
        monkeypatch.setattr(bench, "_bytes_from_disk", lambda: events.append(told))
        stopped = bench.decode(point, 10.0)
    assert (calm.pressure, stopped.pressure) == (None, "slots were given back")
    assert stopped.tokens == 1


def test_the_picture_needs_its_extra(tiny: Path, tmp_path: Path, quick_tuning: None) -> None:
    done = command(tiny, "--budget", "10s", "--no-save", "--context", "64,128", "--plot", tmp_path / "p.png")
    if find_spec("matplotlib") is None:
        assert (done.exit_code, "mlxmoe[plot]" in done.stderr) == (2, True)
    else:
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4"])  # a cache that is filled, one that is prefilled
def test_without_time_nothing_is_begun_and_it_says_so(name: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", DEFINITIONS[name])
    with load(folder) as engine:
        bench = EngineBench(engine, [], lambda: None, deadline=0)
        seen = bench.decode(tuner.Point(200, engine.plan), 1.0)
    assert (seen.tokens, seen.pressure) == (0, None)
    assert seen.overrun is not None
    assert seen.overrun.startswith("filling its KV cache takes" if name == "qwen3_moe" else "trying out")
    assert seen.overrun.endswith("and 0.0 s were left")


def test_reading_the_files_is_part_of_the_budget(
    tiny: Path, quick_tuning: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "measure_read_rate", lambda *_: ReadRate(10**9, 9.0, 10**6, None))
    told: list[tuple[float, float]] = []
    report = tune(
        tiny, contexts=[64], budget=10, save=False, progress=lambda gone, total, what: told.append((gone, total))
    )
    assert report.seconds >= 9.0
    assert {total for _, total in told} == {10.0}
    assert told[0][0] >= 9.0


def test_a_context_that_takes_too_long_is_named_and_nothing_is_recommended(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "needed_s", lambda pace, tokens: 1000.0)
    report = tune(tiny, contexts=[400], memory="1GB", budget="5s", save=False)
    assert (report.recommended, report.ended) == (None, "time")
    assert report.rows
    assert not any(row.usable for row in report.rows)
    assert "context 400 with " in report.reasons[0]
    assert "was not measured: filling it and decoding with it full may take 1000.0 s" in report.reasons[0]
    assert "Give it a longer budget, or a shorter context" in report.reasons[0]
    assert any("ended the measuring before there was any" in note for note in report.notes)
