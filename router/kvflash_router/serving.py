"""Serves a folder of models, each in a process of its own while it is loaded."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import click

from kvflash_ggml import logs, system
from kvflash_ggml.cli.model import log_requests, log_to_stderr, plain_errors
from kvflash_ggml.cli.serving import ENCODERS_CONTEXT, Serving, placed, serve_model
from kvflash_ggml.cli.terminal import note
from kvflash_ggml.config import Fit
from kvflash_ggml.errors import EncoderError, UnsupportedModelError
from kvflash_ggml.placement import memory
from kvflash_ggml.placement.sizes import HOST
from kvflash_ggml.server import requestlog
from kvflash_ggml.server.run import listen

from . import model_folder, router
from .engines import LoadError, Plan
from .model_folder import FolderModel

_SMALL = 512
"""Tokens of the pool of a model that was trained to embed: its answers are asked for by mistake at most."""

STORE_S = 600.0
"""Seconds beyond --drain that a process has to store its conversations; then it is killed."""


def serve_folder(job: Serving, folder: Path, sock: socket.socket, *, idle_s: float | None) -> None:
    """Serve the models of a folder until a signal. Without --session-dir conversations are lost then.

    As many are loaded at once as --models-max says and as have room. ClickException for a folder without models.
    """
    models = model_folder.models(folder)
    if not models:
        raise click.ClickException(f"{folder} has no model: put .gguf files into it, or a folder for each split one")
    if not job.log.quiet:
        log_requests(requestlog.NAME, job.log)
    processes: list[asyncio.subprocess.Process] = []
    with _sessions(job) as sessions:

        async def start(model: FolderModel, left: Mapping[str, int]) -> Process:
            own = await asyncio.to_thread(_job, job, model, sessions)
            return await Process.start(own, model.path, left, processes)

        async def plan(model: FolderModel, room: Mapping[str, int]) -> Plan:
            own = await asyncio.to_thread(_job, job, model, sessions)
            return await planned(own, model.path, room, processes)

        def abandon() -> None:
            for process in processes:
                if process.returncode is None:
                    process.kill()

        router.serve(
            folder,
            job.settings,
            sock,
            start,
            plan=plan if job.server.models_max != 1 and job.opening.devices.fits_layers else None,
            at_once=job.server.models_max,
            n_ctx=job.opening.loading.ctx_size,
            idle_s=idle_s,
            ready=lambda address: note(f"serving {len(models)} model{'s' * (len(models) != 1)} at {address}"),
            abandon=abandon,
        )


def _job(job: Serving, model: FolderModel, sessions: Path | None) -> Serving:
    """Return what is asked of one model's process. A model that was trained to embed or rank does that too."""
    purpose, opening, server = model_folder.head(model).purpose, job.opening, job.server
    opening = replace(opening, loading=replace(opening.loading, mmproj=model.projector))
    if purpose != "answer":
        server = replace(server, embeddings=purpose == "embed", reranking=purpose == "rank")
        opening = replace(opening, pool=replace(opening.pool, kvflash=str(_SMALL)))
    settings = replace(
        job.settings, alias=model.name, host="127.0.0.1", port=0, cors=(), ssl_key_file=None, ssl_cert_file=None,
        api_prefix="", session_dir=None if sessions is None else sessions / quote(model.name, safe=""),
    )  # fmt: skip
    return replace(job, settings=settings, opening=opening, server=server)


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
    async def start(
        cls, job: Serving, path: Path, left: Mapping[str, int], processes: list[asyncio.subprocess.Process]
    ) -> Process:
        """Load a model in a new process, which `processes` gets. LoadError if that fails. Cancelled, it is killed.

        left: memory of each device that it may take; nothing for all that is free.
        """
        process, said = await _told(job, path, {"left": left}, processes)
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


async def planned(
    job: Serving, path: Path, room: Mapping[str, int], processes: list[asyncio.subprocess.Process]
) -> Plan:
    """Ask a new process what a model takes. room: memory of each device, for models; nothing to measure it.

    LoadError if it does not fit, or is no model.
    """
    process, said = await _told(job, path, {"room": room}, processes)
    await process.wait()
    return Plan(**said)


