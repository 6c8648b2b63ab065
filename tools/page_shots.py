"""Pictures of the server's page in both themes: `page_shots.py http://127.0.0.1:8000`.

Says something to the model of a running `mlxmoe serve`, waits until it has answered and the panel has something to
show, and writes page_light.png and page_dark.png. Needs playwright, and a Chromium on the PATH.
"""

import argparse
import base64
import shutil
import struct
import sys
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
from playwright.sync_api import Browser, ViewportSize, sync_playwright

Theme = Literal["light", "dark"]
DOCS = Path(__file__).resolve().parent.parent / "docs"
SIZE: ViewportSize = {"width": 1280, "height": 860}
THEMES: tuple[Theme, ...] = ("light", "dark")
REPLY_LIMIT_MS = 300_000
COLOURS = 256
DECODE = """async (png) => {
    const bytes = Uint8Array.from(atob(png), (one) => one.charCodeAt(0));
    const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
    const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, image.width, image.height).data;
    let text = "";
    for (let at = 0; at < pixels.length; at += 32768) text += String.fromCharCode(...pixels.subarray(at, at + 32768));
    return [image.width, image.height, btoa(text)];
}"""


def shoot(browser: Browser, address: str, theme: Theme, said: str, watch_s: float, file: Path) -> None:
    """One conversation in one theme, as a picture of SIZE. Raises playwright's error if there is no answer."""
    context = browser.new_context(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(address)
    page.fill("#prompt", said)
    page.press("#prompt", "Enter")
    page.locator(".measured").wait_for(timeout=REPLY_LIMIT_MS)
    page.wait_for_timeout(watch_s * 1000)
    page.locator("#scroller").evaluate("node => { node.scrollTop = 0; }")
    png = page.screenshot()
    page.goto("about:blank")
    width, height, pixels = page.evaluate(DECODE, base64.b64encode(png).decode())
    context.close()
    rgba = np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(height, width, 4)
    file.write_bytes(png_of(*with_few_colours(rgba[..., :3])))


def with_few_colours(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`rgb` [height, width, 3] as a palette [at most COLOURS, 3] and indices [height, width]: small files.

    The palette is the most frequent colours that are not almost one already there; others become the nearest of it.
    """
    colours, inverse, counts = np.unique(rgb.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    wide = colours.astype(np.int32)
    nearness = np.full(len(colours), 2**30)
    palette: list[int] = []
    for least in (300, 60, 1):  # squared distance from all of the palette: the far ones first, then what is left
        for index in np.argsort(-counts):
            if len(palette) < COLOURS and nearness[index] >= least:
                palette.append(index)
                nearness = np.minimum(nearness, ((wide - wide[index]) ** 2).sum(axis=1))
    nearest = np.array([((wide[palette] - one) ** 2).sum(axis=1).argmin() for one in wide], np.uint8)
    return colours[palette], nearest[inverse.reshape(-1)].reshape(rgb.shape[:2])


def png_of(palette: np.ndarray, indices: np.ndarray) -> bytes:
    """A PNG file of 8-bit indices, its rows unfiltered."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = indices.shape
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    rows = np.pad(indices, ((0, 0), (1, 0))).tobytes()  # each row begins with its filter, 0
    parts = [(b"IHDR", head), (b"PLTE", palette.tobytes()), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(part(kind, data) for kind, data in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of a running server")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder for the pictures (default: docs)")
    parser.add_argument(
        "--say", default="Why does the speed change while it writes?", help="what is said to the model"
    )
    parser.add_argument("--watch", type=float, default=25.0, metavar="SECONDS", help="for the panel's curve to grow")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("No Chromium on the PATH.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for theme in THEMES:
            file = arguments.out / f"page_{theme}.png"
            shoot(browser, arguments.address, theme, arguments.say, arguments.watch, file)
            print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()
