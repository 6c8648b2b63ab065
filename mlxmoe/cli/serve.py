"""mlxmoe serve: an OpenAI-compatible server and its page, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxmoe import RequestError, SavedStateError
from mlxmoe.cli import common
from mlxmoe.durations import parse_duration
from mlxmoe.memory.sizes import parse_bytes
from mlxmoe.serving.desk.limits import DeskLimits
from mlxmoe.serving.http.settings import ServerSettings

if TYPE_CHECKING:
    from mlxmoe import Engine, PrefixStore
    from mlxmoe.serving.desk.desk import EngineDesk

FOR_EVER = "forever"
AUTO = "auto"
PREFIXES_SHARE, MOST_PREFIXES = 1 / 20, 2 * 10**9  # of the memory, where nothing is said


@common.reported
def serve(
    model: common.ModelArgument = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is the whole network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8080,
    name: Annotated[
        str | None, typer.Option(help="What the model is called by clients; by default as given.", show_default=False)
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that clients must show; may be repeated.", envvar="MLXMOE_API_KEY", show_default=False
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with a key on each line: a command line is for all to see.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name under which the server may be asked.", show_default=False)
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="A web page of another server that may ask.", show_default=False)
    ] = None,
    most_waiting: Annotated[int, typer.Option(help="Requests that wait, beyond which new ones are refused.")] = 64,
    most_together: Annotated[int, typer.Option(help="Replies computed at once, at most.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a reply that does not say.")] = 2048,
    keep_alive: Annotated[
        str, typer.Option(help="How long an idle model stays loaded: 90s, 10m, 2h or forever.")
    ] = FOR_EVER,
    prefixes: Annotated[
        str, typer.Option(help="Memory for the beginnings of earlier prompts, as 1GB; 0 for none.")
    ] = AUTO,
    exact: Annotated[
        bool, typer.Option("--exact", help="One reply at a time in each pass, bit for bit as without a server.")
    ] = False,
    request_time: Annotated[str, typer.Option(help="The most that a request may take.")] = "30m",
    drain_time: Annotated[str, typer.Option(help="What replies under way have to end when the server does.")] = "60s",
    max_body: Annotated[str, typer.Option(help="The largest request.")] = "2MB",
    experts: common.Experts = "auto",
    memory: common.Memory = None,
    context: common.Context = None,
    window: common.Window = None,
    sinks: common.Sinks = 4,
    kv_bits: common.KVBits = None,
    warm: common.Warm = True,
    tuned: common.Tuned = True,
    chunk_tokens: common.ChunkTokens = None,
    adapter: common.Adapter = None,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    quiet: common.Quiet = False,
    debug: common.Debug = False,
) -> None:
    """Serve a model to a small team: OpenAI's API under /v1, a chat page at /, /health and /metrics."""
    _demand_extra()
    from mlxmoe.serving.desk.desk import EngineDesk

    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=(*(api_key or ()), *_keys_of(api_key_file)),
        allowed_hosts=tuple(allow_host or ()),
        allowed_origins=tuple(allow_origin or ()),
        max_body_bytes=parse_bytes(max_body, "--max-body"),
        request_s=parse_duration(request_time, "--request-time"),
        drain_s=parse_duration(drain_time, "--drain-time"),
    )
    limits = DeskLimits(
        most_waiting=most_waiting,
        most_together=most_together,
        max_tokens=max_tokens,
        keep_alive_s=None if keep_alive == FOR_EVER else parse_duration(keep_alive, "--keep-alive"),
        exact=exact,
    )
    load_with = partial(
        common.load_engine,
        model,
        quiet,
        is_wanted=lambda: not desk.ending,
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
    load = _with_prefixes(load_with, _store(prefixes, memory, exact), wanted=prefixes != AUTO)
    desk: EngineDesk = EngineDesk(load, name or _name_of(model), limits)
    _run(desk, settings, quiet=quiet)


def _demand_extra() -> None:
    """Raise RequestError where what the server is built on is not installed."""
    try:
        from mlxmoe.serving.desk import desk  # noqa: F401
        from mlxmoe.serving.http import app  # noqa: F401
    except ModuleNotFoundError as error:
        raise RequestError(
            f"mlxmoe serve needs {error.name}: install mlxmoe with its extra: pip install '.[serve]'."
        ) from error


def _with_prefixes(load: Callable[..., Engine], store: PrefixStore | None, *, wanted: bool) -> Callable[[], Engine]:
    """`load` with `store`; without one, unless it is `wanted`, for a model whose caches cannot be kept."""

    def load_with_prefixes() -> Engine:
        try:
            return load(prefixes=store)
        except SavedStateError:
            if wanted:
                raise
            return load(prefixes=None)

    return load_with_prefixes


def _run(desk: EngineDesk, settings: ServerSettings, *, quiet: bool) -> None:
    """Load the model and serve it, until a signal ends that; the address is taken first, not after a load in vain."""
    from mlxmoe.serving.http.app import Listener, create_app

    def announce() -> None:
        if not quiet:
            _announce(settings, bound.getsockname()[1], desk.model.name)

    with _bound(settings.host, settings.port) as bound, _ended_by_signals():
        try:
            desk.start()
            app = create_app(desk, settings)
            Listener(app, settings, on_listening=announce, end=desk.close).run([bound])
        finally:
            try:
                desk.close()
            except KeyboardInterrupt:  # once more, while a step or a load ends: its thread would outlive this one
                _leave_at_once()


def _leave_at_once() -> None:
    """End the process, whatever its threads do: nothing on disk is half written at any moment."""
    common.notes.print("The server has ended at once.", style="dim")
    os._exit(130)


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address and refuses connections until the server listens."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:
        raise RequestError(f"The server cannot listen on {host} port {port}: {error}. Try another --port.") from error
    return bound


def _announce(settings: ServerSettings, port: int, name: str) -> None:
    host = settings.host
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    text = f"Serving {name}: page {where}/, API {where}/v1. Ctrl-C ends it."
    common.notes.print(text, markup=False, soft_wrap=True, highlight=False)
    if not settings.api_keys and host not in ("127.0.0.1", "localhost", "::1"):
        text = "Anyone who reaches this machine can use it: give an --api-key, or listen on 127.0.0.1."
        common.notes.print(text, style="yellow", markup=False)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the server, which gives them on to this once it has drained: a clean end then."""

    def end(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        common.notes.print("The server has ended.", style="dim")
    finally:
        signal.signal(signal.SIGTERM, before)


def _store(prefixes: str, memory: str | None, exact: bool) -> PrefixStore | None:
    """Where the next turn of a conversation finds what was read of it before."""
    if prefixes.strip() == "0":
        return None
    from mlxmoe import PrefixStore
    from mlxmoe.memory.reading import MemoryReader, usable_bytes

    if prefixes != AUTO:
        return PrefixStore(prefixes, exact=exact)
    budget = usable_bytes(MemoryReader().read()) if memory is None else parse_bytes(memory, "--memory")
    return PrefixStore(min(MOST_PREFIXES, int(PREFIXES_SHARE * budget)), exact=exact)


def _name_of(model: str | None) -> str:
    """A hub id as it is, a folder's own name: no path gets out."""
    if model is None:
        from mlxmoe.hub import demo_folder

        return demo_folder().name
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def _keys_of(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise RequestError(f"The keys cannot be read from {file}: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise RequestError(f"{file} holds no key: write one on each line.")
    return keys
