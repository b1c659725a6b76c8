"""Saves over one file again and again in processes that are killed, and reads the file after each. As a program."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.files import PART
from kvflash_ggml.host import slabs
from kvflash_ggml.sequence.prefill import extend
from support import plain_reader
from support.fake_engine import FakeEngine, make_session
from support.saving import N_VOCAB, save

TEXT = np.random.default_rng(5).integers(0, N_VOCAB, 700, dtype=np.int32)


def save_beginnings(path: Path, ready: int) -> None:
    """Beginnings of every length, over and over. ready: told when it begins."""
    slabs.SLAB_BYTES = 1 << 20  # the fake engine fills it
    session = make_session(FakeEngine(448, 64), KVFlashConfig(tail=2), n_ctx=8192, n_batch=64, n_ubatch=64)
    extend(session, TEXT)
    os.write(ready, b"!")
    while True:
        for length in range(1, len(TEXT), 23):
            save(session, path, length=length)


def main(folder: Path, kills: int) -> dict[str, int]:
    """How often a save was cut off, and how many different files were seen."""
    path = folder / "text.kvs"
    rng = random.Random(1)
    cut_off, seen = 0, set()
    for kill in range(kills):
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_beginnings(path, tell)
            finally:
                os._exit(1)
        os.close(tell)
        assert os.read(ready, 1), "it died by itself"
        os.close(ready)
        time.sleep(
            rng.random() * (0.2 if kill % 10 == 0 else 0.02)
        )  # some on a slow disk, too, get to the end of a save
        writing = time.monotonic() + 1
        while kill % 2 and not list(folder.glob(f".*{PART}")) and time.monotonic() < writing:
            pass  # on a fast disk, too, every second kill comes while a file is being written
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if seen or path.exists():
            parts = plain_reader.read(path.read_bytes())
            length = parts.facts["length"]
            assert np.frombuffer(parts.sections["tokens"], "<i4").tolist() == TEXT[:length].tolist()
            assert len(parts.pages) == -(-length // 64)
            seen.add(length)
        others = [other for other in folder.iterdir() if other != path]
        assert all(other.name.startswith(".text.kvs.") and other.suffix == PART for other in others)
        cut_off += bool(others)
        for other in others:
            other.unlink()
    return {"cut_off": cut_off, "seen": len(seen)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
