"""What is asked for in OpenAI's words reaches the desk, and what comes back has OpenAI's shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_desk import FACTS, FakeDesk, Script
from pydantic import BaseModel, ValidationError
from serving_clients import Local, events

from mlxmoe.errors import PromptError
from mlxmoe.serving.http import replies_schema as told
from mlxmoe.serving.http.schemas import ChatRequest, CompletionRequest
from mlxmoe.serving.jobs import Ask

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Jena"}}</tool_call>'


def asked(**request: Any) -> Ask:
    """What the desk is asked for by a chat request."""
    server = Local()
    answer = server.post(
        "/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": "Hi"}], **request}
    )
    assert answer.status_code == 200, answer.text
    return server.desk.jobs[0].ask


def test_a_chat_request_reaches_the_desk_whole() -> None:
    ask = asked(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, frequency_penalty=1, seed=-1,
        presence_penalty=-1, logit_bias={"7": -100, "8": 0}, stop=["a", "b"], max_tokens=9, top_logprobs=3,
        chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low", tools=[TOOL],
    )  # fmt: skip
    assert ask.options == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "seed": 2**64 - 1, "stop": ("a", "b"), "max_tokens": 9, "frequency_penalty": 1.0, "presence_penalty": -1.0,
        "logit_bias": {7: -100.0}, "top_logprobs": 3,
    }  # fmt: skip
    assert ask.template == {"enable_thinking": False, "reasoning_effort": "low"}
    assert ask.tools is not None
    assert [tool["function"]["name"] for tool in ask.tools] == ["weather"]


def test_what_is_left_out_has_openai_s_defaults() -> None:
    ask = asked()
    assert ask.options["temperature"] == 1.0
    assert "max_tokens" not in ask.options, "as many as the server grants"
    assert (ask.tools, ask.json_schema, ask.score_prompt) == (None, None, False)


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert asked(max_tokens=5, max_completion_tokens=2).options["max_tokens"] == 2


def test_several_replies_with_a_seed_have_different_seeds() -> None:
    server = Local()
    assert server.chat(n=3, seed=7).status_code == 200
    assert [job.ask.options["seed"] for job in server.desk.jobs] == [7, 8, 9]


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}, {"type": "array"}),
    ],
)
def test_a_response_format_is_a_schema_for_the_desk(response_format: Any, schema: Any) -> None:
    assert asked(response_format=response_format).json_schema == schema


def test_messages_are_made_as_templates_take_them() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Jena"}'}}
    ask = asked(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "Weather?", "name": "Jo"},
            {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [call]},
            {"role": "tool", "content": "Rain", "tool_call_id": "call_1"},
        ]
    )
    function = {"name": "weather", "arguments": {"city": "Jena"}}
    assert ask.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?", "name": "Jo"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Rain", "tool_call_id": "call_1"},
    ]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"n": 9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities.1"),
        ({"functions": []}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format"),
        ({"min_tokens": 5}, "min_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(request_: dict[str, Any], param: str) -> None:
    server = Local()
    answer = server.post(
        "/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": "Hi"}], **request_}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert server.desk.jobs == []


def test_harmless_unknown_fields_are_passed_over() -> None:
    asked(store=False, metadata={"a": "b"}, service_tier="auto", something=1, modalities=["text"], ignore_eos=False)


NAMED = {"type": "function", "function": {"name": "weather"}}
OTHER = {"type": "function", "function": {"name": "clock"}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_held_to_the_tools_parameters(choice: Any, stream: bool) -> None:
    server = Local(FakeDesk(Script(tokens=["<think>Hm</think>", '{"city": ', '"Jena"}'])))
    tools = [WEATHER] if choice == "required" else [OTHER, WEATHER]
    answer = server.chat(tools=tools, tool_choice=choice, stream=stream)
    assert server.desk.jobs[0].ask.json_schema == {**CITY, "additionalProperties": False}
    assert len(server.desk.jobs[0].ask.tools or ()) == len(tools)
    choices = [event["choices"][0] for event in events(answer)] if stream else answer.json()["choices"]
    said = [choice["delta"] if stream else choice["message"] for choice in choices]
    [call] = [call for message in said for call in message.get("tool_calls", ())]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Jena"}'}
    assert "".join(message.get("reasoning_content", "") for message in said) == "Hm"
    assert not any(message.get("content") for message in said)
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_one_of_several_tools_has_to_be_called() -> None:
    server = Local(FakeDesk(Script(tokens=['{"name": "clock", "arguments": {}}'])))
    answer = server.chat(tools=[WEATHER, OTHER], tool_choice="required").json()
    names = [form["properties"]["name"]["const"] for form in server.desk.jobs[0].ask.json_schema["anyOf"]]
    assert names == ["weather", "clock"]
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": "{}"}


def test_a_forced_call_that_is_cut_off_is_text() -> None:
    server = Local(FakeDesk(Script(tokens=['{"city": ', '"Je'], reason="length")))
    [choice] = server.chat(tools=[WEATHER], tool_choice="required").json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", '{"city": "Je')
    assert "tool_calls" not in choice["message"]


def test_a_tool_that_is_not_there_cannot_be_forced() -> None:
    error = Local().chat(tools=[OTHER], tool_choice=NAMED).json()["error"]
    assert (error["param"], error["code"]) == ("tool_choice", "invalid_value")


def test_a_model_without_tools_says_so() -> None:
    answer = Local(FakeDesk(model=replace(FACTS, tool_calls=None))).chat(tools=[TOOL])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


def test_tools_that_may_not_be_called_do_not_reach_the_model() -> None:
    server = Local(FakeDesk(Script(tokens=[CALL])))
    answer = server.chat(tools=[TOOL], tool_choice="none").json()
    assert server.desk.jobs[0].ask.tools is None
    assert answer["choices"][0]["message"]["content"] == CALL


@pytest.mark.parametrize("model", ["default", "tiny/chat-moe"])
def test_the_model_goes_by_its_name_or_by_default(model: str) -> None:
    answer = Local().chat(model=model)
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny/chat-moe")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_request_has_to_name_the_model(path: str) -> None:
    answer = Local().post(path, {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("model", "missing_required_parameter")
    assert "'default'" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_another_model_is_not_found(path: str) -> None:
    body = {"model": "gpt-9", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    answer = Local().post(path, body)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_usage_counts_a_prompt_once_and_every_reply() -> None:
    usage = Local(FakeDesk(Script(reused=4))).chat(n=2).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 10, 17)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_a_stream_and_a_whole_answer_say_the_same() -> None:
    script = Script(tokens=["<thi", "nk>Hm", "</think>", "So. ", CALL, " ", CALL])
    whole = Local(FakeDesk(script)).chat(tools=[TOOL]).json()["choices"][0]
    heard = events(Local(FakeDesk(script)).chat(tools=[TOOL], stream=True))
    deltas = [event["choices"][0]["delta"] for event in heard]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["message"]["content"] == "So. "
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert reasoning == whole["message"]["reasoning_content"] == "Hm"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Jena"}] * 2
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [call["function"] for call in calls]
    assert heard[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert all(event["object"] == "chat.completion.chunk" for event in heard)
    assert len({event["id"] for event in heard}) == 1


def test_a_reply_of_calls_alone_has_no_content() -> None:
    message = Local(FakeDesk(Script(tokens=[CALL]))).chat(tools=[TOOL]).json()["choices"][0]["message"]
    assert message["content"] is None


def test_where_one_call_is_wanted_the_reply_ends_with_it() -> None:
    desk = FakeDesk(Script(tokens=[CALL, CALL, "more"], delay_s=0.05))
    choice = Local(desk).chat(tools=[TOOL], parallel_tool_calls=False).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert desk.jobs[0].cancelled.is_set()


def test_reasoning_tokens_are_counted() -> None:
    usage = Local(FakeDesk(Script(tokens=["a", "b", "</think>", "c"], thinks=True))).chat().json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_usage_comes_last_in_a_stream_that_asks_for_it() -> None:
    heard = events(Local().chat(stream=True, stream_options={"include_usage": True}))
    assert heard[-1]["choices"] == []
    assert heard[-1]["usage"]["total_tokens"] == 12
    assert all(event["usage"] is None for event in heard[:-1])
    assert "usage" not in events(Local().chat(stream=True))[-1]


def test_an_end_by_lack_of_memory_is_told_as_length_and_what_it_was() -> None:
    choice = Local(FakeDesk(Script(reason="memory"))).chat().json()["choices"][0]
    assert (choice["finish_reason"], choice["mlxmoe"]) == ("length", {"finish_reason": "memory"})


def test_log_probabilities_of_chat_are_with_the_token_s_bytes_and_its_rivals() -> None:
    desk = FakeDesk(Script(tokens=["ä", "b"]))
    content = Local(desk).chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["ä", "b"]
    assert content[0]["bytes"] == [0xC3, 0xA4]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-1.0, -2.0]


def test_log_probabilities_in_a_stream_are_told_once_each() -> None:
    heard = events(Local(FakeDesk(Script(tokens=["a <th", "ink", " b"]))).chat(stream=True, logprobs=True))
    lists = [event["choices"][0]["logprobs"] for event in heard]
    assert [entry["token"] for one in lists if one for entry in one["content"]] == ["a <th", "ink", " b"]


def test_what_cannot_be_has_a_log_probability_that_json_can_hold() -> None:
    desk = FakeDesk(Script(logprob=float("-inf")))
    assert Local(desk).chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_a_lone_surrogate_of_the_model_breaks_no_answer() -> None:
    assert Local(FakeDesk(Script(tokens=["\ud800"]))).chat().status_code == 200


def test_completions_have_the_old_shape() -> None:
    answer = Local().complete(logprobs=1, max_tokens=2).json()
    choice = answer["choices"][0]
    assert answer["object"] == "text_completion"
    assert (choice["text"], choice["finish_reason"]) == ("Hello there", "length")
    assert choice["logprobs"] == {
        "tokens": ["Hello", " there"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"Hello0": -1.0}, {" there0": -1.0}],
        "text_offset": [0, 5],
    }


def test_completions_have_sixteen_tokens_unless_said() -> None:
    server = Local()
    server.complete()
    assert server.desk.jobs[0].ask.options["max_tokens"] == 16


def test_an_echo_is_the_prompt_and_its_log_probabilities() -> None:
    choice = Local().complete("Hi", echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "HiHello"
    assert choice["logprobs"]["tokens"] == ["H", "i", "Hello"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_a_prompt_can_be_scored_without_a_reply() -> None:
    server = Local()
    choice = server.complete([5, 6], echo=True, logprobs=1, max_tokens=0).json()["choices"][0]
    assert server.desk.jobs[0].ask.score_prompt
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("<5><6>", ["<5>", "<6>"])


def test_several_prompts_are_as_many_choices_in_order() -> None:
    server = Local(FakeDesk(lambda ask: Script(tokens=[f"{ask.prompt}"])))
    answer = server.complete(["a", "b"], n=2).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "a"), (1, "a"), (2, "b"), (3, "b"),
    ]  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == 14
    assert server.complete(["a", "b", "c"], n=4).status_code == 400


@pytest.mark.parametrize(
    "request_", [{"suffix": "x"}, {"best_of": 3}, {"prompt": ""}, {"prompt": [[]]}, {"logprobs": 21}]
)
def test_completions_refuse_by_name(request_: dict[str, Any]) -> None:
    answer = Local().complete(**request_)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] in request_


def test_streamed_completions_say_the_same_as_whole_ones() -> None:
    whole = Local().complete(n=2, echo=True).json()
    heard = events(Local().complete(n=2, echo=True, stream=True))
    for index in (0, 1):
        text = "".join(c["text"] for event in heard for c in event["choices"] if c["index"] == index)
        assert text == whole["choices"][index]["text"] == "HiHello there, friend."


def test_an_error_in_the_middle_of_a_stream_is_an_event_and_its_end() -> None:
    text = Local(FakeDesk(Script(fail=PromptError("gone"), fail_after=2))).chat(stream=True).text
    last = text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "gone"
    assert "[DONE]" not in text


def test_where_one_of_several_fails_the_others_are_cancelled() -> None:
    scripts = iter([Script(delay_s=0.2), Script(fail=PromptError("no"))])
    desk = FakeDesk(lambda ask: next(scripts))
    assert Local(desk).chat(n=2).status_code == 400
    assert desk.jobs[0].cancelled.is_set()


def test_models_are_listed_and_found_by_names_with_slashes() -> None:
    server = Local()
    card = server.get("/v1/models").json()["data"][0]
    assert card["id"] == "tiny/chat-moe"
    assert card["mlxmoe"] == {"context": 4096, "has_chat_template": True, "reasoning": True, "tools": True}
    assert server.get("/v1/models/tiny/chat-moe").json() == card
    assert server.get("/v1/models/tiny/other").status_code == 404


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
def test_known_paths_that_are_not_supported_say_what_to_do(path: str) -> None:
    answer = Local().post(path, {"input": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unsupported_endpoint"


def test_unknown_paths_and_methods_are_told_in_openai_s_form() -> None:
    server = Local()
    assert server.post("/v1/nothing", {}).json()["error"]["code"] == "not_found"
    wrong = server.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert server.get("/docs").status_code == server.get("/redoc").status_code == 404


@pytest.mark.parametrize(
    ("state", "accepts", "code", "word"),
    [
        ("ready", True, 200, "ok"),
        ("unloaded", True, 200, "ok"),
        ("ready", False, 200, "refusing"),
        ("loading", False, 503, "loading"),
        ("failed", False, 503, "failed"),
        ("draining", False, 503, "draining"),
    ],
)
def test_health_says_whether_requests_are_answered(state: Any, accepts: bool, code: int, word: str) -> None:
    server = Local()
    server.desk.state, server.desk.accepts, server.desk.reason = state, accepts, "cannot read /models/x"
    answer = server.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (code, word)
    assert "/models" not in answer.text


def test_metrics_tell_of_the_desk_and_of_requests() -> None:
    server = Local()
    server.desk.pressure = "warning"
    server.chat()
    server.get("/nothing/at/all")
    text = server.get("/metrics").text
    for line in (
        'mlxmoe_http_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'mlxmoe_http_requests_total{route="none",status="404"} 1.0',
        "mlxmoe_memory_pressure 1.0",
        'mlxmoe_memory_bytes{part="experts"} 8.589934592e+09',
        "mlxmoe_expert_hit_rate 0.75",
        "mlxmoe_ttft_seconds_count 1.0",
        "mlxmoe_request_duration_seconds_count 1.0",
        "mlxmoe_queued 2.0",
    ):
        assert line in text.splitlines(), line


def test_two_apps_count_for_themselves() -> None:
    first, second = Local(), Local()
    first.chat()
    assert "mlxmoe_ttft_seconds_count 0.0" in second.get("/metrics").text


def test_the_panel_has_the_heat_where_it_is_asked_for_and_only_what_json_has() -> None:
    server = Local()
    assert server.get("/api/status").json()["heat"] == []
    panel = server.get("/api/status?heat=1").json()
    assert panel["heat"] == [[0.5, None]]
    assert panel["memory"]["bank_bytes"] == 8 * 2**30
    assert panel["model"]["name"] == "tiny/chat-moe"


def test_answers_are_what_the_schema_says() -> None:
    server = Local(FakeDesk(Script(tokens=["<think>a</think>", "b", CALL], reason="memory")))
    kinds: list[tuple[type[BaseModel], httpx.Response]] = [
        (told.ChatCompletion, server.chat(tools=[TOOL], logprobs=True, top_logprobs=1)),
        (told.Completion, server.complete(logprobs=1, echo=True)),
        (told.ModelList, server.get("/v1/models")),
        (told.Health, server.get("/health")),
        (told.Panel, server.get("/api/status?heat=1")),
        (told.Error, server.get("/nothing")),
    ]
    for kind, answer in kinds:
        read = kind.model_validate_json(answer.content, strict=True)
        known = json.loads(read.model_dump_json(exclude_unset=True))
        assert known.items() <= answer.json().items() if kind is told.Panel else known == answer.json()


def test_the_schema_has_no_form_of_error_but_openai_s() -> None:
    paths = Local().get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= paths.keys()
    responses = [method["responses"] for path in paths.values() for method in path.values()]
    assert all("422" not in codes for codes in responses)


def test_numbers_are_those_of_json_where_five_is_five() -> None:
    ask = asked(max_tokens=5.0, seed=7.0, top_k=3.0)
    assert (ask.options["max_tokens"], ask.options["seed"], ask.options["top_k"]) == (5, 7, 3)
    server = Local()
    assert server.complete([1.0, 2]).status_code == 200
    assert server.desk.jobs[0].ask.prompt == [1, 2]
    assert server.complete([1.5]).status_code == server.chat(n=True).status_code == 400


def test_the_schema_says_every_bound() -> None:
    """Those of whole numbers, which are read by a validator of ours, and those that pydantic reads itself."""
    schemas = Local().get("/openapi.json").json()["components"]["schemas"]
    for kind, field, least, most in (
        ("ChatRequest", "n", 1, 8),
        ("ChatRequest", "max_completion_tokens", 1, 2**31 - 1),
        ("ChatRequest", "top_logprobs", 0, 20),
        ("ChatRequest", "temperature", 0, 2),
        ("CompletionRequest", "max_tokens", 0, 2**31 - 1),
        ("CompletionRequest", "logprobs", 0, 20),
    ):
        number = schemas[kind]["properties"][field]["anyOf"][0]
        assert (number["minimum"], number["maximum"]) == (least, most), field
    assert schemas["ChatRequest"]["properties"]["logit_bias"]["propertyNames"] == {"pattern": "^[0-9]{1,9}$"}


MANY = 20_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": [""] * MANY},
        {"prompt": [[]] * MANY},
        {"prompt": [[""] * MANY] * 8},
        {"stop": [""] * MANY},
        {"logit_bias": dict.fromkeys(map(str, range(MANY)), "x")},
        {"messages": [{}] * MANY},
        {"messages": [{"role": "user", "content": [{}] * MANY}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]},
        {"tools": [{}] * MANY},
        {"modalities": [3] * MANY},
        {"chat_template_kwargs": {str(number): [] for number in range(MANY)}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_of_many_wrong_items_the_first_are_told_and_not_all_are_collected(wrong: dict[str, Any]) -> None:
    """Errors of half a million items took the event loop seven seconds, for which every stream stood still."""
    kind = (
        ChatRequest
        if wrong.keys() & {"messages", "tools", "modalities", "chat_template_kwargs"}
        else CompletionRequest
    )
    body = {"model": "default", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], **wrong}
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert 1 <= caught.value.error_count() <= 500


def test_too_many_stops_are_said_to_be_too_many() -> None:
    answer = Local().chat(stop=["x"] * 17)
    assert answer.json()["error"]["message"] == "stop: List should have at most 16 items after validation, not 17."


def test_many_biases_are_all_taken() -> None:
    biases = {str(token): 1.0 for token in range(1000)}
    assert asked(logit_bias=biases).options["logit_bias"] == dict.fromkeys(range(1000), 1.0)
