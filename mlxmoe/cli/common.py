"""What the subcommands share: options, loading with progress, statistics, and errors turned into exit codes."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

import mlxmoe
from mlxmoe import (
    DownloadError,
    EngineClosedError,
    MemoryBudgetError,
    MemoryPressureError,
    MlxMoeError,
    ModelError,
    RequestError,
)
from mlxmoe.cli import interrupts
from mlxmoe.memory.sizes import format_bytes

if TYPE_CHECKING:
    from mlxmoe import Chunk, Engine, MemoryEvent

# Exit codes, from the most to the least particular; 2 is also what a wrong option gives, 130 is Ctrl-C.
EXIT_CODES: dict[type[MlxMoeError], int] = {
    RequestError: 2,
    ModelError: 3,
    DownloadError: 4,
    MemoryBudgetError: 5,
    MemoryPressureError: 5,
    MlxMoeError: 1,
}
INTERNAL_ERROR = 70

notes = Console(stderr=True, highlight=False)  # everything but the model's words

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="Folder or hub id; without it the built-in demo model.", show_default=False),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder or hub id; without it the built-in demo model.", show_default=False),
]
Experts = Annotated[
    str, typer.Option(help="Routed experts kept in memory: auto, all, 12GB or 25%. The words stay the same.")
]
Memory = Annotated[
    str | None,
    typer.Option(help="The most to use, for example 24GB; by default what is free now.", show_default=False),
]
Context = Annotated[int | None, typer.Option(help="Tokens, prompt and reply, that must fit.", show_default=False)]
Contexts = Annotated[
    str | None,
    typer.Option("--context", help="Contexts to compare: 4k,8k,32k,128k. k is 1024 tokens.", show_default=False),
]
Window = Annotated[
    int | None,
    typer.Option(
        help="Lossy: each token attends to this many tokens only, in a KV cache of that size.", show_default=False
    ),
]
Sinks = Annotated[int, typer.Option(help="The first tokens, which stay in the window.")]
KVBits = Annotated[
    int | None, typer.Option("--kv-bits", help="Lossy: a KV cache quantised to 8 or 4 bits.", show_default=False)
]
Tuned = Annotated[
    bool,
    typer.Option("--tuned/--no-tuned", help="Take what `mlxmoe tune` found best, for what is not named here."),
]
ChunkTokens = Annotated[
    int | None,
    typer.Option(min=1, help="The most tokens of a prompt computed at once; by default 2048.", show_default=False),
]
Adapter = Annotated[str | None, typer.Option(help="Folder of a LoRA adapter of mlx-lm.", show_default=False)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False)]
AsJSON = Annotated[bool, typer.Option("--json", help="Everything as JSON.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code that comes with the weights.")]
Warm = Annotated[
    bool, typer.Option("--warm/--no-warm", help="Fill the expert slots while loading, or as experts are asked for.")
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens in the reply.")]
Temperature = Annotated[float, typer.Option("--temperature", "--temp", help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")]
TopK = Annotated[int, typer.Option(help="Sample from the k likeliest; 0 is off.")]
MinP = Annotated[float, typer.Option(help="Least probability relative to the likeliest; 0 is off.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 discourages repeats.", show_default=False)]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="The model's words only, no statistics.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """End `command` with one message and an exit code instead of a traceback, unless `--debug` is given."""

    @functools.wraps(command)
    def wrapper(*args: Any, **options: Any) -> None:
        try:
            with interrupts.raised():
                command(*args, **options)
                sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(interrupts.INTERRUPTED) from None
        except BrokenPipeError:
            _leave_quietly()
        except OSError as error:
            if options.get("debug"):
                raise
            notes.print(f"Error: {error}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(1) from error
        except Exception as error:
            if options.get("debug"):
                raise
            raise typer.Exit(_report(error)) from error

    return wrapper


def _report(error: Exception) -> int:
    if isinstance(error, MlxMoeError):
        notes.print(f"Error: {error}", style="red", markup=False, soft_wrap=True)
        return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
    notes.print(
        f"Internal error: {type(error).__name__}: {error}\nThis is a defect of mlxmoe: please report it with the "
        f"traceback that --debug shows.",
        style="red", markup=False, soft_wrap=True,
    )  # fmt: skip
    return INTERNAL_ERROR


def _leave_quietly() -> None:
    """The reader of our output has gone (`| head`): say nothing, not even at the interpreter's last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(0)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for download and load; nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task({"download": "Downloading", "load": "Loading"}[stage], total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


