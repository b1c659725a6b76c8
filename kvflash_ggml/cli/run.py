"""`kvflash-run MODEL [PROMPT]`: one answer, or a chat."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import logs
from ..errors import SnapshotError
from ..files import check_writable
from ..settings import in_section
from ..snapshot import codec
from ..snapshot.container import Container, FileSource
from .answer import Message, TimedAnswer, ask, finish_preview
from .calibrate import finish
from .chat import Chat
from .hub import HubModel, hub_model, located
from .llama_flags import llama_flags
from .model import first_seed, has_chat_template, keywords, log_to_stderr, open_model, plain_errors
from .options import (
    OpeningOptions,
    OutputOptions,
    PoolOptions,
    SamplingOptions,
    SnapshotOptions,
    opening_options,
    output_options,
    sampling_options,
    snapshot_options,
)
from .prompt import as_typed, model_and_words, read_prompt, with_media
from .report import closing_line, document, recorded
from .report import dry_run as say_what_goes_where
from .sections import HELP, MODEL_FILE, SectionCommand, collected
from .terminal import busy, end_answer, note, print_piece, size_text, stderr_is_terminal, stdin_is_terminal

if TYPE_CHECKING:
    from ..llama.llama import Llama


class SessionFile:
    """The file of --snapshot. options: None, or without a file: every method does nothing then."""

    def __init__(self, options: SnapshotOptions | None, *, quiet: bool) -> None:
        self._path = None if options is None else options.snapshot
        self._only_read = options is not None and options.snapshot_ro
        self._compress = options is not None and options.snapshot_compress
        self._quiet = quiet
        self._there = False
        self._tokens: list[int] = []
        self._restored: dict[str, Any] | None = None
        self._saved: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise KVFlashError for what cannot work, before a model is loaded."""
        if self._path is None:
            return
        self._there = self._path.exists()
        if self._there:
            with _another_file():
                Container(FileSource(self._path))
        elif self._only_read:
            raise SnapshotError(f"{self._path} does not exist: leave out --snapshot-ro to have it made")
        if not self._only_read:
            check_writable(self._path)
            if self._compress:
                codec.require()

    def load(self, llm: Llama) -> None:
        """Restore the session in the file, if there was one. KVFlashError if it is of another model."""
        if self._path is None or not self._there:
            return
        began = time.perf_counter()
        with _another_file(), busy(f"restoring {self._path}", shown=self._shows_work):
            count = llm.load_snapshot(self._path)
        seconds = time.perf_counter() - began
        self._tokens = _tokens(llm)
        self._restored = {"tokens": count, "seconds": round(seconds, 6)}
        self._say(f"kvflash: restored {count} tokens from {self._path} in {seconds:.2f} s")

    def save(self, llm: Llama) -> None:
        """Save the session if it has changed. KVFlashError if that fails; the old file stays then."""
        if self._path is None or self._only_read or _tokens(llm) == self._tokens:
            return
        began = time.perf_counter()
        with busy(f"saving {self._path}", shown=self._shows_work):
            size = llm.save_snapshot(self._path, compress=self._compress).result()
        seconds = time.perf_counter() - began
        self._saved = {"tokens": llm.n_tokens, "bytes": size, "seconds": round(seconds, 6)}
        self._say(f"kvflash: saved {llm.n_tokens} tokens to {self._path}: {size_text(size)} in {seconds:.2f} s")

    def document(self) -> dict[str, Any] | None:
        """Return what was restored and saved, for programs; None without a file."""
        if self._path is None:
            return None
        return {"file": str(self._path), "restored": self._restored, "saved": self._saved}

    @property
    def _shows_work(self) -> bool:
        return stderr_is_terminal() and not self._quiet

    def _say(self, text: str) -> None:
        if not self._quiet:
            note(text)


@contextmanager
def _another_file() -> Iterator[None]:
    """Name the remedy for a file of --snapshot that cannot be used."""
    try:
        yield
    except SnapshotError as error:
        raise SnapshotError(f"{error}: give another file with --snapshot, or delete this one") from error


def _tokens(llm: Llama) -> list[int]:
    return list(llm.input_ids[: llm.n_tokens])


_prompt = in_section("Prompt")

_NEED_A_POOL = ("KVFlash", "Speculative decoding", "Snapshot")
"""Headings of options that change nothing without one."""

