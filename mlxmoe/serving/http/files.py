"""The page's files, as the package has them: read once, so that no path of a request is ever one of the disk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

# Written down: what the system's table says differs, and a wrong type keeps a browser from running a script.
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    content_type: str
    tag: str

    async def answer(self, request: Request) -> Response:
        headers = {"ETag": self.tag, "Cache-Control": "no-cache"}  # asked again each time, sent when it changed
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers | {"Content-Type": self.content_type})


def page_files(folder: Traversable | None = None) -> dict[str, PageFile]:
    """The files of `folder`, by default the package's page, by the path they are served under: `/` is index.html.

    Empty where there is no folder.
    """
    folder = folder or files("mlxmoe.serving").joinpath("page")
    found: dict[str, PageFile] = {}
    for file in folder.iterdir() if folder.is_dir() else ():
        content_type = CONTENT_TYPES.get(file.name[file.name.rfind(".") :])
        if file.is_file() and content_type is not None:
            content = file.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[f"/{file.name}"] = PageFile(content, content_type, tag)
    if "/index.html" in found:
        found["/"] = found["/index.html"]
    return found
