"""A server under load: many clients, some of which leave, send too much, or nonsense. Every word is compared.

python tools/load_server.py [MODEL] --clients 32 --seconds 120

Starts `mlxmoe serve` in a process of its own, lets clients ask for replies whose words `Engine.stream` has told, and
prints what came of it, the total rate with one client and with eight, and a last line of JSON. Ends with 1 where a
word was wrong, an accepted request was not answered, KV memory was left over, or memory was kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from mlxmoe import Chunk, Engine, load

PROMPTS = (
    "In the beginning", "And it came to pass", "Blessed are the meek", "The LORD said unto Moses", "Now therefore",
    "And the king answered", "Hear, O Israel", "Then Peter said", "And there was a man", "The word of God",
    "Woe unto", "And she said",
)  # fmt: skip
ROUNDING = 1e-3  # of log-probabilities: where the best two are closer, a batch may take the other
GROWTH = 0.02  # of what the process holds at its emptiest, from the first to the last part of the time
PARTS = 4  # of the time; in the first one it warms up


@dataclass
class Found:
    """What clients saw."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True)
class Known:
    """A reply as one client alone would get it: its tokens' texts, and how far the second best was behind each."""

    prompt: str
    tokens: tuple[str, ...]
    margins: tuple[float, ...]


def known_replies(engine: Engine, max_tokens: int) -> list[Known]:
    """Of every prompt, greedily."""
    replies = []
    for prompt in PROMPTS:
        chunks = list(engine.stream(prompt, raw=True, max_tokens=max_tokens, top_logprobs=2))
        texts = tuple(_text_of(engine, chunk) for chunk in chunks)
        replies.append(Known(prompt, texts, tuple(c.top_logprobs[0][1] - c.top_logprobs[1][1] for c in chunks)))
    return replies


def _text_of(engine: Engine, chunk: Chunk) -> str:
    return "" if chunk.token in engine.tokenizer.eos_token_ids else str(engine.tokenizer.decode([chunk.token]))


@contextmanager
def serving(model: str | None, *options: str) -> Iterator[tuple[str, int]]:
    """A server's address and process number."""
    command = [sys.executable, "-m", "mlxmoe", "serve", *([model] if model else []), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"page (http://\S+)/,", line):
                yield found[1], process.pid
                break
        else:
            raise SystemExit(f"The server did not start:\n{said}")
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(60)


async def good_client(url: str, known: list[Known], found: Found, end: float, rng: random.Random) -> None:
    """Asks, compares, and sometimes leaves in the middle."""
    async with httpx.AsyncClient(timeout=120) as client:
        while time.monotonic() < end:
            one, leaves = rng.choice(known), rng.random() < 0.25
            length = rng.randint(1, len(one.tokens))
            body = {
                "model": "default",
                "prompt": one.prompt,
                "max_tokens": length,
                "temperature": 0,
                "logprobs": 2,
                "stream": True,
            }
            try:
                await asyncio.wait_for(_ask(client, url, body, one, found, rng.random() if leaves else None), 120)
            except (httpx.HTTPError, TimeoutError) as error:
                found.unanswered.append(f"{one.prompt!r}: {type(error).__name__} {error}")


async def _ask(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], known: Known, found: Found, leaves_s: float | None
) -> None:
    said: list[str] = []
    reason = None
    begun = time.monotonic()
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code in (429, 503):
            found.kinds["told to come back"] += 1
            await asyncio.sleep(0.2)
            return
        if answer.status_code != 200:
            found.unanswered.append(f"{body}: {answer.status_code} {(await answer.aread())[:200]!r}")
            return
        async for line in answer.aiter_lines():
            if leaves_s is not None and time.monotonic() - begun > leaves_s:
                found.kinds["left"] += 1
                return
            if line.startswith("data: {"):
                data = json.loads(line.removeprefix("data: "))
                for choice in data["choices"]:
                    said += (choice.get("logprobs") or {}).get("tokens", [])
                    reason = choice["finish_reason"] or reason
                    found.tokens += len((choice.get("logprobs") or {}).get("tokens", []))
    found.kinds["whole"] += 1
    if reason is None:
        found.unanswered.append(f"{body}: no end")
    if wrong := difference(said, known, body["max_tokens"]):
        found.wrong.append(wrong)


def difference(said: list[str], known: Known, length: int) -> str:
    """What is wrong with a reply, or nothing. Where the best two are as good as level it may go its own way."""
    expected = [text for text in known.tokens[:length] if text]
    said = [text for text in said if text]
    for place, (one, other) in enumerate(zip(said, expected, strict=False)):
        if one != other:
            return "" if known.margins[place] < ROUNDING else f"{known.prompt!r}: {said} and not {expected}"
    return "" if len(said) == len(expected) else f"{known.prompt!r}: {len(said)} tokens and not {len(expected)}"


def _body(prompt: Any, **more: Any) -> bytes:
    return json.dumps({"model": "default", "prompt": prompt, **more}).encode()


