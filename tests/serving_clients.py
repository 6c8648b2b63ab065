"""How the tests of the server reach an app: within this process, or over a real port."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fake_desk import FakeDesk, wait_for

from mlxmoe.hub import demo_folder
from mlxmoe.serving.http.app import Listener, create_app
from mlxmoe.serving.http.settings import ServerSettings
from mlxmoe.serving.jobs import Desk

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for tool_call in m.tool_calls or [] %}<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}\n{% endfor %}"
)


class Local:
    """An app without a port."""

    def __init__(self, desk: FakeDesk | None = None, **settings: Any) -> None:
        self.desk = desk or FakeDesk()
        self.app = create_app(self.desk, ServerSettings(**settings))

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080") as client:
                return await client.request(method, path, **more)

        return asyncio.run(ask())

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **more)

    def chat(self, content: Any = "Hi", **more: Any) -> httpx.Response:
        body = {"model": "default", "messages": [{"role": "user", "content": content}], **more}
        return self.post("/v1/chat/completions", body)

    def complete(self, prompt: Any = "Hi", **more: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "default", "prompt": prompt, **more})


def events(response: httpx.Response) -> list[Any]:
    """A stream's data, without [DONE], which has to be the last."""
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def running(desk: Desk, **settings: Any) -> Iterator[str]:
    """The address of a real server."""
    with listening(desk, **settings) as server:
        yield address_of(server)


@contextmanager
def listening(desk: Desk, **settings: Any) -> Iterator[Listener]:
    """A real server, which listens."""
    chosen = ServerSettings(port=0, **settings)
    server = Listener(create_app(desk, chosen), chosen)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(10)


def address_of(server: Listener) -> str:
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def demo_with_chat(folder: Path) -> Path:
    """The demo model as a chat model, in a new `folder`."""
    shutil.copytree(demo_folder(), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder
