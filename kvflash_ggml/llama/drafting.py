"""What a `Llama` must know of drafts whether or not it has drafters, which `speculating.py` makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..arrays import address
from ..config import MTP, NGRAM, KVFlashConfig, SpecConfig

if TYPE_CHECKING:
    import llama_cpp
    from llama_cpp._internals import LlamaModel

    from ..speculation.find import Found

ROWS = 32
"""Rows of a step that verifies drafts, at most."""

HYBRID_ROWS = 8
"""The same where recurrent state has to go back over them: each row takes a copy of it on the device."""


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """What drafts need of a context. rows: of a step, with the newest token's, at most; 0 without drafts.

    queries: that are captured beyond those that are looked at, so that rejected drafts leave these alone. planes:
    recurrent states to go back to, beside the current one. kept_bytes: device memory of the one more that a lossless
    answer keeps in front of what the pool drafts.
    """

    rows: int = 0
    queries: int = 0
    planes: int = 0
    kept_bytes: int = 0


def room(
    model: LlamaModel, params: llama_cpp.llama_context_params, config: KVFlashConfig, draft_model: object, *,
    n_batch: int, n_ubatch: int,
) -> DraftRoom:  # fmt: skip
    """Return what the drafts need that a model is asked for. It is loaded, and its context is not made yet.

    params: of the context. n_batch, n_ubatch: as they were asked for. The context's parameters do not have them yet if
    n_ctx is 0.
    """
    if config.spec is None and draft_model is None and not config.pool_drafts:
        return DraftRoom()
    from ..native.engine import plane_bytes  # here: a Llama without a pool needs no engine

    spec = config.spec or SpecConfig()
    n_batch = min(n_batch, params.n_ctx or model.n_ctx_train())
    size = plane_bytes(address(model.model))
    rows = spec.width or spec.max_width or (HYBRID_ROWS if size else ROWS)
    rows = min(rows, n_batch)
    n_ubatch = min(n_ubatch or n_batch, n_batch)  # 0 is upstream's "as n_batch"
    planes = max(0, min(rows - 1, n_ubatch - 2)) if size else 0  # llama.cpp wants that a step can fill all of them
    return DraftRoom(rows, 2 * rows if spec.tree else rows, planes, size if config.pool_drafts else 0)


def likely(config: KVFlashConfig, draft_model: object) -> DraftRoom:
    """Predict what `room` will say at most of a model that has recurrent state. Without kept_bytes."""
    if config.spec is None and draft_model is None and not config.pool_drafts:
        return DraftRoom()
    spec = config.spec or SpecConfig()
    rows = spec.width or spec.max_width or ROWS
    return DraftRoom(rows, 2 * rows if spec.tree else rows, (spec.width or spec.max_width or HYBRID_ROWS) - 1)


def search(model: Path, config: KVFlashConfig) -> tuple[Found, ...]:
    """Find who is to draft, before anything is loaded. ConfigError; ConversionError for a file that does not fit."""
    spec = config.spec
    if spec is None:
        return ()
    from ..speculation.find import find  # here: it imports every drafter, and most models draft nothing

    return tuple(find(model, spec.types, spec.draft))


def loads_head(found: Sequence[Found]) -> bool:
    """Tell whether a head of the model's own file is to be loaded with it."""
    return any(one.type == MTP and one.file is None for one in found)


def device_bytes(found: Sequence[Found]) -> int:
    """Estimate the device memory of drafting models: their weights, and what they compute with."""
    models = [one for one in found if one.type != NGRAM]
    if not models:
        return 0
    from ..drafter.model import COMPUTE_BYTES

    return sum((one.file.stat().st_size if one.file is not None else 0) + COMPUTE_BYTES for one in models)
