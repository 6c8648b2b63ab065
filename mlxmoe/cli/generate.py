"""mlxmoe generate: one prompt, one reply."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mlxmoe.cli import common

if TYPE_CHECKING:
    from mlxmoe.reply import ReplyOptions


@common.reported
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say; - reads it from standard input.")],
    model: common.ModelOption = None,
    experts: common.Experts = "auto",
    memory: common.Memory = None,
    context: common.Context = None,
    window: common.Window = None,
    sinks: common.Sinks = 4,
    kv_bits: common.KVBits = None,
    warm: common.Warm = True,
    tuned: common.Tuned = True,
    chunk_tokens: common.ChunkTokens = None,
    max_tokens: common.MaxTokens = 256,
    temperature: common.Temperature = 0.0,
    top_p: common.TopP = 1.0,
    top_k: common.TopK = 0,
    min_p: common.MinP = 0.0,
    repetition_penalty: common.RepetitionPenalty = None,
    seed: common.Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Ends the reply; may be repeated.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt: no chat template.")] = False,
    adapter: common.Adapter = None,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    quiet: common.Quiet = False,
    debug: common.Debug = False,
) -> None:
    """Reply to a prompt. The reply goes to stdout as it is made, everything else to stderr."""
    from mlxmoe.reply import ReplySettings

    text = sys.stdin.read() if prompt == "-" else prompt
    options: ReplyOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or (),
    }
    ReplySettings.check(**options)  # before the model is loaded
    engine = common.load_engine(
        model,
        quiet,
        experts=experts,
        memory=memory,
        context=context,
        window=window,
        sinks=sinks,
        kv_bits=kv_bits,
        warm=warm,
        tuned=tuned,
        chunk_tokens=chunk_tokens,
        adapter=adapter,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    with engine:
        common.show_reply(engine.stream(text, raw=raw, **options), quiet)