async def bad_client(url: str, found: Found, end: float, rng: random.Random) -> None:
    """Sends what no server should fall over."""
    bodies: list[tuple[bytes, set[int]]] = [
        (b"", {400, 422}), (b"{", {400, 422}), (b"[]", {400, 422}), (_body(7), {400, 422}),
        (b"\xff\xfe\x00", {400, 422}), (_body("x", max_tokens=-1), {400}),
        (_body("x", temperature="hot"), {400}), (b'{"prompt": ' + b"[" * 5000, {400, 422}),
        (_body("word " * 5000), {400}), (b'{"prompt": "' + b"x" * 3 * 2**20, {413}),
        (_body("x", max_tokens=10**9), {400}),
    ]  # fmt: skip
    async with httpx.AsyncClient(timeout=120) as client:
        while time.monotonic() < end:
            body, expected = rng.choice(bodies)
            try:
                answer = await client.post(
                    f"{url}/v1/completions", content=body, headers={"content-type": "application/json"}
                )
            except (httpx.WriteError, httpx.ReadError):  # the server hung up on too large a body
                found.kinds["hung up on"] += 1
                continue
            except httpx.HTTPError as error:
                found.unanswered.append(f"{body[:40]!r}: {type(error).__name__} {error}")
                continue
            found.kinds[f"refused with {answer.status_code}"] += 1
            if answer.status_code not in expected | {429, 503}:
                found.wrong.append(f"{body[:40]!r} got {answer.status_code} {answer.text[:100]}")
            await asyncio.sleep(rng.random() / 2)


async def watch_memory(pid: int, seconds: float) -> list[int]:
    """Resident bytes of the process, five times a second."""
    process, readings = psutil.Process(pid), []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        readings.append(process.memory_info().rss)
        await asyncio.sleep(0.2)
    return readings


def kept_growth(readings: list[int]) -> float:
    """By how much the least that the process held grew, once it was warm: what it took and did not give back.

    What it holds at its fullest goes with how many replies and bodies are there at the moment.
    """
    part = len(readings) // PARTS
    return min(readings[-part:]) / min(readings[part : 2 * part]) - 1 if part else 0.0


async def under_load(url: str, pid: int, known: list[Known], clients: int, seconds: float) -> tuple[Found, list[int]]:
    found, end = Found(), time.monotonic() + seconds
    good = [good_client(url, known, found, end, random.Random(i)) for i in range(clients - clients // 8)]
    bad = [bad_client(url, found, end, random.Random(-1 - i)) for i in range(clients // 8)]
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch_memory(pid, seconds))
        for client in (*good, *bad):
            group.create_task(client)
    return found, watching.result()


async def rate(url: str, known: list[Known], clients: int, seconds: float) -> float:
    """Tokens per second of `clients` that ask for whole replies and never leave."""
    found, end = Found(), time.monotonic() + seconds

    async def client(number: int) -> None:
        async with httpx.AsyncClient(timeout=120) as http:
            turn = number
            while time.monotonic() < end:
                one = known[turn % len(known)]
                turn += clients
                body = {
                    "model": "default",
                    "prompt": one.prompt,
                    "max_tokens": len(one.tokens),
                    "temperature": 0,
                    "logprobs": 1,
                }
                await _ask(http, url, {**body, "stream": True}, one, found, None)

    began = time.monotonic()
    await asyncio.gather(*(client(i) for i in range(clients)))
    if found.wrong or found.unanswered:
        raise SystemExit(f"wrong: {found.wrong[:3]} unanswered: {found.unanswered[:3]}")
    return found.tokens / (time.monotonic() - began)


def left_over(url: str) -> dict[str, Any]:
    """What the server still holds once nobody asks."""
    for _ in range(100):
        status = httpx.get(f"{url}/api/status", timeout=60).json()
        if not status["active"] and not status["queued"]:
            break
        time.sleep(0.1)
    return {"kv_bytes": status["memory"]["kv_bytes"], "active": status["active"], "queued": status["queued"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder; without it the built-in demo model")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--experts", default="auto")
    chosen = parser.parse_args()
    with load(chosen.model, experts=chosen.experts) as engine:
        known = known_replies(engine, chosen.max_tokens)
    with serving(chosen.model, "--experts", chosen.experts) as (url, pid):
        one = asyncio.run(rate(url, known, 1, min(20.0, chosen.seconds / 4)))
        eight = asyncio.run(rate(url, known, 8, min(30.0, chosen.seconds / 4)))
        found, readings = asyncio.run(under_load(url, pid, known, chosen.clients, chosen.seconds))
        left = left_over(url)
    growth = kept_growth(readings)
    print(
        f"{chosen.clients} clients, {chosen.seconds:.0f} s: " + ", ".join(f"{n} {k}" for k, n in found.kinds.items())
    )
    print(f"wrong words: {len(found.wrong)}; accepted and not answered: {len(found.unanswered)}")
    for line in (*found.wrong[:5], *found.unanswered[:5]):
        print(f"  {line}")
    print(f"left over: {left}; memory kept {growth:+.1%}, {min(readings) / 1e6:.0f} to {max(readings) / 1e6:.0f} MB")
    print(f"tokens per second in all: one client {one:.1f}, eight {eight:.1f}: {eight / one:.2f} times")
    result = {"one": one, "eight": eight, "ratio": eight / one, "growth": growth, "left": left, **found.kinds}
    print(json.dumps({**result, "wrong": len(found.wrong), "unanswered": len(found.unanswered)}))
    sys.exit(bool(found.wrong or found.unanswered or any(left.values()) or growth > GROWTH))


if __name__ == "__main__":
    main()
