"""Whoever leaves, is slow or takes too long stops the work that is done for them. Over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from fake_desk import FakeDesk, Script, wait_for
from serving_clients import Local, running

from mlxmoe.errors import QueueFullError
from mlxmoe.serving.http.app import create_app
from mlxmoe.serving.http.settings import ServerSettings

SLOW = Script(tokens=["word "] * 1000, delay_s=0.01)


def post(url: str, **request: object) -> socket.socket:
    """A request on a connection of its own, nothing of whose answer is read."""
    body = json.dumps({"model": "default", "messages": [{"role": "user", "content": "Hi"}], **request}).encode()
    connection = connected(url)
    connection.sendall(head_of(len(body)) + body)
    return connection


def connected(url: str) -> socket.socket:
    """A connection to the server, on which nothing is sent yet."""
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def head_of(length: int) -> bytes:
    """A request's head, for a body of `length` bytes."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_client_that_leaves_stops_all_of_its_replies(stream: bool, waiting: bool) -> None:
    desk = FakeDesk(Script(queued=[3], queue_s=30.0) if waiting else SLOW)
    with running(desk) as url:
        connection = post(url, stream=stream, n=2)
        wait_for(lambda: len(desk.jobs) == 2 and (waiting or desk.jobs[1].told > 2))
        begin = time.monotonic()
        connection.close()
        wait_for(lambda: all(job.cancelled.is_set() for job in desk.jobs))
        assert time.monotonic() - begin < 0.5
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_client_that_reads_nothing_is_given_up() -> None:
    desk = FakeDesk(Script(tokens=["word" * 4000] * 100_000))
    with running(desk, idle_s=0.3) as url:
        connection = post(url, stream=True)
        wait_for(lambda: bool(desk.jobs) and desk.jobs[0].cancelled.is_set())
        connection.close()


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with running(FakeDesk(), idle_s=0.2) as url, connected(url) as connection:
        connection.sendall(head_of(100) + b"{")
        assert b" 408 " in connection.recv(1000)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_connection_that_asks_nothing_is_closed(sent: bytes) -> None:
    with running(FakeDesk(), idle_s=0.2) as url, connected(url) as connection:
        connection.sendall(sent)
        assert connection.recv(1000) == b""


def test_a_request_that_takes_long_keeps_its_connection() -> None:
    with running(FakeDesk(Script(queue_s=0.8)), idle_s=0.2) as url, httpx.Client(base_url=url) as client:
        for _ in range(2):
            body = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200


def test_a_body_may_not_drip() -> None:
    with running(FakeDesk(), idle_s=0.4) as url, connected(url) as connection:
        connection.sendall(head_of(1000))
        begun = time.monotonic()
        with contextlib.suppress(OSError):  # it hangs up
            while time.monotonic() - begun < 5:
                connection.sendall(b" ")
                time.sleep(0.05)
        assert time.monotonic() - begun < 4
        with contextlib.suppress(ConnectionError):
            assert b" 408 " in connection.recv(1000)


def test_a_stream_of_several_replies_begins_though_one_of_them_waits_for_the_other() -> None:
    desk = FakeDesk(lambda ask: Script(queued=[1], queue_s=4.0) if ask.follows else Script(delay_s=0.05))
    body = {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "n": 2, "stream": True}
    with running(desk, patience_s=0.2) as url:
        begun = time.monotonic()
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as answer:
            first = next(line for line in answer.iter_lines() if '"content":"Hello"' in line)
            assert time.monotonic() - begun < 3
        assert '"index":0' in first


def test_a_connection_whose_client_reads_nothing_is_cut_in_the_end() -> None:
    desk = FakeDesk(Script(tokens=["word" * 4000] * 100_000))
    with running(desk, idle_s=0.2) as url:
        connection = post(url, stream=True)
        wait_for(lambda: bool(desk.jobs) and desk.jobs[0].cancelled.is_set())
        _, port = connection.getpeername()
        wait_for(
            lambda: all(one.laddr[1] != port or not one.raddr for one in psutil.Process().net_connections("tcp"))
        )
        connection.close()


