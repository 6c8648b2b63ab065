"""The page of `mlxmoe serve` in a browser: the real server, over a desk that says what it is told, or a model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")

from fake_desk import FACTS  # noqa: E402
from page_desk import ANSWER, PageDesk  # noqa: E402
from serving_clients import address_of, demo_with_chat, listening, running  # noqa: E402

import mlxmoe  # noqa: E402
from mlxmoe import MemoryPressureError, QueueFullError  # noqa: E402
from mlxmoe.serving.desk.desk import EngineDesk  # noqa: E402
from mlxmoe.serving.http.app import Listener  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here"), pytest.mark.slow]

expect = sync_api.expect
expect.set_options(timeout=15_000)  # milliseconds, for a busy machine
PLAIN = {"viewport": {"width": 1100, "height": 800}, "reduced_motion": "reduce"}
LONG = " ".join(f"word{number}" for number in range(400))
KEY = "s3cret-for-tests"
FULL = QueueFullError("64 requests wait already.", 7)
PAGE = Path(mlxmoe.__file__).parent / "serving" / "page"
HOSTILE = (
    '<img src=x onerror="window.harm=1"> <script>window.harm=1</script>\n\n'
    "[run](javascript:window.harm=1) [data](data:text/html,x) [own](/v1/models) ![pixel](http://harm.example/p.png)\n\n"
    "- <b>bold?</b> `<i>code</i>`\n\n```html\n<script>window.harm=1</script>\n```\n\n[good](https://good.example/a?b=c)"
)
MIXED = (
    "- a\n\n- b\n  ```\n  c\n  ```\n- d\n\ntext\n| a | b |\n|---|---|\n| 1 | 2 |\nend\n\n\n1) x\n2) y\n\n"
    "~~~py\n`not` the end\n``` nor this\n~~~\nafter\n# head\n> quote\n> - in it\nlast"
)


@pytest.fixture(scope="module")
def told() -> PageDesk:
    return PageDesk()


@pytest.fixture(scope="module")
def server(told: PageDesk) -> Iterator[Listener]:
    with listening(told, patience_s=0.02, comment_s=0.1) as server:
        yield server


@pytest.fixture
def desk(told: PageDesk) -> PageDesk:
    """As new."""
    told.reset()
    return told


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, desk: PageDesk, server: Listener) -> Iterator[Callable[..., Any]]:
    """Opens the page in a browser of its own. No error may be logged, and no request leave the origin."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_page(address: str = address_of(server), **options: Any) -> Any:
        context = browser.new_context(
            **{"viewport": {"width": 1100, "height": 800}, "reduced_motion": "reduce", **options}
        )
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: request.url.startswith((address, "blob:")) or wrong.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: "Content Security Policy" in line.text and wrong.append(line.text))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def say(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def last_reply(page: Any) -> Any:
    return page.locator(".message.assistant .body").last


def done(page: Any) -> None:
    expect(page.locator(".message.assistant").last.locator(".actions")).to_be_visible()
    expect(page.locator("#stop")).to_be_hidden()


def until(page: Any, expression: str, also: Callable[[], bool] = lambda: True) -> None:
    """Wait for something to become true; wait_for_function would evaluate strings in the page, which it forbids."""
    for _ in range(250):
        if page.evaluate(expression) and also():
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never true: {expression}")


def test_a_reply_streams_is_stopped_and_survives_a_reload(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.answer, desk.pause_s = LONG, 0.02
    page = visit()
    say(page, "Count on.")
    expect(last_reply(page)).to_contain_text("word3")
    early = last_reply(page).inner_text()
    expect(last_reply(page)).to_contain_text("word12")
    assert last_reply(page).inner_text().startswith(early.strip()[:20])
    page.click("#stop")
    expect(page.locator(".note")).to_have_text("You stopped it here.")
    kept = last_reply(page).inner_text()
    assert "word399" not in kept
    page.fill("#prompt", "a draft")
    page.reload()
    expect(last_reply(page)).to_have_text(kept)
    expect(page.locator(".message.user .body")).to_have_text("Count on.")
    expect(page.locator("#prompt")).to_have_value("a draft")
    expect(page.locator("#chats .open")).to_have_text("Count on.")
    assert desk.jobs[-1].cancelled.wait(10)  # the server was told, too


def test_leaving_in_the_middle_keeps_what_was_said(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.answer, desk.pause_s = LONG, 0.02
    page = visit()
    say(page, "Count on.")
    expect(last_reply(page)).to_contain_text("word5")
    page.reload()
    expect(last_reply(page)).to_contain_text("word5")
    expect(page.locator(".note")).to_contain_text("left before the reply was finished")


def test_untrusted_text_is_never_markup(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.answer = "{}"
    page = visit()
    say(page, HOSTILE)
    done(page)
    reply = last_reply(page)
    expect(reply).to_contain_text('<img src=x onerror="window.harm=1"> <script>window.harm=1</script>')
    expect(page.locator(".message.user .body")).to_have_text(HOSTILE)
    assert page.evaluate("window.harm") is None
    assert page.locator("#thread :is(img, script, iframe, b, i)").count() == 0
    links = reply.locator("a").evaluate_all("links => links.map(link => [link.href, link.rel])")
    assert links == [
        ["http://harm.example/p.png", "noopener noreferrer"],
        ["https://good.example/a?b=c", "noopener noreferrer"],
    ]
    assert page.locator("#title").inner_text().startswith("<img")


def test_no_file_of_the_page_makes_markup_from_text_or_fetches_from_elsewhere() -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setHTML|DOMParser|srcdoc"
    )
    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8")
        assert not re.search(forbidden, text), file
        assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(|\sstyle=|\son\w+="|<style""", text), file
    assert re.search(r"<script(?![^>]*src=)", (PAGE / "index.html").read_text(encoding="utf-8")) is None


def test_markdown_becomes_elements(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.answer = (
        "# Head\n\nA **bold** and *italic* and `code` word, 2 * 3 * 4, snake_case_name.\n\n"
        "1. one\n   - inner\n2. two\n\n> said\n\n| a | b |\n| - | - |\n| 1 | 2 |\n\n---\n\n````py\n```\nx = 1\n````"
    )
    page = visit()
    say(page, "Markdown, please.")
    done(page)
    shape = last_reply(page).evaluate(
        "root => [...root.querySelectorAll('*')].filter(node => !node.closest('figure')).map(node => node.localName)"
    )
    assert " ".join(shape) == (
        "h3 p strong em code ol li ul li li blockquote p div table thead tr th th tbody tr td td hr"
    )
    expect(last_reply(page).locator("p").first).to_contain_text("2 * 3 * 4, snake_case_name.")
    assert last_reply(page).locator("pre").inner_text() == "```\nx = 1"


def test_text_that_grows_looks_as_if_it_had_come_at_once(visit: Callable[..., Any]) -> None:
    page = visit()
    differing = page.evaluate(
        """async (texts) => {
            const { markdown, GrowingMarkdown } = await import("/markdown.js");
            const flat = (root) => {
                for (const chunk of root.querySelectorAll(".chunk")) chunk.replaceWith(chunk.textContent);
                root.normalize();
                return root;
            };
            const wrong = [];
            for (const text of texts) for (const size of [1, 3, 7]) {
                const [grown, whole] = [document.createElement("div"), document.createElement("div")];
                const view = new GrowingMarkdown(grown);
                for (let at = 0; at < text.length; at += size) view.append(text.slice(at, at + size));
                view.end();
                whole.append(...markdown(text));
                if (!flat(grown).isEqualNode(flat(whole))) wrong.push([size, text]);
            }
            return wrong;
        }""",
        [
            ANSWER,
            HOSTILE,
            "- a\n\n- b\n  ```\n  c\n  ```\n- d\n\ntext\n| a | b |\n|---|---|\n| 1 | 2 |\nend\n\n\n1) x\n2) y",
        ],
    )
    assert differing == []


def test_hostile_markdown_takes_no_long_time(visit: Callable[..., Any]) -> None:
    page = visit()
    slowest = page.evaluate(
        """async (texts) => {
            const { markdown } = await import("/markdown.js");
            const times = texts.map((text) => {
                const began = performance.now();
                markdown(text.repeat(10000));
                return performance.now() - began;
            });
            return Math.max(...times);
        }""",
        ["[", "*a ", "**", "_a", "`", "> ", "- ", "  - a\n", "![](", "<http://", "|-", "a*_", "\\"],
    )
    assert slowest < 3000  # milliseconds on a busy machine; what is quadratic takes minutes


def test_ten_thousand_tokens_stream_without_long_pauses(visit: Callable[..., Any], desk: PageDesk) -> None:
    paragraph = "A sentence with some *marked* words and `code` goes on for a while. " * 6
    code = "```py\n" + "value = compute(value, 1)\n" * 1000 + "```"
    desk.answer = "\n\n".join([paragraph] * 60 + [code])
    page = visit()
    page.evaluate(
        """() => { window.longest = 0; new PerformanceObserver((list) => {
            for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
        }).observe({ type: "longtask" }); }"""
    )
    say(page, "Go on and on.")
    page.locator(".measured").wait_for(timeout=20_000)
    assert page.locator(".chunk").count() >= 1000 // 60
    assert page.locator("#scroller").evaluate("node => node.scrollHeight - node.scrollTop - node.clientHeight") < 50
    assert page.evaluate("window.longest") < 1500  # milliseconds; two busy cores, software rendering


def test_scrolling_up_is_left_alone(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.answer, desk.pause_s = "\n\n".join([LONG[:600]] * 12), 0.001
    page = visit()
    say(page, "Go on.")
    until(page, "document.querySelector('#scroller').scrollTop > 200")
    page.hover("#scroller")
    page.mouse.wheel(0, -5000)
    expect(page.locator("#latest")).to_be_visible()
    done(page)
    # The end is thousands of pixels down; the browser itself may move by a line to keep in place what is read.
    assert page.locator("#scroller").evaluate("node => node.scrollTop") < 100
    page.click("#latest")
    expect(page.locator("#latest")).to_be_hidden()


def test_the_keyboard_is_enough(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.answer, desk.pause_s = LONG, 0.02
    page = visit(viewport={"width": 900, "height": 800})
    reach(page, "Skip to the message box", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("By keys")
    page.keyboard.press("Enter")
    expect(last_reply(page)).to_contain_text("word3")
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_have_text("You stopped it here.")
    expect(page.locator("#prompt")).to_be_focused()
    reach(page, "Rename By keys")
    page.keyboard.press("Enter")
    page.keyboard.type("Keys alone")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Keys alone")
    reach(page, "Delete Keys alone")
    page.keyboard.press("Enter")
    expect(page.locator("#chats li")).to_have_count(0)
    expect(page.get_by_role("button", name="Undo")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#chats .open")).to_have_text("Keys alone")
    expect(page.locator(".note")).to_have_text("You stopped it here.")
    reach(page, "Memory and experts")
    page.keyboard.press("Enter")
    expect(page.locator("#close-panel")).to_be_focused()
    expect(page.locator("#rate")).not_to_have_text("–")
    page.keyboard.press("Tab")
    expect(page.locator("#heat")).to_be_focused()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(page.locator("#readout")).to_contain_text(
        re.compile(r"Layer 1, expert 2: heat \d\.\d\d, (in memory|on disk)")
    )
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.locator("#open-panel")).to_be_focused()


def reach(page: Any, name: str, key: str = "Tab") -> None:
    """Press Tab until what is of that name has the focus; it has to be seen, with its outline."""
    for _ in range(60):
        page.keyboard.press(key)
        focused = page.locator(":focus")
        if focused.count() and name == (focused.get_attribute("aria-label") or focused.inner_text()):
            assert focused.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
            return
    raise AssertionError(f"no Tab leads to {name}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_a_phone(visit: Callable[..., Any], desk: PageDesk, scheme: str) -> None:
    desk.answer = (
        "w" * 300 + "\n\n```\n" + "x" * 300 + "\n```\n\n| " + " | ".join(["cell"] * 30) + " |\n" + "|-" * 30 + "|"
    )
    page = visit(viewport={"width": 360, "height": 640}, color_scheme=scheme)
    widest = "() => Math.max(document.documentElement.scrollWidth, document.querySelector('#scroller').scrollWidth)"
    assert page.evaluate(widest) <= 360
    say(page, "y" * 300)
    done(page)
    assert page.evaluate(widest) <= 360
    assert page.locator("pre").evaluate("node => node.scrollWidth > node.clientWidth")  # scrolls within
    for opener, column in (("#open-panel", "#panel"), ("#open-side", "#side")):
        page.click(opener)
        expect(page.locator(column)).to_be_visible()
        assert page.locator(column).evaluate("node => node.scrollWidth - node.clientWidth") <= 0
        assert page.evaluate(widest) <= 360
        page.keyboard.press("Escape")
        expect(page.locator(column)).to_be_hidden()


CONTRASTS = """(selectors) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const rgb = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const light = (colour) => {
        const [r, g, b] = colour.map((part) => linear(part / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (node) => {
        const colour = rgb(getComputedStyle(node).backgroundColor);
        return colour[3] === 255 ? colour : behind(node.parentElement);
    };
    return selectors.map((selector) => {
        const node = document.querySelector(selector);
        const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
        return [selector, (a + 0.05) / (b + 0.05)];
    });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_have_contrast_and_the_switch_is_remembered(
    visit: Callable[..., Any], desk: PageDesk, scheme: str
) -> None:
    desk.refuse = [FULL]
    page = visit(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    other = {"light": "dark", "dark": "light"}[scheme]
    say(page, "Hello")
    page.locator(".failure").wait_for()
    say(page, "Hello")
    done(page)
    expect(page.locator("#legend dd").first).to_be_visible()
    text = [
        "body", ".hint", ".model", ".message.user .body", ".body p", ".body code", ".code-head", ".failure p",
        ".action", ".measured", ".chats .current .open", ".chats .icon-button", ".side-foot p", "#state", "#pressure",
        ".figure", ".tile h3", ".small", ".axes", ".readout", "#legend dt", ".send", ".new", ".body pre code",
        ".ramps li",
    ]  # fmt: skip
    for _ in range(2):
        weak = [(name, round(ratio, 2)) for name, ratio in page.evaluate(CONTRASTS, text) if ratio < 4.5]
        assert weak == []
        page.click("#theme")
    page.click("#theme")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == other
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground


def test_a_full_queue_is_told_and_can_be_tried_again(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.refuse = [FULL, MemoryPressureError("The machine is short of memory.")]
    page = visit()
    say(page, "Hello")
    expect(page.locator(".failure")).to_contain_text(
        "The queue is full: too many replies are waiting. Try again in 7 seconds."
    )
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".failure")).to_have_text(
        re.compile("takes no new work now. The machine is short of memory. Try again in 10 seconds.")
    )
    page.get_by_role("button", name="Try again").click()
    expect(last_reply(page)).to_contain_text("Three things follow")
    done(page)
    assert page.locator(".message").count() == 2
    assert page.locator(".failure").count() == 0
    assert desk.last.prompt == [{"role": "user", "content": "Hello"}]
    desk.refuse = [FULL]
    say(page, "More")
    expect(page.locator(".failure")).to_be_visible()
    say(page, "Please")
    done(page)
    turns = [(turn["role"], turn["content"]) for turn in desk.last.prompt]
    assert turns == [("user", "Hello"), ("assistant", ANSWER), ("user", "More\n\nPlease")]


def test_a_lost_connection_keeps_the_words_and_is_told(
    visit: Callable[..., Any], desk: PageDesk, server: Listener
) -> None:
    desk.answer, desk.pause_s = LONG, 0.02
    page = visit()
    say(page, "Hello")
    expect(last_reply(page)).to_contain_text("word5")
    for connection in list(server.server_state.connections):
        connection.loop.call_soon_threadsafe(connection.transport.abort)
    expect(page.locator(".failure")).to_contain_text("before the reply was finished")
    kept = last_reply(page).inner_text()
    assert kept.startswith("word0 word1 ")
    assert desk.jobs[-1].cancelled.wait(10)
    page.context.set_offline(True)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".failure")).to_contain_text("cannot be reached")
    page.get_by_role("button", name="Undo").click()
    expect(last_reply(page)).to_have_text(kept)


def test_a_reply_that_fails_keeps_its_words_and_says_why(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.fail = MemoryPressureError("The machine is short of memory.")
    page = visit()
    say(page, "Hello")
    expect(page.locator(".failure")).to_contain_text("The server broke off: The machine is short of memory.")
    expect(last_reply(page)).to_have_text("Experts that were wanted lately")


def test_the_place_in_the_queue_and_the_reasoning_are_shown(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.queued, desk.reasoning, desk.answer = [2, 1, 0], "<b>Hm</b>, let me see", "So."
    page = visit()
    say(page, "Hello")
    expect(page.locator(".waiting")).to_have_text("Waiting: 2 replies are before this one.")
    expect(page.locator(".waiting")).to_have_text("Waiting: one reply is before this one.")
    done(page)
    assert page.locator("details.reasoning").get_attribute("open") is None
    page.click("summary")
    expect(page.locator(".thought")).to_have_text("<b>Hm</b>, let me see")
    say(page, "And?")
    done(page)
    assert [turn["content"] for turn in desk.last.prompt] == ["Hello", "So.", "And?"]


def test_settings_and_edits_go_with_the_next_request(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.answer = "You said {}"
    page = visit()
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.25")
    page.fill("#max-tokens", "77")
    page.keyboard.press("Enter")
    say(page, "first")
    done(page)
    assert desk.last.prompt[0] == {"role": "system", "content": "Be brief."}
    assert (desk.last.options["temperature"], desk.last.options["max_tokens"]) == (0.25, 77)
    page.hover(".message.user")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Your message").fill("second")
    page.keyboard.press("Enter")
    expect(last_reply(page)).to_have_text("You said second")
    done(page)
    page.get_by_role("button", name="Undo").click()
    expect(last_reply(page)).to_have_text("You said first")
    desk.answer = "Another"
    page.get_by_role("button", name="Regenerate").click()
    expect(last_reply(page)).to_have_text("Another")
    assert page.locator(".message").count() == 2


def test_a_reply_goes_on_while_another_conversation_is_shown(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.answer, desk.pause_s = " ".join(LONG.split()[:40]), 0.02
    page = visit()
    say(page, "first")
    expect(last_reply(page)).to_contain_text("word2")
    page.click("#new")
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_role("button", name="first", exact=False).first.click()
    expect(last_reply(page)).to_contain_text("word39")
    done(page)


def test_what_does_not_fit_the_browser_is_told_and_kept_meanwhile(visit: Callable[..., Any], desk: PageDesk) -> None:
    page = visit()
    page.evaluate(
        """() => { for (let size = 2 ** 22; size; size >>= 1) {
            try { localStorage.setItem(`filler${size}`, "x".repeat(size)); } catch {}
        } }"""
    )
    say(page, "Hello " * 50)
    done(page)
    expect(page.locator("#banner")).to_contain_text("storage is full")
    with page.expect_download() as download:
        page.locator("#banner button").click()
    kept = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert kept["conversations"][0]["messages"][1]["content"] == ANSWER
    page.evaluate(
        "for (const key of Object.keys(localStorage)) if (key.startsWith('filler')) localStorage.removeItem(key)"
    )
    say(page, "Again")
    done(page)
    expect(page.locator("#banner")).to_be_hidden()
    page.reload()
    expect(page.locator(".message")).to_have_count(4)


@pytest.fixture(scope="module")
def with_key(told: PageDesk) -> Iterator[str]:
    """The address of a server that wants a key."""
    with running(told, api_keys=(KEY,)) as address:
        yield address


@pytest.mark.usefixtures("desk")
def test_a_key_is_asked_for_and_kept_for_the_tab_only(visit: Callable[..., Any], with_key: str) -> None:
    page = visit(with_key)
    for given in ("wrong", KEY):
        expect(page.locator("#ask-key")).to_be_visible()
        page.fill("#key", given)
        page.keyboard.press("Enter")
    expect(page.locator("#model")).to_contain_text(FACTS.name)
    say(page, "Hello")
    done(page)
    kept = "([name, key]) => Object.values(window[name]).some(value => value.includes(key))"
    assert page.evaluate(kept, ["sessionStorage", KEY])
    assert not page.evaluate(kept, ["localStorage", KEY])


@pytest.mark.usefixtures("desk")
def test_who_has_no_key_is_asked_again_only_when_they_want_something(
    visit: Callable[..., Any], with_key: str
) -> None:
    page = visit(with_key)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#model")).to_have_text("The server wants an API key.")
    page.wait_for_timeout(300)
    expect(page.locator("#ask-key")).to_be_hidden()
    say(page, "Hello")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".failure")).to_contain_text("wants an API key")
    expect(page.locator(".message.user .body")).to_have_text("Hello")


def test_a_model_without_a_chat_template_goes_on_with_the_text(visit: Callable[..., Any], desk: PageDesk) -> None:
    desk.model, desk.answer = replace(FACTS, has_chat_template=False), "there was **light**"
    page = visit()
    expect(page.locator(".plain-note")).to_contain_text("no chat template")
    say(page, "In the beginning ")
    done(page)
    expect(last_reply(page)).to_have_text("there was **light**")
    page.press("#prompt", "Enter")
    expect(page.locator(".message")).to_have_count(4)
    done(page)
    assert [job.ask.prompt for job in desk.jobs] == [
        "In the beginning ",
        "In the beginning there was **light**",
    ]


def test_the_panel_shows_the_numbers_of_the_status(visit: Callable[..., Any], desk: PageDesk) -> None:
    page = visit(viewport={"width": 1400, "height": 1000})
    legend = page.locator("#legend")
    expect(legend).to_have_text("Trunk1.7 GBExperts13.2 GBKV3.2 GBPrefill and pool957.1 MBFree in the budget3.2 GB")
    expect(page.locator("#bar")).to_have_attribute("aria-label", re.compile(r"^Trunk 1\.7 GB, .* of 22\.3 GB$"))
    expect(page.locator("#budget")).to_have_text("budget 22.3 GB")
    expect(page.locator("#pressure")).to_have_text("normal")
    expect(page.locator("#hits")).to_have_text("94.3 %")
    expect(page.locator("#batch")).to_have_text("3 of 6")
    expect(page.locator("#queue")).to_have_text("2 waiting")
    expect(page.locator("#resident")).to_have_text("4,032 of 6,144 in memory")
    expect(page.locator("#heat-summary")).to_contain_text("48 layers of 128 experts.")
    widths = page.locator("#bar .part").evaluate_all("parts => parts.map(part => part.getBoundingClientRect().width)")
    assert widths[1] / sum(widths) == pytest.approx(13.2 / 22.3, abs=0.03)
    assert (
        page.locator("#heat").evaluate("map => new Set(map.getContext('2d').getImageData(0, 0, 300, 200).data).size")
        > 20
    )
    desk.state, desk.accepts, desk.reason = "draining", False, "It ends."
    expect(page.locator("#notice")).to_contain_text("No new work is taken. It ends.")
    page.click("#close-panel")
    page.wait_for_timeout(300)
    polls = desk.polls
    page.wait_for_timeout(1300)
    assert desk.polls == polls  # nobody looks, nobody asks


STOP_AFTER = """(pieces) => new Promise((resolve) => {
    const lengths = new Set();
    const giveUp = setTimeout(() => resolve([...lengths]), 20000);
    const watch = new MutationObserver(() => {
        const length = document.querySelector(".message.assistant .body")?.textContent.length;
        if (length) lengths.add(length);
        if (lengths.size < pieces) return;
        watch.disconnect();
        clearTimeout(giveUp);
        document.getElementById("stop").click();
        resolve([...lengths]);
    });
    watch.observe(document.getElementById("thread"), { childList: true, subtree: true, characterData: true });
    document.getElementById("send").click();
})"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineDesk]:
    folder = demo_with_chat(tmp_path_factory.mktemp("chat") / "demo-chat")
    desk = EngineDesk(lambda: mlxmoe.load(folder, experts="50%"), "demo-chat")
    desk.start()
    yield desk
    desk.close()


def test_a_real_model_streams_is_stopped_and_found_again(visit: Callable[..., Any], real: EngineDesk) -> None:
    with running(real) as address:
        page = visit(address, viewport={"width": 1400, "height": 1000})
        expect(page.locator("#model")).to_have_text("demo-chat · 256 tokens of context")
        page.fill("#prompt", "In the beginning")
        lengths = page.evaluate(STOP_AFTER, 3)  # by the page itself, before a fast machine has said all
        assert len(lengths) == 3
        assert lengths == sorted(lengths)
        expect(page.locator(".note")).to_have_text("You stopped it here.")
        until(page, "true", lambda: real.status().active == 0)
        assert 0 < real.status().tokens < 200  # of about 250 that the context has room for
        memory = real.status().memory
        assert memory is not None
        assert memory.kv_bytes == 0
        kept = last_reply(page).inner_text()
        assert len(kept) >= lengths[-1] - 2  # but for white space
        page.reload()
        expect(last_reply(page)).to_have_text(kept)
        expect(page.locator("#chats .open")).to_have_text("In the beginning")
        stats = real.status().stats
        assert stats is not None
        layers = stats.layers
        expect(page.locator("#heat-summary")).to_contain_text(
            f"{len(layers)} layers of {layers[0].num_experts} experts."
        )
        expect(page.locator("#resident")).to_have_text(re.compile(r"^\d+ of 96 in memory$"))


def test_the_demo_model_goes_on_with_a_text_in_its_small_context(visit: Callable[..., Any]) -> None:
    real = EngineDesk(lambda: mlxmoe.load(experts="all"), "demo")
    real.start()
    try:
        with running(real) as address:
            page = visit(address)
            expect(page.locator("#model")).to_have_text("demo · 256 tokens of context")
            say(page, "In the beginning ")
            done(page)
            page.press("#prompt", "Enter")
            expect(page.locator(".message")).to_have_count(4)
            done(page)
            expect(page.locator(".failure")).to_have_count(0)
    finally:
        real.close()
