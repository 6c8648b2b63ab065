"""The demo model's text: two books as chapters, their tokenizer, windows to train on, a held-out exam.

Owns where the text comes from, how it is cut and what is held out; every draw follows from a seed.
Knows nothing of the model, nor of training: it gives and takes numpy arrays.

Axes: B windows of a batch, W windows of an exam, L = CONTEXT tokens of a window.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOT = "<|endoftext|>"
EOT_ID = 0
VOCABULARY = 2048  # tokens
CONTEXT = 256  # tokens of a window
ENGLISH_PACKAGES = "bible-kjv bible-kjv-text"
SPANISH_PACKAGES = "diatheke sword-text-sparv"


# --- the books --------------------------------------------------------------------------------------------


def run_text_tool(command: list[str], packages: str) -> str:
    """What a Debian text program prints; exits naming the packages to install where it is absent."""
    if shutil.which(command[0]) is None:
        sys.exit(f"'{command[0]}' is missing; the demo's text is in Debian: apt-get install {packages}")
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    text = done.stdout.decode("utf-8")
    if done.returncode != 0 or text.count("\n") < 30_000:
        sys.exit(f"'{' '.join(command)}' gave no whole Bible: apt-get install {packages}")
    return text


def english_chapters() -> list[str]:
    """The King James Version, a chapter a string: heading, blank line, one verse a line."""
    command = ["bible", "-l100000", "Genesis 1:1-Revelation 22:21"]
    chapters: list[list[str]] = []
    for line in run_text_tool(command, ENGLISH_PACKAGES).splitlines():
        if verse := re.match(r"\s+\d+ (.*)", line):
            chapters[-1].append(" ".join(verse[1].split()))
        elif line.strip():
            chapters.append([line.strip(), ""])
    return ["\n".join(lines) for lines in chapters]


def spanish_chapters() -> list[str]:
    """The Reina-Valera of 1909 in the form of `english_chapters`, without its concordance numbers."""
    command = ["diatheke", "-b", "spaRV1909eb", "-l", "es", "-f", "plain", "-k", "Gen-Rev"]
    output = re.sub(r"<[GH]\d+>", " ", run_text_tool(command, SPANISH_PACKAGES))
    words = Counter(re.findall(r"\w+", output))
    chapters: dict[str, list[str]] = {}
    for chapter, number, text in re.findall(r"^(.+ \d+):(\d+): (.*)$", output, re.MULTILINE):
        text = re.sub(r" ([,.;:?!)])", r"\1", " ".join(text.split()))
        if number == "1":
            text = without_capitals(text, words)
        if text:
            chapters.setdefault(chapter, [chapter, ""]).append(text)
    return ["\n".join(lines) for lines in chapters.values()]


def without_capitals(verse: str, words: Counter[str]) -> str:
    """Chapters open in capitals (`EN el principio`, `Y VIENDO Jacob`): writes them as `words` mostly does."""

    def lower(match: re.Match[str]) -> str:
        word = match[0].capitalize().replace("Jehova", "Jehová")
        opens = match.start() == 0 or verse[: match.start()].rstrip("¡¿( ")[-1:] in (".", "!", "?", ":", "")
        return word.lower() if not opens and words[word.lower()] >= words[word] else word

    return re.sub(r"\b[A-ZÁÉÍÓÚÑÜÂÊÎÔÛ]{2,}\b", lower, verse)


@dataclass(frozen=True)
class Text:
    """The chapters of one book, divided: `train` is learned, `held_out` only measured."""

    title: str
    packages: str  # of Debian
    train: list[str]
    held_out: list[str]


def read_texts(seed: int, held_out: float) -> list[Text]:
    """Both books, English first; `held_out` is the share of the chapters that `seed` draws."""
    books = [
        ("English: King James Version", ENGLISH_PACKAGES, english_chapters()),
        ("Spanish: Reina-Valera 1909", SPANISH_PACKAGES, spanish_chapters()),
    ]
    texts = []
    for i, (title, packages, chapters) in enumerate(books):
        order = np.random.default_rng([seed, i]).permutation(len(chapters))
        held = set(order[: round(held_out * len(chapters))].tolist())
        train = [c for n, c in enumerate(chapters) if n not in held]
        texts.append(Text(title, packages, train, [chapters[n] for n in sorted(held)]))
    return texts


# --- tokens -----------------------------------------------------------------------------------------------


def make_tokenizer(texts: list[Text]) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are tokens, so every UTF-8 text comes back as it was."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((chapter for text in texts for chapter in text.train), trainer)
    assert tokenizer.token_to_id(EOT) == EOT_ID, "config.json names the token that ends a text"
    return tokenizer


@dataclass(frozen=True)
class Stream:
    """One language as tokens: every chapter followed by EOT. `starts`: where a chapter or a verse begins."""

    tokens: np.ndarray
    starts: np.ndarray

    def windows(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Windows of CONTEXT + 1 tokens for ever, a pass over the text after another, in a new order each.

        Half of the windows are moved back to where a verse begins.
        """
        last = len(self.tokens) - CONTEXT - 1
        while True:
            begins = np.arange(rng.integers(CONTEXT), last, CONTEXT)
            verse = self.starts[np.searchsorted(self.starts, begins, side="right") - 1]
            begins = rng.permutation(np.where(rng.random(len(begins)) < 0.5, verse, begins))
            for begin in begins:
                yield self.tokens[begin : begin + CONTEXT + 1]