def test_what_takes_too_long_is_ended_with_a_status() -> None:
    desk = FakeDesk(SLOW)
    answer = Local(desk, request_s=0.1).chat()
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    assert desk.jobs[0].cancelled.is_set()


def test_what_takes_too_long_in_a_stream_is_ended_with_an_event() -> None:
    desk = FakeDesk(SLOW)
    text = Local(desk, request_s=0.2).chat(stream=True).text
    assert '"code":"timeout"' in text.strip().split("\n\n")[-1]
    assert desk.jobs[0].cancelled.is_set()


def test_what_never_began_in_time_has_a_status_of_its_own() -> None:
    desk = FakeDesk(Script(queued=[1], queue_s=9.0))
    assert Local(desk, request_s=0.1).chat(stream=True).status_code == 504


def test_who_has_to_wait_is_told_so_and_then_answered() -> None:
    desk = FakeDesk(Script(queued=[2, 1], queue_s=1.0))
    answer = Local(desk, patience_s=0.03, comment_s=0.03).chat(stream=True)
    assert answer.headers["x-queue-position"] == "2"
    assert answer.text.startswith(": queued 2\n\n")
    assert ": queued 1\n\n" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_where_the_queue_fills_up_in_the_middle_of_a_request_nothing_of_it_stays() -> None:
    scripts = iter([SLOW, Script(refuse=QueueFullError("full", 3.0))])
    desk = FakeDesk(lambda ask: next(scripts))
    assert Local(desk).chat(n=2).status_code == 429
    assert desk.jobs[0].cancelled.is_set()


def test_a_handler_that_is_cancelled_cancels_its_replies() -> None:
    desk = FakeDesk(SLOW)
    transport = httpx.ASGITransport(create_app(desk, ServerSettings()))

    async def ask() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            task = asyncio.create_task(
                client.post(
                    "/v1/chat/completions", json={"model": "default", "messages": [{"role": "user", "content": "Hi"}]}
                )
            )
            while not (desk.jobs and desk.jobs[0].told):
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask())
    assert desk.jobs[0].cancelled.is_set()


def test_a_reply_that_ended_is_not_cancelled() -> None:
    server = Local()
    server.chat(n=2)
    server.chat(stream=True)
    assert not any(job.cancelled.is_set() for job in server.desk.jobs)


def test_a_server_that_ends_lets_replies_end_first() -> None:
    desk = FakeDesk(Script(tokens=["word "] * 20, delay_s=0.02))
    with running(desk) as url:
        connection = post(url)
        wait_for(lambda: bool(desk.jobs) and desk.jobs[0].told > 2)
    assert b" 200 " in connection.recv(20)
    assert desk.jobs[0].told == 20


def test_many_clients_that_come_and_go_as_they_like_leave_nothing_behind() -> None:
    """Some leave at once, some in the middle, some send nonsense; the rest are answered in full."""
    desk = FakeDesk(Script(tokens=["word "] * 20, delay_s=0.005))
    with running(desk) as url, ThreadPoolExecutor(32) as pool:

        def visit(number: int) -> str:
            what = random.Random(number).choice(["whole", "stream", "leave", "leave later", "nonsense"])
            if what in ("whole", "stream"):
                body = {
                    "model": "default",
                    "messages": [{"role": "user", "content": "Hi"}],
                    "stream": what == "stream",
                }
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
                assert answer.status_code == 200
                assert answer.text.count("word ") == 20
            elif what == "nonsense":
                assert httpx.post(f"{url}/v1/chat/completions", content=b"{" * 999, timeout=30).status_code == 400
            else:
                with post(url, stream=number % 2 == 0):
                    time.sleep(0.05 if what == "leave later" else 0)
            return what

        assert len(set(pool.map(visit, range(150)))) == 5
        wait_for(lambda: all(job.ended.is_set() for job in desk.jobs))
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        wait_for(lambda: not [task for task in threads_of_jobs() if task.is_alive()])


def threads_of_jobs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith("(_run)")]
