"""The clients that people use work against the server, over a real port and without any other network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fake_desk import FakeDesk, Script
from serving_clients import running

from mlxmoe.errors import ContextError, QueueFullError
from mlxmoe.serving.jobs import Ask

openai = pytest.importorskip("openai")
# Not by importing it: litellm would ask the network for its prices.
needs_litellm = pytest.mark.skipif(find_spec("litellm") is None, reason="litellm is not installed")
needs_llm = pytest.mark.skipif(find_spec("llm") is None, reason="llm is not installed")

KEY = "sk-a-key-for-tests"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Jena"}}</tool_call>'
HI: list[Any] = [{"role": "user", "content": "Hi"}]
WORDS = "Hello there, friend."


def script(ask: Ask) -> Script:
    """By what the prompt says."""
    said = ask.prompt if isinstance(ask.prompt, str) else json.dumps(list(ask.prompt))
    if "too long" in said:
        return Script(fail=ContextError("The prompt has 9 tokens, but the context is 8."))
    if "full" in said:
        return Script(refuse=QueueFullError("As many wait as the server takes on.", 1.0))
    return Script(tokens=["<think>Hm</think>", CALL]) if ask.tools else Script()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(FakeDesk(script), api_keys=(KEY,)) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)


def test_openai_chats(client: Any) -> None:
    reply = client.chat.completions.create(model="default", messages=HI, logprobs=True, top_logprobs=2, n=2)
    assert [choice.message.content for choice in reply.choices] == [WORDS, WORDS]
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
    assert reply.usage.total_tokens == 17


def test_openai_streams(client: Any) -> None:
    options = {"include_usage": True}
    told = list(client.chat.completions.create(model="default", messages=HI, stream=True, stream_options=options))
    assert "".join(event.choices[0].delta.content or "" for event in told if event.choices) == WORDS
    assert told[-1].usage.completion_tokens == 5
    with client.chat.completions.stream(model="default", messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == WORDS


def test_openai_calls_tools_and_takes_their_results(client: Any) -> None:
    reply = client.chat.completions.create(model="default", messages=HI, tools=[TOOL])
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Jena"}
    assert choice.message.reasoning_content == "Hm"
    result = {"role": "tool", "content": "Rain", "tool_call_id": choice.message.tool_calls[0].id}
    messages = [*HI, choice.message.model_dump(), result]
    assert client.chat.completions.create(model="default", messages=messages).choices[0].message.content == WORDS
    with client.chat.completions.stream(model="default", messages=HI, tools=[TOOL]) as stream:
        assert stream.get_final_completion().choices[0].message.tool_calls[0].function.name == "weather"


def test_openai_completes(client: Any) -> None:
    reply = client.completions.create(model="default", prompt="Hi", logprobs=1, echo=True, max_tokens=2)
    assert reply.choices[0].text == "HiHello there"
    assert reply.choices[0].logprobs.tokens == ["H", "i", "Hello", " there"]
    told = client.completions.create(model="default", prompt="Hi", stream=True)
    assert "".join(event.choices[0].text for event in told) == WORDS


def test_openai_lists_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny/chat-moe"]
    assert client.models.retrieve("tiny/chat-moe").id == "tiny/chat-moe"


def test_openai_raises_what_it_raises_for_openai(client: Any, url: str) -> None:
    def chat(content: str, asking: Any = client, **more: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        return asking.chat.completions.create(**{"model": "default", "messages": messages, **more})

    with pytest.raises(openai.BadRequestError) as raised:
        chat("too long")
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.RateLimitError):
        chat("full")
    with pytest.raises(openai.NotFoundError):
        chat("Hi", model="gpt-9")
    with pytest.raises(openai.BadRequestError) as raised:
        chat("Hi", temperature=3)
    assert raised.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        chat("Hi", openai.OpenAI(base_url=url, api_key="wrong", max_retries=0))
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="default", input="Hi")
    with pytest.raises(openai.BadRequestError):
        list(chat("too long", stream=True))


def run(program: str, url: str, tmp_path: Path) -> str:
    """In a process of its own: these clients are slow to import, and keep things in the user's home."""
    environment = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LLM_USER_PATH": str(tmp_path),
        "HOME": str(tmp_path),
        "OPENAI_API_KEY": KEY,
    }
    done = subprocess.run(
        [sys.executable, "-c", program, url, KEY], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


LITELLM = """
import json, sys
import litellm
litellm.suppress_debug_info = True
url, key = sys.argv[1:]
common = dict(model="openai/default", api_base=url, api_key=key, num_retries=0, max_retries=0)
hi = [{"role": "user", "content": "Hi"}]
tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
print(litellm.completion(messages=hi, **common).choices[0].message.content)
stream = litellm.completion(messages=hi, stream=True, **common)
print("".join(event.choices[0].delta.content or "" for event in stream))
print(litellm.completion(messages=hi, tools=[tool], **common).choices[0].message.tool_calls[0].function.arguments)
try:
    litellm.completion(messages=[{"role": "user", "content": "too long"}], **common)
except litellm.BadRequestError as error:
    print(type(error).__name__)
try:
    litellm.completion(messages=[{"role": "user", "content": "full"}], **common)
except litellm.RateLimitError as error:
    print(type(error).__name__)
"""


@needs_litellm
@pytest.mark.slow
def test_litellm_chats_streams_calls_tools_and_understands_errors(url: str, tmp_path: Path) -> None:
    lines = run(LITELLM, url, tmp_path).splitlines()
    assert lines[:2] == [WORDS, WORDS]
    assert json.loads(lines[2]) == {"city": "Jena"}
    assert lines[3] in ("ContextWindowExceededError", "BadRequestError")
    assert lines[4] == "RateLimitError"


LLM = """
import sys
import llm
model = llm.get_model("served")
key = sys.argv[2]
print(model.prompt("Hi", stream=False, key=key).text())
print("".join(model.prompt("Hi", stream=True, key=key)))
try:
    model.prompt("too long", stream=False, key=key).text()
except Exception as error:
    print(type(error).__name__)
"""


@needs_llm
@pytest.mark.slow
def test_llm_chats_and_streams(url: str, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: served\n  model_name: default\n  api_base: {url}\n  api_key_name: served\n", encoding="utf-8"
    )
    assert run(LLM, url, tmp_path).splitlines() == [WORDS, WORDS, "BadRequestError"]
