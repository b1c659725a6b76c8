"""A model that is served, as the command line says: it is loaded, and answers until its server ends."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal

from ..errors import UnsupportedModelError
from ..server.settings import ServerSettings
from .model import log_requests, open_model
from .options import DeviceOptions, LogOptions, ModelOptions, PoolOptions, SpecOptions
from .terminal import note, size_text


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a command line asks of a server, but for the model. template: None for the model's own.

    embedding: tokens of a text that is embedded or ranked, 0 for none. pooling: "rank" to rank.
    """

    settings: ServerSettings
    loading: ModelOptions
    devices: DeviceOptions
    pool: PoolOptions
    drafts: SpecOptions
    log: LogOptions
    template: str | None
    parallel: int | Literal["auto"]
    pool_share: Literal["strict", "elastic"] | None
    deterministic_batch: bool
    embedding: int
    pooling: Literal["mean", "cls", "last", "rank"] | None


Ready = Callable[[Any, str], None]
"""Called with the `Llama` and the server's address once it takes requests."""


def serve_model(
    job: Job, path: str, sock: socket.socket, *, ready: Ready | None = None, until: BinaryIO | None = None
) -> None:
    """Load a model and serve it at `sock` until a signal, or the end of `until`. The default of `ready` is a note.

    Raises:
        KVFlashError, ValueError: a setting, the library or the file is not usable.
    """
    from ..server import requestlog
    from ..server.start import start

    settings, log = job.settings, job.log
    if not log.quiet:
        log_requests(requestlog.NAME, log)

    def found(count: int) -> None:
        if settings.session_dir is not None and not log.quiet:
            note(f"{count} conversation{'s' * (count != 1)} found in {settings.session_dir}")

    with _open(job, path) as llm:
        if not log.quiet and not log.verbose:
            note(llm.kvflash.banner())
        if (cache := job.pool.prefix_cache()) is not None:
            llm.set_cache(replace(cache, memory_bytes=0))  # in memory there are the parked ones
        embedder = None
        if job.embedding:
            from ..llama.embedding import Embedder

            embedder = Embedder(llm, pooling=job.pooling)
            if not log.quiet:
                what = "reranking" if job.pooling == "rank" else f"embeddings, pooling {embedder.pooling}"
                note(f"{what}: texts of up to {embedder.most:,} tokens, a context of {size_text(embedder.bytes)}")

        def listening(address: str) -> None:
            if ready is not None:
                ready(llm, address)
            else:
                note(f"serving {settings.alias} at {address}")

        start(llm, settings, sock, template=job.template, embedder=embedder, found=found, ready=listening, until=until)


@contextmanager
def _open(job: Job, path: str) -> Iterator[Any]:
    """The loaded model. One that cannot decode several answers together is opened for one at a time, with a note."""
    settings: dict[str, Any] = {
        "loading": job.loading, "devices": job.devices, "pool": job.pool, "drafts": job.drafts,
        "verbose": job.log.verbose, "quiet": job.log.quiet, "embedding": job.embedding,
        "pool_share": job.pool_share, "deterministic_batch": job.deterministic_batch,
    }  # fmt: skip
    with ExitStack() as stack:
        try:
            llm = stack.enter_context(open_model(path, parallel=job.parallel, **settings))
        except UnsupportedModelError as err:
            if job.parallel == 1:
                raise
            note(f"--parallel {job.parallel} has no effect, answers take turns: {err}")
            llm = stack.enter_context(open_model(path, **{**settings, "deterministic_batch": False}))
        yield llm
