"""What is kept of the texts that were read: sessions as values and files, and the prefix cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..arrays import Int32s, common_prefix
from ..config import PrefixCache
from ..errors import ConfigError, KVFlashError, SnapshotError
from ..sequence import prefill
from .text import Text

if TYPE_CHECKING:
    from ..snapshot.fingerprint import Fingerprint
    from ..snapshot.store import SnapshotStore
    from ..state.session import SessionState
    from ..store.prefixes import Prefixes

logger = logging.getLogger("kvflash_ggml")


class Saver:
    """Saves a text, and goes on from what was saved.

    store: writes and reads snapshots; None without a pool.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self.store: SnapshotStore | None = None

    def open(self, read: Callable[[], Fingerprint]) -> None:
        """Save the text of a pool from now on. read: returns what must be equal for its bytes to mean the same."""
        from ..snapshot.store import SnapshotStore  # here: a text without a pool has none

        model = self.text.model
        self.store = SnapshotStore(self.text.pooled, fingerprint=read, n_vocab=model.n_vocab)
        model.context._exit_stack.callback(self.store.close)

    @property
    def snapshots(self) -> SnapshotStore:
        """The store. KVFlashError without a pool, and once the model is closed."""
        sequence = self.text.sequence
        if self.store is None or sequence is None:
            raise KVFlashError("snapshots are of a paged session: make the Llama with kvflash=, or use save_state")
        sequence.engine.check_open()
        return self.store

    # --- sessions

    def saved(self, length: int | None, *, drafts: bool = True) -> SessionState:
        """Return the text and its memory as a value; the caller releases it. length, drafts: as in `restore.state`."""
        from ..sequence import restore  # here, as below: most texts are never saved

        text = self.text
        self._check_kept()
        text.catch_up()
        saved = restore.state(text.pooled, length, drafts=drafts)
        saved.seed = text.seed
        if length in (None, text.n_tokens) and text.logits_at_hand:
            saved.logits = text.logits_row(text.n_tokens - 1).copy()
        return saved

    def park(self) -> SessionState:
        """See `Llama.park`."""
        _ = self.snapshots
        return self.saved(None)

    def resume(self, parked: SessionState) -> None:
        """See `Llama.resume`."""
        _ = self.snapshots
        self.go_on_from(_given(parked).share())

    def write(self, parked: SessionState, path: Path, *, sync: bool) -> None:
        """See `Llama.write_parked`."""
        self.snapshots.save(_given(parked).share(), path, compress=False, sync=sync).result()

    def _check_kept(self) -> None:
        if self.text.previewing:
            raise KVFlashError("the text at hand is a preview's, which is never kept: end its stream first")

    def go_on_from(self, saved: SessionState) -> None:
        """Replace the text by a saved session, and release that."""
        from ..sequence import restore

        text = self.text
        try:
            text.pooled.settle()  # the text that stays if the load is refused
            restore.load(text.pooled, saved, text.follow)
        finally:
            saved.release()
        text.seed = saved.seed

    def save(self, path: Path, *, length: int | None, compress: bool, wait: bool, recover: bool) -> Future[int]:
        """Write the text and its memory to a file. See `Llama.save_snapshot`."""
        store = self.snapshots
        if recover and length is not None:
            raise ConfigError("salvage=True saves what there is: leave out length")
        done = store.save(self._recovered() if recover else self.saved(length), path, compress=compress)
        if wait:
            done.result()
        else:
            done.add_done_callback(_report_failure)
        return done

    def _recovered(self) -> SessionState:
        """Return what is left of the text after its devices were lost."""
        from ..sequence import restore

        self._check_kept()
        saved = restore.kept_state(self.text.pooled)
        saved.seed = self.text.seed
        return saved

    def checkpoint(self) -> None:
        """See `Llama.checkpoint`."""
        _ = self.snapshots
        self.text.catch_up()
        sequence = self.text.pooled
        sequence.checkpoints.before_step(sequence.length, wanted=True)

    # --- prefix cache

    def use(self, cache: PrefixCache | None) -> None:
        """Keep texts in this cache from now on; None for none. KVFlashError where none can be kept."""
        text, before = self.text, self.text.prefixes
        text.prefixes = None
        if before is not None:
            before.close()
        if cache is None:
            return
        if text.sequence is None:
            raise KVFlashError("a PrefixCache keeps pages of a pool: make the Llama with kvflash=")
        if text.sequence.config.deterministic:
            raise KVFlashError("kvflash_deterministic reads each prompt from its beginning: it uses no PrefixCache")
        from ..store.prefixes import Prefixes  # here: only a cache needs it

        text.prefixes = Prefixes(cache, text.sequence, self.snapshots, n_vocab=text.model.n_vocab)
        text.model.context._exit_stack.callback(text.prefixes.close)

    @contextmanager
    def uncached(self) -> Iterator[None]:
        """Take nothing from the prefix cache, and keep nothing there, within this context manager."""
        text, prefixes = self.text, self.text.prefixes
        text.prefixes = None
        try:
            yield
        finally:
            text.prefixes = prefixes

    def keep_prefix(self) -> None:
        """Put the text into the prefix cache, if there is one."""
        sequence, prefixes = self.text.sequence, self.text.prefixes
        if sequence is None or prefixes is None or sequence.engine.closed or prefixes.has(sequence.tokens):
            return
        try:
            prefixes.put(self.saved(None, drafts=False))
        except KVFlashError as err:
            logger.warning("the text is not kept for later: %s", err)

    def branch(self, tokens: Int32s, given: int | None) -> int | None:
        """Return where to keep a checkpoint in a prompt: where other texts differ from it. given: if known."""
        prefixes = self.text.prefixes
        return given if given is not None or prefixes is None else prefixes.branch(tokens, self.text.n_tokens)

    def reuse_prefix(self, tokens: Int32s) -> int:
        """Cut the text to the longest prefix that it shares with `tokens`; return how many need no evaluation."""
        text = self.text
        if text.sequence is not None and text.sequence.config.deterministic:
            text.reset()
        if text.prefixes is not None:
            self._restore_prefix(text.prefixes, tokens)
        shared = common_prefix(text.ids, tokens)
        if shared == len(tokens) == text.n_tokens and text.logits_at_hand:
            return shared  # the logits of the last token are at hand
        if shared == len(tokens) and text.take_end(tokens):
            return shared
        if shared == len(tokens):
            shared -= 1  # one token has to be evaluated for its logits
        if text.sequence is not None:
            shared = prefill.prefix_to_keep(text.sequence, shared, tokens)
        left = text.cut(shared) if shared > 0 else 0
        if left == 0:
            text.reset()
        elif text.model.verbose:
            logger.info("%d tokens of the prompt are known, %d to evaluate", left, len(tokens) - left)
        text.n_tokens = left
        text.requires_eval = True
        return left

    def known(self, tokens: Int32s) -> int:
        """Return how many leading tokens are known, to the current text or one that the cache gives. Cuts nothing."""
        if self.text.prefixes is not None:
            self._restore_prefix(self.text.prefixes, tokens)
        return common_prefix(self.text.ids, tokens)

    def _restore_prefix(self, prefixes: Prefixes, tokens: Int32s) -> None:
        """Load the cached text that shares most with `tokens`, if it shares more than the current one."""
        text, sequence = self.text, self.text.pooled
        if text.model.logits_all:
            return  # the logits of what is restored would be missing
        text.catch_up()
        shared = common_prefix(sequence.tokens, tokens)
        if shared == len(tokens) == sequence.length and text.logits_at_hand:
            return
        mine = sequence.truncates_to(prefill.prefix_to_keep(sequence, min(shared, len(tokens) - 1), tokens))
        self.keep_prefix()
        prefixes.load(tokens, mine, text.follow)


def _report_failure(done: Future[int]) -> None:
    """Log the failure of a file that is written behind the decode: the caller may never ask for its result."""
    error = done.exception()
    if error is not None:
        logger.warning("a snapshot was not saved: %s", error)


def _given(parked: object) -> SessionState:
    from ..state.session import SessionState  # here: most texts are never saved

    if not isinstance(parked, SessionState):
        raise SnapshotError(f"a {type(parked).__name__} is no parked text: give what park or read_parked has returned")
    return parked
