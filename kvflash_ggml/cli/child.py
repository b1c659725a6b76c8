"""Runs native code in a child process, which a bad build can crash: for doctor, and before a first run.

Before its first run on a kind of CPU a build is tried there, so that a crash can be told.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import env, pip_line
from ..errors import LibraryError
from ..native import library, trial

PROBE = "kvflash_ggml.cli.probe"

_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What a child process said, what it was doing last, and why it failed ("": it did not). crashed: by a signal."""

    said: dict[str, Any]
    doing: str
    failure: str
    crashed: bool = False


def run_child(model: str | None, *, timeout: float, module: str = PROBE, entry: str = "main") -> Child:
    """Call `entry(model)` of `module` in a new process, and collect its JSON lines. model: None for a tiny one."""
    if model is None:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "tiny.gguf"
            made.write_bytes(trial.tiny_model())
            return run_child(str(made), timeout=timeout, module=module, entry=entry)
    # The same modules as here: with -m or -c alone a source folder in the way would win.
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom {module} import {entry}; {entry}({model!r})"
    command = [sys.executable, "-c", code]
    crashed = False
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, check=False)
        out, err, status = done.stdout, done.stderr, done.returncode
        crashed = status < 0
        failure = "" if status == 0 else _reason(status, err.decode(errors="replace"))
    except subprocess.TimeoutExpired as late:
        out, failure = late.stdout or b"", f"no answer within {timeout:g} s"
    said: dict[str, Any] = {}
    for line in out.decode(errors="replace").splitlines():
        if line.startswith("{"):
            said.update(json.loads(line))
    return Child(said=said, doing=said.get("doing", "start"), failure=failure, crashed=crashed)


def _reason(status: int, stderr: str) -> str:
    """Return the name of the signal, or the last exception with its continuation lines."""
    lines = stderr.rstrip().splitlines()
    tail = "\n".join(lines[-5:])
    if status < 0:
        return f"crashed with {trial.signal_name(status)}" + (f"\n{tail}" if tail else "")
    last = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    message = [line for line in lines[last + 1 :] if not line.startswith("    ")]
    text = "\n".join(message) or tail or f"exit code {status}"
    return text.removeprefix("kvflash_ggml.errors.")


# --- the first run


def check_first_run(*, repack: bool = True) -> None:
    """Decode a tiny model in a child process, unless these libraries have done so on a CPU of this kind before.

    repack: also try weights that are packed for the kernels of the CPU.

    Raises:
        LibraryError: the child crashed, or packed weights are computed wrongly. Whatever else fails there is left to
            the run itself, which can say so.
    """
    try:
        marker = _marker(library.library_folder(), repack)
    except LibraryError:
        return
    if marker.exists():
        return
    entry = main if repack else plain
    child = run_child(None, timeout=_SECONDS, module=__name__, entry=entry.__name__)
    if buffer := child.said.get("buffer"):
        why, remedy = trial.explain_weights(buffer)
        raise LibraryError(f"this build does not work on this machine: {why}: {child.failure}\n{remedy}")
    if child.crashed:
        raise LibraryError(f"this build does not work on this machine: {told(child)}\nBuild it again: {rebuild(child)}")
    if not child.failure:
        with contextlib.suppress(OSError):  # without a place to remember it, the next run looks again
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


def told(child: Child) -> str:
    """Return how a child failed, and why it crashed if that is known."""
    why, _ = trial.explain(child.said.get("features", []))
    if not (child.crashed and why):
        return child.failure
    first, *rest = child.failure.split("\n")
    return "\n".join([f"{first}: {why}", *rest])


def rebuild(child: Child) -> str:
    """Return the command for a build that should work here."""
    variables = trial.explain(child.said.get("features", []))[1] if child.crashed else ""
    return pip_line.reinstall(variables)


def main(model: str) -> None:
    """Run in the child."""
    llama = _load()
    trial.check_weights(llama, _say)
    trial.decode(llama, model)


def plain(model: str) -> None:
    """Run in the child; weights stay as the file has them."""
    llama = _load()
    import llama_cpp

    field: Any = llama_cpp.llama_model_params.use_extra_bufts
    trial.decode(llama, model, off=[field.offset])


def _load() -> ctypes.CDLL:
    library.load()
    llama = ctypes.CDLL(str(library.libllama_path()))
    _say(features=trial.built_for(llama))
    return llama


def _say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def _marker(folder: Path, repack: bool) -> Path:
    """Return the file that marks that these libraries have run on such a CPU."""
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
    cpu = trial.cpu()
    key = repr((str(folder), files, cpu.get("model name"), cpu.get("flags"), repack))
    return env.cache_dir() / "ran" / hashlib.sha256(key.encode()).hexdigest()[:20]
