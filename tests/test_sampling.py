"""Sampling: mlx-lm's distribution, seeds that hold, values that are checked."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler

from mlxmoe import Engine, SamplingError, load
from mlxmoe.sampling import Sampler, SamplingSettings

LOGITS = mx.random.normal((1, 50), key=mx.random.key(5)) * 3


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_k": True},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0},
        {"repetition_penalty": -2.0},
        {"repetition_penalty": 1e-45},
        {"temperature": 10**400},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.5},
        {"presence_penalty": 2.5},
        {"frequency_penalty": "much"},
        {"logit_bias": {"7": 1}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {7: 101}},
        {"logit_bias": [7]},
        {"top_logprobs": 21},
        {"top_logprobs": -1},
    ],
)
def test_a_value_out_of_range_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=next(iter(bad))):
        SamplingSettings(**bad)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "top_k": 10},
    ],
)
def test_draws_are_those_of_mlx_lm_with_the_same_key(settings: dict[str, Any]) -> None:
    ours = Sampler(SamplingSettings(**settings, seed=3))
    theirs = make_sampler(
        temp=settings["temperature"],
        top_p=settings.get("top_p", 0.0),
        top_k=settings.get("top_k", 0),
        min_p=settings.get("min_p", 0.0),
    )
    logprobs = LOGITS - mx.logsumexp(LOGITS, keepdims=True)
    mx.random.seed(3)  # both split the same key in two for each draw
    assert [ours(LOGITS, [])[0].item() for _ in range(40)] == [theirs(logprobs).item() for _ in range(40)]


def test_greedy_takes_the_likeliest_and_its_logprob() -> None:
    token, logprob, _ = Sampler(SamplingSettings())(LOGITS, []).sampled()
    assert token == mx.argmax(LOGITS).item()
    assert logprob == pytest.approx((LOGITS[0, token] - mx.logsumexp(LOGITS)).item())


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 5e-324])
def test_a_minute_temperature_is_greedy_and_no_nan(temperature: float) -> None:
    assert Sampler(SamplingSettings(temperature=temperature))(LOGITS, [])[0].item() == mx.argmax(LOGITS).item()


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    many = [Sampler(SamplingSettings(temperature=1.0, top_k=k, seed=1))(LOGITS, [])[0].item() for k in (0, 50, 10**6)]
    assert len(set(many)) == 1


def test_repetition_penalty_makes_the_same_token_less_likely() -> None:
    best = int(mx.argmax(LOGITS).item())
    plain = Sampler(SamplingSettings())(LOGITS, [best])
    penalized = Sampler(SamplingSettings(repetition_penalty=100.0))(LOGITS, [best])
    assert plain[0].item() == best != penalized[0].item()
    worst = int(mx.argmin(LOGITS).item())
    far_back = Sampler(SamplingSettings(repetition_penalty=100.0))(LOGITS, [best] + [worst] * 20)
    assert far_back[0].item() == best, "it looks back 20 tokens"


def test_penalties_count_what_the_reply_has_said_and_not_the_prompt() -> None:
    best = int(mx.argmax(LOGITS).item())
    sampler = Sampler(SamplingSettings(presence_penalty=1.0, frequency_penalty=0.5, top_logprobs=20))
    before = dict(sampler(LOGITS, [best]).sampled().top)
    for _ in range(3):
        sampler.took(best)
    after = dict(sampler(LOGITS, [best]).sampled().top)
    other = next(token for token in after if token != best)
    fallen = (before[best] - before[other]) - (after[best] - after[other])
    assert fallen == pytest.approx(1.0 + 3 * 0.5, abs=1e-5)


def test_a_bias_moves_a_token_up_and_down() -> None:
    worst, best = int(mx.argmin(LOGITS).item()), int(mx.argmax(LOGITS).item())
    assert Sampler(SamplingSettings(logit_bias={worst: 100}))(LOGITS, []).sampled().token == worst
    assert Sampler(SamplingSettings(logit_bias={best: -100}))(LOGITS, []).sampled().token != best


def test_a_bias_on_what_is_no_token_is_refused_before_anything_runs(demo: Engine) -> None:
    for ask in (demo.stream, demo.session().stream):
        with pytest.raises(SamplingError, match="2048"):
            ask("Once", logit_bias={2048: 1.0})


def test_the_most_probable_tokens_are_told_with_theirs_in_order() -> None:
    token, logprob, top = Sampler(SamplingSettings(top_logprobs=5))(LOGITS, []).sampled()
    logprobs = (LOGITS[0] - mx.logsumexp(LOGITS)).tolist()
    expected = sorted(range(50), key=lambda i: -logprobs[i])[:5]  # type: ignore[index]
    assert [token for token, _ in top] == expected
    assert top[0] == (token, logprob)


def test_a_constraint_decides_what_may_be_drawn_and_hears_what_was() -> None:
    class OnlyOdd:
        def __init__(self) -> None:
            self.heard: list[int] = []

        def allowed(self) -> mx.array | None:
            return None if self.heard else mx.arange(50) % 2 == 1

        def took(self, token: int) -> None:
            self.heard.append(token)

    odd = OnlyOdd()
    sampler = Sampler(SamplingSettings(temperature=5.0, seed=1), odd)
    assert all(sampler(LOGITS, []).sampled().token % 2 == 1 for _ in range(30))
    sampler.took(7)
    assert odd.heard == [7]
    assert any(sampler(LOGITS, []).sampled().token % 2 == 0 for _ in range(30))


def test_the_users_random_state_is_left_alone() -> None:
    mx.random.seed(11)
    expected = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(11)
    sampler = Sampler(SamplingSettings(temperature=1.0, top_p=0.9, top_k=5, min_p=0.01, seed=4))
    for _ in range(5):
        sampler(LOGITS, [])
    assert mx.random.uniform(shape=(3,)).tolist() == expected


def test_a_seed_gives_the_same_text_at_every_capacity_and_when_interleaved() -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 42, "max_tokens": 20}
    with load(experts="25%") as small, load(experts="all") as whole:
        alone = [chunk.token for chunk in whole.stream("And God said", **options)]
        one, two = small.stream("And God said", **options), small.stream("And God said", **options)
        together = [(a.token, b.token) for a, b in zip(one, two, strict=True)]
        assert together == [(token, token) for token in alone]
        other = [chunk.token for chunk in whole.stream("And God said", **{**options, "seed": 43})]
        assert other != alone


def test_without_a_seed_texts_differ() -> None:
    with load() as engine:
        texts = {engine.generate("And", temperature=1.5, max_tokens=12) for _ in range(4)}
    assert len(texts) > 1