def load_engine(
    model: str | None, quiet: bool, *, is_wanted: Callable[[], bool] = lambda: True, **options: Any
) -> Engine:
    """load() with a progress bar, and a line that says what was loaded and how much of it is in memory.

    Raises EngineClosedError as soon as it is no longer wanted.
    """
    with progress_bar() as show, warnings.catch_warnings(record=True) as caught:

        def show_wanted(stage: str, done: int, total: int) -> None:
            if not is_wanted():
                raise EngineClosedError("The model was not loaded to its end: nobody wants it any more.")
            show(stage, done, total)

        warnings.simplefilter("always", UserWarning)
        engine = mlxmoe.load(model, progress=show_wanted, on_memory=None if quiet else tell_memory, **options)
    for warning in caught:
        notes.print(str(warning.message), style="yellow", markup=False, soft_wrap=True)
    if not quiet:
        notes.print(describe(engine), style="dim", markup=False, soft_wrap=True)
    return engine


def tell_memory(event: MemoryEvent) -> None:
    """A line of its own for what the memory guard did, also in the middle of a reply."""
    notes.print(f"\n({event.text})", style="yellow", markup=False, soft_wrap=True)


def describe(engine: Engine) -> str:
    """One line: the model, its experts in memory, its context."""
    from mlxmoe.hub import demo_folder

    plan = engine.plan
    name = "built-in demo model" if engine.path == demo_folder() else engine.path.name
    parts = [f"{name}: trunk {format_bytes(plan.trunk_bytes)}"]
    layers = engine.stats().layers
    if layers:
        slots, most = sum(layer.slots for layer in layers), sum(layer.num_experts for layer in layers)
        where = "all in memory" if slots == most else f"{slots} of {most} in memory ({format_bytes(plan.bank_bytes)})"
        parts.append(f"experts {format_bytes(plan.expert_bytes)}, {where}")
    if plan.context is not None:
        whole = (
            "" if plan.model_context in (None, plan.context) else f" (the model was made for {plan.model_context})"
        )
        parts.append(f"context {plan.context} tokens{whole}")
    kv = engine.kv_settings
    if kv.window is not None:
        parts.append(f"window {kv.window} tokens with {kv.sinks} sinks (lossy)")
    if kv.kv_bits is not None:
        parts.append(f"KV cache in {kv.kv_bits} bits (lossy)")
    if engine.tuning is not None:
        parts.append("as mlxmoe tune found best")
    return ", ".join(parts)


def summarize(last: Chunk) -> str:
    """One line of statistics for the last chunk of a reply."""
    parts = [
        f"{last.prompt_tokens} prompt tokens at {last.prompt_tokens_per_s:.1f}/s",
        f"{last.generated_tokens} tokens at {last.tokens_per_s:.1f}/s",
        f"first after {last.ttft_s:.2f} s",
        f"expert hits {last.expert_hit_rate:.1%}",
        f"peak {format_bytes(last.peak_memory_bytes)}",
    ]
    if last.finish_reason == "length":
        parts.append("stopped at its length limit")
    if last.finish_reason == "memory":
        parts.append("ended early because the machine ran short of memory")
    return ", ".join(parts)


def show_reply(chunks: Iterator[Chunk], quiet: bool) -> Chunk | None:
    """Write a reply to stdout as it comes, a line of statistics to stderr; the last chunk.

    Raises KeyboardInterrupt once the reply so far has been ended properly.
    """
    last = None
    try:
        for chunk in chunks:
            last = chunk
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
        if last is not None and not quiet:
            notes.print(summarize(last), style="dim", markup=False, soft_wrap=True)
    return last
