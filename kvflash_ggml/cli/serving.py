"""The options of a server, and a model that is served: it is loaded, and answers until its server ends."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import click

from .. import notation
from ..batching.messages import Sampling
from ..config import KVFlashConfig
from ..constants import CHUNK, POOL_STEP, SPEED_CAP, round_up
from ..errors import EncoderError, UnsupportedModelError
from ..server.settings import ServerSettings
from ..settings import in_section
from . import report
from .hub import HubModel, hub_model
from .model import in_words, keywords, load_model, log_requests, open_model
from .options import LogOptions, OpeningOptions, read_parallel
from .prompt import read_text
from .sections import MODEL_FILE
from .terminal import note, size_text

_net = in_section("Network")
_limits = in_section("Limits")
_server = in_section("Server")


CHATML = "chatml"
"""llama.cpp's other names are of templates that it has in C++ only, which know no tools."""


def read_template(text: str) -> str:
    """Read a Jinja template, or the name of one that llama.cpp has. ValueError for any other text."""
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
    alias: tuple[str, ...] | None = _server(
        notation.names, "-a", metavar="NAME,...",
        help="Names of the model in the API; answers have the first.  [default: the file's name, or the hub's]",
    )  # fmt: skip
    chat_template: str | None = _server(
        read_template, metavar="JINJA|chatml", help="Jinja template in place of the model's own, as text."
    )
    chat_template_file: Path | None = _server(
        Path, metavar="FILE", exists=True, help="Jinja template in place of the model's own."
    )
    api_key: tuple[str, ...] = _net(
        notation.key, default=(), many=True, metavar="KEY",
        help="Key that requests need; may be repeated.  [default: none]",
    )  # fmt: skip
    api_key_file: Path | None = _net(Path, metavar="FILE", exists=True, help="File with more keys, one a line.")
    insecure: bool = _net(bool, default=False, help="Listen at an address that is not loopback without a key.")
    parallel: int | Literal["auto"] = _limits(
        read_parallel, "-np", "--parallel", default="auto", metavar="N|auto",
        help="Answers decoded together, each in its share of the pool; up to 4,096 conversations are kept."
        " auto: 4, or fewer where recurrent states or the smallest shares take too much, or the model or another"
        " option serves one; the banner says why.",
    )  # fmt: skip
    pool_share: Literal["strict", "elastic"] | None = _limits(
        ("strict", "elastic"),
        help="elastic: running answers divide the pool anew whenever a request begins or ends; idle conversations"
        " keep their newest tokens and pins. strict: each answer has the pool divided by --parallel, so that no other"
        " request changes what is resident.  [default: elastic; strict with --deterministic-batch or"
        " --kvflash-deterministic]",
    )  # fmt: skip
    deterministic_batch: bool = _limits(
        bool, default=False,
        help="No other request changes a bit of an answer: each step has --parallel rows. On a GPU the slot that an"
        " answer gets still does. Needs a model without recurrent state or sliding windows, no drafts, and --parallel"
        " of up to 4, or a multiple of 4.",
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
        help="How token vectors become one embedding.  [default: the model's own, or mean]",
    )
    embedding_tokens: int = _server(
        notation.tokens, least=64, default=2048, metavar="N", help="Longest text to embed or rank, in tokens."
    )
    models_dir: Path | None = _server(
        Path, "--models-dir", "--models", metavar="DIR", exists=True,
        help="Serve every model in DIR, with kvflash-router. The one that a request names is loaded, beside others"
        " where there is room. Conversations are kept.",
    )  # fmt: skip
    models_max: int = _server(
        int, "--models-max", least=0, default=4, metavar="N",
        help="With --models-dir: most models loaded at once, as far as they fit; 0: as many as fit.",
    )  # fmt: skip
    sleep_idle_seconds: float = _server(
        float, "--sleep-idle-seconds", "--idle", least=-1, default=300, metavar="S",
        help="With --models-dir: unload a model after S seconds without a request; -1: never.",
    )  # fmt: skip
    dry_run: bool = _server(
        bool, default=False, variable="",
        help="Say what would go where, and whether it fits; load nothing, and take no port. The exit code is 3 if it"
        " does not fit.",
    )  # fmt: skip
    fields: dict[str, Any]

    def embedding(self) -> int:
        """Return the tokens of a text to leave memory for; 0 without embeddings. UsageError for a contradiction."""
        if self.embeddings and self.reranking:
            raise click.UsageError("--embeddings and --reranking need different models: start a server for each")
        if self.pooling is not None and not self.embeddings:
            raise click.UsageError(f"--pooling {self.pooling} says how embeddings are made: add --embeddings")
        return self.embedding_tokens if self.embeddings or self.reranking else 0

    def pool(self) -> dict[str, Any]:
        """Return the fields of KVFlashConfig that only a server sets."""
        return {
            "embedding": self.embedding(),
            "pool_share": self.pool_share,
            "parallel": self.parallel,
            "deterministic_batch": self.deterministic_batch,
        }

    @property
    def idle_s(self) -> float | None:
        """Seconds after which a model is unloaded; None for never."""
        return None if self.sleep_idle_seconds < 0 else self.sleep_idle_seconds

    def template(self) -> str | None:
        """Read the chat template that replaces the model's own. UsageError for a file that cannot be read."""
        return self.chat_template if self.chat_template_file is None else _text(self.chat_template_file)

    def settings(self, model: str | HubModel, sampling: Sampling) -> ServerSettings:
        """Return the server's settings for the model. UsageError for a file of keys that is empty or unreadable."""
        alias, *others = self.alias or (Path(model).stem if isinstance(model, str) else str(model),)
        return ServerSettings(alias=alias, aliases=tuple(others), keys=self._keys(), sampling=sampling, **self.fields)

    def _keys(self) -> tuple[str, ...]:
        file, keys = self.api_key_file, list(self.api_key)
        lines = [] if file is None else _text(file).splitlines()
        for number, line in enumerate(map(str.strip, lines), 1):
            try:
                keys += [notation.key(line)] if line else []
            except ValueError as err:
                raise click.UsageError(f"line {number} of {file}: {err}") from err
        if file is not None and not keys:
            raise click.UsageError(f"{file} has no key: write one a line")
        return tuple(keys)


