"""mlxmoe plan: sizes from a config or headers, load's own division, and no claim without a basis."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import command
from definitions import DEFINITIONS
from hub_standin import StandIn
from model_facts import CONFIGS, EXPERT_BYTES, KV_BYTES_PER_TOKEN, WEIGHT_BYTES
from test_layouts import REFUSED_LAYOUTS, rewritten
from tiny import QWEN3_MOE, make_tiny

import mlxmoe
from mlxmoe import MemoryBudgetError, PlanError, UnsupportedModelError, load
from mlxmoe.memory.sizes import format_bytes, parse_bytes, parse_tokens
from mlxmoe.tuning.report import percent
from mlxmoe.tuning.roofline import Rates

DENSE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 2048, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip

# Any config.json files, under any names, in a folder of your own.
OTHER_CONFIGS = sorted(file.name for file in Path(os.environ.get("MLXMOE_CONFIGS", "/none")).glob("*.json")) or [
    "none"
]


def config_file(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize("model", CONFIGS)
def test_sizes_of_real_models_are_as_published_and_as_derived_by_hand(model: str, tmp_path: Path) -> None:
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    file = config_file(tmp_path, CONFIGS[model])
    report = mlxmoe.plan(file, memory="1TB", chip="m4", bits=4, contexts=[2])
    assert mx.get_peak_memory() <= before + 2**20, "no weight is computed"
    if model in WEIGHT_BYTES:
        assert report.weight_bytes == pytest.approx(WEIGHT_BYTES[model], rel=0.03)
    if model in EXPERT_BYTES:
        assert report.expert_bytes == pytest.approx(EXPERT_BYTES[model], rel=0.03)
    if model in KV_BYTES_PER_TOKEN:
        assert report.kv_bytes_per_token == KV_BYTES_PER_TOKEN[model]
    assert report.weights == "config"
    assert report.trunk_bytes + report.expert_bytes == report.weight_bytes


def test_active_parameters_are_told_from_all(tmp_path: Path) -> None:
    report = mlxmoe.plan(config_file(tmp_path, CONFIGS["Qwen3-30B-A3B"]), memory="64GB", bits=4, contexts=[4096])
    assert report.params == pytest.approx(30.5e9, rel=0.01), "as the model card says"
    assert report.active_params == pytest.approx(3.3e9, rel=0.02)


@pytest.mark.slow
@pytest.mark.skipif("MLXMOE_CONFIGS" not in os.environ, reason="MLXMOE_CONFIGS names no folder of config.json files")
@pytest.mark.parametrize("memory", ["16GB", "24GB", "32GB", "64GB"])
@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_every_config_of_a_folder_is_planned(name: str, memory: str) -> None:
    report = mlxmoe.plan(Path(os.environ["MLXMOE_CONFIGS"]) / name, memory=memory, chip="m4", bits=4)
    assert report.contexts
    for row in report.contexts:
        assert row.plan is None or row.plan.total_bytes <= report.target.budget_bytes
        assert (row.plan is None) == (row.verdict == "does not fit") == (row.why is not None)
    published = next((size for model, size in WEIGHT_BYTES.items() if name.startswith(model)), None)
    assert published is None or report.weight_bytes == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe", "gemma4_text", "nemotron_h"])
@pytest.mark.parametrize("bits", [4, None])
def test_sizes_from_the_config_alone_are_those_of_the_files(name: str, bits: int | None, tmp_path: Path) -> None:
    config = {**DEFINITIONS[name], "torch_dtype": "float32"}
    folder = make_tiny(tmp_path / "whole", config, bits=bits)
    bare = config_file(tmp_path / "bare", json.loads((folder / "config.json").read_text()))
    whole, alone = (mlxmoe.plan(m, memory="8GB", chip="m4", contexts=[64]) for m in (folder, bare))
    assert (whole.weights, alone.weights) == ("files", "config")
    for field in ("params", "active_params", "trunk_bytes", "expert_bytes", "floor_bytes", "kv_bytes_per_token"):
        assert getattr(alone, field) == getattr(whole, field), field
    assert alone.contexts[0].plan == whole.contexts[0].plan


@pytest.mark.parametrize(("memory", "experts"), [("1GB", "auto"), ("1GB", "50%"), ("9MB", "auto")])
def test_the_division_is_the_one_that_load_chooses(tiny: Path, memory: str, experts: str) -> None:
    memory_bytes = parse_bytes(memory, "memory") + 64 * 2**20 * 3 // 2  # the pool's least, and what the system keeps
    report = mlxmoe.plan(tiny, memory=memory_bytes, contexts=[100, 500], experts=experts)
    for row in report.contexts:
        assert row.plan is not None, row.why
        assert row.verdict == ("resident" if experts == "auto" else "streams")
        with load(tiny, memory=report.target.budget_bytes, context=row.context, experts=experts) as engine:
            plan = engine.plan
        ours, theirs = row.plan.as_dict(), plan.as_dict()
        ours["reserve_bytes"] = theirs["reserve_bytes"]  # load leaves none beside a budget that was set
        assert ours == theirs


def test_a_longer_context_costs_experts_and_the_reasons_say_so(tmp_path: Path) -> None:
    file = config_file(tmp_path, CONFIGS["Qwen3-30B-A3B"])
    report = mlxmoe.plan(file, memory="32GiB", chip="m4", bits=4, contexts=["4k", "32k", "128k"])
    short, middle, long = report.contexts
    assert [row.verdict for row in report.contexts] == ["resident", "resident", "streams"]
    assert report.recommended is middle
    assert long.expert_share is not None
    assert long.expert_share < 1
    assert long.tokens_per_s is not None
    assert short.tokens_per_s is not None
    assert long.tokens_per_s < short.tokens_per_s
    text = report.reasons[1]
    for words in (
        "131072 tokens: KV takes 12.9 GB",
        "of the experts leave memory",
        "decode drops to",
        "32768 keeps 100 %",
    ):
        assert words in text
    assert any("131072 tokens are more than the 40960" in warning for warning in report.warnings)


def test_what_does_not_fit_says_by_how_much_and_is_never_rounded_into_fitting(tmp_path: Path) -> None:
    file = config_file(tmp_path, CONFIGS["Mixtral-8x7B"])
    report = mlxmoe.plan(file, memory="16GB", chip="m4", bits=4, contexts=[4096, 131072])
    assert report.contexts[1].verdict == "does not fit"
    assert "need 2" in (report.contexts[1].why or "")
    least = mlxmoe.plan(file, memory="1TB", bits=4, contexts=[131072])
    kv = 131072 * KV_BYTES_PER_TOKEN["Mixtral-8x7B"]
    need = least.trunk_bytes + least.floor_bytes + kv + 64 * 2**20
    short = mlxmoe.plan(file, memory=need * 4 // 3 - 2, bits=4, contexts=[131072]).contexts[0]
    assert short.verdict == "does not fit"
    assert percent(0.9999) == "99 %"
    assert percent(1 - 0.9999, up=True) == "1 %"
    assert percent(1.0) == "100 %"
    assert format_bytes(21_310_000_000) == "21.3 GB"
    assert format_bytes(21_310_000_000, up=True) == "21.4 GB"


def test_gigabytes_are_no_gibibytes(tiny: Path) -> None:
    decimal, binary = (mlxmoe.plan(tiny, memory=size, contexts=[64]).target for size in ("32GB", "32GiB"))
    assert (decimal.total_bytes, binary.total_bytes) == (32 * 10**9, 32 * 2**30)
    assert any("write 32GiB" in line for line in decimal.assumptions)
    assert not any("write 32GiB" in line for line in binary.assumptions)


def test_a_dense_model_has_no_expert_figures(tmp_path: Path) -> None:
    report = mlxmoe.plan(config_file(tmp_path, DENSE), memory="8GB", chip="m4")
    row = report.contexts[0]
    assert (report.expert_bytes, report.floor_bytes, row.expert_share, row.hit_rate) == (0, 0, None, None)
    assert row.verdict == "resident"
    assert report.active_params == report.params
    assert row.tokens_per_s is not None


def test_hits_and_rates_may_be_measured_ones(tmp_path: Path) -> None:
    file = config_file(tmp_path, CONFIGS["Mixtral-8x7B"])

    def row(**options: Any) -> mlxmoe.ContextPlan:
        return mlxmoe.plan(file, memory="24GB", chip="m4", bits=4, contexts=[4096], **options).contexts[0]

    guessed, given, points = row(), row(hits=lambda share: 0.5), row(hits=[(0.0, 0.99), (0.999, 0.99)])
    assert given.hit_rate == pytest.approx(0.5)
    assert points.hit_rate == pytest.approx(0.99)
    assert points.tokens_per_s > guessed.tokens_per_s > given.tokens_per_s  # type: ignore[operator]
    assert row(read_rate="7GB").tokens_per_s > guessed.tokens_per_s  # type: ignore[operator]
    assert row(window=1024).plan.kv_bytes < guessed.plan.kv_bytes  # type: ignore[union-attr]
    assert row(kv_bits=8).plan.kv_bytes < guessed.plan.kv_bytes  # type: ignore[union-attr]


def test_without_a_known_chip_no_speed_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxmoe.memory.sources.Sources.chip_brand", lambda self: None)
    report = mlxmoe.plan(tiny, memory="8GB")
    assert [row.tokens_per_s for row in report.contexts] == [None] * len(report.contexts)
    assert report.recommended is report.contexts[-1]
    assert any("no speed is predicted" in line for line in report.assumptions)


@pytest.mark.parametrize("name", REFUSED_LAYOUTS)
def test_files_that_cannot_be_streamed_in_place_do_not_fit_unless_whole(tmp_path: Path, name: str) -> None:
    """As load has it."""
    definition, quantization, change, says = REFUSED_LAYOUTS[name]
    converted = make_tiny(tmp_path / "mlx", DEFINITIONS[definition], quantization=quantization)
    other = rewritten(converted, tmp_path / "other", change)
    whole, half = (
        mlxmoe.plan(other, memory="1GB", contexts=[64], experts=experts).contexts[0] for experts in ("all", "50%")
    )
    assert (whole.verdict, half.verdict) == ("resident", "does not fit")
    assert says in (half.why or "")
    assert f"mlx_lm.convert --hf-path {other}" in (half.why or "")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"chip": "m9"}, PlanError, "There is no chip 'm9' in the table: m1, m1-pro"),
        ({"memory": "plenty"}, MemoryBudgetError, "memory='plenty' is not a size"),
        ({"contexts": ["many"]}, MemoryBudgetError, "context='many' is no number of tokens"),
        ({"contexts": []}, PlanError, "No context was named"),
        ({"experts": "some"}, MemoryBudgetError, "experts='some' is not a size"),
        ({"bits": 4}, PlanError, "the config says that these are"),
        ({"read_rate": "fast", "chip": "m4"}, MemoryBudgetError, "read_rate='fast' is not a size"),
        ({"kv_bits": 5}, mlxmoe.WindowError, "kv_bits=5"),
    ],
)
def test_bad_input_is_one_error_that_says_what_to_do(
    tiny: Path, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        mlxmoe.plan(tiny, **options)
    assert says in str(caught.value)


def test_an_unknown_model_type_is_loads_own_error(tmp_path: Path) -> None:
    file = config_file(tmp_path, {**QWEN3_MOE, "model_type": "no_such_model"})
    for model in (file, file.parent):
        with pytest.raises(UnsupportedModelError, match="no_such_model, which the installed mlx-lm does not know"):
            mlxmoe.plan(model)
    with pytest.raises(PlanError, match="bits=7"):
        mlxmoe.plan(config_file(tmp_path / "other", QWEN3_MOE), bits=7)
    with pytest.raises(mlxmoe.ModelError, match="quantised with gptq"):
        mlxmoe.plan(config_file(tmp_path / "gptq", {**QWEN3_MOE, "quantization_config": {"quant_method": "gptq"}}))


def test_contexts_are_written_as_people_write_them() -> None:
    assert [parse_tokens(text) for text in ("4k", "128K", " 1m", 4096, "300")] == [4096, 131072, 2**20, 4096, 300]


def test_a_report_is_plain_values_and_says_what_is_predicted(tiny: Path) -> None:
    report = mlxmoe.plan(tiny, memory="8GB", chip="m4-pro")
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["basis"] == {
        "weights": "exact", "target.rates": "published or assumed: see assumptions", "contexts": "predicted",
        "together": "predicted", "measured": [],
    }  # fmt: skip
    assert plain["recommended"] == 512
    given = mlxmoe.plan(tiny, memory="8GB", rates=Rates(100e9))
    assert given.as_dict()["basis"]["target.rates"] == "given by the caller"
    assert "the rates are those that were given" in given.assumptions
    assert plain["contexts"][-1]["plan"]["context"] == 512


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`mlxmoe plan` in a process of its own: huggingface-hub reads its environment once, when it is imported."""
    env = {
        **os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "2",
        "COLUMNS": "80", **environment,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "mlxmoe", "plan", *arguments], capture_output=True, text=True, timeout=300, env=env
    )