async def _told(
    job: Serving, path: Path, what: dict[str, Mapping[str, int]], processes: list[asyncio.subprocess.Process]
) -> tuple[asyncio.subprocess.Process, Any]:
    """Start a process, and return it with what it says first. LoadError for an error, and if it ends."""
    # in a session of its own, so that Ctrl-C reaches this process alone, which tells that one
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD.format(path=sys.path), stdin=-1, stdout=-1, start_new_session=True
    )
    processes[:] = [*(one for one in processes if one.returncode is None), process]
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(ConnectionError):
            process.stdin.write(pickle.dumps((job, str(path), what)))
            await process.stdin.drain()
        line = await process.stdout.readline()
        said = json.loads(line) if line else {}
        if not said or "error" in said:
            code = await process.wait()
            why = said.get("error", f"its process has ended with {code}")
            raise LoadError(why.replace(f"{path.parent}{os.sep}", ""))  # clients see it: no path is theirs
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    return process, said


# --- the other process


_CHILD = "import sys; sys.path[:] = {path!r}\nfrom kvflash_router.serving import main; main()"
"""The same modules as here: with -m or -c alone a source folder in the way would win."""


def main() -> None:
    """Serve the model that standard input names, until standard input ends, or plan it. Print one line of JSON."""
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints must not be taken for a report

    def report(**said: Any) -> None:
        with suppress(OSError):
            print(json.dumps(said), file=reports, flush=True)

    job, path, what = pickle.load(sys.stdin.buffer)
    log_to_stderr(job.log)
    for handler in logging.getLogger(logs.NAME).handlers:
        handler.addFilter(_named(job.settings.alias))
    try:
        with plain_errors(verbose=job.log.verbose):
            if "room" in what:
                report(**needs_of(job, path, what["room"]))
                return
            job = within(job, path, what["left"])
            if not job.log.quiet:
                note(f"loading {job.settings.alias}")
            with listen(job.settings) as sock:
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


def _named(model: str) -> Callable[[logging.LogRecord], bool]:
    """Return a filter that takes all of the log, and puts the model's name before it: several processes write there."""

    def named(record: logging.LogRecord) -> bool:
        record.msg, record.args = f"{model}: {record.getMessage()}", ()
        return True

    return named


def needs_of(job: Serving, path: str, room: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a `Plan`, by the same computation as --fit and --dry-run. Raises as `serve_model`.

    The host's margin is for all models together. A device's is for what the backend takes in each of their processes.
    """
    from kvflash_ggml.llama.fitting import without_loading

    asked = placed(_quiet(job), path)
    fit = asked.get("fit") or Fit()
    limits = Fit(free=room, margin=_margins(fit.margin, room)) if room else None
    embedder: Counter[str] = Counter()
    try:
        placement, devices = without_loading(path, asked, limits)
    except EncoderError:
        asked |= {"kvflash": None, "n_ctx": ENCODERS_CONTEXT}
        placement, devices = without_loading(path, asked, limits)
        most = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), job.server.embedding_tokens)
        for need in without_loading(path, {**asked, **most, "embedding": True}, limits)[0].needs:
            embedder[need.device] = need.total - need.margin - need.weights
    except UnsupportedModelError:  # which `serve_model` opens for one answer at a time
        return {"needs": {}, "room": {}, "alone": True}
    *others, host = memory.counted(devices, fit)
    left = {**{one.name: one.free for one in others}, host.name: max(0, host.free - memory.margin(host, fit))}
    needs = {need.device: need.total + embedder[need.device] for need in placement.needs}
    return {"needs": {**needs, host.name: needs[host.name] - placement.needs[-1].margin}, "room": left}


def _margins(given: int | Mapping[str, int] | None, names: Iterable[str]) -> dict[str, int]:
    """Return margins for a process that gets a share of memory: as they are given, and none of the host."""
    own = dict(given) if isinstance(given, Mapping) else dict.fromkeys(names, given) if given is not None else {}
    return {**own, HOST: 0}


def within(job: Serving, path: str, left: Mapping[str, int]) -> Serving:
    """Return the job with what is left of memory, if it is fitted at all."""
    if not left or "fit" not in placed(_quiet(job), path):
        return job
    devices = job.opening.devices
    devices = replace(devices, device_memory=dict(left), fit_target=_margins(devices.fit_target, left))
    return replace(job, opening=replace(job.opening, devices=devices))


def _quiet(job: Serving) -> Serving:
    """Return a job whose notes are left out: they come with the load."""
    return replace(job, log=replace(job.log, quiet=True))