def _text(file: Path) -> str:
    try:
        return read_text(file)
    except (ValueError, OSError) as err:
        raise click.UsageError(in_words(err)) from err


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a command line asks of a server, but for the model. template: None for the model's own."""

    settings: ServerSettings
    opening: OpeningOptions
    server: ServerOptions
    log: LogOptions
    template: str | None


ENCODES = "an encoder: it embeds texts and writes none, so there is no pool and no conversation"
"""What a user is told of a model that embeds only."""

ENCODERS_CONTEXT = 512
"""Tokens of a context that an encoder has beside the one that embeds, and that nothing is read in."""

Ready = Callable[[Any, str], None]
"""Called with the `Llama` and the server's address once it takes requests."""


def serve_model(
    job: Serving, path: str, sock: socket.socket, *, ready: Ready | None = None, until: BinaryIO | None = None
) -> None:
    """Load a model and serve it at `sock` until a signal, or the end of `until`. The default of `ready` is a note.

    Raises:
        KVFlashError, ValueError: a setting, the library or the file is not usable.
    """
    from ..server import requestlog
    from ..server.run import start

    settings, log = job.settings, job.log
    if not log.quiet:
        log_requests(requestlog.NAME, log)

    def found(count: int) -> None:
        if settings.session_dir is not None and not log.quiet:
            note(f"{count} conversation{'s' * (count != 1)} found in {settings.session_dir}")

    with _open(job, path) as llm:
        if not log.quiet and not log.verbose:
            note(ENCODES if llm.kvflash is None else llm.kvflash.banner())
        if llm.kvflash is not None and (cache := job.opening.pool.prefix_cache()) is not None:
            llm.set_cache(replace(cache, memory_bytes=0))  # in memory there are the parked ones
        embedder, server = None, job.server
        if server.embedding() or llm.kvflash is None:
            from ..llama.serving import embedder_of

            pooling = "rank" if server.reranking else server.pooling
            embedder = embedder_of(llm, pooling=pooling, most_tokens=server.embedding_tokens)
            if not log.quiet:
                what = "reranking" if server.reranking else f"embeddings, pooling {embedder.pooling}"
                note(f"{what}: texts of up to {embedder.most:,} tokens, a context of {size_text(embedder.bytes)}")

        def listening(address: str) -> None:
            if ready is not None:
                ready(llm, address)
            else:
                note(f"serving {settings.alias} at {address}")

        start(llm, settings, sock, template=job.template, embedder=embedder, found=found, ready=listening, until=until)