def test_the_command_prints_a_table_that_says_it_is_predicted() -> None:
    done = command("plan", "--memory", "8GB", "--chip", "m4", "--context", "128,256,1k")
    assert done.exit_code == 0, done.stderr
    for words in ("figures in the table are predicted", "Nothing was measured", "→ ", "resident", "Warning: 1024"):
        assert words in done.stdout
    assert max(len(line) for line in done.stdout.split("\n\n")[1].splitlines()) <= 80
    plain = json.loads(command("plan", "--memory", "8GB", "--json").stdout)
    assert plain["model"] == "built-in demo model"
    assert command("plan", "--chip", "m9").exit_code == 2
    assert command("plan", "--memory", "x").exit_code == 5


@pytest.mark.slow
def test_a_hub_ids_weights_are_not_downloaded(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", {**QWEN3_MOE, "moe_intermediate_size": 256, "vocab_size": 4096})
    size = (folder / "model.safetensors").stat().st_size
    with StandIn({"org/tiny": folder}).running() as hub:
        machine = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url}
        done = in_a_process("org/tiny", "--memory", "8GB", "--chip", "m4", "--json", **machine)
        assert done.returncode == 0, done.stderr
        assert "%|" not in done.stderr
        assert hub.sent["model.safetensors"] <= 100_001 < size
        assert hub.sent["tokenizer.json"] == 0
        sent = dict(hub.sent)
        gone = in_a_process("org/absent", **machine)
    assert gone.returncode == 3
    assert "The hub has no org/absent" in gone.stderr
    ours, theirs = json.loads(done.stdout), mlxmoe.plan(folder, memory="8GB", chip="m4").as_dict()
    assert ours["weights"] == "headers"
    for field in ("params", "trunk_bytes", "expert_bytes", "contexts"):
        assert ours[field] == json.loads(json.dumps(theirs[field])), field
    assert sent["config.json"] > 0


def test_a_hub_out_of_reach_is_said_with_what_needs_none(tmp_path: Path) -> None:
    machine = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = in_a_process("org/tiny", **machine)
    assert done.returncode == 4
    assert "A config.json alone needs no network" in done.stderr
    offline = in_a_process("org/tiny", **machine, HF_HUB_OFFLINE="1")
    assert offline.returncode == 4
    assert "HF_HUB_OFFLINE is set" in offline.stderr


def test_without_a_network_a_config_is_enough(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tiny / "config.json", bare)
    for model in (bare, bare / "config.json"):
        assert command("plan", model).exit_code == 0


@pytest.mark.skipif(sys.platform == "darwin", reason="with a GPU prefill takes another peak")
def test_the_table_in_the_readme_is_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    shown = readme.split("$ mlxmoe plan ")[1].split("```")[0]
    line, _, printed = shown.partition("\n")
    config_file(tmp_path / "Qwen3-30B-A3B", CONFIGS["Qwen3-30B-A3B"])
    monkeypatch.chdir(tmp_path)
    done = command("plan", *line.split())
    assert done.exit_code == 0, done.stderr
    assert printed.split() == done.stdout.split()
