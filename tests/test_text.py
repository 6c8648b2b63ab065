"""Text as it is shown: whole characters, nothing lost, no part of a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.errors import SamplingError
from mlxmoe.text import TextStream, check_stop

TEXTS = [
    "plain words",
    " a leading space",
    "naïve café ¿Qué?",
    "日本語 and 한국어",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag",
    "a\n\n  b\tc",
    "x  y",
]


@pytest.fixture(scope="module")
def tokenizer(stock_demo: tuple[Any, Any]) -> Any:
    return stock_demo[1]


def streamed(tokenizer: Any, prompt: list[int], reply: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    text = TextStream(tokenizer, prompt, stop)
    pieces = [text.add(token) for token in reply]
    return [*pieces, text.finish()]


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["Go on:", "with a space at the end ", "emoji 🎉"])
def test_pieces_are_the_text_and_never_a_broken_character(tokenizer: Any, prompt: str, text: str) -> None:
    pieces = streamed(tokenizer, encode(tokenizer, prompt), encode(tokenizer, text))
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)


@given(data=st.data(), text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20))
def test_any_text_cut_anywhere_into_prompt_and_reply_comes_out_whole(tokenizer: Any, data: Any, text: str) -> None:
    tokens = encode(tokenizer, text)
    cut = data.draw(st.integers(1, len(tokens)))  # no generation begins from nothing
    shown_before = tokenizer.decode(tokens[:cut])
    if "�" in shown_before.removesuffix("�") or "�" in text:
        return  # a text of replacement characters proves nothing
    pieces = "".join(streamed(tokenizer, tokens[:cut], tokens[cut:]))
    assert shown_before.rstrip("�") + pieces == text


@pytest.mark.parametrize("prompt", ["�", "a �", "two �� "])
def test_a_replacement_character_of_the_prompt_is_not_said_again(tokenizer: Any, prompt: str) -> None:
    assert "".join(streamed(tokenizer, encode(tokenizer, prompt), encode(tokenizer, " b"))) == " b"


def test_a_reply_cut_within_a_character_leaves_it_out(tokenizer: Any) -> None:
    tokens = encode(tokenizer, "so 😀")
    assert "".join(streamed(tokenizer, encode(tokenizer, "x"), tokens[:-1])) == "so "


@given(tokens=st.lists(st.integers(0, 2046), min_size=1, max_size=30))
def test_random_tokens_come_out_as_the_tokenizer_decodes_them(tokenizer: Any, tokens: list[int]) -> None:
    # Not byte 0, which mlx-lm's detokeniser takes for the letter that stands for it.
    tokens = [
        token for token in tokens if token not in tokenizer.eos_token_ids and "Ā" not in token_text(tokenizer, token)
    ]
    prompt = encode(tokenizer, "x")
    assert "x" + "".join(streamed(tokenizer, prompt, tokens)) == tokenizer.decode([*prompt, *tokens]).rstrip("�")


def token_text(tokenizer: Any, token: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(token))


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (("World",), "Hello "),
        (("o W",), "Hell"),
        (("Hello World! And",), ""),
        (("zzz", "! A"), "Hello World"),
        (("And more.X",), "Hello World! And more."),
        (("more", "And"), "Hello World! "),
        ((".",), "Hello World! And more"),
    ],
)
def test_no_part_of_a_stop_string_is_shown(tokenizer: Any, stop: tuple[str, ...], shown: str) -> None:
    text = TextStream(tokenizer, encode(tokenizer, "x"), stop)
    seen = ""
    for token in encode(tokenizer, "Hello World! And more."):
        seen += text.add(token)
        assert shown.startswith(seen), "only what is certain is shown"
        if text.stopped:
            break
    assert seen + text.finish() == shown
    assert text.stopped == (stop != ("And more.X",))


@given(st.data())
def test_the_stop_string_that_is_complete_first_cuts(tokenizer: Any, data: Any) -> None:
    words = st.text("ab ", min_size=1, max_size=4)
    text = data.draw(st.text("ab ", min_size=1, max_size=30))
    stop = tuple(data.draw(st.lists(words, min_size=1, max_size=3)))
    found = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]
    pieces = streamed(tokenizer, encode(tokenizer, "x"), encode(tokenizer, text), stop)
    assert "".join(pieces) == text[: min(found, default=(0, len(text)))[1]]


@pytest.mark.parametrize("stop", ["", ("a", ""), (3,), [None], None, 5])
def test_a_stop_that_is_no_text_is_refused(stop: Any) -> None:
    with pytest.raises(SamplingError, match="at least one character"):
        check_stop(stop)
