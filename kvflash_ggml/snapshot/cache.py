"""The prefix cache: texts that were read before are not read again, whether this process read them or another."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..config import CHUNK
from ..errors import ConfigError, SnapshotError
from ..saved import SavedSession
from ..session import Session
from .disk import DiskTier, Found
from .keeper import Keeper
from .memory import MemoryTier

logger = logging.getLogger("kvflash_ggml")

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """Settings of a prefix cache, to be given to `Llama.set_cache`. One can serve several models.

    folder: where prefixes are stored for other processes and later runs, None for memory only. disk_bytes: capacity of
    the folder, for all models together. memory_bytes: capacity in memory, per model. least: shorter prefixes are not
    worth keeping, in tokens.
    """

    folder: Path | None = None
    disk_bytes: int = 16 << 30
    memory_bytes: int = 8 << 30
    least: int = 256

    def __post_init__(self) -> None:
        for name in ("disk_bytes", "memory_bytes", "least"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name} must be a whole number of at least 0, not {value!r}")
        if self.folder is not None:
            object.__setattr__(self, "folder", Path(self.folder))


class Prefixes:
    """A prefix cache at work for one model. Everything but the writing of files is done on the caller's thread."""

    def __init__(self, cache: PrefixCache, session: Session, keeper: Keeper, *, n_vocab: int) -> None:
        info, heap = session.engine.info, session.paging.heap
        self.cache = cache
        self._session = session
        self._stateful = info.recurrent or info.n_swa > 0
        self._memory = MemoryTier(cache.memory_bytes, session.store.pages)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvflash-cache")
        self._writing: list[Future[None]] = []
        self._failed = ""
        self._disk: DiskTier | None = None
        if cache.folder is not None:
            self._disk = DiskTier(
                cache.folder,
                capacity=cache.disk_bytes,
                fingerprint=keeper.fingerprint,
                settings={**keeper.settings, "pins": session.config.pins},
                heap=heap,
                blank=session.engine.blank,
                stateful=self._stateful,
                n_vocab=n_vocab,
            )
        session.paging.keep_images = True
        heap.reclaim = self._memory.evict

    def restore(self, tokens: Int32s, mine: int) -> SavedSession | None:
        """Put the session to where more than `mine` tokens of a text can be continued from, if that is known.

        Returns what was restored. It may go on beyond what is shared: cut it then.
        """
        saved, length = self._memory.find(tokens, stateful=self._stateful)
        found = None if self._disk is None else self._disk.find(tokens)
        best = length if found is None else max(length, found.length)
        # less than a chunk is read sooner than restored, but the end of the text comes with its logits
        if best < max(mine + CHUNK, self.cache.least) and not mine < best == len(tokens):
            return None
        if found is not None and found.length > length:
            return self._restore_found(found, tokens)
        assert saved is not None
        self._session.restore(saved)
        self._memory.touch(saved)
        return saved

    def _restore_found(self, found: Found, tokens: Int32s) -> SavedSession | None:
        assert self._disk is not None
        try:
            saved = self._disk.load(found, tokens, self._session.fresh_policy)
            try:
                self._session.restore(saved)
            finally:
                saved.release()
        except SnapshotError as err:
            logger.warning("a prefix of %d tokens cannot be used and is read again: %s", found.length, err)
            self._disk.forget_damaged(found)
            return None
        return saved

    def branch(self, tokens: Int32s, known: int) -> int | None:
        """Where a text leaves those that are known, if it cannot be continued from there: worth a checkpoint.

        known: how much of it the session has. None if there is no such place.
        """
        if not self._stateful:
            return None
        length = self._memory.known(tokens)
        if self._disk is not None:
            length = max(length, self._disk.known(tokens))
        length = min(length, len(tokens) - 1)
        return length if length - known >= self.cache.least else None

    def has(self, tokens: Int32s) -> bool:
        """Is this very text kept, or too short to be?"""
        return len(tokens) < self.cache.least or self._memory.known(tokens) == len(tokens)

    def put(self, saved: SavedSession) -> None:
        """Keep a session, here and in the folder, and release it in the end."""
        if self._disk is not None:
            self._writing = [future for future in self._writing if not future.done()]
            self._writing.append(self._writer.submit(self._write, saved.share()))
        self._memory.put(saved)

    def flush(self) -> None:
        """Wait until the folder has everything."""
        wait(self._writing)

    def close(self) -> None:
        self.flush()
        self._writer.shutdown()
        self._memory.clear()
        self._session.paging.heap.reclaim = None

    def _write(self, saved: SavedSession) -> None:
        assert self._disk is not None
        try:
            self._disk.put(saved)
        except (OSError, SnapshotError) as err:
            if str(err) != self._failed:  # a full disk stays full: say so once
                self._failed = str(err)
                logger.warning("the prefix cache could not be written: %s", err)
        finally:
            saved.release()
