"""`kvflash-run serve MODEL`: an OpenAI server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from .. import pip_line
from .device_options import DeviceOptions, device_options
from .llama_flags import llama_flags
from .model import log_requests, log_to_stderr, open_model, plain_errors
from .options import LogOptions, ModelOptions, SamplerOptions, log_options, model_options, sampler_options
from .pool_options import PoolOptions, pool_options
from .sections import SectionCommand, collected, option
from .spec_options import SpecOptions, spec_options
from .terminal import note
from .types import Size

_net = option("Network")
_limits = option("Limits")
_sessions = option("Conversations")
_server = option("Server")

_EPILOG = """\b
Any number of conversations share the pool: one is computed at a time, the others are put
aside and go on bit for bit. A prompt is read from where it leaves what is known.

\b
Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, /props,
/slots, /tokenize, /detokenize, /apply-template, /completion, /kvflash/state and more:
docs/server.md. SIGTERM or Ctrl-C lets running answers end; a second one does not.

\b
Every option has a variable: --api-key is KVFLASH_API_KEY, --kvflash is KVFLASH_POOL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetOptions:
    """Where it listens, and to whom."""

    host: str
    port: int
    api_key: tuple[str, ...]
    api_key_file: Path | None
    insecure: bool
    cors_origins: tuple[str, ...]
    isolate_keys: bool
    metrics_public: bool


