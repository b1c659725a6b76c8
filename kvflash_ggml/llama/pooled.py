"""Opens the pool of a `Llama`, and the texts on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import llama_cpp

from .. import policy
from ..arrays import address
from ..config import KVFlashConfig
from ..native import engine as native
from ..placement import sizing
from ..placement.sizing import PoolSize
from ..policy.base import Scorer
from ..runtime.saving import Saver
from ..runtime.text import Text
from ..sequence.pool import Pool
from ..sequence.sequence import Sequence as Pooled
from ..snapshot import fingerprint
from .context import PagedContext, take_closing
from .reading import open_index, open_sequence

if TYPE_CHECKING:
    from ..speculation.find import Found
    from ..speculation.loop import Speculator
    from .speculating import Drafting
    from .stats import PoolStats

logger = logging.getLogger("kvflash_ggml")


class PooledTexts:
    """The texts on the pool of a `Llama`, the first of which is the one at hand, and what they share.

    saver: of that text. config, size: of the pool. scorer: of the first text. found: who is to draft. rows: of a step
    that verifies drafts, at most; 0 without drafts. mapped: weights on the host are pages of their file.

    context: takes the place of upstream's. drafting: the drafters that were opened; None while there are none.
    """

    def __init__(
        self, llm: llama_cpp.Llama, saver: Saver, config: KVFlashConfig, size: PoolSize, *, scorer: Scorer | None,
        found: Sequence[Found], rows: int, mapped: bool,
    ) -> None:  # fmt: skip
        """Open the pool, with its scorer and its drafters. They are closed with upstream's context."""
        self._saver, self.config, self._size = saver, config, size
        self._swa_full = bool(llm.context_params.swa_full)
        self.drafting: Drafting | None = None
        text, model = saver.text, saver.text.model
        stack, n_ubatch = model.context._exit_stack, model.n_ubatch
        engine = native.PagedEngine(address(model.context.ctx), max(n_ubatch, rows))
        stack.callback(engine.close)  # should anything of what follows fail
        if rows:
            from .speculating import open_drafting  # here, as below: it imports every drafter

            self.drafting = open_drafting(llm, config, found, engine, rows, stack)
        sizing.warn_if_tight(engine.info.devices, n_ubatch)
        limit = sizing.image_limit(config, address(model.weights.model), size, engine.info.page_bytes, mapped=mapped)
        pool = Pool(
            engine,
            n_ubatch=n_ubatch,
            host_limit=limit,
            spill=config.spill,
            fixed_rows=config.deterministic_batch,
        )
        self._fingerprint = fingerprint.of_llama(llm, engine)
        sequence = open_sequence(model, config, pool, scorer)
        self._open_text(saver, sequence)
        self.context = PagedContext(model.context, sequence)
        self.open_speculator(text, llm.draft_model)
        if config.calibrate is not False and sequence.scoring is not None:
            from ..calibration.finder import open_finder

            model.finder = open_finder(llm, model.weights, sequence, scorer)
        if model.finder is not None:
            stack.callback(model.finder.close)
        open_index(model, config, sequence)
        level = logging.WARNING if llm.verbose else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, self.stats_of(text).banner())

    def stats_of(self, text: Text) -> PoolStats:
        """Return the live state of the pool as a text on it sees it."""
        from .stats import PoolStats  # here: most programs ask for none

        return PoolStats(text.pooled, self._size, text.model.finder, text.speculator, swa_full=self._swa_full)

    def open_speculator(self, text: Text, draft_model: Any, first: Speculator | None = None) -> None:
        """Let a text have what drafts for it. draft_model, first: as in `speculating.make_speculator`."""
        made, opened = None, self.drafting is not None and len(self.drafting.drafters) > 0
        if draft_model is not None or opened or first is not None or self.config.pool_drafts:
            from .speculating import Drafting, make_speculator

            self.drafting = self.drafting or Drafting()
            made = make_speculator(draft_model, text, self.config, self.drafting, first)
        text.speculator = text.pooled.follower = made

    def all(self, draft_model: Any) -> list[tuple[Saver, PoolStats]]:
        """Return all texts that the pool has room for, the first one first, each with what tells of it.

        The further ones are opened now. They are closed with the context, which nothing else may use meanwhile.
        draft_model: of the `Llama`.
        """
        savers = [self._saver, *(self._open_beside(seq, draft_model) for seq in range(1, self.config.sequences))]
        return [(saver, self.stats_of(saver.text)) for saver in savers]

    def _open_beside(self, seq: int, draft_model: Any) -> Saver:
        """Return the text of another sequence. It reads as the first one does, and drafts for itself if that does."""
        first, config, text = self._saver.text, self.config, Text()
        text.open(first.model)
        text.seed = first.seed
        scorer, reading = policy.resolve(config.policy), first.pooled.reading
        own = open_sequence(text.model, config, first.pooled.pool, scorer, seq=seq, reading=reading)
        saver = Saver(text)
        self._open_text(saver, own)
        self.open_speculator(text, draft_model, first.speculator)
        if text.speculator is not None:
            from ..speculation.loop import ANOTHER

            text.speculator.lend(ANOTHER)
        if text.model.finder is not None:
            text.model.finder.settle(own)
        if first.prefixes is not None:
            saver.use(first.prefixes.cache)
        return saver

    def _open_text(self, saver: Saver, sequence: Pooled) -> None:
        """Let a text have the memory of a sequence."""
        saver.text.sequence, context = sequence, saver.text.model.context
        # with the context's own, which a garbage collector may close before it closes this
        context._exit_stack.callback(sequence.close, partial(take_closing, context))
        saver.open(self._fingerprint)
