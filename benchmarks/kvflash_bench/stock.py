"""Upstream's own programs, unpatched and of the same commit, from the folder that `scripts/vendor.py stock` prints."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kvflash_ggml.constants import KV_TYPES, round_up
from kvflash_ggml.errors import ConfigError, KVFlashError

from .sockets import Reply, Server, begun, running

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


def kept_paces(
    folder: Path, model: str, counts: Sequence[int], *, length: int, decode: int, options: dict[str, Any]
) -> dict[int, float]:
    """Tokens a second of texts that are copies of one, each in its own part of `llama-server`'s cache. It saves the
    text and restores it for each: `llama-batched-bench` copies no hybrid text. What has no memory is left out.
    """
    text, left = [10 + i * 7919 % 3000 for i in range(length)], sorted(counts)
    while left:
        most = left[-1]
        with tempfile.TemporaryDirectory() as place:
            cells, more = round_up(length + decode + 2, 256) * most, ["--no-kv-unified", "--slot-save-path", place]
            try:
                with served(folder, model, cells=cells, parallel=most, options=options, more=more) as server:
                    return _paces(server, text, left, decode)
            except KVFlashError as err:
                if "failed to allocate" not in str(err) and "out of memory" not in str(err):
                    raise
                left.pop()
    return {}


def _paces(server: Server, text: Sequence[int], counts: Sequence[int], decode: int) -> dict[int, float]:
    try:
        _answered(server, text, slot=0, tokens=1)
        _did(server.ask("/slots/0?action=save", {"filename": "text"}))
        return {count: _together(server, text, count, decode) for count in counts}
    except ConnectionError as err:
        raise KVFlashError(f"llama-server has {server.end()}") from err


def _together(server: Server, text: Sequence[int], count: int, decode: int) -> float:
    for slot in range(count):
        _did(server.ask(f"/slots/{slot}?action=restore", {"filename": "text"}))
    with ThreadPoolExecutor(count) as clients:
        # another token for each; the time of an answer's first token is that of its prompt
        answers = [clients.submit(_answered, server, [*text, 10 + slot], slot, decode + 1) for slot in range(count)]
        seconds = [answer.result()["predicted_ms"] / 1e3 for answer in answers]
    return count * decode / statistics.mean(seconds)


def _answered(server: Server, text: Sequence[int], slot: int, tokens: int) -> dict[str, float]:
    body = {"prompt": list(text), "n_predict": tokens, "temperature": 0, "ignore_eos": True}
    timings: dict[str, float] = _did(server.ask("/completion", {**body, "id_slot": slot}))["timings"]
    return timings


def _did(reply: Reply) -> Any:
    if reply.status != 200:
        raise KVFlashError(f"llama-server has refused: {reply.status} {reply.body}")
    return reply.body


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
