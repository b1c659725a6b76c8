"""`kvflash-run exec [OPTIONS] -- PROGRAM ...`: runs another Python program with a pool."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click

from .. import pip_line
from ..config import POOL_SETTINGS
from .model import plain_errors
from .options import PoolOptions, pool_options
from .sections import HELP, SectionCommand
from .terminal import note

_PYTHONS = ("python", "python3")
_STARTUP = "_kvflash_ggml_startup"

_EPILOG = """\b
Every llama_cpp.Llama that the program makes has the pool, unless the program asks for one itself. The
program must run in a Python environment that has kvflash_ggml; one of another environment is refused. It
is told through the environment: KVFLASH_INSTALL=1, and the variables of the options."""


@click.command(
    "exec",
    cls=SectionCommand,
    epilog=_EPILOG,
    context_settings=HELP | {"auto_envvar_prefix": "KVFLASH", "allow_interspersed_args": False},
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
    try:
        os.execve(program[0], program, {**os.environ, **_variables(pool)})
    except OSError as err:
        raise click.ClickException(f"{program[0]} cannot be executed: {err.strerror}. Name its interpreter") from err


def resolve(command: list[str]) -> list[str]:
    """Return the command with the full path of its program.

    A program that is no Python program gets a warning: nobody can tell what it will start. UsageError for a program
    that is not there, or that runs in a Python environment without this package, where it would get no pool.
    """
    name, *arguments = command
    if name in _PYTHONS:
        return [sys.executable, *arguments]
    if name.endswith(".py") and Path(name).is_file():
        return [sys.executable, *command]
    here = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join([here, os.environ.get("PATH", os.defpath)]))
    there = found or (name if os.sep in name and Path(name).exists() else None)
    if there is not None and not (found and Path(found).is_file()):
        raise click.UsageError(f"{there!r} is not an executable file: name a script or a program, or chmod +x it")
    if found is None:
        raise click.UsageError(f"there is no program {name!r} in {here} or on the PATH")
    python = _interpreter(Path(found))
    if python is None:
        note(f"warning: {found} is no Python program: what it starts gets a pool only from {sys.prefix}")
    elif not _starts_us(python):
        raise click.UsageError(
            f"{found} runs in another Python environment, {python}, and would get no pool there. Install kvflash_ggml "
            f"into it: {pip_line.install_into(python)}; or install the program beside kvflash_ggml, in {sys.prefix}"
        )
    return [found, *arguments]


def _starts_us(python: str) -> bool:
    """Tell whether a Python runs our file at its start. It is asked unless it is this one."""
    ours = Path(sys.executable)
    if Path(python).absolute().parent == ours.absolute().parent and Path(python).resolve() == ours.resolve():
        return True
    question = f"import sys; sys.exit({_STARTUP!r} not in sys.modules)"
    try:
        return subprocess.run([python, "-c", question], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
    except OSError:
        return False


def _interpreter(program: Path) -> str | None:
    """Find the Python that runs a program: itself, or the one that its first lines name; None for anything else."""
    if _is_python(str(program)):
        return str(program)
    with program.open("rb") as file:
        lines = [file.readline(4096).decode(errors="replace") for _ in range(2)]
    if not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split()
    if words[:1] == ["/bin/sh"] and lines[1].startswith("'''exec' "):  # pip's way with long paths and blanks
        words = shlex.split(lines[1])[1:]
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    return shutil.which(words[0]) if words and _is_python(words[0]) else None


def _is_python(name: str) -> bool:
    return re.fullmatch(r"(python|pypy)[\d.]*", Path(name).name) is not None


def _variables(pool: PoolOptions) -> dict[str, str]:
    """Write what the options say as variables that the program's `install` reads."""
    values = {**vars(pool), **pool.fields, "pins": " ".join(f"{lo}:{hi}" for lo, hi in pool.fields["pins"]) or None}
    return {"KVFLASH_INSTALL": "1"} | {
        one.variable_of(name): str(values[name]) for name, one in POOL_SETTINGS.items() if values[name] is not None
    }
