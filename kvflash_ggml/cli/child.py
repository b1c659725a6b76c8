"""Native code for doctor runs in a child process, since a bad build can crash it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

PROBE = "kvflash_ggml.cli.probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What the child process said, where it stopped, and why (empty: it did not fail)."""

    said: dict[str, Any]
    doing: str
    failure: str


def run_child(model: str | None, *, timeout: float, module: str = PROBE) -> Child:
    """Call `main(model)` of `module` in a new process and collect what it says."""
    # The same modules as here: with -m or -c alone a source folder in the way would win.
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom {module} import main; main({model!r})"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, check=False)
        out, err, status = done.stdout, done.stderr, done.returncode
        failure = "" if status == 0 else _reason(status, err.decode(errors="replace"))
    except subprocess.TimeoutExpired as late:
        out, failure = late.stdout or b"", f"no answer within {timeout:g} s"
    said: dict[str, Any] = {}
    for line in out.decode(errors="replace").splitlines():
        if line.startswith("{"):
            said.update(json.loads(line))
    return Child(said=said, doing=said.get("doing", "start"), failure=failure)


def _reason(status: int, stderr: str) -> str:
    """A signal's name, or the last exception with its continuation lines."""
    lines = stderr.rstrip().splitlines()
    tail = "\n".join(lines[-5:])
    if status < 0:
        return f"crashed with {signal.Signals(-status).name}" + (f"\n{tail}" if tail else "")
    last = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    message = [line for line in lines[last + 1 :] if not line.startswith("    ")]
    text = "\n".join(message) or tail or f"exit code {status}"
    return text.removeprefix("kvflash_ggml.errors.")
