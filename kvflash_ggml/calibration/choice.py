"""Chooses the retrieval heads of a model from the measurements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..policy.base import KeyShape
from ..policy.heads import every_head
from .known import Calibration, HeadScore, ModelId
from .measure import Measured

MAX_HEADS = 8
"""More heads win the maximum by chance, and cost memory and time."""

FLOOR = 0.4
"""A head counts if it finds at least this share of the facts that the best head finds."""

RECALLS = 0.3
"""How often the best head ranks the fact's chunk first, for a model that can recall at all."""

MIN_SCORE = 0.1
"""How much more of its attention that head gives to a fact when it is asked for."""

LISTED = 32
"""Pairs that the file lists, for a person to read."""


def choose(measured: Measured, *, model_id: ModelId, layers: Sequence[int], shapes: Sequence[KeyShape]) -> Calibration:
    """Choose at most MAX_HEADS heads, or none where no head finds the facts. layers: of the model, that are pooled."""
    heads = every_head(shapes)
    chosen = _best(measured)
    agreed = len(chosen.intersection(*map(_best, measured.alone))) if measured.alone else None
    found = []
    for i in _order(measured)[:LISTED].tolist():
        layer, head = heads[i].tolist()
        found.append(
            HeadScore(
                layer=layers[layer],
                head=head,
                found=round(float(measured.found[i]), 4),
                control=round(float(measured.control[i]), 4),
                first=round(float(measured.first[i]), 4),
                chosen=i in chosen,
            )
        )
    return Calibration(
        model=model_id.identity,
        questions=measured.questions,
        tokens=measured.tokens,
        heads=tuple(found),
        agreed=agreed,
        title=model_id.title,
    )


def _best(measured: Measured) -> set[int]:
    """Return the heads that count, by their index among all."""
    order = _order(measured)[:MAX_HEADS]
    best = order[0]
    if measured.first[best] < RECALLS or measured.score[best] < MIN_SCORE:
        return set()
    return set(order[measured.score[order] >= FLOOR * measured.score[best]].tolist())


def _order(measured: Measured) -> npt.NDArray[np.intp]:
    return np.argsort(-measured.score, kind="stable")
