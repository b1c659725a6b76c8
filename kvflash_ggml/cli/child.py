"""Native code for doctor runs in a child process, since a bad build can crash it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..native.trial import signal_name, tiny_model

PROBE = "kvflash_ggml.cli.probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What the child process said, where it stopped, and why (empty: it did not fail). crashed: by a signal."""

    said: dict[str, Any]
    doing: str
    failure: str
    crashed: bool = False


def run_child(model: str | None, *, timeout: float, module: str = PROBE, entry: str = "main") -> Child:
    """Call `entry(model)` of `module` in a new process and collect what it says. None: a tiny model made for it."""
    if model is None:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "tiny.gguf"
            made.write_bytes(tiny_model())
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
    """A signal's name, or the last exception with its continuation lines."""
    lines = stderr.rstrip().splitlines()
    tail = "\n".join(lines[-5:])
    if status < 0:
        return f"crashed with {signal_name(status)}" + (f"\n{tail}" if tail else "")
    last = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    message = [line for line in lines[last + 1 :] if not line.startswith("    ")]
    text = "\n".join(message) or tail or f"exit code {status}"
    return text.removeprefix("kvflash_ggml.errors.")
