"""mlxmoe chat: a conversation at the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mlxmoe import MemoryBudgetError, MemoryPressureError, RequestError
from mlxmoe.cli import common
from mlxmoe.memory.sizes import format_bytes

if TYPE_CHECKING:
    from mlxmoe import Engine, Session
    from mlxmoe.reply import ReplyOptions

HELP = "/reset starts afresh, /stats shows the expert cache, /exit or Ctrl-D leaves, Ctrl-C stops a reply."


@common.reported
def chat(
    model: common.ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="A system message.", show_default=False)] = None,
    experts: common.Experts = "auto",
    memory: common.Memory = None,
    context: common.Context = None,
    window: common.Window = None,
    sinks: common.Sinks = 4,
    kv_bits: common.KVBits = None,
    warm: common.Warm = True,
    tuned: common.Tuned = True,
    chunk_tokens: common.ChunkTokens = None,
    max_tokens: common.MaxTokens = 1024,
    temperature: common.Temperature = 0.7,
    top_p: common.TopP = 1.0,
    top_k: common.TopK = 0,
    min_p: common.MinP = 0.0,
    repetition_penalty: common.RepetitionPenalty = None,
    seed: common.Seed = None,
    adapter: common.Adapter = None,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    quiet: common.Quiet = False,
    debug: common.Debug = False,
) -> None:
    """Talk with a model. Where stdin is no terminal, each of its lines is a turn."""
    from mlxmoe.reply import ReplySettings

    options: ReplyOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
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
        session = engine.session(system)
        if not quiet:
            if not engine.tokenizer.has_chat_template:
                common.notes.print("This model has no chat template: it continues what you write.", style="dim")
            common.notes.print(HELP, style="dim", markup=False)
        while (line := _read_line()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/help":
                    common.notes.print(HELP, markup=False)
                case "/reset":
                    session = engine.session(system)
                case "/stats":
                    common.notes.print(_cache_stats(engine))
                case command if command.startswith("/"):
                    common.notes.print(f"No such command: {command}. {HELP}", markup=False)
                case text:
                    _turn(session, text, quiet, options)


def _cache_stats(engine: Engine) -> str:
    stats, in_memory = engine.stats(), engine.memory().bank_bytes
    if in_memory == engine.plan.expert_bytes and not stats.misses:
        return "all experts are in memory: there is nothing to read"
    return (
        f"experts: {stats.hits} hits, {stats.misses} misses ({stats.hit_rate:.1%} hits), "
        f"{stats.evictions} evictions, {format_bytes(stats.bytes_read)} read"
    )


def _read_line() -> str | None:
    """The next line, or None at the end: Ctrl-D, or Ctrl-C while nothing is being said."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        common.notes.print()
        return None


def _turn(session: Session, text: str, quiet: bool, options: ReplyOptions) -> None:
    try:
        common.show_reply(session.stream(text, **options), quiet)
    except KeyboardInterrupt:
        common.notes.print("(stopped)", style="dim")
    except (RequestError, MemoryPressureError, MemoryBudgetError) as error:
        # a prompt too long, a template that refuses, memory short for now: the conversation goes on
        common.notes.print(f"{error}", style="red", markup=False, soft_wrap=True)
