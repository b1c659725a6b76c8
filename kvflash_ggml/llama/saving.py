"""What a `Llama` keeps of the texts it has read: sessions as values and files, and the prefix cache."""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
from llama_cpp.llama_cache import BaseLlamaCache

from ..arrays import Int32s, common_prefix
from ..config import PrefixCache
from ..errors import CLOSED, ConfigError, ContextFull, KVFlashError, SnapshotError
from ..native.engine import Engine
from ..sequence import prefill, restore
from ..snapshot import fingerprint
from ..snapshot.store import SnapshotStore
from ..state.session import SessionState
from .reader import Reader

if TYPE_CHECKING:
    from ..store.prefixes import Prefixes

logger = logging.getLogger("kvflash_ggml")


class Saver:
    """Saves the text of a reader, and goes on from what was saved.

    store: writes and reads snapshots; None without a pool.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.store: SnapshotStore | None = None

    def open(self, llm: llama_cpp.Llama, engine: Engine) -> None:
        """Save the text of the reader's sequence from now on, which is on this engine."""
        read = fingerprint.of_llama(llm, engine)
        self.store = SnapshotStore(self.reader.pooled, fingerprint=read, n_vocab=llm.n_vocab())
        llm._ctx._exit_stack.callback(self.store.close)

    @property
    def snapshots(self) -> SnapshotStore:
        """The store. KVFlashError without a pool, and once the model is closed."""
        sequence = self.reader.sequence
        if self.store is None or sequence is None:
            raise KVFlashError("snapshots are of a paged session: make the Llama with kvflash=, or use save_state")
        if sequence.engine.closed:
            raise KVFlashError(CLOSED)
        return self.store

    # --- sessions

    def saved(self, length: int | None, *, drafts: bool = True) -> SessionState:
        """Return the text and its memory as a value; the caller releases it. length, drafts: as in `restore.state`."""
        reader, llm = self.reader, self.reader.llm
        self._check_kept()
        reader.catch_up()
        saved = restore.state(reader.pooled, length, drafts=drafts)
        saved.seed = llm._seed
        if length in (None, llm.n_tokens) and reader.logits_at_hand:
            saved.logits = reader.logits_row(llm.n_tokens - 1).copy()
        return saved

    def _check_kept(self) -> None:
        if self.reader.previewing:
            raise KVFlashError("the text at hand is a preview's, which is never kept: end its stream first")

    def go_on_from(self, saved: SessionState) -> None:
        """Replace the text by a saved session, and release that."""
        reader = self.reader
        try:
            reader.pooled.settle()  # the text that stays if the load is refused
            restore.load(reader.pooled, saved, reader.follow)
        finally:
            saved.release()
        reader.llm._seed = saved.seed

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
        self._check_kept()
        saved = restore.kept_state(self.reader.pooled)
        saved.seed = self.reader.llm._seed
        return saved

    def save_state(self) -> llama_cpp.LlamaState:
        """See `Llama.save_state`."""
        llm = self.reader.llm
        data = _stock_state(llm._ctx.ctx) if self.reader.sequence is None else self.snapshots.dump(self.saved(None))
        rows = llm.n_tokens if llm._logits_all else 0
        return llama_cpp.LlamaState(
            scores=llm.scores[:rows].copy(),
            input_ids=llm._input_ids.copy(),
            n_tokens=llm.n_tokens,
            llama_state=data,
            llama_state_size=len(data),
            seed=llm._seed,
        )

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """See `Llama.load_state`."""
        reader, llm = self.reader, self.reader.llm
        if not isinstance(state, llama_cpp.LlamaState):
            raise SnapshotError(f"a {type(state).__name__} is no state: give what save_state has returned")
        if state.n_tokens > llm._n_ctx:
            raise ContextFull(
                f"Requested tokens ({state.n_tokens}) exceed context window of {llm._n_ctx}: the state is longer"
            )
        if reader.sequence is None:
            _set_stock_state(llm._ctx.ctx, state.llama_state)
            llm.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
            llm.n_tokens = state.n_tokens
            reader.requires_eval = True
        else:
            self.go_on_from(self.snapshots.load(state.llama_state))
        llm._seed = state.seed
        if llm._logits_all:
            reader.grow_scores(llm.n_tokens)
            llm.scores[: len(state.scores)] = state.scores

    def checkpoint(self) -> None:
        """See `Llama.checkpoint`."""
        _ = self.snapshots
        self.reader.catch_up()
        sequence = self.reader.pooled
        sequence.checkpoints.before_step(sequence.length, wanted=True)

    # --- prefix cache

    def use(self, cache: PrefixCache | BaseLlamaCache | None) -> None:
        """Keep texts in this cache from now on; in none if it is none or upstream's. ConfigError for another object."""
        if not isinstance(cache, PrefixCache | None) and not hasattr(cache, "__setitem__"):
            raise ConfigError(
                f"set_cache({cache!r}): a PrefixCache, such as PrefixCache(folder=...), or one of upstream's"
            )
        reader, before = self.reader, self.reader.prefixes
        reader.prefixes = None
        if before is not None:
            before.close()
        if not isinstance(cache, PrefixCache):
            return
        if reader.sequence is None:
            raise KVFlashError("a PrefixCache keeps pages of a pool: make the Llama with kvflash=")
        if reader.sequence.config.deterministic:
            raise KVFlashError("kvflash_deterministic reads each prompt from its beginning: it uses no PrefixCache")
        from ..store.prefixes import Prefixes  # here: only a cache needs it

        reader.prefixes = Prefixes(cache, reader.sequence, self.snapshots, n_vocab=reader.llm.n_vocab())
        reader.llm._ctx._exit_stack.callback(reader.prefixes.close)

    def keep_prefix(self) -> None:
        """Put the text into the prefix cache, if there is one."""
        sequence, prefixes = self.reader.sequence, self.reader.prefixes
        if sequence is None or prefixes is None or sequence.engine.closed or prefixes.has(sequence.tokens):
            return
        try:
            prefixes.put(self.saved(None, drafts=False))
        except KVFlashError as err:
            logger.warning("the text is not kept for later: %s", err)

    def branch(self, tokens: Int32s, given: int | None) -> int | None:
        """Return where to keep a checkpoint in a prompt: where other texts differ from it. given: if known."""
        prefixes = self.reader.prefixes
        return given if given is not None or prefixes is None else prefixes.branch(tokens, self.reader.llm.n_tokens)

    def reuse_prefix(self, tokens: Int32s) -> int:
        """Cut the text to the longest prefix that it shares with `tokens`; return how many need no evaluation."""
        reader, llm = self.reader, self.reader.llm
        if reader.sequence is not None and reader.sequence.config.deterministic:
            llm.reset()
        if reader.prefixes is not None:
            self._restore_prefix(reader.prefixes, tokens)
        shared = common_prefix(llm._input_ids, tokens)
        if shared == len(tokens) == llm.n_tokens and reader.logits_at_hand:
            return shared  # the logits of the last token are at hand
        if shared == len(tokens) and reader.take_end(tokens):
            return shared
        if shared == len(tokens):
            shared -= 1  # one token has to be evaluated for its logits
        if reader.sequence is not None:
            shared = prefill.prefix_to_keep(reader.sequence, shared, tokens)
        left = reader.cut(shared) if shared > 0 else 0
        if left == 0:
            llm.reset()
        elif llm.verbose:
            logger.info("%d tokens of the prompt are known, %d to evaluate", left, len(tokens) - left)
        llm.n_tokens = left
        reader.requires_eval = True
        return left

    def known(self, tokens: Int32s) -> int:
        """Return how many leading tokens are known, to the current text or one that the cache gives. Cuts nothing."""
        if self.reader.prefixes is not None:
            self._restore_prefix(self.reader.prefixes, tokens)
        return common_prefix(self.reader.llm._input_ids, tokens)

    def _restore_prefix(self, prefixes: Prefixes, tokens: Int32s) -> None:
        """Load the cached text that shares most with `tokens`, if it shares more than the current one."""
        reader, sequence = self.reader, self.reader.pooled
        if reader.llm._logits_all:
            return  # the logits of what is restored would be missing
        reader.catch_up()
        shared = common_prefix(sequence.tokens, tokens)
        if shared == len(tokens) == sequence.length and reader.logits_at_hand:
            return
        mine = sequence.truncates_to(prefill.prefix_to_keep(sequence, min(shared, len(tokens) - 1), tokens))
        self.keep_prefix()
        prefixes.load(tokens, mine, reader.follow)


def _report_failure(done: Future[int]) -> None:
    """Log the failure of a file that is written behind the decode: the caller may never ask for its result."""
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
