"""Nobody gets past the gate who may not, and nothing gets out that nobody should see."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from fake_desk import FakeDesk, Script
from serving_clients import Local, running
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from mlxmoe.errors import (
    CheckpointReadError,
    ContextError,
    EngineClosedError,
    MemoryBudgetError,
    MemoryPressureError,
    PromptError,
    QueueFullError,
    RequestError,
    SamplingError,
)
from mlxmoe.serving.http.files import page_files
from mlxmoe.serving.http.problems import ApiError, without_paths
from mlxmoe.serving.http.settings import ServerSettings, bare_host

KEYS = ("sk-one-secret", "sk-two-secret")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1:8080", "[::1]:8080", "localhost."])
def test_local_names_are_answered(host: str) -> None:
    assert Local().get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "192.168.1.9", "", "[evil]"])
def test_other_names_are_not_so_that_dns_rebinding_gets_nothing(host: str) -> None:
    answer = Local().get("/health", headers={"Host": host})
    assert answer.status_code == 421
    assert answer.json()["error"]["code"] == "host_not_allowed"


def test_hosts_can_be_allowed_and_all_addresses_are_where_it_listens_everywhere() -> None:
    assert ServerSettings(allowed_hosts=("mini.local",)).answers_to("mini.local")
    everywhere = ServerSettings(host="0.0.0.0")
    assert everywhere.answers_to("192.168.1.9")
    assert not everywhere.answers_to("evil.example")
    assert ServerSettings(allowed_hosts=("*",)).answers_to("any.example")
    assert ServerSettings(host="10.0.0.3").answers_to("10.0.0.3")
    assert bare_host("[FE80::1]:80") == "fe80::1"


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/api/status", "/openapi.json", "/nothing"])
def test_without_a_key_there_is_nothing(path: str) -> None:
    server = Local(api_keys=KEYS)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEYS[0]}, {"Authorization": "Bearer "}):
        answer = server.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "authentication_error"


def test_every_key_opens_and_the_health_and_the_page_need_none() -> None:
    server = Local(api_keys=KEYS)
    for key in KEYS:
        assert server.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert server.get("/health").status_code == 200
    assert server.get("/").status_code != 401


def test_a_body_that_says_it_is_too_long_is_refused_unread() -> None:
    answer = Local(max_body_bytes=2000).chat("x" * 3000)
    assert answer.status_code == 413
    assert "2000" in answer.json()["error"]["message"]


def test_a_body_that_turns_out_too_long_is_refused() -> None:
    async def endless() -> Any:
        for _ in range(30):
            yield b" " * 100

    headers = {"Content-Type": "application/json"}
    server = Local(max_body_bytes=2000)
    answer = server.request("POST", "/v1/chat/completions", content=endless(), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_pages_of_other_servers_may_do_nothing_unless_allowed() -> None:
    headers = {"Origin": "https://evil.example"}
    body = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}
    closed = Local()
    answer = closed.post("/v1/chat/completions", body, headers=headers)
    assert answer.status_code == 403
    assert closed.desk.jobs == []
    assert "access-control-allow-origin" not in closed.get("/v1/models", headers=headers).headers
    asking = {**headers, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert closed.request("OPTIONS", "/v1/chat/completions", headers=asking).status_code == 405
    own = {"Origin": "http://localhost:8080"}
    assert closed.post("/v1/chat/completions", body, headers=own).status_code == 200


def test_pages_that_are_allowed_may_ask() -> None:
    headers = {"Origin": "https://chat.example"}
    server = Local(allowed_origins=("https://chat.example",), api_keys=KEYS)
    asking = {**headers, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = server.request("OPTIONS", "/v1/chat/completions", headers=asking)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    body = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}
    keyed = {**headers, "Authorization": f"Bearer {KEYS[1]}"}
    answer = server.post("/v1/chat/completions", body, headers=keyed)
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert "Origin" in answer.headers["vary"]


def test_a_form_from_a_page_is_not_taken_for_json() -> None:
    server = Local()
    text = b'{"model": "default", "messages": [{"role": "user", "content": "Hi"}]}'
    answer = server.request("POST", "/v1/chat/completions", content=text, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert server.desk.jobs == []


def test_the_page_may_load_nothing_from_elsewhere() -> None:
    headers = Local().get("/").headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "unsafe-inline" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptError("empty"), 400, "invalid_value"),
        (SamplingError("top_k"), 400, "invalid_value"),
        (RequestError("no"), 400, "invalid_value"),
        (ContextError("The prompt has 9 tokens, but the context is 8"), 400, "context_length_exceeded"),
        (MemoryBudgetError("9 GB"), 400, "context_length_exceeded"),
        (MemoryPressureError("short"), 503, "memory_pressure"),
        (QueueFullError("full", 7.2), 429, "queue_full"),
        (EngineClosedError("closed"), 503, "closing"),
        (CheckpointReadError("/models/x: read failed"), 500, "internal_error"),
        (KeyError("/secret/path"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("when", ["refuse", "fail"])
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_status_also_where_a_stream_was_asked_for(
    error: Exception, status: int, code: str, when: str, stream: bool
) -> None:
    answer = Local(FakeDesk(Script(**{when: error}))).chat(stream=stream)
    told = answer.json()["error"]
    assert (answer.status_code, told["code"]) == (status, code)
    assert set(told) == {"message", "type", "param", "code"}
    assert "/" not in told["message"]
    if status == 429:
        assert answer.headers["retry-after"] == "8"
    if status == 503 and code != "closing":
        assert int(answer.headers["retry-after"]) > 0


def test_an_error_nobody_foresaw_is_told_by_a_number_that_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = Local(FakeDesk(Script(fail=ZeroDivisionError("in /home/me/model.py")))).chat()
    number = answer.json()["error"]["message"].split("under ")[1].rstrip(".")
    assert "ZeroDivisionError" not in answer.text
    assert number in caplog.text
    assert "in /home/me/model.py" in caplog.text


def test_an_error_in_the_server_itself_is_told_no_better(caplog: pytest.LogCaptureFixture) -> None:
    server = Local()
    server.desk.model = None  # type: ignore[assignment]
    answer = server.get("/v1/models")
    assert answer.status_code == 500
    assert "AttributeError" not in answer.text
    assert "AttributeError" in caplog.text


@pytest.mark.parametrize(
    "message",
    [
        "Cannot read /Users/me/My Models/x-4bit/model.safetensors: gone",
        "in '/tmp/a b/c.json' and ~/models/x too",
        "see (/etc/passwd)",
        r"C:\Users\me\model",
        "/tmp",
    ],
)
def test_no_path_is_left_in_a_message(message: str) -> None:
    shown = without_paths(message)
    for word in ("Users", "me", "Models", "x-4bit", "tmp", "c.json", "models", "passwd"):
        assert not {word, f"/{word}", f"~/{word}"} & set(shown.split())
        assert f"{word}/" not in shown


@pytest.mark.parametrize("message", ["9 tok/s, but 3/4 of them", "mlx-community/Qwen3-30B-A3B-4bit has no template"])
def test_what_is_no_path_stays(message: str) -> None:
    assert without_paths(message) == message


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"port": True},
        {"host": ""},
        {"api_keys": ("short",)},
        {"api_keys": "sk-a-string-not-a-tuple"},
        {"api_keys": ("with a space in it",)},
        {"allowed_origins": ("chat.example",)},
        {"allowed_origins": ("https://chat.example/path",)},
        {"allowed_hosts": ("http://mini",)},
        {"max_body_bytes": 10},
        {"request_s": 0},
        {"idle_s": float("inf")},
        {"max_n": 0},
        {"max_n": 100},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))) as raised:
        ServerSettings(**wrong)
    assert "short" not in str(raised.value)


def test_a_key_is_asked_for_over_a_real_port_too() -> None:
    import httpx

    with running(FakeDesk(), api_keys=KEYS) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEYS[0]}"}).status_code == 200


def test_an_api_error_is_in_openai_s_form() -> None:
    body = ApiError(404, "no", param="model", code="model_not_found").body()
    assert body["error"] == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_an_error_that_repeats_what_was_sent_is_short_and_quick() -> None:
    begin = time.monotonic()
    answer = Local(FakeDesk(Script(fail=PromptError("/x" * 500_000)))).chat()
    assert len(answer.content) < 3000
    assert len(Local().chat(logit_bias={"x" * 100_000: 1}).content) < 3000
    assert time.monotonic() - begin < 5


def test_the_page_s_files_have_their_types_and_are_sent_when_they_changed(tmp_path: Path) -> None:
    for name in ("index.html", "app.js", "style.css", "icon.svg", "notes.py"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    found = page_files(tmp_path)
    assert set(found) == {"/", "/index.html", "/app.js", "/style.css", "/icon.svg"}
    assert found["/"].content_type == "text/html; charset=utf-8"
    assert found["/app.js"].content_type.startswith("text/javascript")
    app = Starlette(routes=[Route(path, file.answer) for path, file in found.items()])
    with TestClient(app) as client:
        whole = client.get("/app.js")
        assert (whole.status_code, whole.text) == (200, "app.js")
        assert client.get("/app.js", headers={"If-None-Match": whole.headers["etag"]}).status_code == 304


def test_without_a_page_there_is_none(tmp_path: Path) -> None:
    assert page_files(tmp_path / "nothing") == {}


def test_one_client_is_one_however_it_writes_its_key() -> None:
    keys = ("secret-of-one", "secret-of-two")
    local = Local(api_keys=keys)
    for header in ("Bearer secret-of-one", "bearer  secret-of-one", "Bearer secret-of-two"):
        body = {"model": "default", "prompt": "Hi"}
        assert local.post("/v1/completions", body, headers={"Authorization": header}).status_code == 200
    first, again, other = (job.ask.client for job in local.desk.jobs)
    assert first == again != other
    assert not any(key in client for key in keys for client in (first, other))


def test_without_keys_no_header_makes_another_client() -> None:
    local = Local()
    for number in range(3):
        headers = {"Authorization": f"Bearer {number}"}
        assert local.post("/v1/completions", {"model": "default", "prompt": "Hi"}, headers=headers).status_code == 200
    assert len({job.ask.client for job in local.desk.jobs}) == 1