@contextmanager
def _open(job: Serving, path: str) -> Iterator[Any]:
    """Open the model, an encoder without a pool. One that cannot decode several answers together is opened for one at
    a time, with a note.
    """
    server, served = job.server, job.server.pool()
    with ExitStack() as stack:
        try:
            llm = stack.enter_context(open_model(path, job.opening, job.log, **served))
        except EncoderError:
            loading, devices = replace(job.opening.loading, ctx_size=ENCODERS_CONTEXT), job.opening.devices
            llm = stack.enter_context(load_model(path, loading=loading, devices=devices, verbose=job.log.verbose))
        except UnsupportedModelError as err:
            if server.parallel in (1, "auto"):
                raise
            note(f"--parallel {server.parallel} has no effect, answers take turns: {err}")
            alone = {"parallel": 1, "deterministic_batch": False}
            llm = stack.enter_context(open_model(path, job.opening, job.log, **served | alone))
        yield llm


def placed(job: Serving, path: str) -> dict[str, Any]:
    """Return the keywords of the `Llama` that `serve_model` makes, as far as they say where it goes."""
    found = keywords(path, job.opening, quiet=job.log.quiet)
    return {**found, "kvflash": replace(found["kvflash"], **job.server.pool())}


def dry_run(job: Serving, path: str) -> int:
    """Print where a model would go, and where it would be served. Return the exit code: 0, or DOES_NOT_FIT.

    Raises as `serve_model`.
    """
    asked, settings = placed(job, path), job.settings
    try:
        found = report.predicted(path, asked)
        lines = report.placement_lines(path, found)
        lines += _together(asked["kvflash"], found) if found["fits"] else []
    except EncoderError:
        found, lines = {"fits": True}, [ENCODES]
    for line in lines:
        click.echo(line)
    if not found["fits"]:
        return report.DOES_NOT_FIT
    click.echo(f"served: {settings.alias} at {settings.host}, port {settings.port}")
    return 0


def _together(config: KVFlashConfig, placed: Mapping[str, Any]) -> list[str]:
    """Say what pool several answers share, where the placement is of one answer."""
    from ..placement import sizing

    one, n_ctx = placed["pool"], placed["n_ctx"]
    several = one < n_ctx or config.pool_bytes is not None
    slots = one if several else SPEED_CAP if config.pool == "auto" else round_up(config.pool, POOL_STEP)
    count = config.sequences
    if config.parallel == "auto" and not (config.serves_one or config.deterministic):
        count = sizing.sequences(config, slots, rows=placed["n_ubatch"])
    if count == 1:
        return []
    asked = replace(config, parallel=count, **({"pool": one, "pool_bytes": None} if one < n_ctx else {}))
    slot_bytes = sum(device["needs"]["KV"] for device in placed["devices"]) // one
    shared = sizing.resolve(asked, n_ctx=n_ctx, slot_bytes=slot_bytes, lanes=()).slots
    least = shared // count // CHUNK * CHUNK
    return [
        f"pool of {count} answers at once: {shared:,} tokens, at least {least:,} for each; the table is of one answer, "
        f"with {one:,}"
    ]
