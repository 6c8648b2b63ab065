"""A stand-in for `mlxmoe serve`, for the page's tests: OpenAI's shapes, slow words, a status that moves.

`python tests/page_server.py [PORT]` runs it for who works on the page.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

import mlxmoe

PAGE = Path(mlxmoe.__file__).parent / "serving" / "page"
LAYERS, EXPERTS, RESIDENT = 48, 128, 84
LUCK = random.Random(7)
SKEW = [[LUCK.random() ** 5 for _ in range(EXPERTS)] for _ in range(LAYERS)]
WORTH = [[one + 0.6 * LUCK.random() for one in row] for row in SKEW]
IN_MEMORY = [[one >= sorted(row)[EXPERTS - RESIDENT] for one in row] for row in WORTH]
ANSWER = """Experts that were wanted lately stay in memory; the others wait on the disk. Three things follow:

1. **The first words are slow.** Nothing is known yet of what this text will need.
2. **Then it settles.** Most layers keep asking for the same few experts, so *nine in ten* are already there.
3. **A change of subject costs a little.** Others are read, and those wanted least give up their slots.

```python
from mlxmoe import load

with load("mlx-community/Qwen3-30B-A3B-4bit") as llm:
    for chunk in llm.stream("Why is the sky blue?"):
        print(chunk, end="", flush=True)
```

The words are the same whichever experts happen to be in memory: `mlxmoe verify` shows it."""


class Script:
    """How the stand-in behaves. `answer`: its reply, word by word each `pause_s`; `{}` in it is the last message.

    `refuse`: (status, seconds) to refuse the next requests with; `queued`: positions told before the reply begins;
    `key`: the API key it wants; `break_off`: words after which the connection ends. `asked`: bodies of requests.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.answer = ANSWER
        self.reasoning = ""
        self.pause_s = 0.0
        self.refuse: list[tuple[int, int]] = []
        self.queued: list[int] = []
        self.key = ""
        self.break_off = 0
        self.has_chat_template = True
        self.asked: list[dict[str, Any]] = []
        self.polls = 0
        self.under_way = 0
        self.state = "ready"


def make_app(script: Script) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        path = request.url.path
        allowed = request.headers.get("authorization") == f"Bearer {script.key}"
        if script.key and not allowed and path.startswith(("/v1/", "/api/")):
            return failure(401, "no such key")
        answer: Response = await call_next(request)
        answer.headers["Content-Security-Policy"] = "default-src 'self'"
        answer.headers["Cache-Control"] = "no-store"
        return answer

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        facts = {"context": 32768, "has_chat_template": script.has_chat_template}
        model = {"id": "stand-in", "object": "model", "created": 1, "owned_by": "mlxmoe", "mlxmoe": facts}
        return {"object": "list", "data": [model]}

    @app.get("/api/status")
    async def status() -> Response:
        script.polls += 1
        return Response(json.dumps(make_status(script)), media_type="application/json")

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        script.asked.append(body)
        if script.refuse:
            status, seconds = script.refuse.pop(0)
            return failure(status, "too many requests wait", {"Retry-After": str(seconds)})
        return StreamingResponse(events(script, body), media_type="text/event-stream")

    app.mount("/", StaticFiles(directory=PAGE, html=True))
    return app


def failure(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


async def events(script: Script, body: dict[str, Any]) -> AsyncIterator[str]:
    chat = "messages" in body
    last = body["messages"][-1]["content"] if chat else body["prompt"]
    words = script.answer.replace("{}", last).split(" ")
    words = [word + " " for word in words[:-1]] + words[-1:]
    script.under_way += 1
    try:
        for position in script.queued:
            yield f": queued {position}\n\n"
            await asyncio.sleep(0.25)
        for word in script.reasoning.split(" ") if script.reasoning else []:
            yield event(chat, {"reasoning_content": word + " "})
            await asyncio.sleep(script.pause_s)
        for number, word in enumerate(words):
            if script.break_off and number == script.break_off:
                return
            yield event(chat, {"content": word})
            if script.pause_s:
                await asyncio.sleep(script.pause_s)
        yield event(chat, {}, "stop")
        usage = {"prompt_tokens": 9, "completion_tokens": len(words)}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        script.under_way -= 1


def event(chat: bool, delta: dict[str, str], finish: str | None = None) -> str:
    said = {"delta": delta} if chat else {"text": delta.get("content", "")}
    return f"data: {json.dumps({'choices': [{'index': 0, **said, 'finish_reason': finish}]})}\n\n"


def make_status(script: Script) -> dict[str, Any]:
    now = time.monotonic()
    lately = random.Random(int(now))
    heat = [[round(one * (0.75 + 0.25 * lately.random()), 3) for one in row] for row in SKEW]
    layers = [{"path": f"model.layers.{number}.mlp.switch_mlp", "num_experts": EXPERTS} for number in range(LAYERS)]
    plan = {
        "trunk_bytes": 1_740_000_000, "expert_bytes": 15_460_000_000, "bank_bytes": 13_200_000_000,
        "kv_bytes": 3_220_000_000, "prefill_bytes": 890_000_000, "pool_bytes": 67_108_864,
        "memory_bytes": 22_300_000_000, "reserve_bytes": 3_200_000_000, "context": 32768, "model_context": 40960,
        "chunk_tokens": 2048, "slots": {}, "total_bytes": 19_117_108_864,
    }  # fmt: skip
    memory = {"plan": plan, "bank_bytes": 13_200_000_000, "kv_bytes": 3_220_000_000, "reading": {}, "usable_bytes": 0}
    hits, misses = 943_000 + int(now * 96), 57_000 + int(now * 4)
    ready = script.state == "ready"
    return {
        "state": script.state, "accepts": ready, "reason": "" if ready else "It ends.",
        "queued": 2, "active": 3, "best_batch": 6, "pressure": "normal", "replies": 412, "tokens": 123_456,
        "tokens_per_s": 21.4 + 6 * math.sin(now / 5) + lately.random(), "prompt_tokens": 900_000, "refused": 5,
        "uptime_s": 11_520.0, "heat": heat, "resident": IN_MEMORY,
        "memory": memory, "stats": {"hits": hits, "misses": misses, "hit_rate": 0.943, "layers": layers},
    }  # fmt: skip


@contextmanager
def serving(script: Script, port: int = 0) -> Iterator[str]:
    """The stand-in in a thread; its address."""
    config = uvicorn.Config(make_app(script), port=port, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(5)


if __name__ == "__main__":
    slow = Script()
    slow.pause_s = 0.04
    with serving(slow, int(sys.argv[1]) if len(sys.argv) > 1 else 8000) as address:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        threading.Event().wait()
