"""`kvflash-run exec [OPTIONS] -- PROGRAM ...`: another Python program, with a pool."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .. import env
from .model import plain_errors
from .pool_options import PoolOptions, pool_options
from .sections import SectionCommand

_PYTHONS = ("python", "python3")
_STARTUP = "_kvflash_ggml_startup"

_EPILOG = """\b
Every llama_cpp.Llama that the program makes has the pool, unless the program asks for one itself. The
program must be installed in the Python environment of kvflash-run. It is told through the environment:
KVFLASH_INSTALL=1, and the variables of the options."""


@click.command(
    "exec",
    cls=SectionCommand,
    epilog=_EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "KVFLASH",
        "allow_interspersed_args": False,
    },
)
@pool_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] PROGRAM [ARGUMENTS]...")
@click.pass_context
def execute(ctx: click.Context, *, command: tuple[str, ...], pool: PoolOptions) -> None:
    """Run a Python program whose llama_cpp.Llama shall live in a pool.

    \b
    kvflash-run exec --kvflash auto -- llm -m my-model "Why is the sky blue?"
    kvflash-run exec --kvflash 4096 -- python -m llama_cpp.server --model model.gguf --n_ctx 131072
    kvflash-run exec --kvflash 2G --kvflash-cache cache/ -- script.py
    """
    if ctx.get_parameter_source("kvflash_report") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--kvflash-report draws one answer of kvflash-run run: leave it out")
    with plain_errors(verbose=False):
        if pool.config() is None:
            raise click.UsageError("exec is for a pool: add --kvflash TOKENS or auto")
    if importlib.util.find_spec(_STARTUP) is None:
        raise click.ClickException(f"{sys.prefix} has no complete install of kvflash_ggml, so programs cannot be told")
    program = resolve(list(command))
    sys.stdout.flush()
    os.execve(program[0], program, {**os.environ, **_variables(pool)})


def resolve(command: list[str]) -> list[str]:
    """The command with the full path of its program, which must run in this environment. UsageError if it does not."""
    name, *arguments = command
    if name in _PYTHONS:
        return [sys.executable, *arguments]
    if name.endswith(".py") and Path(name).is_file():
        return [sys.executable, *command]
    here = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join([here, os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise click.UsageError(f"there is no program {name!r} in {here} or on the PATH")
    python = _interpreter(Path(found))
    if python is not None and python.absolute().parent != Path(sys.executable).absolute().parent:
        raise click.UsageError(
            f"{found} runs in another Python environment, {python}: install the program beside kvflash_ggml "
            f"({here}), or kvflash_ggml there"
        )
    return [found, *arguments]


def _interpreter(script: Path) -> Path | None:
    """The Python that a script names in its first line; None for anything else."""
    with script.open("rb") as file:
        line = file.readline(500)
    if not line.startswith(b"#!"):
        return None
    words = shlex.split(line[2:].decode(errors="replace"))
    if words and Path(words[0]).name == "env":
        words = words[1:]
    if not words or not Path(words[0]).name.startswith("python"):
        return None
    found = shutil.which(words[0])
    return None if found is None else Path(found)


def _variables(pool: PoolOptions) -> dict[str, str]:
    """What the options say, as the program's `install` reads it."""
    values: dict[str, Any] = asdict(pool)
    values["kvflash_pins"] = " ".join(f"{lo}:{hi}" for lo, hi in pool.kvflash_pin) or None
    named = {name: variable for name, (variable, _) in env.VARIABLES.items()}
    return {"KVFLASH_INSTALL": "1"} | {
        variable: str(values[name]) for name, variable in named.items() if values[name] is not None
    }
