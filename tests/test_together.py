"""How many people a machine serves: distinct experts, KV of all replies, and sentences that promise no more."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import command
from definitions import DEFINITIONS
from hypothesis import given
from hypothesis import strategies as st
from model_facts import CONFIGS, PUBLISHED_TOGETHER, PublishedTogether
from test_layouts import REFUSED_LAYOUTS, rewritten
from test_planning import DENSE, config_file
from tiny import make_tiny

import mlxmoe
from mlxmoe import MemoryBudgetError, PlanError, SavedStateError, Trace, load
from mlxmoe.cli.plan_together import together_markdown
from mlxmoe.memory.plan import Plan
from mlxmoe.opening import open_folder
from mlxmoe.tuning.outline import outlined
from mlxmoe.tuning.report import rate_down
from mlxmoe.tuning.roofline import Rates, Step, decode_s, default_hit_curve
from mlxmoe.tuning.wanted import shared_by, wanted_evenly, wanted_in
from mlxmoe.tuning.workload import Workload

SHARED_TRACES = Path(__file__).parent.parent.parent / "shared" / "traces"
SERVING = (Path(__file__).parent.parent / "docs" / "serving.md").read_text(encoding="utf-8")
SERVED = ("Qwen3-30B-A3B", "gpt-oss-20b", "gpt-oss-120b")  # in the docs' table


def a_trace(tokens: int, layers: int, num_experts: int, top_k: int, seed: int = 0) -> Trace:
    """Of a router that has its favourites."""
    draw = np.random.default_rng(seed)
    favour = draw.exponential(size=(layers, num_experts))
    noise = draw.gumbel(size=(tokens, layers, num_experts))
    experts = np.argsort(-(np.log(favour) + noise), axis=2)[:, :, :top_k]
    return Trace(experts.astype(np.uint16), (num_experts,) * layers)


def test_distinct_experts_are_the_average_over_all_draws_from_a_trace() -> None:
    trace = a_trace(tokens=6, layers=2, num_experts=8, top_k=3)
    for layer, wanted in enumerate(wanted_in(trace)):
        for texts in (1, 2, 3):
            draws = product(trace.experts[:, layer].tolist(), repeat=texts)
            counted = [len(set().union(*draw)) for draw in draws]
            assert wanted(texts) == pytest.approx(sum(counted) / len(counted), abs=1e-12)


@given(num_experts=st.integers(1, 512), top_k=st.integers(1, 16), texts=st.integers(1, 100))
def test_experts_asked_for_evenly_are_the_most_that_texts_can_want(num_experts: int, top_k: int, texts: int) -> None:
    top_k = min(top_k, num_experts)
    wanted = wanted_evenly(num_experts, top_k)
    assert wanted(1) == pytest.approx(top_k)
    assert wanted(texts) <= wanted(texts + 1) + 1e-9
    assert top_k - 1e-9 <= wanted(texts) <= min(num_experts, texts * top_k) + 1e-9
    trace = a_trace(tokens=4, layers=1, num_experts=num_experts, top_k=top_k)
    assert wanted_in(trace)[0](texts) <= wanted(texts) + 1e-9


@given(share=st.floats(0, 1), texts=st.integers(1, 100))
def test_a_cache_that_more_texts_share_hits_less(share: float, texts: int) -> None:
    alone = default_hit_curve(128, 8)
    fewer, more = shared_by(texts, alone)(share), shared_by(texts + 1, alone)(share)
    assert 0 <= more <= fewer + 1e-12
    assert fewer <= alone(share) + 1e-12
    assert shared_by(1, alone)(share) == pytest.approx(alone(share))
    assert shared_by(texts, alone)(1.0) == 1


def replay(texts: Sequence[np.ndarray[Any, Any]], layer: int, slots: int) -> tuple[int, int]:
    """Misses and distinct experts wanted of an LRU of `slots` that all `texts` share, a token of each in a step."""
    held: OrderedDict[int, None] = OrderedDict()
    misses = wants = 0
    steps = min(len(text) for text in texts)
    for step in range(steps):
        wanted = dict.fromkeys(int(expert) for text in texts for expert in text[step, layer])
        if step >= steps // 4:  # once it is warm
            wants += len(wanted)
            misses += sum(expert not in held for expert in wanted)
        for expert in wanted:
            held[expert] = None
            held.move_to_end(expert)
        while len(held) > slots:
            held.popitem(last=False)
    return misses, wants


@pytest.mark.skipif(not SHARED_TRACES.is_dir(), reason="needs recorded traces of real models")
@pytest.mark.parametrize(("texts", "too_many"), [(2, 0.026), (4, 0.103), (8, 0.188)])
def test_how_far_the_formula_is_from_texts_of_a_real_model(texts: int, too_many: float) -> None:
    """Side by side, they want fewer than if each drew its own evenly; popularity over all of them explains it."""
    traces = [Trace.load(SHARED_TRACES / f"gpt-oss-20b-{n}.npz") for n in range(8)]
    tokens = min(trace.tokens for trace in traces)
    used = np.zeros((8, tokens, 24, 32), bool)
    for text, trace in enumerate(traces):
        np.put_along_axis(used[text], trace.experts[:tokens].astype(np.int64), True, 2)
    counted = used.reshape(8 // texts, texts, tokens, 24, 32).any(axis=1).sum(axis=-1).mean()
    assert wanted_evenly(32, 4)(texts) / counted - 1 == pytest.approx(too_many, abs=0.001)
    every = Trace(np.concatenate([trace.experts[:tokens] for trace in traces]), traces[0].num_experts)
    assert np.mean([wanted(texts) for wanted in wanted_in(every)]) == pytest.approx(counted, rel=0.015)


@pytest.mark.skipif(not SHARED_TRACES.is_dir(), reason="needs recorded traces of real models")
@pytest.mark.parametrize("slots", [12, 16, 20, 24])
def test_hits_of_a_shared_cache_are_near_what_a_replay_gives(slots: int) -> None:
    texts = [Trace.load(SHARED_TRACES / f"gpt-oss-20b-{n}.npz").experts for n in range(8)]
    for together in (2, 4, 8):
        counted = [
            replay(texts[first : first + together], layer, slots)
            for first in range(0, 8, max(4, together)) for layer in range(0, 24, 6)
        ]  # fmt: skip
        misses, wants = (sum(column) for column in zip(*counted, strict=True))
        predicted = shared_by(together, default_hit_curve(32, 4))(slots / 32)
        assert predicted == pytest.approx(1 - misses / wants, abs=0.07)


@pytest.mark.parametrize("published", PUBLISHED_TOGETHER, ids=lambda p: f"{p.model}, {p.machine}")
def test_published_rates_of_batches_are_met(published: PublishedTogether, tmp_path: Path) -> None:
    """Within 25 %: too high by a fifth with several at once, nothing of which was fitted to them."""
    with outlined(config_file(tmp_path, CONFIGS[published.model]), None, published.bits) as outline:
        work = Workload.of(open_folder(outline.folder))
    layers = work.opened.layers
    plan = Plan(0, 0, 0, 0, 0, 0, 0, None, None, 512, {layer.path: layer.num_experts for layer in layers})
    wanted = {layer.path: wanted_evenly(layer.num_experts, layer.top_k) for layer in layers}
    rates = Rates(published.bandwidth_bytes_per_s, published.flops_per_s)
    for replies, seen in published.tokens_per_s.items():
        step = work.step_of(plan, {}, published.context, work.distinct(wanted, replies), replies)
        predicted = replies / decode_s(step, rates)
        print(f"{replies} at once: predicted {predicted:.1f}, published {seen}")
        assert predicted == pytest.approx(seen, rel=0.25)


def test_what_a_step_computes_counts_where_it_takes_longer_than_what_it_reads() -> None:
    rates = Rates(100e9, 1e12, efficiency=0.5, layer_s=1e-3, prefill_efficiency=0.5)
    assert decode_s(Step(50e9, 10, flops=0.4e12), rates) == pytest.approx(1 + 0.01)
    assert decode_s(Step(50e9, 10, flops=1e12), rates) == pytest.approx(2 + 0.01)
    assert decode_s(Step(50e9, 10, flops=1e12), Rates(100e9, efficiency=0.5, layer_s=1e-3)) == pytest.approx(1.01)


def test_what_fits_together_is_what_the_engine_admits(tiny: Path) -> None:
    context, pool_bytes = 500, 64 * 2**20
    report = mlxmoe.plan(
        tiny, memory=(pool_bytes + 9_000_000) * 3 // 2, contexts=[context], together=range(1, 25), chip="m4"
    )
    fits = [row.replies for row in report.together if row.fits]
    assert 1 < max(fits) < 24, "the budget is for some of them"
    assert fits == list(range(1, max(fits) + 1))
    with load(tiny, memory=report.target.budget_bytes, context=context) as engine:
        for row in report.together[1:]:
            lease = engine._balance.lease()
            if row.plan is None:
                with pytest.raises(MemoryBudgetError, match=f"The KV caches of {row.replies} texts in one batch"):
                    lease.begin(context + 256, texts=row.replies)
                continue
            lease.begin(context + 256, texts=row.replies)
            assert lease.nbytes == row.plan.kv_bytes
            assert sum(layer.slots for layer in engine.stats().layers) == sum(row.plan.slots.values())
            assert row.plan.total_bytes <= report.target.budget_bytes
            lease.keep(0)


def test_more_replies_take_experts_and_the_sentences_say_how_many_are_served(tmp_path: Path) -> None:
    file = config_file(tmp_path, CONFIGS["Qwen3-30B-A3B"])
    report = mlxmoe.plan(file, memory="32GiB", chip="m4", bits=4, together=[8, "2", 1, 64])
    assert [row.replies for row in report.together] == [1, 2, 8, 64]
    assert {row.context for row in report.together} == {8192}
    one, two, eight, sixty_four = report.together
    alone = report.contexts[0]
    assert (one.plan, one.tokens_per_s, one.full_tokens_per_s) == (
        alone.plan, alone.tokens_per_s, alone.full_tokens_per_s
    )  # fmt: skip
    assert two.plan is not None
    assert eight.plan is not None
    assert two.plan.kv_bytes == 2 * 98304 * (8192 + 256), "rows of a batch grow in steps"
    assert [row.verdict for row in report.together] == ["resident", "resident", "too slow", "does not fit"]
    assert eight.expert_share is not None
    assert eight.expert_share < 1
    assert eight.hit_rate is not None
    assert two.full_tokens_per_s > one.full_tokens_per_s  # type: ignore[operator]
    assert two.each_tokens_per_s < one.each_tokens_per_s  # type: ignore[operator]
    served, more, most = report.people
    assert served.startswith("Serves 4 people at once with 8192 tokens each: KV takes 3.3 GB and all experts stay in")
    assert served.endswith("9.7 tokens/s each, 38 together.")
    for words in ("8 at 8192: KV takes 6.6 GB, 20 % of the experts are not in memory", "the server lets some wait"):
        assert words in more
    assert most.startswith("64 at 8192: does not fit. KV for 64 replies of 8192 tokens takes 53.2 GB")
    assert "an engine gets 22.9 GB" in (sixty_four.why or "")


def test_what_does_not_fit_alone_serves_nobody_and_says_why(tmp_path: Path) -> None:
    file = config_file(tmp_path, CONFIGS["Mixtral-8x7B"])
    report = mlxmoe.plan(file, memory="4GB", chip="m4", bits=4, together=[1, 2])
    assert [row.verdict for row in report.together] == ["does not fit"] * 2
    assert report.people[0].startswith("Serves nobody with 8192 tokens. Trunk (")
    assert report.contexts[0].why in report.people[0]  # type: ignore[operator]


def test_rates_are_never_rounded_up() -> None:
    assert [rate_down(rate) for rate in (3.99, 10.99, 0.999, 9.99, 0.004)] == ["3.9", "10", "0.99", "9.9", "0.00"]


def test_a_model_type_that_cannot_share_a_pass_gains_nothing(tmp_path: Path) -> None:
    llama = mlxmoe.plan(
        config_file(tmp_path, CONFIGS["Llama-4-Scout"]), memory="1TB", chip="m4", bits=4, together=[1, 4]
    )
    one, four = llama.together
    assert four.tokens_per_s == pytest.approx(one.tokens_per_s)
    assert llama.people[0].startswith("Serves 1 person")
    assert any("computed in turns" in line for line in llama.assumptions)


def test_a_dense_model_and_a_machine_of_unknown_speed_are_served_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxmoe.memory.sources.Sources.chip_brand", lambda self: None)
    report = mlxmoe.plan(config_file(tmp_path, DENSE), memory="8GB", together=[1, 3])
    assert [(row.expert_share, row.hit_rate, row.each_tokens_per_s) for row in report.together] == [(None,) * 3] * 2
    assert report.people[0].startswith("Serves 3 people at once with 512 tokens each: KV takes")
    done = command("plan", tmp_path / "config.json", "--memory", "8GB", "--together", "1,3")
    assert "does not fit" not in done.stdout
    assert "Serves 3 people" in done.stdout


def test_a_trace_of_the_model_takes_the_place_of_guesses(tiny: Path, tmp_path: Path) -> None:
    trace = a_trace(tokens=200, layers=3, num_experts=8, top_k=2)
    file = trace.save(tmp_path / "routing.npz")
    options: dict[str, Any] = {"memory": "8GB", "chip": "m4", "contexts": [256], "experts": "50%", "together": [1, 4]}
    guessed, counted = (mlxmoe.plan(tiny, **options, trace=given) for given in (None, file))
    assert counted == mlxmoe.plan(tiny, **options, trace=trace)
    assert counted.contexts[0].hit_rate == pytest.approx(mlxmoe.routing_stats(trace).hit_rates[4])
    assert counted.together[1].tokens_per_s != guessed.together[1].tokens_per_s
    assert any("replays the trace of 200 tokens" in line for line in counted.assumptions)
    assert any("drawn at random from the trace" in line for line in counted.assumptions)
    done = command("plan", tiny, "--memory", "8GB", "--together", "4", "--trace", file)
    assert "replays the trace" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"together": [0]}, PlanError, "together=0 is no number of replies at once: from 1 to 1024"),
        ({"together": ["many"]}, PlanError, "together='many'"),
        ({"together": ["²"]}, PlanError, "together='²'"),
        ({"together": [True]}, PlanError, "together=True"),
        ({"together": [2.0]}, PlanError, "together=2.0"),
        ({"together": [1025]}, PlanError, "together=1025"),
        ({"together": []}, PlanError, "No number of replies was named"),
        ({"trace": a_trace(5, 2, 8, 2)}, PlanError, "The trace is of 2 layers"),
        ({"trace": a_trace(5, 3, 8, 3)}, PlanError, "3 a token, but the model has 3 with up to 8, 2 a token"),
        ({"trace": a_trace(0, 3, 8, 2)}, PlanError, "The trace holds no token"),
        ({"trace": "/none/routing.npz"}, SavedStateError, "/none/routing.npz"),
    ],
)
def test_bad_input_is_one_error_that_says_what_to_do(
    tiny: Path, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        mlxmoe.plan(tiny, memory="8GB", **options)
    assert says in str(caught.value)


def test_files_that_cannot_be_streamed_serve_as_many_as_fit_beside_all_experts(tmp_path: Path) -> None:
    definition, quantization, change, says = next(iter(REFUSED_LAYOUTS.values()))
    converted = make_tiny(tmp_path / "mlx", DEFINITIONS[definition], quantization=quantization)
    other = rewritten(converted, tmp_path / "other", change)
    report = mlxmoe.plan(other, memory="150MB", contexts=[64], together=range(1, 1025, 64))
    assert report.together[0].verdict == "resident"
    assert {row.verdict for row in report.together} == {"resident", "does not fit"}
    assert says in (report.together[-1].why or "")


def test_the_command_prints_one_table_and_everything_as_json() -> None:
    done = command("plan", "--memory", "8GB", "--chip", "m4", "--context", "128,256", "--together", "1,2,1024")
    assert done.exit_code == 0, done.stderr
    for words in ("figures in the table are predicted", "Nothing was measured", "Serves ", "with 256 tokens"):
        assert words in done.stdout
    assert "Take " not in done.stdout
    assert max(len(line) for line in done.stdout.split("\n\n")[1].splitlines()) <= 80
    plain = json.loads(command("plan", "--memory", "8GB", "--chip", "m4", "--together", "2", "--json").stdout)
    assert plain["basis"]["together"] == "predicted"
    (row,) = plain["together"]
    assert (row["replies"], row["context"], row["plan"]["context"]) == (2, 256, 256)
    assert row["each_tokens_per_s"] == row["full_tokens_per_s"] / 2
    assert plain["people"]
    printed = command("plan", "--memory", "8GB", "--chip", "m4", "--together", "2", "--markdown").stdout.splitlines()
    assert printed[2].startswith("| built-in demo model | 2 | 256 |")
    assert command("plan", "--together", "0").exit_code == 2
    assert command("plan", "--markdown").exit_code == 2


@pytest.mark.skipif(sys.platform == "darwin", reason="with a GPU prefill takes another peak")
def test_the_table_in_the_docs_is_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = SERVING.split("## How many people")[1].split("\n## ")[0]
    words = section.split("mlxmoe plan MODEL ")[1].splitlines()[0].split()
    asked = dict(zip(words[::2], words[1::2], strict=True))
    assert asked.keys() == {"--memory", "--chip", "--together"}
    reports = []
    for model in SERVED:
        file = Path(f"{model}.json")
        file.write_text(json.dumps(CONFIGS[model]))
        report = mlxmoe.plan(
            file, memory=asked["--memory"], chip=asked["--chip"], together=asked["--together"].split(","),
            bits=None if "quantization_config" in CONFIGS[model] else 4,
        )  # fmt: skip
        assert report.people[0] in " ".join(section.split()), report.people[0]
        reports.append(report)
    assert together_markdown(reports) in section