_EPILOG = """\b
With a chat template the prompt is a user message, and without a prompt a chat begins;
-no-cnv, or a model without a template, continues the text as it stands.
The answer goes to stdout, everything else to stderr.

\b
A snapshot holds the model's memory of a text, not the messages of a chat: what the next
prompt shares with it from the beginning is not read again. So -f book.txt with another
question reads only the question; a prompt that begins differently is read as a whole, and
takes the place of the old text in FILE. Ctrl-C twice leaves without saving.

\b
Every option has a variable: --ctx-size is KVFLASH_CTX_SIZE, --kvflash is KVFLASH_POOL,
--kvflash-tau is KVFLASH_TAU.
Exit codes: 0 done, 1 failed, 2 wrong usage or a server of --rpc that cannot be used,
3 does not fit (--dry-run), 130 stopped by Ctrl-C."""


_COMMON = (
    "--model", "--hf-repo", "--prompt", "--file", "--system", "--conversation", "--dry-run", "--ctx-size",
    "--n-gpu-layers", "--threads", "--cache-type-k", "--cache-type-v", "--kvflash", "--kvflash-cache", "--kvflash-spec",
    "--snapshot", "--predict", "--temp", "--seed", "--json", "--verbose", "--quiet",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What is answered, and how."""

    model: str | None = _prompt(MODEL_FILE, "-m", metavar="PATH", help="The model, instead of the first argument.")
    hf_repo: HubModel | None = _prompt(
        hub_model, "-hf", "-hfr", "--hf-repo", metavar="OWNER/REPO[:QUANT]",
        help="The model, from a hub: fetched once (kvflash-run pull --help).",
    )  # fmt: skip
    prompt: str | None = _prompt(str, "-p", variable="", metavar="TEXT", help="The prompt.")
    files: tuple[Path, ...] = _prompt(
        click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path), "-f", "--file", default=(), many=True,
        variable="", metavar="FILE",
        help="Text that comes before the prompt; '-' is stdin. Several are read in their order.",
    )  # fmt: skip
    images: tuple[Path, ...] = _prompt(
        Path, "--image", default=(), many=True, variable="", metavar="FILE", exists=True,
        help="An image before the prompt; several are seen in their order. Needs --mmproj.",
    )  # fmt: skip
    sounds: tuple[Path, ...] = _prompt(
        Path, "--audio", default=(), many=True, variable="", metavar="FILE", exists=True,
        help="A sound before the prompt and behind images: WAV, MP3 or FLAC; may be repeated. Needs --mmproj.",
    )  # fmt: skip
    system: str | None = _prompt(str, "-s", "-sys", "--system", metavar="TEXT", help="The system message.")
    conversation: bool | None = _prompt(
        bool, "-cnv/-no-cnv", "--conversation/--no-conversation",
        help="Use the chat template, or continue the prompt as raw text; -cnv with a prompt at a terminal stays in the"
        " chat.  [default: by the model]",
    )  # fmt: skip
    dry_run: bool = _prompt(
        bool, default=False, variable="",
        help="Say what would go where, and whether it fits; load nothing. The exit code is 3 if it does not fit.",
    )  # fmt: skip


@click.command(
    cls=SectionCommand,
    epilog=_EPILOG,
    common=_COMMON,
    context_settings=HELP | {"auto_envvar_prefix": "KVFLASH"},
)
@llama_flags
@click.argument("arguments", nargs=-1, type=MODEL_FILE, metavar="MODEL [PROMPT]")
@collected("asked", PromptOptions)
@opening_options
@snapshot_options
@sampling_options
@output_options
@click.pass_context
def run(
    ctx: click.Context,
    *,
    arguments: tuple[str, ...],
    asked: PromptOptions,
    opening: OpeningOptions,
    saving: SnapshotOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Answer one prompt, or chat.

    \b
    kvflash-run model.gguf "Why is the sky blue?"
    kvflash-run model.gguf -ngl 99 -ctk q8_0 -ctv q8_0 --kvflash 8192
    kvflash-run model.gguf --kvflash auto -f book.txt -p "Who is Ishmael?" --json
    kvflash-run model.gguf --kvflash auto -f book.txt -p "And Ahab?" --snapshot book.kvs
    """
    pool = opening.pool
    _refuse_idle_options(ctx, pool, saving)
    model, words = model_and_words(asked.model, asked.hf_repo, arguments)
    log_to_stderr(output)
    with plain_errors(verbose=output.verbose):
        if asked.dry_run:
            path = located(model, quiet=output.quiet)
            settings = keywords(path, opening, quiet=output.quiet)
            ctx.exit(say_what_goes_where(path, settings, as_json=output.as_json))
        text = read_prompt(words, asked.prompt, asked.files, use_stdin=asked.conversation is not True)
        system = as_typed(asked.system, "the system message")
        if system is not None and system.isdecimal():
            note(f"warning: -s is the system message here, which is {system!r} now: --seed {system} sets the seed")
        chatting = text is None or (asked.conversation is True and stdin_is_terminal())
        if chatting and asked.conversation is False:
            raise click.UsageError("-no-cnv continues a text: give a prompt, -p, -f or a pipe")
        if chatting and output.as_json:
            raise click.UsageError("--json answers one prompt: give one, with -p, -f or a pipe")
        media = (*asked.images, *asked.sounds)
        option = "--image" if asked.images else "--audio"
        if media and opening.loading.mmproj is None:
            raise click.UsageError(f"{option} needs the model's projector, a second GGUF file: add --mmproj FILE")
        if media and asked.conversation is False:
            raise click.UsageError(f"{option} is part of a chat: leave out -no-cnv")
        if system is not None and asked.conversation is False:
            raise click.UsageError("a system message needs the chat template: leave out -no-cnv")

        report = None if pool.kvflash == "off" else pool.report
        if report is not None:
            check_writable(report)
        session_file = SessionFile(None if pool.kvflash == "off" else saving, quiet=output.quiet)
        session_file.check()
        path = located(model, quiet=output.quiet)
        start = time.perf_counter()
        with open_model(path, opening, output) as llm, recorded(llm, report, title=Path(path).name):
            load_s = time.perf_counter() - start
            if not output.quiet and not output.verbose:  # with -v the library says it
                _say_how_it_was_loaded(llm)
            conversation = True if media else asked.conversation
            templated = _use_template(llm, conversation, chatting=chatting, system=system)
            session_file.load(llm)
            if chatting:
                Chat(llm, sampling=sampling, output=output, system=system, media=media).run(text)
                session_file.save(llm)
                return
            assert text is not None
            request = _messages(system, with_media(media, text)) if templated else text
            answer = _answer(llm, request, sampling, output)
            if not output.quiet:
                note(closing_line(answer, llm.kvflash))
            kept = saving.snapshot is not None or pool.cache is not None
            counters = llm.kvflash
            try:
                if kept and counters is not None and counters.last.previewed:
                    finish_preview(llm, shown=stderr_is_terminal() and not output.quiet)
                session_file.save(llm)
            finally:  # the answer is worth having even if the disk is full
                if output.as_json:
                    result = document(
                        answer,
                        model=path,
                        n_ctx=llm.n_ctx(),
                        load_s=load_s,
                        stats=llm.kvflash,
                        snapshot=session_file.document(),
                    )
                    click.echo(json.dumps(result, ensure_ascii=False))
            if not answer.interrupted:
                finish(llm, shown=stderr_is_terminal() and not output.quiet)
    if answer.interrupted:
        raise KeyboardInterrupt


def _say_how_it_was_loaded(llm: Llama) -> None:
    """Note how the model was loaded, with a pool or where fitting has decided something."""
    if llm.kvflash is not None:
        note(llm.kvflash.banner())
    elif llm.placement is not None:
        note(f"fit: {llm.placement.why}")


@logs.held()
def _answer(llm: Llama, request: str | list[Message], sampling: SamplingOptions, output: OutputOptions) -> TimedAnswer:
    streaming = output.stream and not output.as_json
    answer = ask(
        llm,
        request,
        sampling=sampling,
        seed=first_seed(sampling.seed),
        emit=print_piece if streaming else None,
        show_progress=stderr_is_terminal() and not output.quiet,
    )
    if not output.as_json:
        end_answer(answer.text, streamed=streaming)
    return answer


def _use_template(llm: Llama, conversation: bool | None, *, chatting: bool, system: str | None) -> bool:
    if conversation is False:
        return False
    if has_chat_template(llm):
        return True
    if chatting or conversation or system is not None:
        raise click.ClickException(
            "this model has no chat template, so it cannot chat or take a system message: "
            "give a prompt, which is continued as raw text"
        )
    return False


def _messages(system: str | None, content: Any) -> list[Message]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": content}]


def _refuse_idle_options(ctx: click.Context, pool: PoolOptions, saving: SnapshotOptions) -> None:
    """Raise UsageError for an option on the command line that would change nothing."""
    given = {
        str(param.name): getattr(param, "section", None)
        for param in ctx.command.params
        if ctx.get_parameter_source(str(param.name)) is click.core.ParameterSource.COMMANDLINE
    }
    for name, section in given.items():
        flag = f"--{name.replace('_', '-')}"
        if pool.kvflash == "off" and name != "kvflash" and section in _NEED_A_POOL:
            raise click.UsageError(f"{flag} needs a pool: add --kvflash TOKENS or auto")
        if saving.snapshot is None and name in ("snapshot_ro", "snapshot_compress"):
            raise click.UsageError(f"{flag} needs a file: add --snapshot FILE")
        if saving.snapshot_ro and name == "snapshot_compress":
            raise click.UsageError("--snapshot-ro writes nothing that could be compressed: leave one of the two out")
