"""Upstream's own programs, unpatched and of the same commit, from the folder that `scripts/vendor.py stock` prints."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kvflash_ggml.constants import KV_TYPES, round_up
from kvflash_ggml.errors import ConfigError, KVFlashError

from .sockets import Server, begun, running

READY = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")


def flags(options: dict[str, Any]) -> list[str]:
    """Of upstream's programs, as a `Llama` with these keywords has them."""
    names = {kind: name for name, kind in KV_TYPES.items()}
    line = ["-ngl", str(options["n_gpu_layers"]), "-b", str(options["n_batch"]), "-ub", str(options["n_ubatch"])]
    line += ["-ctk", names[options["type_k"]], "-ctv", names[options["type_v"]], "-fa", "on"]
    if options["n_threads"] is not None:
        line += ["-t", str(options["n_threads"])]
    if not options["use_extra_bufts"]:
        line += ["--no-repack"]
    return line


def pace(
    folder: Path, model: str, count: int, *, length: int, share: int, decode: int, options: dict[str, Any]
) -> float | None:
    """Tokens a second of `llama-batched-bench` at the same lengths; None if it refuses them for want of cells."""
    shape = ["-c", str(count * share), "-kvu", "-npp", str(length - decode), "-ntg", str(decode), "-npl", str(count)]
    return _batched(folder, model, shape, options)


def kept_pace(
    folder: Path, model: str, count: int, *, length: int, decode: int, options: dict[str, Any]
) -> float | None:
    """The same of texts that are copies of one, each in its own part of the cache; None too if that has no memory."""
    room = round_up(length + decode, 256) * count
    shape = ["-c", str(room), "-pps", "-npp", str(length), "-ntg", str(decode), "-npl", str(count)]
    try:
        return _batched(folder, model, shape, options)
    except KVFlashError as err:
        if "failed to allocate" in str(err) or "out of memory" in str(err):
            return None
        raise


def _batched(folder: Path, model: str, shape: Sequence[str], options: dict[str, Any]) -> float | None:
    line = [str(program(folder, "llama-batched-bench")), "-m", model, *shape, "--output-format", "jsonl"]
    done = subprocess.run([*line, *flags(options)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise KVFlashError(f"llama-batched-bench has failed: {done.stderr[-2000:]}")
    # its log has a thread of its own, and can begin the line
    rows = [json.loads(row[row.index("{") :]) for row in done.stdout.splitlines() if '"speed_tg"' in row]
    return float(rows[0]["speed_tg"]) if rows else None


def served(
    folder: Path, model: str, *, cells: int, parallel: int, options: dict[str, Any], more: Sequence[str] = ()
) -> AbstractContextManager[Server]:
    """`llama-server` with a unified cache of so many cells."""
    line = [str(program(folder, "llama-server")), "-m", model, "--host", "127.0.0.1", "--port", "0"]
    line += ["-c", str(cells), "-np", str(parallel), "--kv-unified", "--no-webui", "-fit", "off"]
    line += [*flags(options), *more]
    return running(Server(begun(line), ready=READY))


def program(folder: Path, name: str) -> Path:
    """ConfigError if the folder has none."""
    found = folder / name
    if not found.is_file():
        raise ConfigError(f"{folder} has no {name}: build it with 'scripts/vendor.py stock', which prints the folder")
    return found
