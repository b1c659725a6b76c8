"""Loads the model as the options say. Tests replace the functions at the top."""

from __future__ import annotations

import errno
import logging
import os
import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

import click

from .. import logs
from ..config import Fit
from ..errors import KVFlashError, LibraryError, RemoteError
from ..native import library
from .child import check_first_run
from .options import DeviceOptions, LogOptions, OpeningOptions, WeightOptions

if TYPE_CHECKING:
    from ..llama.llama import Llama

_CONTEXT_FULL = "exceed context window"

_REMEDIES = {
    errno.ENOSPC: "Make room there.", errno.EDQUOT: "Make room there.",
    errno.EFBIG: "Files there have a largest size: choose another folder, or raise the limit (ulimit -f).",
}  # fmt: skip
"""What helps against an error of the system."""

_FLAGS = {
    "host_limit = ": "--kvflash-host-limit ",
    "host_limit": "--kvflash-host-limit",
    "spill = ": "--kvflash-spill ",
    "a spill folder": "a folder with --kvflash-spill",
}
"""Options that the library names by their keywords, the longest name first."""


class UnusableServer(click.ClickException):
    """A server of --rpc that cannot be used."""

    exit_code = 2


def create_llama(**settings: Any) -> Any:
    from kvflash_ggml import Llama

    return Llama(**settings)


def supports_gpu_offload() -> bool:
    return library.supports_gpu_offload()


def ensure_gpu_offload(layers: int) -> None:
    library.ensure_gpu_offload(layers)


@contextmanager
def load_model(path: str, *, loading: WeightOptions, devices: DeviceOptions, verbose: bool) -> Iterator[Any]:
    """Yield the model with a small context, for verbs that need its weights only."""
    settings: dict[str, Any] = {"n_ctx": 512, "verbose": verbose}
    settings |= offloading(loading, devices) | loading.settings() | devices.settings()
    with closing(create_llama(model_path=path, **settings)) as llm:
        yield llm


@contextmanager
def open_model(path: str, opening: OpeningOptions, log: LogOptions, **served: Any) -> Iterator[Any]:
    """Yield the loaded model, and close it at the end. served: fields of KVFlashConfig that only a server sets.

    Raises:
        KVFlashError, ValueError: a setting, the library or the file is not usable.
    """
    settings = keywords(path, opening, quiet=log.quiet)
    if settings["kvflash"] is not None:
        settings["kvflash"] = replace(settings["kvflash"], **served)
    if (cache := opening.pool.prefix_cache()) is not None:
        settings["kvflash_cache"] = cache
    with closing(create_llama(model_path=path, verbose=log.verbose, **settings)) as llm:
        yield llm


def keywords(path: str, opening: OpeningOptions, *, quiet: bool) -> dict[str, Any]:
    """Return the keywords of `Llama` that say how a model is loaded, and where it goes."""
    loading, devices, config = opening.loading, opening.devices, opening.pool.config()
    if config is not None:
        config = replace(config, spec=opening.drafts.over(config.spec))
    settings = {"kvflash": config} | offloading(loading, devices) | loading.settings() | devices.settings()
    return settings | loading.for_model(path, loading.ctx_size, quiet=quiet)


def offloading(loading: WeightOptions, devices: DeviceOptions) -> dict[str, Any]:
    """Return the keywords of `Llama` for the layers on devices: their number, or that fitting finds it."""
    check_first_run(repack=loading.repack)
    fits, leaves = devices.fit, devices.fit_target is not None or devices.device_memory is not None
    if leaves and (fits is False or not devices.fits_layers):
        with_what = "--no-fit" if fits is False else f"--split-mode {devices.split_mode}"
        given = "--device-memory" if devices.fit_target is None else "--fit-target"
        raise click.UsageError(f"{given} says how much memory fitting takes, and with {with_what} nothing is fitted")
    if fits is None:
        automatic = loading.n_gpu_layers == "auto" and devices.fits_layers and supports_gpu_offload()
        fits = leaves or automatic
    if not fits:
        return {"n_gpu_layers": gpu_layers(loading)}
    layers = loading.n_gpu_layers
    asked = {}
    if layers != "auto":  # of another machine's devices this build need not know
        asked = {"n_gpu_layers": layers if devices.device_memory else gpu_layers(loading)}
    return asked | {"fit": Fit(margin=devices.fit_target, free=devices.device_memory or {})}


def gpu_layers(loading: WeightOptions) -> int:
    """Return n_gpu_layers, -1 for all. LibraryError if the machine has a GPU that this build cannot use."""
    layers = loading.n_gpu_layers
    if loading.rpc is not None:
        return -1 if layers == "auto" else layers
    if layers == "auto":
        return -1 if supports_gpu_offload() else 0
    try:
        ensure_gpu_offload(layers)
    except LibraryError as error:
        raise LibraryError(f"{error} On this command line: -ngl 0.") from error
    return layers


def has_chat_template(llm: Llama) -> bool:
    return any(name.startswith("tokenizer.chat_template") for name in llm.metadata)


def first_seed(seed: int) -> int:
    """Return the seed of the first answer; a random one for -1."""
    return random.SystemRandom().randrange(0xFFFFFFFF) if seed == -1 else seed


@contextmanager
def plain_errors(*, verbose: bool) -> Iterator[None]:
    """End errors that a user can cause with their message and exit code 1, or 2 for an unusable server.

    verbose: print the traceback too.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
        raise
    except (KVFlashError, ValueError, RuntimeError, OSError, MemoryError) as error:
        if verbose:
            traceback.print_exc(file=sys.stderr)
        kind = UnusableServer if isinstance(error, RemoteError) else click.ClickException
        raise kind(in_words(error)) from error


def in_words(error: BaseException) -> str:
    """Return the text of an error, with the option that helps. An error of the system becomes a sentence."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
        helps = _REMEDIES.get(error.errno or 0, "Check the name, and who may use it.")
        return f"{name}: {error.strerror}. {helps}"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    for keyword, flag in _FLAGS.items():
        text = text.replace(keyword, flag)
    if _CONTEXT_FULL in text:
        text += ": give a larger context with -c (0 is the length the model was trained for, --yarn goes beyond it)"
        text += ", or a shorter prompt"
    return text


def log_to_stderr(output: LogOptions) -> None:
    """Show the package's log on stderr: warnings, with -v everything, with -q errors only."""
    level = logging.DEBUG if output.verbose else logging.ERROR if output.quiet else logging.WARNING
    logs.show_on(_LogHandler(output), level)


def log_requests(name: str, output: LogOptions) -> None:
    """Show a server's log on stderr too, one line of JSON a request."""
    logger = logging.getLogger(name)
    logger.handlers[:] = [_LogHandler(output)]
    logger.propagate = False
    logger.setLevel(logging.INFO)


class _LogHandler(logging.Handler):
    """Writes to stderr, and to --log-file. UsageError if that cannot be written."""

    def __init__(self, output: LogOptions) -> None:
        super().__init__()
        self._file: TextIO | None = None
        if output.log_file is not None:
            try:
                self._file = output.log_file.open("a", encoding="utf-8", buffering=1)
            except OSError as err:
                raise click.UsageError(f"--log-file {output.log_file}: {err.strerror}") from err

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. A disk that is full, or a pipe that is closed, must not end whoever logs."""
        text = self.format(record)
        with suppress(OSError):
            click.echo(text, err=True)
        if (file := self._file) is None:
            return
        try:
            file.write(f"{text}\n")
        except OSError as err:
            self._file = None
            with suppress(OSError):
                click.echo(f"kvflash: --log-file {file.name}: {err.strerror}: nothing more is written there", err=True)
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()
