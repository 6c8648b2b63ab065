"""A hub on this machine: serves folders over HTTP the way huggingface-hub asks for them. For tests only.

It can break a transfer half way, refuse, and count what was asked.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


class StandIn:
    """Repositories by id, and how to behave. `broken_file`: the file whose transfer is cut half way, every time."""

    def __init__(self, repos: dict[str, Path]) -> None:
        self.repos = repos
        self.broken_file: str | None = None
        self.pretend_sizes: dict[str, int] = {}
        self.status: int | None = None
        self.sent: Counter[str] = Counter()
        self.revisions = {"main", COMMIT}
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[StandIn]:
        stand_in = self

        class Handler(_Handler):
            hub = stand_in

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.respond(send_body=False)

    def do_GET(self) -> None:
        self.respond(send_body=True)

    def respond(self, send_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if self.hub.status is not None:
            return self.fail(self.hub.status, "Refused")
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
        else:
            repo, rest = "/".join(parts[:2]), parts[2:]
        if repo not in self.hub.repos:
            return self.fail(404, "RepoNotFound")
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in self.hub.revisions:
            return self.fail(404, "RevisionNotFound")
        folder = self.hub.repos[repo]
        match rest[0] if rest else "revision":
            case "revision":
                siblings = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                return self.send_json({"id": repo, "sha": COMMIT, "siblings": siblings}, send_body)
            case "tree":
                return self.send_json([self.entry(file) for file in sorted(folder.iterdir())], send_body)
            case "resolve":
                return self.send_file(folder / "/".join(rest[2:]), send_body)
            case _:
                return self.fail(404, "EntryNotFound")

    def entry(self, file: Path) -> dict[str, Any]:
        size = self.hub.pretend_sizes.get(file.name, file.stat().st_size)
        return {"type": "file", "path": file.name, "size": size, "oid": _etag(file)}

    def send_json(self, content: object, send_body: bool) -> None:
        raw = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if send_body:
            self.wfile.write(raw)

    def send_file(self, file: Path, send_body: bool) -> None:
        if not file.is_file():
            return self.fail(404, "EntryNotFound")
        raw = file.read_bytes()
        size = self.hub.pretend_sizes.get(file.name, len(raw))
        start, end = 0, size
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(size, int(last) + 1) if last else size
        partly = (start, end) != (0, size)
        self.send_response(206 if partly else 200)
        self.send_header("Content-Length", str(end - start))
        if partly:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if not send_body:
            return None
        body = raw[start:end]
        if file.name == self.hub.broken_file:
            body = body[: len(body) // 2]
            self.close_connection = True
        self.hub.sent[file.name] += len(body)
        self.wfile.write(body)
        return None

    def fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