net_options = collected(
    "net",
    NetOptions,
    _net("--host", default="127.0.0.1", show_default=True, metavar="NAME", help="Address to listen at."),
    _net("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, metavar="N", help="0: any free."),
    _net("--api-key", multiple=True, metavar="KEY", help="Needed by every request; may be repeated.  [default: none]"),
    _net(
        "--api-key-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="More keys, one a line.",
    ),
    _net("--insecure", is_flag=True, help="Listen at an address that is not loopback without a key."),
    _net(
        "--cors-origins", multiple=True, metavar="ORIGIN", help="Pages that may ask; may be repeated.  [default: none]"
    ),
    _net("--isolate-keys", is_flag=True, help="A key sees, uses and changes its own conversations only."),
    _net("--metrics-public", is_flag=True, help="/metrics needs no key."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """How much is taken at once, and for how long. Times in seconds."""

    max_queue: int
    max_queued_tokens: int | None
    max_body: int
    max_tokens_default: int
    max_tokens_limit: int | None
    timeout: float
    queue_timeout: float
    stall_timeout: float
    drain: float


def _seconds(name: str, what: str, default: float) -> Any:
    return _limits(
        name,
        type=click.FloatRange(min=0, min_open=name != "--drain"),
        default=default,
        show_default=True,
        metavar="S",
        help=f"{what} Seconds.",
    )


def _count(name: str, what: str, default: int | None = None) -> Any:
    shown = default is not None
    return _limits(name, type=click.IntRange(min=1), default=default, show_default=shown, metavar="N", help=what)


limit_options = collected(
    "limits",
    LimitOptions,
    _count("--max-queue", "Requests that wait; beyond: 429.", default=256),
    _count("--max-queued-tokens", "Prompt tokens that wait.  [default: 4 x -c]"),
    _limits(
        "--max-body",
        type=Size(),
        default="32M",
        show_default=True,
        metavar="SIZE",
        help="Of a request; beyond: 413.",
    ),
    _limits(
        "-n",
        "--max-tokens-default",
        "--predict",
        "--n-predict",
        type=click.IntRange(min=1),
        default=4096,
        show_default=True,
        metavar="N",
        help="Of an answer that names no limit.",
    ),
    _count("--max-tokens-limit", "Of any answer.  [default: the context]"),
    _seconds("--timeout", "For a request, from its arrival.", 3600),
    _seconds("--queue-timeout", "For its turn.", 600),
    _seconds("--stall-timeout", "For a client that does not read, or does not send.", 60),
    _seconds("--drain", "For running answers at the end.", 30),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Where conversations are meanwhile."""

    park_memory: int
    session_dir: Path | None


session_options = collected(
    "sessions",
    SessionOptions,
    _sessions(
        "--park-memory",
        type=Size(),
        default="8G",
        show_default=True,
        metavar="SIZE",
        help="Host memory for conversations that are put aside; the longest unused leaves it first.",
    ),
    _sessions(
        "--session-dir",
        "--slot-save-path",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Folder for those that find no room there, and for all of them when the server ends.",
    ),
)


_COMMON = (
    "--model", "--alias", "--chat-template-file", "--host", "--port", "--api-key", "--isolate-keys", "--session-dir",
    "--park-memory", "--max-queue", "--max-tokens-default", "--temp", "--ctx-size", "--n-gpu-layers", "--threads",
    "--cache-type-k", "--cache-type-v", "--kvflash", "--kvflash-cache", "--kvflash-spec", "--verbose", "--quiet",
)  # fmt: skip


@click.command(
    cls=SectionCommand,
    epilog=_EPILOG,
    common=_COMMON,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "KVFLASH",
        "default_map": {"kvflash": "auto"},
    },
)
@llama_flags
@click.argument("path", metavar="MODEL", required=False)
@_server("-m", "--model", metavar="PATH", help="The model, instead of the argument.")
@_server("-a", "--alias", metavar="NAME", help="What the model is called.  [default: the file's name]")
@_server(
    "--chat-template-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Jinja template in place of the model's own.",
)
@_server("--page/--no-page", "--webui/--no-webui", default=True, help="Serve the chat page at /.")
@_server(
    "--strict", is_flag=True, help="Answer 400 to a field that the server does not know, which it ignores otherwise."
)
@net_options
@session_options
@limit_options
@_limits(
    "-np",
    "--parallel",
    type=int,
    metavar="N",
    help="For llama-server's command lines: any number of conversations share the pool, and answers take turns.",
)
@model_options
@sampler_options
@device_options
@pool_options
@spec_options
@log_options
@click.pass_context
def serve(
    ctx: click.Context,
    *,
    path: str | None,
    model: str | None,
    alias: str | None,
    chat_template_file: Path | None,
    page: bool,
    strict: bool,
    net: NetOptions,
    sessions: SessionOptions,
    limits: LimitOptions,
    parallel: int | None,
    loading: ModelOptions,
    sampling: SamplerOptions,
    devices: DeviceOptions,
    pool: PoolOptions,
    drafts: SpecOptions,
    log: LogOptions,
) -> None:
    """Serve OpenAI's API, with every conversation kept.

    \b
    kvflash-run serve model.gguf
    kvflash-run serve model.gguf --kvflash 8K --session-dir sessions --api-key SECRET --host 0.0.0.0
    """
    path = _model_of(ctx, path, model)
    if pool.kvflash == "off":
        raise click.UsageError("conversations are put aside in a pool: leave out --kvflash off, or give --kvflash auto")
    if pool.kvflash_report is not None:
        raise click.UsageError("--kvflash-report is of one run: the page at / shows the same while it happens")
    keys = _keys(net)
    if net.host not in ("127.0.0.1", "localhost", "::1") and not keys and not net.insecure:
        raise click.UsageError(f"--host {net.host} lets others in: give an --api-key, or say --insecure")
    log_to_stderr(log)
    if parallel is not None and parallel > 1 and not log.quiet:
        note(f"-np {parallel}: any number of conversations share the pool, and answers take turns")
    with plain_errors(verbose=log.verbose):
        try:
            from ..batching.messages import Sampling
            from ..server import requestlog
            from ..server.settings import ServerSettings
            from ..server.start import listen, start
        except ModuleNotFoundError as err:
            raise click.ClickException(
                f"the server needs {err.name}, which is not installed: {pip_line.install('server')}"
            ) from err
        if not log.quiet:
            log_requests(requestlog.NAME)
        template = None if chat_template_file is None else chat_template_file.read_text(encoding="utf-8")
        settings = ServerSettings(
            alias=alias or Path(path).stem,
            host=net.host,
            port=net.port,
            keys=keys,
            cors=net.cors_origins,
            isolate_keys=net.isolate_keys,
            public_metrics=net.metrics_public,
            max_queue=limits.max_queue,
            max_queued_tokens=limits.max_queued_tokens,
            max_body=limits.max_body,
            default_tokens=limits.max_tokens_default,
            most_tokens=limits.max_tokens_limit,
            timeout_s=limits.timeout,
            queue_timeout_s=limits.queue_timeout,
            stall_timeout_s=limits.stall_timeout,
            drain_s=limits.drain,
            park_bytes=sessions.park_memory,
            session_dir=sessions.session_dir,
            page=page,
            sampling=Sampling(**sampling.settings()),
            strict=strict,
        )

        def found(count: int) -> None:
            if settings.session_dir is not None and not log.quiet:
                note(f"{count} conversation{'s' * (count != 1)} found in {settings.session_dir}")

        with (
            listen(settings) as sock,  # before the model, whose loading may take minutes
            open_model(path, loading=loading, devices=devices, pool=pool, drafts=drafts, verbose=log.verbose) as llm,
        ):
            if not log.quiet and not log.verbose:
                note(llm.kvflash.banner())
            if (cache := pool.cache()) is not None:
                llm.set_cache(replace(cache, memory_bytes=0))  # in memory there are the parked ones
            start(
                llm,
                settings,
                sock,
                template=template,
                found=found,
                ready=lambda address: note(f"serving {settings.alias} at {address}"),
            )


def _model_of(ctx: click.Context, path: str | None, model: str | None) -> str:
    """The argument, or `-m`. UsageError for both, or neither; a variable gives way to the argument."""
    if path is not None and ctx.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError(f"the model is given twice, as {path} and with -m {model}: leave one out")
    found = path if path is not None else model
    if found is None:
        raise click.UsageError("which model? Give the path of a .gguf file, or -m PATH.")
    return found


def _keys(net: NetOptions) -> tuple[str, ...]:
    lines = [] if net.api_key_file is None else net.api_key_file.read_text(encoding="utf-8").splitlines()
    keys = tuple(key for key in (*net.api_key, *(line.strip() for line in lines)) if key)
    if net.api_key_file is not None and not keys:
        raise click.UsageError(f"{net.api_key_file} has no key: write one a line")
    return keys
