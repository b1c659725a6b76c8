"""Makes what drafts for a `Llama`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp

from ..arrays import address
from ..config import DFLASH, EAGLE3, MTP, NGRAM, SIMPLE, KVFlashConfig, SpecConfig
from ..errors import ConfigError, ConversionError, HostMemoryError, UnsupportedError
from ..native import vocabulary
from ..native.engine import PagedEngine
from ..runtime.pool_drafter import PoolDrafter
from ..speculation.base import Callback, Drafter, FeatureRows, Target
from ..speculation.chained import Eagle3, Mtp, Small
from ..speculation.decision import WIDTHS, Controller, Controls, Fixed
from ..speculation.dflash import DFlash
from ..speculation.draft import DraftStats
from ..speculation.find import Found
from ..speculation.guarded import GuardedDrafter
from ..speculation.loop import Speculator
from ..speculation.ngram import NGram
from .drafting import ROWS

if TYPE_CHECKING:
    from ..runtime.text import Text

logger = logging.getLogger("kvflash_ggml")

SERIAL = ("pool", "mtp", "eagle3", "draft")
"""Drafters that compute one token after the other."""

HOPES = {"pool": 0.9}
"""How often a token of whom one has not seen much is thought to be right, if not as often as anybody's: what is in the
pool decides as all of the text does at nine places of ten, in small models already."""

BRANCHES = 4
"""Tokens of a tree that may follow another."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """What was opened for one context: the drafters, what they are given of its compute, and rows of a step.

    ends: the tokens that end a text, found once: llama.cpp is asked of each token of the vocabulary. total: what came
    of all drafts, also of a `draft_model` that was set; on_pool: the same of those that the pool has verified.
    """

    drafters: Sequence[Drafter] = ()
    features: FeatureRows | None = None
    rows: int = ROWS
    ends: frozenset[int] = frozenset()
    total: DraftStats = field(default_factory=DraftStats)
    on_pool: DraftStats = field(default_factory=DraftStats)

    def after(self, speculator: Speculator) -> Drafting:
        """Return this with what came of drafts, and without drafters that are not asked any more."""
        drafters = [drafter for drafter in self.drafters if drafter in speculator.drafters]
        nested = speculator.nested
        on_pool = self.on_pool if nested is None else nested.total
        return replace(self, drafters=drafters, total=speculator.total, on_pool=on_pool)


def open_drafting(
    llm: llama_cpp.Llama,
    config: KVFlashConfig,
    found: Sequence[Found],
    engine: PagedEngine,
    rows: int,
    stack: ExitStack,
) -> Drafting:
    """Open who was found, before the first step. They are closed by the stack.

    Raises what they raise, and UnsupportedError where llama.cpp does not give what they want of the target; where
    nobody was named, a warning is all, and the text drafts alone. ConfigError for a deterministic pool where other
    texts would change how many rows a step has.
    """
    spec = config.spec
    ends = vocabulary.ends(vocabulary.of(llm.model))
    if spec is None:
        return Drafting(rows=rows, ends=ends)
    if config.deterministic and config.sequences > 1:
        bound = [one.type for one in found if engine.info.recurrent or is_lone(one.type, config, engine)]
        if bound:
            raise ConfigError(
                f"deterministic: what {bound[0]} drafts depends on the texts beside, and so does what is resident;"
                f" parallel is {config.parallel}: leave out one of them"
            )
    try:
        with ExitStack() as opening:
            target = _target(llm, spec, ends)
            drafters = [_open(one, target, spec, opening) for one in found]
            given = [drafter for drafter in drafters if drafter.wants]
            features = FeatureRows(engine, given, llm.n_embd()) if given else None
            stack.push(opening.pop_all())
            return Drafting(drafters, features, rows, ends)
    except (ConversionError, HostMemoryError, UnsupportedError) as error:
        if spec.types or spec.draft is not None:
            raise
        logger.warning("drafts by the text alone: %s", error)
        return Drafting([NGram()], None, rows, ends)


def _open(found: Found, target: Target, spec: SpecConfig, stack: ExitStack) -> Drafter:
    """Open a drafter. It goes before the context of its target, on which it may depend."""
    drafter: Drafter
    if found.type == NGRAM:
        drafter = NGram()
    elif found.type == MTP:
        drafter = Mtp(found.file, target, window=spec.window)
    else:
        assert found.file is not None
        branches = {"branches": BRANCHES} if found.type == DFLASH and spec.tree else {}
        drafter = _BY_FILE[found.type](found.file, target, window=spec.window, **branches)
    stack.callback(drafter.close)
    return drafter


_BY_FILE: dict[str, Callable[..., Drafter]] = {DFLASH: DFlash, EAGLE3: Eagle3, SIMPLE: Small}


def is_lone(type: str, config: KVFlashConfig, engine: PagedEngine) -> bool:
    """Tell whether a drafter of this type drafts only for a text that is decoded alone.

    A drafting model has one context. A step has equally many rows of each text with recurrent state, which must be able
    to go back over those that are no drafts.
    """
    info = engine.info
    return config.sequences > 1 and (type != NGRAM or (info.recurrent and not info.rs_planes))


def make_speculator(
    draft_model: Any, text: Text, config: KVFlashConfig, drafting: Drafting, first: Speculator | None = None
) -> Speculator | None:
    """Make what drafts for a text: `draft_model` first, then what was opened; None if nothing does.

    draft_model: upstream's, a function from a text to tokens that may follow it; None for none. first: of another text
    on the same pool, which has drafting models until both are told otherwise by `lend`.

    For a lossless answer the pool drafts too, and they draft for it. With measured costs whoever promises most is
    asked; with a fixed width the pool comes first.
    """
    if draft_model is not None and config.sequences > 1:
        raise ConfigError(f"draft_model serves one sequence, and parallel is {config.parallel}: leave out one of them")
    engine, heap = text.pooled.engine, text.pooled.paging.heap
    given = [] if draft_model is None else [Callback(draft_model)]
    sources = [
        GuardedDrafter(drafter, is_lone(drafter.name, config, engine), heap.room)
        for drafter in (*given, *drafting.drafters)
    ]
    if first is not None:
        sources = [GuardedDrafter(NGram(), one.lone) if isinstance(one.drafter, NGram) else one for one in first.active]
    spec = config.spec or SpecConfig()
    ends = drafting.ends or vocabulary.ends(text.model.weights.vocab)  # nobody was to draft when the context was made
    speculator = partial(Speculator, n_vocab=text.model.n_vocab, ends=ends)
    if not config.pool_drafts:
        if not sources:
            return None
        level = config.sequences > 1 and engine.info.recurrent
        return speculator(sources, _controls(spec, drafting, level), features=drafting.features, total=drafting.total)
    nested = speculator(sources, _controls(spec, drafting), total=drafting.on_pool) if sources else None
    pool = GuardedDrafter(PoolDrafter(text, nested))
    order = [*sources, pool] if spec.width is None else [pool, *sources]
    return speculator(order, _controls(spec, drafting), features=drafting.features, total=drafting.total, nested=nested)


def _controls(spec: SpecConfig, drafting: Drafting, level: bool = False) -> Controls:
    """Choose drafts by costs, or by a fixed width. level: see `Controller`."""
    if spec.width is not None:
        return Fixed(spec.width)
    if drafting.rows < 2:
        return Fixed(1)  # n_batch leaves no row for a draft
    widths = [width for width in WIDTHS if width <= drafting.rows]
    return Controller(widths, serial=SERIAL, hopes=HOPES, level=level)


def _target(llm: llama_cpp.Llama, spec: SpecConfig, ends: frozenset[int]) -> Target:
    params = llm.context_params
    offload = llm.model_params.n_gpu_layers if spec.n_gpu_layers is None else spec.n_gpu_layers
    return Target(
        path=Path(llm.model_path),
        model=address(llm.model),
        context=address(llm.ctx),
        n_embd=llm.n_embd(),
        n_vocab=llm.n_vocab(),
        n_ctx=llm.n_ctx(),
        ends=ends,
        threads=params.n_threads,
        batch_threads=params.n_threads_batch,
        offload=offload != 0,
        repack=llm.model_params.use_extra_bufts,
    )
