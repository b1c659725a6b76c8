"""`kvflash-run serve MODEL`: an OpenAI server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from .. import notation, pip_line
from ..batching.messages import Sampling
from ..server.settings import ServerSettings
from ..settings import in_section
from .hub import HubModel, hub_model, located
from .llama_flags import llama_flags
from .model import log_to_stderr, plain_errors
from .options import (
    DeviceOptions,
    LogOptions,
    ModelOptions,
    PoolOptions,
    SpecOptions,
    device_options,
    log_options,
    model_options,
    pool_options,
    read_parallel,
    spec_options,
)
from .sections import MODEL_FILE, SectionCommand, collected
from .serving import Job, serve_model
from .several import serve_folder
from .terminal import note

_net = in_section("Network")
_limits = in_section("Limits")
_server = in_section("Server")

_EPILOG = """\b
Any number of conversations share the pool: --parallel of them are computed together, the
others are put aside and go on bit for bit. A prompt is read from where it leaves what is known.

\b
Endpoints: /v1/chat/completions, /v1/embeddings, /api/chat, /v1/messages, /v1/responses, /v1/completions, /v1/models,
/health, /metrics, /props, /slots, /tokenize, /detokenize, /apply-template, /completion, /kvflash/state and more:
docs/server.md. SIGTERM or Ctrl-C lets running answers end; a second one does not.

\b
Every option has a variable: --api-key is KVFLASH_API_KEY, --kvflash is KVFLASH_POOL."""


CHATML = "chatml"
"""llama.cpp's other names are of templates that it has in C++ only, which know no tools."""


