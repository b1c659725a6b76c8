"""The file of `--snapshot`: a session comes from it, and goes to it."""

from __future__ import annotations

import time
from typing import Any

from ..errors import SnapshotError, SnapshotMismatch
from ..files import check_writable
from ..snapshot import codec
from ..snapshot.container import Container, FileSource
from .options import SnapshotOptions
from .terminal import busy, note, size_text, stderr_is_terminal


class SessionFile:
    """options: None, or without a file, for a run that keeps nothing. Every method does nothing then."""

    def __init__(self, options: SnapshotOptions | None, *, quiet: bool) -> None:
        self._path = None if options is None else options.snapshot
        self._only_read = options is not None and options.snapshot_ro
        self._compress = options is not None and options.snapshot_compress
        self._quiet = quiet
        self._there = False
        self._tokens: list[int] = []
        self._restored: dict[str, Any] | None = None
        self._saved: dict[str, Any] | None = None

    def check(self) -> None:
        """Find what cannot work before a model is loaded. Raises KVFlashError."""
        if self._path is None:
            return
        self._there = self._path.exists()
        if self._there:
            Container(FileSource(self._path))
        elif self._only_read:
            raise SnapshotError(f"{self._path} does not exist: leave out --snapshot-ro to have it made")
        if not self._only_read:
            check_writable(self._path)
            if self._compress:
                codec.require()

    def load(self, llm: Any) -> None:
        """Go on from the file, if it was there. KVFlashError if it is not of this model."""
        if self._path is None or not self._there:
            return
        began = time.perf_counter()
        try:
            with busy(f"restoring {self._path}", shown=self._shows_work):
                count = llm.load_snapshot(self._path)
        except SnapshotMismatch as error:
            raise SnapshotError(f"{error}: give another file with --snapshot, or delete this one") from error
        seconds = time.perf_counter() - began
        self._tokens = _tokens(llm)
        self._restored = {"tokens": count, "seconds": round(seconds, 6)}
        self._say(f"kvflash: restored {count} tokens from {self._path} in {seconds:.2f} s")

    def save(self, llm: Any) -> None:
        """Save the session, if there is anything new in it. KVFlashError if that fails; the file is as it was then."""
        if self._path is None or self._only_read or _tokens(llm) == self._tokens:
            return
        began = time.perf_counter()
        with busy(f"saving {self._path}", shown=self._shows_work):
            size = llm.save_snapshot(self._path, compress=self._compress).result()
        seconds = time.perf_counter() - began
        self._saved = {"tokens": llm.n_tokens, "bytes": size, "seconds": round(seconds, 6)}
        self._say(f"kvflash: saved {llm.n_tokens} tokens to {self._path}: {size_text(size)} in {seconds:.2f} s")

    def document(self) -> dict[str, Any] | None:
        """What was done, for machines; None without a file."""
        if self._path is None:
            return None
        return {"file": str(self._path), "restored": self._restored, "saved": self._saved}

    @property
    def _shows_work(self) -> bool:
        return stderr_is_terminal() and not self._quiet

    def _say(self, text: str) -> None:
        if not self._quiet:
            note(text)


def _tokens(llm: Any) -> list[int]:
    return list(llm.input_ids[: llm.n_tokens])
