"""Pictures of the server's page in both themes: `page_shots.py http://127.0.0.1:8000`.

Says something to the model of a running `mlxmoe serve`, waits until it has answered and the panel has something to
show, and writes page_light.png and page_dark.png. Needs playwright, and a Chromium on the PATH.
"""

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

DOCS = Path(__file__).resolve().parent.parent / "docs"
SIZE = {"width": 1280, "height": 860}
REPLY_LIMIT_MS = 300_000


def shoot(browser: Browser, address: str, theme: str, said: str, watch_s: float, file: Path) -> None:
    """One conversation in one theme, as a picture of SIZE. Raises playwright's error if there is no answer."""
    context = browser.new_context(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(address)
    page.fill("#prompt", said)
    page.press("#prompt", "Enter")
    page.locator(".measured").wait_for(timeout=REPLY_LIMIT_MS)
    page.wait_for_timeout(watch_s * 1000)
    page.locator("#scroller").evaluate("node => { node.scrollTop = 0; }")
    page.screenshot(path=file)
    context.close()


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
        for theme in ("light", "dark"):
            file = arguments.out / f"page_{theme}.png"
            shoot(browser, arguments.address, theme, arguments.say, arguments.watch, file)
            print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()
