"""mlxmoe serve as a user starts and ends it: a process of its own, on the built-in model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mlxmoe import EngineClosedError
from mlxmoe.cli import common
from mlxmoe.cli.commands import app

pytestmark = pytest.mark.slow

Start = Callable[..., "Server"]


class Server:
    """A child process that serves; `errors` is what it wrote to stderr so far."""

    def __init__(self, *options: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlxmoe", "serve", "--port", "0", *options],
            stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.errors = ""
        self.url = ""
        self._ready = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        assert self._ready.wait(120), self.errors

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line
            if found := re.search(r"page (http://\S+)/,", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def end(self, signum: int) -> int:
        self.process.send_signal(signum)
        return self.process.wait(60)


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[Server] = []

    def started(*options: str, **more: Any) -> Server:
        servers.append(Server(*options, **more))
        assert servers[-1].url, servers[-1].errors
        return servers[-1]

    yield started
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


def stream(url: str, seconds: float = 60, **more: Any) -> Iterator[dict[str, Any]]:
    body = {"model": "default", "prompt": "In the beginning", "temperature": 0, "stream": True, **more}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=seconds) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def test_it_serves_and_ctrl_c_ends_it_once_the_reply_under_way_is_whole(start: Start) -> None:
    server = start("--experts", "25%")
    chunks = stream(server.url, max_tokens=60)
    said = [next(chunks)]
    server.process.send_signal(signal.SIGINT)
    said += chunks
    assert sum(bool(chunk["choices"][0]["text"]) for chunk in said) > 20
    assert said[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0
    assert "The server has ended." in server.errors
    assert "Traceback" not in server.errors


def test_sigterm_ends_it_cleanly_and_a_reply_that_outlasts_the_drain_is_cut(start: Start) -> None:
    server = start("--drain-time", "1s")
    chunks = stream(server.url, max_tokens=240, logit_bias={"0": -100})
    said = [next(chunks)]
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    said += chunks
    assert server.process.wait(60) == 0
    assert time.monotonic() - began < 30
    assert "finish" in str(said[-1]) or "error" in said[-1]
    assert "Traceback" not in server.errors


SLOW_TO_LOAD = """
import time
from mlxmoe.cli import common, main
def load_engine(*_, **__):
    print("loading", flush=True)
    time.sleep(60)
common.load_engine = load_engine
main.main()
"""


def test_ctrl_c_twice_ends_it_at_once_also_while_a_model_is_loaded() -> None:
    command = [sys.executable, "-c", SLOW_TO_LOAD, "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        began = time.monotonic()
        while process.poll() is None and time.monotonic() - began < 30:
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert process.poll() == 130
        assert process.stderr is not None
        assert process.stderr.read() == "The server has ended at once.\n"


def test_a_load_that_nobody_waits_for_any_more_is_given_up() -> None:
    with pytest.raises(EngineClosedError):
        common.load_engine(None, True, is_wanted=lambda: False)


def test_a_prompt_that_was_read_is_not_read_again(start: Start) -> None:
    server = start()
    body = {"model": "default", "prompt": "And it came to pass in those days " * 8, "max_tokens": 2}
    read = [
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert read[0]["cached_tokens"] == 0
    assert read[1]["cached_tokens"] > 40


def test_keys_are_asked_for_and_never_shown(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# the team\nsecret-of-one\nsecret-of-two\n")
    server = start("--api-key-file", str(keys), env={"MLXMOE_API_KEY": "secret-of-three"})
    models = f"{server.url}/v1/models"
    assert httpx.get(models).status_code == 401
    for key in ("secret-of-one", "secret-of-two", "secret-of-three"):
        assert httpx.get(models, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert "secret" not in server.errors


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "mlxmoe", "serve", str(tmp_path / "no-such-model"), "--port", str(port)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode != 0
    assert f"port {port}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--keep-alive", "soon"], "--keep-alive='soon' is no time"),
        (["--most-together", "0"], "most_together"),
        (["--request-time", "0"], "request_s"),
        (["--max-body", "huge"], "--max-body"),
        (["--api-key", "short"], "api_keys"),
        (["--api-key-file", "/nowhere/keys"], "cannot be read"),
        (["--port", "99999"], "port"),
        (["no-such-folder/no-such-model/here"], "no-such"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["serve", "--port", "0", *options])
    assert done.exit_code != 0
    assert said in done.output
    assert "Traceback" not in done.output


WITHOUT_THE_EXTRA = """
import sys
sys.modules["fastapi"] = None
from mlxmoe.cli import main
main.main()
"""


def test_without_its_extra_it_says_what_to_install() -> None:
    command = [sys.executable, "-c", WITHOUT_THE_EXTRA, "serve", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "mlxmoe serve needs fastapi: install mlxmoe with its extra" in done.stderr
    assert "Traceback" not in done.stderr
