"""What a `Llama` keeps of the texts it has read: states, snapshots, and the prefix cache."""

from __future__ import annotations

import ctypes
import logging
import math
from collections import abc
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_cache import BaseLlamaCache

from ..arrays import common_prefix
from ..errors import CLOSED, ConfigError, ContextFull, KVFlashError, NotFinite
from ..sequence import prefill, restore
from ..sequence.sequence import Sequence
from ..sequence.step import Logits
from ..snapshot import fingerprint
from ..snapshot.store import SnapshotStore
from ..state.session import SessionState
from ..store.prefixes import PrefixCache, Prefixes
from .call_lock import CallLock, changing, locked

logger = logging.getLogger("kvflash_ggml")


class SavingLlama(llama_cpp.Llama):
    """The part of `Llama` that saves and restores. With a pool `_session` is set; then `_open_snapshots` follows."""

    _call_lock: CallLock
    _session: Sequence | None = None
    _snapshot_store: SnapshotStore | None = None
    _prefixes: Prefixes | None = None
    _logits_all: bool = False
    _requires_eval: bool  # without a pool
    kvflash_sampled_s: float = 0.0
    """Seconds that the newest token took to be chosen, without its evaluation."""
    kvflash_branch: int | None = None
    """Where in the next prompt to keep what is not pooled, because other texts go on differently from there."""

    def _open_snapshots(self, session: Sequence) -> None:
        read = fingerprint.of_llama(self, session.engine)
        self._snapshot_store = SnapshotStore(session, fingerprint=read, n_vocab=self.n_vocab())
        self._ctx._exit_stack.callback(self._snapshot_store.close)

    def _catch_up(self, session: Sequence) -> None:
        """Bring the session to `n_tokens`, which inherited methods and users may have set."""
        if not 0 <= self.n_tokens <= self._n_ctx:
            raise ConfigError(f"n_tokens = {self.n_tokens} must be from 0 to n_ctx = {self._n_ctx}")
        session.settle()
        if self.n_tokens < session.length:
            prefill.rewind_to(session, self.n_tokens)
        elif self.n_tokens > session.length:
            prefill.extend(session, self.input_ids[session.length : self.n_tokens].astype(np.int32))

    @property
    def _logits_at_hand(self) -> bool:
        """Can a token that follows the text be sampled?"""
        if self._session is None:
            return not self._requires_eval
        return self._logits_at(self.n_tokens - 1) is not None

    def _logits_at(self, pos: int) -> int | None:
        """The row of the newest step that has the logits of a position; None if there is none."""
        session = self._session
        if session is None:
            return pos - self.n_tokens
        return session.logits.row(pos) if session.length == self.n_tokens else None

    def _logits_row(self, pos: int) -> npt.NDArray[np.single]:
        """Logits of the token at `pos`. KVFlashError unless it is among those evaluated last and kept."""
        at = self._logits_at(pos)
        row = None if at is None else self._ctx.get_logits_ith(at)
        if not row:
            if self._session is not None:
                self._session.check_open()
            if self.n_tokens == 0:
                raise KVFlashError("nothing has been read that a token could follow: eval a text first")
            raise KVFlashError(
                f"no logits are kept of position {pos} of {self.n_tokens}: it was not evaluated last (by another "
                f"generator of the same model, perhaps), or logits_all=True is needed"
            )
        return np.ctypeslib.as_array(row, shape=(self._n_vocab,))

    def _put_logits(self, session: Sequence, pos: int, row: npt.NDArray[np.single]) -> None:
        """Make `row` [n_vocab] the logits of the token at `pos`, the only ones at hand."""
        session.engine.set_logits(row)
        session.logits = Logits(pos, 1)

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As upstream. KVFlashError where the logits to sample from are not at hand, which would end the process, and
        NotFinite where they are no numbers.
        """
        idx = kwargs.pop("idx", None)
        pos = self.n_tokens - 1 if idx is None else idx
        logits = self._logits_row(pos)
        row = self._logits_at(pos)
        assert row is not None
        kwargs["idx"] = self.n_tokens + row  # it takes n_tokens off again
        began = perf_counter()
        token = int(super().sample(*args, **kwargs))
        self.kvflash_sampled_s = perf_counter() - began
        if not math.isfinite(logits[token]):
            raise NotFinite(f"the logits after token {pos} are not finite: reset, and read the text again")
        return token

    def _grow_scores(self, rows: int) -> None:
        if rows > len(self.scores):
            grown = np.empty((min(self._n_ctx, max(rows, 2 * len(self.scores))), self._n_vocab), np.single)
            grown[: len(self.scores)] = self.scores
            self.scores = grown

    # --- states

    @locked
    def save_snapshot(
        self,
        path: str | Path,
        *,
        length: int | None = None,
        compress: bool = False,
        wait: bool = True,
        salvage: bool = False,
    ) -> Future[int]:
        """Write the text and its memory to a file, from which this or another process goes on bit for bit.

        length: only the first tokens, None for all. With recurrent state or a sliding window it must be a position that
        has a checkpoint. compress: with Zstandard. wait: False returns as soon as what only the device holds has been
        copied; the file is written behind the decode, and is there when the future is done. Its result is the size in
        bytes. salvage: after DeviceLost, what is on this machine: its `kept` first tokens, from which a Llama on other
        devices goes on.

        A file that is there is replaced as a whole, or stays as it was. Raises SnapshotError.
        """
        store = self._snapshots()
        if salvage and length is not None:
            raise ConfigError("salvage=True saves what there is: leave out length")
        saved = self._recovered() if salvage else self._saved(length)
        done = store.save(saved, Path(path), compress=compress)
        if wait:
            done.result()
        else:
            done.add_done_callback(_report_failure)
        return done

    @changing
    def load_snapshot(self, path: str | Path) -> int:
        """Go on from a file that `save_snapshot` has written; how many tokens it holds.

        Page images are read when they are needed, so the file must stay readable; it may be replaced or deleted.
        Raises SnapshotMismatch for another model, SnapshotError for a file that is damaged, ContextFull: nothing has
        changed then. With `logits_all` the rows of all tokens but the last are NaN: a file does not have them.
        """
        saved = self._snapshots().load(Path(path))
        self._go_on_from(saved)
        return self.n_tokens

    @locked
    def save_state(self) -> llama_cpp.LlamaState:
        """The text and its memory. Logits of all tokens are carried only with `logits_all`."""
        if self._session is None:
            data = _stock_state(self._ctx.ctx)
        else:
            store = self._snapshots()
            data = store.dump(self._saved(None))
        rows = self.n_tokens if self._logits_all else 0
        return llama_cpp.LlamaState(
            scores=self.scores[:rows].copy(),
            input_ids=self._input_ids.copy(),
            n_tokens=self.n_tokens,
            llama_state=data,
            llama_state_size=len(data),
            seed=self._seed,
        )

    @changing
    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Return to a saved state of the same model and settings. SnapshotError, and no change, if it does not fit."""
        if state.n_tokens > self._n_ctx:
            raise ContextFull(
                f"Requested tokens ({state.n_tokens}) exceed context window of {self._n_ctx}: the state is longer"
            )
        if self._session is None:
            _set_stock_state(self._ctx.ctx, state.llama_state)
            self.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
            self.n_tokens = state.n_tokens
            self._requires_eval = True
        else:
            self._go_on_from(self._snapshots().load(state.llama_state))
        self._seed = state.seed
        if self._logits_all:
            self._grow_scores(self.n_tokens)
            self.scores[: len(state.scores)] = state.scores

    def _snapshots(self) -> SnapshotStore:
        if self._snapshot_store is None or self._session is None:
            raise KVFlashError("snapshots are of a paged session: make the Llama with kvflash=, or use save_state")
        if self._session.engine.closed:
            raise KVFlashError(CLOSED)
        return self._snapshot_store

    def _saved(self, length: int | None, *, drafts: bool = True) -> SessionState:
        assert self._session is not None
        self._catch_up(self._session)
        saved = restore.state(self._session, length, drafts=drafts)
        saved.seed = self._seed
        if length in (None, self.n_tokens) and self._logits_at_hand:
            saved.logits = self._logits_row(self.n_tokens - 1).copy()
        return saved

    def _recovered(self) -> SessionState:
        assert self._session is not None
        saved = restore.kept_state(self._session)
        saved.seed = self._seed
        return saved

    def _go_on_from(self, saved: SessionState) -> None:
        """Go on from a saved session, and release it."""
        assert self._session is not None
        try:
            self._session.settle()  # the text that stays if the load is refused
            restore.load(self._session, saved, self._follow)
        finally:
            saved.release()
        self._seed = saved.seed

    def _follow(self, saved: SessionState) -> None:
        """The session has been restored: follow it."""
        assert self._session is not None
        self.n_tokens = 0  # interrupted here, no text is known, or all of one: never a mixture
        self.input_ids[: saved.length] = saved.tokens
        self.n_tokens = saved.length
        if saved.logits is not None:
            self._put_logits(self._session, self.n_tokens - 1, saved.logits)
        if self._logits_all:
            self._grow_scores(self.n_tokens)
            self.scores[: self.n_tokens] = np.nan
            if saved.logits is not None:
                self.scores[self.n_tokens - 1] = saved.logits

    # --- texts that are put aside in this process

    @locked
    def park(self) -> SessionState:
        """The text and its memory as a value, to be released; it stays at hand. Its page images are not copied.

        Raises HostMemoryError where there is no room for what only the device holds.
        """
        self._snapshots()
        return self._saved(None)

    @changing
    def resume(self, parked: SessionState) -> None:
        """Go on from a text that `park` or `read_parked` has given, bit for bit. It can be resumed again.

        Raises SnapshotError where a page cannot be read, HostMemoryError: nothing has changed then.
        """
        self._snapshots()
        self._go_on_from(parked.share())

    def write_parked(self, parked: SessionState, path: str | Path, *, sync: bool = True) -> None:
        """Write a parked text to a file as `save_snapshot` does. Raises SnapshotError.

        sync: wait until it is on the disk. Without it the file outlives this process, but perhaps no loss of power.
        """
        self._snapshots().save(parked.share(), Path(path), compress=False, sync=sync).result()

    def read_parked(self, path: str | Path) -> SessionState:
        """Open a file of `save_snapshot` or `write_parked`, to be resumed and released. Raises SnapshotError."""
        return self._snapshots().load(Path(path))

    @locked
    def checkpoint(self) -> None:
        """Keep what is not pooled as it is now, so that the text can be cut to here. Nothing where all is pooled."""
        self._snapshots()
        assert self._session is not None
        self._catch_up(self._session)
        self._session.checkpoints.before_step(self._session.length, wanted=True)

    @locked
    def newest_logits(self) -> npt.NDArray[np.single]:
        """A copy of the logits of the newest token. KVFlashError where none are kept."""
        row: npt.NDArray[np.single] = self._logits_row(self.n_tokens - 1).copy()
        return row

    # --- prefix cache

    @locked
    def set_cache(self, cache: PrefixCache | BaseLlamaCache | None) -> None:
        """Use a prefix cache from now on: ours, which needs a pool, one of upstream's, or none."""
        self._drop_prefixes()
        if isinstance(cache, PrefixCache):
            if self._session is None:
                raise KVFlashError("a PrefixCache keeps pages of a pool: make the Llama with kvflash=")
            if self._session.config.deterministic:
                raise KVFlashError("kvflash_deterministic reads each prompt from its beginning: it uses no PrefixCache")
            super().set_cache(None)
            self._prefixes = Prefixes(cache, self._session, self._snapshots(), n_vocab=self.n_vocab())
            self._ctx._exit_stack.callback(self._prefixes.close)
        else:
            super().set_cache(cache)

    @contextmanager
    def without_cache(self) -> Iterator[None]:
        """Meanwhile nothing is taken from the prefix cache, and nothing is kept there."""
        prefixes, self._prefixes = self._prefixes, None
        try:
            yield
        finally:
            self._prefixes = prefixes

    def _drop_prefixes(self) -> None:
        prefixes, self._prefixes = self._prefixes, None
        if prefixes is not None:
            prefixes.close()

    def _restore_prefix(self, prefixes: Prefixes, tokens: npt.NDArray[np.int32]) -> None:
        """Bring the session to the text that shares most with `tokens`, if that is not the one at hand."""
        assert self._session is not None
        if self._logits_all:
            return  # the logits of what is restored would be missing
        self._catch_up(self._session)
        shared = common_prefix(self._session.tokens, tokens)
        if shared == len(tokens) == self._session.length and self._logits_at_hand:
            return
        mine = self._session.truncates_to(prefill.prefix_to_keep(self._session, min(shared, len(tokens) - 1), tokens))
        self._keep_prefix()
        prefixes.load(tokens, mine, self._follow)

    def _discard_lost(self) -> None:
        """A page of the text cannot be read: do not restore it again."""
        if self._prefixes is not None:
            self._prefixes.discard_lost()

    def _keep_prefix(self) -> None:
        """Keep the text for later, if there is a cache."""
        session, prefixes = self._session, self._prefixes
        if session is None or prefixes is None or session.engine.closed or prefixes.has(session.tokens):
            return
        try:
            prefixes.put(self._saved(None, drafts=False))
        except KVFlashError as err:
            logger.warning("the text is not kept for later: %s", err)

    def _branch(self, tokens: abc.Sequence[int]) -> int | None:
        """Where to keep a checkpoint in a prompt, because other texts are known to go on differently from there."""
        if self.kvflash_branch is not None or self._prefixes is None:
            return self.kvflash_branch
        return self._prefixes.branch(np.asarray(tokens, np.int32), self.n_tokens)


def _report_failure(done: Future[int]) -> None:
    """A file that is written behind the decode: perhaps nobody asks how it went."""
    error = done.exception()
    if error is not None:
        logger.warning("a snapshot was not saved: %s", error)


def _stock_state(ctx: Any) -> bytes:
    """The state of a context without a pool, as llama.cpp writes it."""
    data = bytearray(llama_cpp.llama_state_get_size(ctx))
    buffer = (ctypes.c_uint8 * len(data)).from_buffer(data)
    used = llama_cpp.llama_state_get_data(ctx, buffer, len(data))
    return bytes(data[:used])


def _set_stock_state(ctx: Any, data: bytes) -> None:
    """Put it back. RuntimeError, with upstream's words, if llama.cpp refuses it."""
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    if llama_cpp.llama_state_set_data(ctx, buffer, len(data)) != len(data):
        raise RuntimeError("Failed to set llama state data")
