"""Saves the session of one model, as a file or as bytes, and loads it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SnapshotError
from ..sequence.sequence import Sequence
from ..threads import held_back
from .fingerprint import Fingerprint

if TYPE_CHECKING:
    from ..state.session import SessionState

logger = logging.getLogger("kvflash_ggml")


class SnapshotStore:
    """Saves and loads a session. fingerprint: of the model, called when first needed. n_vocab: bounds tokens.

    What writes and reads files is imported then: most texts are never saved.
    """

    def __init__(self, session: Sequence, *, fingerprint: Callable[[], Fingerprint], n_vocab: int) -> None:
        self._session = session
        self._read_fingerprint = fingerprint
        self._n_vocab = n_vocab
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvflash-save")
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the store: threads do not survive a fork."""
        return os.getpid() != self._process

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return self._read_fingerprint()

    @property
    def settings(self) -> dict[str, Any]:
        """Facts of the file that may differ when it is restored."""
        session, config = self._session, self._session.config
        return {
            "pool": session.pool.share, "n_ctx": session.n_ctx, "policy": session.policy, "tau": config.tau,
            "sinks": config.sinks, "tail": config.tail_of(), "reading": "exact" if session.reading.exact else "pool",
            "repair": None,  # of a removed option: the names of prefixes are hashes of these settings
        }  # fmt: skip

    def save(self, saved: SessionState, path: Path, *, compress: bool, sync: bool = True) -> Future[int]:
        """Write a file on another thread; return its size in bytes. Takes over `saved`. sync: see `replacing`."""
        try:
            if self.forked:
                raise SnapshotError(
                    f"cannot write {path}: this process was forked after the model was made, and the thread that "
                    f"writes is in the other one: make the Llama here, or write what save_state returns"
                )
            if compress:
                from . import codec

                codec.require()
            place = _place(path)
            return self._writer.submit(self._write, saved, place, self.fingerprint, self.settings, compress, sync)
        except BaseException:
            saved.release()
            raise

    def _write(
        self, saved: SessionState, path: Path, fingerprint: Fingerprint, settings: dict[str, Any], compress: bool,
        sync: bool,
    ) -> int:  # fmt: skip
        from ..files import replacing
        from . import format

        try:
            with replacing(path, sync=sync) as file:
                format.write(saved, file, fingerprint, settings, compress=compress)
                return file.tell()
        except OSError as err:
            raise SnapshotError(
                f"cannot write {path}: {err.strerror or err}: name a file in a folder that exists, can be written and "
                f"has room for {saved.size >> 20} MiB"
            ) from err
        finally:
            saved.release()

    def dump(self, saved: SessionState) -> bytes:
        """Return the bytes of a snapshot. Takes over `saved`."""
        from . import format

        stream = BytesIO()
        try:
            format.write(saved, stream, self.fingerprint, self.settings)
        finally:
            saved.release()
        return stream.getvalue()

    def load(self, source: Path | bytes) -> SessionState:
        """Open a snapshot. Page images stay in the file until they are needed. The caller releases the result."""
        from . import format
        from .container import BytesSource, Container, ContainerSource, FileSource

        opened: ContainerSource = BytesSource(source) if isinstance(source, bytes) else FileSource(source)
        container = Container(opened)
        saved = format.read(container, self.fingerprint, self._session.paging.heap, self._session.limits(self._n_vocab))
        theirs = container.facts.get("settings")
        policy = theirs.get("policy") if isinstance(theirs, dict) else None
        if self._session.bounded and saved.policy is None and policy != self._session.policy:
            logger.warning("%s was saved with policy %s: statistics are made anew", opened.name, policy)
        return saved

    def close(self) -> None:
        """Wait for files that are being written."""
        with held_back():
            self._writer.shutdown()


def _place(path: Path) -> Path:
    """Return the absolute path of a file to write, with links resolved. SnapshotError for a device or a folder."""
    try:
        place = path.resolve()
        usable = place.is_file() or not place.exists()
    except (OSError, ValueError) as err:
        raise SnapshotError(f"cannot write {path}: {err}") from err
    if not usable:
        raise SnapshotError(f"cannot write {path}: it is there and no regular file: name a file in a folder")
    return place
