"""`kvflash-run serve MODEL`: starts an OpenAI server."""

from __future__ import annotations

import click

from .. import pip_line
from ..batching.messages import Sampling
from ..extensions import extension
from ..server.settings import ServerSettings
from .hub import HubModel, located
from .llama_flags import llama_flags
from .model import log_to_stderr, plain_errors
from .options import LogOptions, OpeningOptions, log_options, opening_options
from .sections import HELP, MODEL_FILE, SectionCommand, collected
from .serving import ServerOptions, Serving, dry_run, serve_model
from .terminal import note

_EPILOG = """\b
Up to 4,096 conversations share the pool: --parallel of them are computed together. Idle
conversations are swapped to host memory and resume bitwise identical. A turn reads only new tokens.

\b
Endpoints: /v1/chat/completions, /v1/embeddings, /api/chat, /v1/messages, /v1/responses, /v1/completions, /v1/models,
/v1/audio/transcriptions, /health, /metrics, /props, /slots, /tokenize, /completion, /kvflash/state and more:
GET /openapi.json, docs/server.md. SIGTERM or Ctrl-C lets running answers end; a second one does not.

\b
Every option has a variable: --api-key is KVFLASH_API_KEY, --kvflash is KVFLASH_POOL."""


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
    context_settings=HELP | {"auto_envvar_prefix": "KVFLASH", "default_map": {"kvflash": "auto"}},
)
@llama_flags
@click.argument("path", type=MODEL_FILE, metavar="MODEL", required=False)
@collected("server", ServerOptions, also=ServerSettings)
@collected("sampling", Sampling)
@opening_options
@log_options
@click.pass_context
def serve(
    ctx: click.Context,
    *,
    path: str | None,
    server: ServerOptions,
    sampling: Sampling,
    opening: OpeningOptions,
    log: LogOptions,
) -> None:
    """Serve OpenAI's API, with every conversation kept.

    \b
    kvflash-run serve model.gguf
    kvflash-run serve model.gguf --kvflash 8K --session-dir sessions --api-key SECRET --host 0.0.0.0
    kvflash-run serve --models-dir models --session-dir sessions
    """
    model, pool = _model_of(ctx, path, server), opening.pool
    if server.models_dir is not None and opening.loading.mmproj is not None:
        raise click.UsageError(
            "--mmproj is of one model, and --models-dir serves several: put the projector beside its model, as "
            "mmproj-MODEL.gguf"
        )
    if server.models_dir is not None and server.dry_run:
        raise click.UsageError("--dry-run is of one model, and --models-dir serves several: give the model's file")
    for name, flag in ("sleep_idle_seconds", "--sleep-idle-seconds"), ("models_max", "--models-max"):
        if server.models_dir is None and ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{flag} is of several models: add --models-dir, or leave it out")
    if pool.kvflash == "off":
        raise click.UsageError(
            "a server needs a pool for its conversations: leave out --kvflash off, or give --kvflash auto"
        )
    if pool.fields["reading"] == "preview":
        raise click.UsageError(
            "a server makes previews by request (kvflash.reading): leave out --kvflash-reading preview"
        )
    if pool.report is not None:
        raise click.UsageError("--kvflash-report is of one run: the page at / shows the same while it happens")
    settings = server.settings(model, sampling)
    server.embedding()  # for its errors, before anything is loaded
    if not (settings.loopback or settings.keys or server.insecure):
        raise click.UsageError(f"--host {settings.host} lets others in: give an --api-key, or say --insecure")
    if settings.isolate_keys and not settings.keys:
        raise click.UsageError("--isolate-keys without keys keeps nobody apart: give an --api-key for each client")
    if settings.store is not None and settings.session_dir is not None:
        raise click.UsageError("--store and --session-dir both keep conversations: give one of them")
    log_to_stderr(log)
    if settings.isolate_keys and pool.cache is not None and not log.quiet:
        note("--kvflash-cache does nothing with --isolate-keys: the prefix cache is not separated by key")
    job = Serving(settings=settings, opening=opening, server=server, log=log, template=server.template())
    with plain_errors(verbose=log.verbose):
        if server.dry_run:
            ctx.exit(dry_run(job, located(model, quiet=log.quiet)))
        try:
            from ..server.run import listen, shared_store
        except ModuleNotFoundError as err:
            raise click.ClickException(
                f"the server needs {err.name}, which is not installed: {pip_line.install('server')}"
            ) from err
        if settings.store is not None:
            shared_store()  # for its error, before anything is loaded
        serve_folder = extension("models-dir", asked="--models-dir", folder="router") if server.models_dir else None
        with listen(settings) as sock:  # before a model, whose loading may take minutes
            if serve_folder is None:
                serve_model(job, located(model, quiet=log.quiet), sock)
            else:
                serve_folder(job, server.models_dir, sock, idle_s=server.idle_s)


def _model_of(ctx: click.Context, path: str | None, server: ServerOptions) -> str | HubModel:
    """Return the argument, `-m` or `-hf`; "" with a folder of models. UsageError for two of them, or none.

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
            what = "{}{}".format(*given[0]) if given else f"--alias {','.join(server.alias or ())}"
            raise click.UsageError(f"--models-dir serves each model by its file's name: leave out {what}")
        return ""
    found = next((value for _flag, value in [*given, *options.values()] if value is not None), None)
    if found is None:
        raise click.UsageError(
            "which model? Give the path of a .gguf file, -m PATH, -hf OWNER/REPO, or --models-dir DIR."
        )
    return found