def read_template(text: str) -> str:
    """A Jinja template, or the name of the one that llama.cpp has. ValueError for any other text."""
    if text != CHATML and "{%" not in text and "{{" not in text:
        raise ValueError(
            f"{text[:40]!r} is no Jinja template, and {CHATML} is the only name of one: --chat-template-file reads one"
            " from a file"
        )
    return text


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What only a command line says of a server. fields: of `ServerSettings`, by name."""

    model: str | None = _server(MODEL_FILE, "-m", metavar="PATH", help="The model, instead of the argument.")
    hf_repo: HubModel | None = _server(
        hub_model, "-hf", "-hfr", "--hf-repo", metavar="OWNER/REPO[:QUANT]",
        help="The model, from a hub: fetched once (kvflash-run pull --help).",
    )  # fmt: skip
    alias: str | None = _server(
        notation.word, "-a", metavar="NAME", help="What the model is called.  [default: the file's name, or the hub's]"
    )
    chat_template: str | None = _server(
        read_template, metavar="JINJA|chatml", help="Jinja template in place of the model's own, as text."
    )
    chat_template_file: Path | None = _server(
        Path, metavar="FILE", exists=True, help="Jinja template in place of the model's own."
    )
    api_key: tuple[str, ...] = _net(
        notation.key, default=(), many=True, metavar="KEY",
        help="Needed by every request; may be repeated.  [default: none]",
    )  # fmt: skip
    api_key_file: Path | None = _net(Path, metavar="FILE", exists=True, help="More keys, one a line.")
    insecure: bool = _net(bool, default=False, help="Listen at an address that is not loopback without a key.")
    parallel: int | Literal["auto"] = _limits(
        read_parallel, "-np", "--parallel", default=1, metavar="N|auto",
        help="Answers that are decoded together, each in its share of the pool; any number of conversations is kept."
        " auto: 8, or fewer where their states or least shares take too much.",
    )  # fmt: skip
    pool_share: Literal["strict", "elastic"] | None = _limits(
        ("strict", "elastic"),
        help="elastic: whenever a request begins or ends, the answers that run divide the pool among them; idle"
        " conversations keep their newest tokens and what is pinned. strict: the pool divided by --parallel, so that no"
        " other request changes what is resident.  [default: elastic; strict with --deterministic-batch or"
        " --kvflash-deterministic]",
    )  # fmt: skip
    deterministic_batch: bool = _limits(
        bool, default=False,
        help="Others change no bit of an answer: each step has a row for each of --parallel. Needs --kvflash-tau or"
        " --kvflash-deterministic, and a model without recurrent state or sliding windows.",
    )  # fmt: skip
    embeddings: bool = _server(
        bool, "--embeddings", "--embedding", default=False,
        help="Serve /v1/embeddings too, from a further context on the same weights.",
    )  # fmt: skip
    reranking: bool = _server(
        bool, "--reranking", "--rerank", default=False, help="Serve /v1/rerank too, with a model that ranks texts."
    )
    pooling: Literal["mean", "cls", "last"] | None = _server(
        ("mean", "cls", "last"),
        help="How tokens become an embedding.  [default: the model's own, or mean]",
    )
    embedding_tokens: int = _server(
        int, least=64, default=2048, metavar="N", help="Tokens of a text that is embedded or ranked, at most."
    )
    models_dir: Path | None = _server(
        Path, "--models-dir", "--models", metavar="DIR", exists=True,
        help="Serve every model in DIR, one loaded at a time: the one that a request names. Conversations are kept.",
    )  # fmt: skip
    sleep_idle_seconds: float = _server(
        float, "--sleep-idle-seconds", "--idle", least=-1, default=300, metavar="S",
        help="With --models-dir: unload a model that nobody has asked for so long; -1: never.",
    )  # fmt: skip
    fields: dict[str, Any]

    def embedding(self) -> int:
        """Tokens of a text to leave memory for; 0 without embeddings. UsageError for a contradiction."""
        if self.embeddings and self.reranking:
            raise click.UsageError("--embeddings and --reranking need different models: start a server for each")
        if self.pooling is not None and not self.embeddings:
            raise click.UsageError(f"--pooling {self.pooling} says how embeddings are made: add --embeddings")
        return self.embedding_tokens if self.embeddings or self.reranking else 0

    @property
    def idle_s(self) -> float | None:
        """Seconds after which a model is unloaded; None for never."""
        return None if self.sleep_idle_seconds < 0 else self.sleep_idle_seconds

    def template(self) -> str | None:
        """The chat template that takes the place of the model's own."""
        file = self.chat_template_file
        return self.chat_template if file is None else file.read_text(encoding="utf-8")

    def settings(self, model: str | HubModel, sampling: Sampling) -> ServerSettings:
        """The server's settings, for the model. UsageError for a file without a key."""
        alias = self.alias or (Path(model).stem if isinstance(model, str) else str(model))
        return ServerSettings(alias=alias, keys=self._keys(), sampling=sampling, **self.fields)

    def _keys(self) -> tuple[str, ...]:
        file, keys = self.api_key_file, list(self.api_key)
        lines = [] if file is None else file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(map(str.strip, lines), 1):
            try:
                keys += [notation.key(line)] if line else []
            except ValueError as err:
                raise click.UsageError(f"line {number} of {file}: {err}") from err
        if file is not None and not keys:
            raise click.UsageError(f"{file} has no key: write one a line")
        return tuple(keys)


