"""The server's life: it starts, serves, drains, and swaps every conversation out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from .. import system
from ..batching.encoder import EmbeddingModel
from ..batching.messages import Request, Usage
from ..batching.model import ServedText
from ..batching.scheduler import Limits, Scheduler
from ..errors import ConfigError
from ..extensions import extension
from ..store.swapped import ConversationFolder
from . import requestlog
from .app import make_app
from .connection import bounded
from .front import Front
from .metrics import Metrics
from .prompts import LlamaPrompts, Prompts
from .settings import ServerSettings

if TYPE_CHECKING:
    from ..llama.embedding import Embedder
    from ..llama.llama import Llama

logger = logging.getLogger("kvflash_ggml")

SWITCH_INTERVAL_S = 0.0005
"""Seconds. The engine's thread comes back from C many times a second; the default of 5 ms would delay it."""

KEEP_ALIVE_S = 75

BACKLOG = 2048

MAX_OTHERS = 512
"""Connections beside those that wait for an answer. Further ones get 503."""


class _State(ServerState):
    """Has the time of an answer when it is asked for."""

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"date", formatdate(usegmt=True).encode())]

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        pass


class _Server(uvicorn.Server):
    """Signals are ours. It sleeps until something comes: uvicorn's own looks ten times a second for its end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = _State()
        self._ended = asyncio.Event()

    async def main_loop(self) -> None:
        await self._ended.wait()

    def end(self) -> None:
        """Close all connections now."""
        self.force_exit = self.should_exit = True
        self._ended.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def serve(
    model: ServedText,
    prompts: Prompts,
    settings: ServerSettings,
    sock: socket.socket,
    *,
    found: Callable[[int], None],
    ready: Callable[[str], None],
    embedder: Embedder | None = None,
    until: BinaryIO | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends the process at once. The model is closed at the end.

    sock: of `listen`. found: called, on another thread, with the number of conversations that the session folder
    had. ready: called with the address once requests are taken. embedder: answers requests for embeddings; None for
    501. until: a stream whose end counts as the first signal. ConfigError for a session folder or a store that cannot
    be used.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    system.allow_files()
    metrics = Metrics()

    def ended(request: Request, usage: Usage, reason: str) -> None:
        metrics.ended(request, usage, reason)
        requestlog.ended(request, usage, reason, settings.alias)

    limits = Limits(
        most=settings.max_queue,
        most_tokens=settings.max_queued_tokens or 4 * model.n_ctx,
        park_bytes=settings.park_bytes,
        itl_target=None if settings.itl_target_ms is None else settings.itl_target_ms / 1000,
    )
    folder = None if settings.session_dir is None else ConversationFolder(settings.session_dir)
    shared = None
    if settings.store is not None:
        # texts of other models, caches and builds lie beside ours
        place = f"{settings.store.rstrip('/')}/{model.fingerprint}"
        shared = shared_store()(place, made=model.made, bandwidth=settings.store_bandwidth)
    scheduler = Scheduler(model, limits=limits, folder=folder, shared=shared, on_end=ended)
    metrics.attach(scheduler)
    scheduler.start()
    scheduler.call(lambda: found(len(scheduler.swapped)))
    try:
        asyncio.run(_serve(Front(settings, scheduler, prompts, embedder), metrics, sock, ready, until))
    finally:
        scheduler.close()


def start(
    llm: Llama,
    settings: ServerSettings,
    sock: socket.socket,
    *,
    template: str | None,
    found: Callable[[int], None],
    ready: Callable[[str], None],
    embedder: Embedder | None = None,
    until: BinaryIO | None = None,
) -> None:
    """Serve a model with a pool, or an encoder without one, until a signal ends it; it is closed then. See `serve`."""
    from ..batching.llama import LlamaModel

    prompts, model = LlamaPrompts(llm, template), None
    if llm.kvflash is None and embedder is not None:
        model = cast("ServedText", EmbeddingModel(llm, embedder.most))
        settings = replace(settings, session_dir=None, store=None)  # there are no conversations
    serve(model or LlamaModel(llm), prompts, settings, sock, found=found, ready=ready, embedder=embedder, until=until)


def listen(settings: ServerSettings) -> socket.socket:
    """Take the address of the server: clients that connect wait until it serves.

    ConfigError if it is taken, or a certificate cannot be used.
    """
    _check_certificate(settings)
    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as err:
        why = (err.strerror or str(err)).partition(" (while attempting to bind")[0]  # which names the address again
        raise ConfigError(f"cannot listen at {host}, port {port}: {why}: give another --port or --host") from err


def _check_certificate(settings: ServerSettings) -> None:
    certificate, key = settings.ssl_cert_file, settings.ssl_key_file
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise ConfigError("https needs both: give --ssl-cert-file and --ssl-key-file")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ValueError) as err:  # an SSLError is an OSError
        raise ConfigError(
            f"{certificate} and {key} are not a certificate in PEM and its key without a password: {err}"
        ) from err


def shared_store() -> Any:
    """Return what opens the store of --store. ConfigError where it is not installed."""
    return extension("store", asked="--store", folder="fleet")


async def _serve(
    front: Front, metrics: Metrics, sock: socket.socket, ready: Callable[[str], None], until: BinaryIO | None
) -> None:
    try:
        await run(make_app(front, metrics), front.settings, sock, ready=ready, drain=lambda: _drain(front), until=until)
    finally:
        front.close()


async def run(
    app: ASGIApp,
    settings: ServerSettings,
    sock: socket.socket,
    *,
    ready: Callable[[str], None],
    drain: Callable[[], Awaitable[None]],
    until: BinaryIO | None = None,
    abandon: Callable[[], None] = lambda: None,
) -> None:
    """Serve an application until a signal, or the end of the stream `until`; then until `drain` returns.

    ready: called with the address once requests are taken. A second signal calls `abandon` and ends the process.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        http=bounded(settings.stall_timeout_s),
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=settings.max_queue + MAX_OTHERS,
        ssl_keyfile=settings.ssl_key_file,
        ssl_certfile=settings.ssl_cert_file,
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []
    signals: list[bool] = []

    async def end() -> None:
        await drain()
        await asyncio.sleep(0.1)  # the last frames are on their way
        server.end()

    def stop() -> None:
        if not stopping:
            stopping.append(asyncio.ensure_future(end()))

    def signalled() -> None:
        if signals:
            abandon()
            os._exit(130)
        signals.append(True)
        stop()

    def follow(stream: BinaryIO) -> None:
        stream.read()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(stop)

    system.on_signals(loop, (signal.SIGTERM, signal.SIGINT), signalled)
    if until is not None:
        threading.Thread(target=follow, args=(until,), daemon=True).start()
    port = sock.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        ready(f"{'http' if settings.ssl_cert_file is None else 'https'}://{host}:{port}{settings.api_prefix}")
    await serving


async def _drain(front: Front) -> None:
    """Let running answers end for `--drain` seconds; then end them."""
    front.draining = True
    until = time.monotonic() + front.settings.drain_s
    while not front.scheduler.idle and time.monotonic() < until:
        await asyncio.sleep(0.05)
    front.scheduler.end_answers()
    while not front.scheduler.idle and time.monotonic() < until + 10:
        await asyncio.sleep(0.02)