def make_stream(chapters: list[str], tokenizer: Tokenizer) -> Stream:
    """All `chapters` in their order, as one stream."""
    tokens: list[int] = []
    starts: list[int] = []
    newline = tokenizer.token_to_id("Ċ")
    for encoding in tokenizer.encode_batch(chapters):
        ids = np.array([*encoding.ids, EOT_ID])
        verses = np.flatnonzero((ids[:-2] == newline) & (ids[1:-1] != newline)) + 1
        starts += [len(tokens), *(len(tokens) + verses).tolist()]
        tokens += ids.tolist()
    return Stream(np.array(tokens, dtype=np.int64), np.array(starts))


def batches(streams: list[Stream], seed: int, batch: int, english_share: float) -> Iterator[np.ndarray]:
    """`[B, L + 1]` token ids for ever; the same for the same seed, however many steps are asked for."""
    rng = np.random.default_rng([seed, 100])
    sources = [s.windows(np.random.default_rng([seed, 101 + i])) for i, s in enumerate(streams)]
    while True:
        languages = rng.random(batch) >= english_share
        yield np.stack([next(sources[int(language)]) for language in languages])


# --- the exam ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exam:
    """Held-out chapters as windows that overlap by half: each token counts once, where `scored`."""

    windows: np.ndarray  # [W, L + 1]
    scored: np.ndarray  # [W, L] bool
    text_bytes: int


def make_exam(chapters: list[str], tokenizer: Tokenizer) -> Exam:
    """An exam on `chapters`; each begins after the token that ended the one before."""
    windows, scored = [], []
    for encoding in tokenizer.encode_batch(chapters):
        ids = np.array([EOT_ID, *encoding.ids])
        for begin in range(0, max(1, len(ids) - 1 - CONTEXT // 2), CONTEXT // 2):
            part = ids[begin : begin + CONTEXT + 1]
            target = np.arange(1, CONTEXT + 1)
            windows.append(np.pad(part, (0, CONTEXT + 1 - len(part))))
            scored.append((target < len(part)) & ((begin == 0) | (target > CONTEXT // 2)))
    return Exam(np.stack(windows), np.stack(scored), sum(len(c.encode()) for c in chapters))


@dataclass(frozen=True)
class Data:
    """All that comes from the texts; the lists have one entry a book."""

    texts: list[Text]
    tokenizer: Tokenizer
    streams: list[Stream]
    exams: list[Exam]


def make_data(seed: int, held_out: float) -> Data:
    texts = read_texts(seed, held_out)
    tokenizer = make_tokenizer(texts)
    streams = [make_stream(text.train, tokenizer) for text in texts]
    return Data(texts, tokenizer, streams, [make_exam(text.held_out, tokenizer) for text in texts])
