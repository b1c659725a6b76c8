"""The group. The verb may be left out: `kvflash-run model.gguf` is `kvflash-run run model.gguf`."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import click

from ..errors import ConfigError
from ..extensions import extension
from .report import version_line
from .sections import HELP
from .terminal import is_dumb

INTERRUPTED = 130
_OWN_OPTIONS = ("-h", "--help", "--version")
_MODEL_OPTIONS = {"-m", "--model", "-hf", "--hf-repo"}
_MODEL_VARIABLES = {"KVFLASH_MODEL", "KVFLASH_HF_REPO"}


_MODULES = {
    "run": "run",
    "serve": "serve",
    "pull": "models",
    "list": "models",
    "rm": "models",
    "doctor": "doctor",
    "check": "check",
    "exec": "execute",
    "calibrate": "calibrate",
    "snapshot": "snapshot",
    "rpc": "rpc",
    "launch": "launch",
}
"""Verb to module."""

_ELSEWHERE = {"store": "fleet"}
"""Verbs of distributions beside the package, by the folders of these in the checkout."""

_NAMES = {"exec": "execute", "list": "list_"}
"""The names of the commands there, where Python has the verb for something else."""


_CONVERTS = ("convert", "quantize")
"""Verbs that one may look for here."""


class Imported(Mapping[str, click.Command]):
    """The verbs, each imported when it is looked up: `--version` and an error need none of them."""

    def __getitem__(self, name: str) -> click.Command:
        if name in _ELSEWHERE:
            return _beside(name)
        module = import_module(f".{_MODULES[name]}", __package__)
        command: click.Command = getattr(module, _NAMES.get(name, name))
        return command

    def __iter__(self) -> Iterator[str]:
        yield from _MODULES
        yield from _ELSEWHERE

    def __len__(self) -> int:
        return len(_MODULES) + len(_ELSEWHERE)


def _beside(name: str) -> click.Command:
    """Import a verb of another distribution. Where it is missing, return one that says what to install."""
    try:
        command: click.Command = extension(f"verb-{name}", asked=f"kvflash-run {name}", folder=_ELSEWHERE[name])
        return command
    except ConfigError as err:
        why = str(err)

    def refuse() -> None:
        raise click.ClickException(why)

    takes_all = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=refuse, help=why, context_settings=HELP | takes_all)


@contextmanager
def _plain_end() -> Iterator[None]:
    """End without a traceback: Ctrl-C with its usual exit code, a stdout that takes no more with what is wrong."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno == errno.EPIPE:  # click ends quietly
            raise
        raise click.ClickException(str(error)) from error


class Verbs(click.Group):
    """Ends as `_plain_end`, also while it imports a verb."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _plain_end():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        if is_dumb():
            ctx.color = False
        with _plain_end():
            return super().invoke(ctx)


class DefaultRun(Verbs):
    """Hands everything that does not start with a verb to `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in _OWN_OPTIONS:
            if (
                not ctx.resilient_parsing
                and _is_word(args[0])
                and not _MODEL_OPTIONS & {*args}
                and not _MODEL_VARIABLES & {*os.environ}
            ):
                if args[0] in _CONVERTS:
                    raise click.UsageError(f"{args[0]!r} is no verb here: kvflash-convert makes and changes files", ctx)
                close = difflib.get_close_matches(args[0], self.commands, n=1)
                hint = f": did you mean {close[0]}?" if close else f". Verbs are {', '.join(self.commands)}."
                raise click.UsageError(f"{args[0]!r} is neither a verb nor a model file{hint}", ctx)
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete verbs and options, those of `run` too; where none begins so, the shell completes files."""
        from click.shell_completion import CompletionItem

        run = self.commands["run"]
        theirs = run.shell_complete(click.Context(run, parent=ctx), incomplete)
        found = {item.value: item for item in [*theirs, *super().shell_complete(ctx, incomplete)]}
        return [*found.values()] or [CompletionItem(incomplete, type="file")]


def _is_word(text: str) -> bool:
    """Tell whether a text could be a mistyped verb. A path has a dot or a slash, or is there."""
    return text.isalpha() and not Path(text).exists()


def _print_version(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        click.echo(version_line())
        ctx.exit()


@click.group(
    cls=DefaultRun,
    commands=cast("MutableMapping[str, click.Command]", Imported()),  # a group of no further verbs
    context_settings=HELP,
    epilog="The verb 'run' may be left out; its options: kvflash-run run --help, and all of them: --help-all",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Versions of the package, llama.cpp and ggml, and CUDA or CPU.",
)
def main() -> None:
    """Run GGUF models with a KV cache that does not grow with the context.

    \b
    kvflash-run model.gguf                                  chat
    kvflash-run model.gguf "Why is the sky blue?"           one answer
    kvflash-run model.gguf --kvflash 4096 -f book.txt -p "Who is Ishmael?"
    cat book.txt | kvflash-run model.gguf --kvflash auto "Who is Ishmael?"
    kvflash-run -hf OWNER/REPO:Q4_K_M                       chat, with a model of a hub
    kvflash-run serve model.gguf                            OpenAI's API, and a page
    kvflash-run pull OWNER/REPO                             fetch it; also list, rm
    kvflash-run launch claude                               a coding agent on that server
    kvflash-run exec --kvflash auto -- llm -m my-model      another Python program, with a pool
    kvflash-run snapshot info book.kvs                      what is in a saved session
    kvflash-run store ls /mnt/texts                         what servers of one model share
    kvflash-run calibrate model.gguf                        which heads find what is asked for
    kvflash-run rpc serve                                   lend this machine's devices to another
    kvflash-run doctor                                      what is installed, and does it work
    kvflash-run check model.gguf                            what a pool gives with it, in five minutes
    """
