"""Serves a folder of models, each in a process of its own while it is loaded."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import click

from kvflash_ggml import system
from kvflash_ggml.cli.model import log_requests, log_to_stderr, plain_errors
from kvflash_ggml.cli.serving import Serving, serve_model
from kvflash_ggml.cli.terminal import note
from kvflash_ggml.server import requestlog
from kvflash_ggml.server.run import listen

from . import model_folder, router
from .engines import LoadError
from .model_folder import FolderModel

STORE_S = 600.0
"""Seconds beyond --drain that a process has to store its conversations; then it is killed."""


def serve_folder(job: Serving, folder: Path, sock: socket.socket, *, idle_s: float | None) -> None:
    """Serve the models of a folder until a signal. Without --session-dir conversations are lost then.

    ClickException for a folder without models.
    """
    models = model_folder.models(folder)
    if not models:
        raise click.ClickException(f"{folder} has no model: put .gguf files into it, or a folder for each split one")
    if not job.log.quiet:
        log_requests(requestlog.NAME, job.log)
    processes: list[asyncio.subprocess.Process] = []
    with _sessions(job) as sessions:

        async def start(model: FolderModel) -> Process:
            opening = replace(job.opening, loading=replace(job.opening.loading, mmproj=model.projector))
            settings = replace(
                job.settings, alias=model.name, host="127.0.0.1", port=0, cors=(), ssl_key_file=None,
                ssl_cert_file=None, api_prefix="",
                session_dir=None if sessions is None else sessions / quote(model.name, safe=""),
            )  # fmt: skip
            return await Process.start(replace(job, settings=settings, opening=opening), model.path, processes)

        def abandon() -> None:
            for process in processes:
                if process.returncode is None:
                    process.kill()

        router.serve(
            folder,
            job.settings,
            sock,
            start,
            n_ctx=job.opening.loading.ctx_size,
            idle_s=idle_s,
            ready=lambda address: note(f"serving {len(models)} model{'s' * (len(models) != 1)} at {address}"),
            abandon=abandon,
        )


@contextmanager
def _sessions(job: Serving) -> Iterator[Path | None]:
    """Yield the folder for conversations; None where a store keeps them."""
    if job.settings.session_dir is not None or job.settings.store is not None:
        yield job.settings.session_dir
        return
    with TemporaryDirectory(prefix="kvflash-") as folder:
        if not job.log.quiet:
            note(
                f"conversations of unloaded models are in {folder} until the server ends; --session-dir DIR keeps them"
            )
        yield Path(folder)


@dataclass(slots=True, eq=False)
class Process:
    """A process that serves one model. At the end of its input it lets answers end, stores conversations and ends."""

    port: int
    n_ctx: int
    _process: asyncio.subprocess.Process
    _patience_s: float

    @classmethod
    async def start(cls, job: Serving, path: Path, processes: list[asyncio.subprocess.Process]) -> Process:
        """Load a model in a new process, which `processes` gets. LoadError if that fails. Cancelled, it is killed."""
        # in a session of its own, so that Ctrl-C reaches this process alone, which tells that one
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD.format(path=sys.path), stdin=-1, stdout=-1, start_new_session=True
        )
        processes[:] = [process]  # one is loaded at a time
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(ConnectionError):
                process.stdin.write(pickle.dumps((job, str(path))))
                await process.stdin.drain()
            line = await process.stdout.readline()
            said = json.loads(line) if line else {}
            if "port" not in said:
                code = await process.wait()
                why = said.get("error", f"its process has ended with {code}")
                raise LoadError(why.replace(f"{path.parent}{os.sep}", ""))  # clients see it: no path is theirs
        except BaseException:
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise
        return cls(said["port"], said["n_ctx"], process, job.settings.drain_s + STORE_S)

    @property
    def alive(self) -> bool:
        """Asks the system, too: the loop hears of an end some time after it."""
        return self._process.returncode is None and not system.has_ended(self._process.pid)

    async def stop(self) -> None:
        """Stop the process, and return when it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), self._patience_s)
        except (TimeoutError, asyncio.TimeoutError):
            note(f"a model's process has not ended in {self._patience_s:g} s, and is killed")
            self._process.kill()
            await self._process.wait()


# --- the other process


_CHILD = "import sys; sys.path[:] = {path!r}\nfrom kvflash_router.serving import main; main()"
"""The same modules as here: with -m or -c alone a source folder in the way would win."""


def main() -> None:
    """Serve the model that standard input names, until standard input ends. Print one line of JSON."""
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints must not be taken for a report

    def report(**said: Any) -> None:
        with suppress(OSError):
            print(json.dumps(said), file=reports, flush=True)

    job, path = pickle.load(sys.stdin.buffer)
    log_to_stderr(job.log)
    try:
        with plain_errors(verbose=job.log.verbose), listen(job.settings) as sock:
            port = sock.getsockname()[1]
            serve_model(
                job,
                path,
                sock,
                ready=lambda llm, _address: report(port=port, n_ctx=llm.n_ctx()),
                until=sys.stdin.buffer,
            )
    except click.ClickException as err:
        report(error=err.format_message())
        sys.exit(1)