_COMMON = (
    "--model", "--hf-repo", "--alias", "--chat-template-file", "--host", "--port", "--api-key", "--isolate-keys",
    "--session-dir", "--store", "--park-memory", "--max-queue", "--max-tokens-default", "--temp", "--ctx-size",
    "--n-gpu-layers", "--threads", "--cache-type-k", "--cache-type-v", "--kvflash", "--kvflash-cache", "--kvflash-spec",
    "--verbose", "--quiet",
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
@click.argument("path", type=MODEL_FILE, metavar="MODEL", required=False)
@collected("server", ServerOptions, also=ServerSettings)
@model_options
@collected("sampling", Sampling)
@device_options
@pool_options
@spec_options
@log_options
@click.pass_context
def serve(
    ctx: click.Context,
    *,
    path: str | None,
    server: ServerOptions,
    loading: ModelOptions,
    sampling: Sampling,
    devices: DeviceOptions,
    pool: PoolOptions,
    drafts: SpecOptions,
    log: LogOptions,
) -> None:
    """Serve OpenAI's API, with every conversation kept.

    \b
    kvflash-run serve model.gguf
    kvflash-run serve model.gguf --kvflash 8K --session-dir sessions --api-key SECRET --host 0.0.0.0
    kvflash-run serve --models-dir models --session-dir sessions
    """
    model = _model_of(ctx, path, server)
    if server.models_dir is not None and loading.mmproj is not None:
        raise click.UsageError(
            "--mmproj is of one model, and --models-dir serves several: put the projector beside its model, as "
            "mmproj-MODEL.gguf"
        )
    named = ctx.get_parameter_source("sleep_idle_seconds") is click.core.ParameterSource.COMMANDLINE
    if server.models_dir is None and named:
        raise click.UsageError("--sleep-idle-seconds unloads one of several models: add --models-dir, or leave it out")
    if pool.kvflash == "off":
        raise click.UsageError("conversations are put aside in a pool: leave out --kvflash off, or give --kvflash auto")
    if pool.fields["reading"] == "preview":
        raise click.UsageError(
            "a server makes previews by request (kvflash.reading): leave out --kvflash-reading preview"
        )
    if pool.report is not None:
        raise click.UsageError("--kvflash-report is of one run: the page at / shows the same while it happens")
    settings, embedding = server.settings(model, sampling), server.embedding()
    if not (settings.loopback or settings.keys or server.insecure):
        raise click.UsageError(f"--host {settings.host} lets others in: give an --api-key, or say --insecure")
    if settings.isolate_keys and not settings.keys:
        raise click.UsageError("--isolate-keys without keys keeps nobody apart: give an --api-key for each client")
    if settings.store is not None and settings.session_dir is not None:
        raise click.UsageError("--store and --session-dir both keep conversations: give one of them")
    log_to_stderr(log)
    if settings.isolate_keys and pool.cache is not None and not log.quiet:
        note("--kvflash-cache does nothing with --isolate-keys: the prefix cache is not separated by key")
    job = Job(
        settings=settings,
        loading=loading,
        devices=devices,
        pool=pool,
        drafts=drafts,
        log=log,
        template=server.template(),
        parallel=server.parallel,
        pool_share=server.pool_share,
        deterministic_batch=server.deterministic_batch,
        embedding=embedding,
        pooling="rank" if server.reranking else server.pooling,
    )
    with plain_errors(verbose=log.verbose):
        try:
            from ..server.start import listen
        except ModuleNotFoundError as err:
            raise click.ClickException(
                f"the server needs {err.name}, which is not installed: {pip_line.install('server')}"
            ) from err
        with listen(settings) as sock:  # before a model, whose loading may take minutes
            if server.models_dir is None:
                serve_model(job, located(model, quiet=log.quiet), sock)
            else:
                serve_folder(job, server.models_dir, sock, idle_s=server.idle_s)


def _model_of(ctx: click.Context, path: str | None, server: ServerOptions) -> str | HubModel:
    """The argument, `-m` or `-hf`; "" with a folder of models. UsageError for two of them, or none.

    A variable gives way to the command line.
    """
    options = {"model": ("-m ", server.model), "hf_repo": ("-hf ", server.hf_repo)}
    typed = [
        (flag, value)
        for name, (flag, value) in options.items()
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    given: list[tuple[str, str | HubModel | None]] = [*([] if path is None else [("", path)]), *typed]
    if len(given) > 1:
        (one, first), (other, second) = given[:2]
        raise click.UsageError(f"the model is given twice, as {one}{first} and with {other}{second}: leave one out")
    if server.models_dir is not None:
        if given or server.alias is not None:
            what = "{}{}".format(*given[0]) if given else f"--alias {server.alias}"
            raise click.UsageError(f"--models-dir serves each model by its file's name: leave out {what}")
        return ""
    found = next((value for _flag, value in [*given, *options.values()] if value is not None), None)
    if found is None:
        raise click.UsageError(
            "which model? Give the path of a .gguf file, -m PATH, -hf OWNER/REPO, or --models-dir DIR."
        )
    return found
