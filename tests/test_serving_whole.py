"""The whole server, from a client's socket to the model and back: the demo model with a chat template."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from serving_clients import demo_with_chat, running

from mlxmoe import Engine, PrefixStore, load
from mlxmoe.serving.desk.desk import EngineDesk
from mlxmoe.serving.desk.limits import DeskLimits

PROMPTS = ["In the beginning", "And it came to pass", "Blessed are the meek", "The LORD said unto"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_with_chat(tmp_path_factory.mktemp("chat") / "demo-chat")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Engine]:
    with load(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def desk(folder: Path) -> Iterator[EngineDesk]:
    desk = EngineDesk(
        lambda: load(folder, experts="50%", prefixes=PrefixStore("10MB", exact=False)), "demo-chat", DeskLimits()
    )
    desk.start()
    yield desk
    desk.close()


@pytest.fixture(scope="module")
def url(desk: EngineDesk) -> Iterator[str]:
    with running(desk) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def chat(client: OpenAI, prompt: str, **more: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 10, **more}
    return client.chat.completions.create(
        model="demo-chat", messages=[{"role": "user", "content": prompt}], **options
    )


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "not within a minute"
        time.sleep(0.01)


def test_a_chat_is_what_the_engine_says(client: OpenAI, alone: Engine) -> None:
    for prompt in PROMPTS[:2]:
        said = chat(client, prompt)
        chunks = list(alone.stream(prompt, max_tokens=10))
        assert said.choices[0].message.content == "".join(chunk.text for chunk in chunks)
        assert said.usage.prompt_tokens == chunks[0].prompt_tokens
        assert said.usage.completion_tokens == len(chunks)
        streamed = list(chat(client, prompt, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
        assert text == said.choices[0].message.content
        assert streamed[-1].usage.completion_tokens == len(chunks)


def test_clients_at_once_each_get_their_own_words(client: OpenAI, alone: Engine) -> None:
    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda i: chat(client, PROMPTS[i % 4], max_tokens=10 + i), range(8)))
    for i, one in enumerate(said):
        assert one.choices[0].message.content == alone.generate(PROMPTS[i % 4], max_tokens=10 + i)


def test_seeds_choices_and_stops_work_as_with_the_engine(client: OpenAI, alone: Engine) -> None:
    said = chat(client, PROMPTS[0], temperature=1.0, seed=5, n=2, stop=["e"], max_tokens=30)
    first = alone.generate(PROMPTS[0], temperature=1.0, seed=5, stop="e", max_tokens=30)
    assert said.choices[0].message.content == first
    assert [choice.index for choice in said.choices] == [0, 1]
    assert "e" not in said.choices[1].message.content


def test_log_probabilities_are_the_models(client: OpenAI, alone: Engine) -> None:
    said = chat(client, PROMPTS[1], logprobs=True, top_logprobs=3, max_tokens=4)
    chunks = list(alone.stream(PROMPTS[1], max_tokens=4, top_logprobs=3))
    for told, chunk in zip(said.choices[0].logprobs.content, chunks, strict=True):
        assert told.logprob == pytest.approx(chunk.logprob, abs=1e-4)
        expected = [logprob for _, logprob in chunk.top_logprobs]
        assert [one.logprob for one in told.top_logprobs] == pytest.approx(expected, abs=1e-4)


def test_a_prompt_can_be_scored_without_a_reply(client: OpenAI, alone: Engine) -> None:
    said = client.completions.create(model="demo-chat", prompt=PROMPTS[0], echo=True, logprobs=1, max_tokens=0)
    told = said.choices[0].logprobs
    assert told is not None
    tokens = alone.encode(PROMPTS[0], raw=True)
    assert said.choices[0].text == PROMPTS[0] == "".join(told.tokens or ())
    assert len(told.token_logprobs or ()) == len(tokens)
    assert (told.token_logprobs or (0,))[0] is None


def test_a_schema_is_kept(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    said = chat(client, PROMPTS[0], response_format=form, temperature=1.0, max_tokens=40)
    assert json.loads(said.choices[0].message.content)["n"] in (1, 2)


def test_a_call_can_be_forced(client: OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "count", "parameters": parameters}}
    said = chat(client, PROMPTS[0], tools=[tool], tool_choice="required", temperature=1.0, max_tokens=40).choices[0]
    [call] = said.message.tool_calls
    assert call.function.name == "count"
    assert json.loads(call.function.arguments)["n"] in (1, 2)
    assert said.finish_reason == "tool_calls"


def test_more_than_the_context_is_refused_with_the_numbers(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        chat(client, "word " * 60, max_tokens=250)
    assert refused.value.code == "context_length_exceeded"
    assert "256" in refused.value.message
    assert "250" in refused.value.message


def test_the_next_turn_of_a_conversation_reads_only_what_is_new(client: OpenAI) -> None:
    turns = [{"role": "user", "content": "And the king of the north went up to the mountain and said " * 3}]
    first = client.chat.completions.create(model="demo-chat", messages=turns, max_tokens=20, temperature=0)
    turns += [{"role": "assistant", "content": first.choices[0].message.content or ""}]
    turns += [{"role": "user", "content": "And then"}]
    second = client.chat.completions.create(model="demo-chat", messages=turns, max_tokens=2, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_memory(url: str, desk: EngineDesk, stream: bool) -> None:
    body = {"model": "default", "prompt": PROMPTS[0], "max_tokens": 240, "stream": stream, "logit_bias": {"0": -100}}
    begun = desk.status().tokens

    def leave() -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=0.5) as answer:
                next(answer.iter_lines())
        except httpx.TimeoutException:
            pass  # without streaming nothing comes: gone after half a second

    threading.Thread(target=leave).start()
    until(lambda: desk.status().tokens > begun)
    until(lambda: desk.status().active == 0)
    assert desk.status().tokens - begun < 240
    memory = desk.status().memory
    assert memory is not None
    assert memory.kv_bytes == 0


def test_health_metrics_and_status_tell_what_is_so(url: str, client: OpenAI) -> None:
    chat(client, PROMPTS[0])
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    metrics = httpx.get(f"{url}/metrics").text
    assert "mlxmoe" in metrics
    status = httpx.get(f"{url}/api/status?heat=1").json()
    assert status["state"] == "ready"
    assert status["memory"]["plan"]["context"] == 256
    assert len(status["heat"]) == len(status["resident"]) == len(status["stats"]["layers"])
    assert httpx.get(f"{url}/").headers["content-type"].startswith("text/html")
