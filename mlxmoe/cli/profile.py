"""mlxmoe profile: which experts a model asks for, as tables, as a trace, as a picture, and for later loads."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import mlxmoe
from mlxmoe import MlxMoeError, PromptError, RequestError
from mlxmoe.cli import common
from mlxmoe.memory.sizes import format_bytes

if TYPE_CHECKING:
    from mlxmoe import Engine, RoutingStats, Trace

# Of several kinds, so that one subject's experts do not pass for everybody's. Without a chat template the model goes
# on from them.
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "In the beginning there was a small village by the sea, and in it lived",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train leaves at nine and travels 80 kilometres an hour. How far has it come at noon, and why?",
    "Give me a recipe for a simple vegetable soup.",
    "Traduce al español: the house stands on a hill, and the river runs below it.",
    "And he said unto them, Hear now my words:",
    "List the planets of the solar system and one fact about each.",
)
REPLY_TOKENS = 64  # at most, for each prompt
BYTES_PER_TOKEN = 32  # more of a text need not be read for a token
GRID_COLUMNS = 8


@common.reported
def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder or hub id, or a trace (.npz) made before; without it the built-in demo model.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Let the model read this UTF-8 text instead of replying to prompts.", show_default=False),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="About so many are recorded.")] = 512,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the routing to this .npz file.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw experts by layers and the hit curve to this .png file.", show_default=False),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Keep the profile, so that later loads read these experts first.")
    ] = True,
    as_json: common.AsJSON = False,
    experts: common.Experts = "auto",
    memory: common.Memory = None,
    context: common.Context = None,
    adapter: common.Adapter = None,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The tables only.")] = False,
    debug: common.Debug = False,
) -> None:
    """Record which experts a model asks for: hit rate at every cache size, use of each expert, balance, reuse."""
    from mlxmoe.cli.routing_plot import draw, refuse_without_matplotlib

    if plot is not None:
        refuse_without_matplotlib()
    for option, path in (("--trace", trace), ("--plot", plot)):
        if path is not None and not path.expanduser().parent.is_dir():
            raise RequestError(
                f"{option} {path}: there is no folder {path.parent}. Make it, or choose another place."
            )
    said = None if text is None else _read_text(text, tokens)
    expert_bytes: int | None = None
    if model is not None and model.endswith(".npz"):
        recorded = mlxmoe.Trace.load(model)
    else:
        engine = common.load_engine(
            model,
            quiet,
            experts=experts,
            memory=memory,
            context=context,
            adapter=adapter,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        with engine:
            recorded = _record(engine, said, tokens)
            expert_bytes = engine.plan.expert_bytes
            if save:
                kept = engine.keep_profile(recorded)
                if not quiet:
                    common.notes.print(f"Kept for later loads: {kept}", style="dim", markup=False, soft_wrap=True)
    if trace is not None:
        recorded.save(trace)
    try:
        stats = mlxmoe.routing_stats(recorded)
    except ValueError as error:
        raise RequestError(f"{model}: {error} Record a longer one.") from error
    if plot is not None:
        draw(stats, plot)
    if as_json:
        typer.echo(json.dumps(stats.as_dict(), indent=2))
    else:
        _show(stats, expert_bytes)


def _read_text(path: Path, tokens: int) -> str:
    """As much of the file as `tokens` can be."""
    most = tokens * BYTES_PER_TOKEN
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(most)
        # Of a file that goes on, the last character may be cut.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(content, final=len(content) < most)
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{path} is not UTF-8 text: byte {error.start} of it ({error.object[error.start]:#04x}) cannot begin or "
            f"continue a character. Convert it, or give another file."
        ) from error
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}. Give a text file.") from error
    if not text.strip():
        raise PromptError(f"{path} holds no text. Give a text file with some words in it.")
    return text


def _record(engine: Engine, text: str | None, tokens: int) -> Trace:
    """What passes of about `tokens` tokens ask for: of `text`, as the model reads it, or of its own replies."""
    longest = engine.plan.context or 2048
    with engine.record(max_tokens=tokens + longest) as recording, _progress(tokens) as show:
        runs = _replies(engine, tokens, lambda: recording.tokens) if text is None else _reading(engine, text, tokens)
        for _ in runs:
            show(recording.tokens)
    return recording.trace


def _reading(engine: Engine, text: str, tokens: int) -> Iterator[None]:
    """The model reads `text` in pieces of a prefill chunk: with a reply of one token just the prompt is computed."""
    ids = list(engine.tokenizer.encode(text))[:tokens]
    piece = min(engine.plan.chunk_tokens, (engine.plan.context or len(ids) + 1) - 1)
    for start in range(0, len(ids), piece):
        for _ in engine.stream(ids[start : start + piece], max_tokens=1):
            yield


def _replies(engine: Engine, tokens: int, recorded: Callable[[], int]) -> Iterator[None]:
    """The model replies to one prompt after the other until `tokens` are recorded; each time round differently."""
    seed, refused = 0, None
    while recorded() < tokens:
        before = recorded()
        for prompt in PROMPTS:
            if recorded() >= tokens:
                return
            try:
                reply = engine.stream(
                    prompt, max_tokens=min(REPLY_TOKENS, tokens - recorded()), temperature=0.7, seed=seed
                )
            except PromptError as error:  # longer than a small context
                refused = error
                continue
            for _ in reply:
                yield
        seed += 1
        if recorded() == before:
            raise refused or MlxMoeError("The model made no token.")


@contextmanager
def _progress(tokens: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=common.notes, transient=True, disable=not common.notes.is_terminal) as bar:
        task = bar.add_task("Recording tokens", total=tokens)
        yield lambda done: bar.update(task, completed=min(done, tokens))


def _show(stats: RoutingStats, expert_bytes: int | None) -> None:
    out = Console(highlight=False)
    most = len(stats.hit_rates) - 1
    fewest = min(layer.num_experts for layer in stats.layers)
    experts = f"{most}" if fewest == most else f"{fewest} to {most}"
    out.print(
        f"{stats.tokens} tokens, {len(stats.layers)} layers of {experts} experts, {stats.top_k} for each token",
        style="bold",
    )
    out.print("\nHits of an LRU cache, cold at first, by slots a layer:", style="bold")
    _print_curve(out, stats, expert_bytes)
    table = Table(title="Layers", title_style="bold", title_justify="left", box=None, padding=(0, 2, 0, 0))
    recall = any(layer.lookahead_recall is not None for layer in stats.layers)
    heads = ["layer", "busiest", "its share", "std", "dead", "burst", "reuse", "next", "within 8"]
    for head in [*heads, *(["lookahead"] if recall else [])]:
        table.add_column(head, justify="right")
    for layer in stats.layers:
        busiest = max(range(layer.num_experts), key=layer.shares.__getitem__)
        row = [
            f"{layer.layer}",
            f"{busiest}",
            f"{layer.shares[busiest]:.1%}",
            f"{layer.share_std:.2%}",
            f"{len(layer.dead_experts)}",
            f"{layer.longest_burst}",
            "-" if layer.reuse_tokens is None else f"{layer.reuse_tokens:g}",
            f"{layer.reused_next:.0%}",
            f"{layer.reused_within_8:.0%}",
        ]
        if recall:
            row.append("-" if layer.lookahead_recall is None else f"{layer.lookahead_recall:.0%}")
        table.add_row(*row)
    out.print()
    out.print(table)
    out.print(
        "busiest: the expert used most; std: standard deviation of the experts' shares; dead: experts not used; "
        "burst: tokens in a row that used one expert; reuse: median tokens between two uses of an expert; next, "
        "within 8: uses that the token before, or one of the 8 before, made too.",
        style="dim",
    )


def _print_curve(out: Console, stats: RoutingStats, expert_bytes: int | None) -> None:
    """Every capacity, in columns from top to bottom."""
    capacities = range(1, len(stats.hit_rates))
    cells = [f"{slots:>4} {stats.hit_rates[slots]:>6.1%}" for slots in capacities]
    rows = -(-len(cells) // GRID_COLUMNS)
    for row in range(rows):
        out.print("  ".join(cells[row::rows]), soft_wrap=True)
    if expert_bytes is not None:
        total = sum(layer.num_experts for layer in stats.layers)
        out.print(f"One slot in each layer takes {format_bytes(expert_bytes * len(stats.layers) // total)}.")
    out.print(f"No cache has fewer than {stats.top_k}, what one token needs.", style="dim")
