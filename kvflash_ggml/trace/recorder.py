"""The history of a page table: which chunks were resident when, which came back, and the scores of the policy."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Floats
from ..constants import CHUNK
from ..files import write_atomically
from .events import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One or more successive changes of the page table, as the last of them left it.

    length: tokens evaluated. bits: packed residency by chunk. recalled: chunks paged in, one entry each time. scores:
    the last scores among the changes, one per chunk. evicted_mass: at these scores. generating: an answer was being
    generated. changes: how many changes this moment stands for.
    """

    length: int
    bits: npt.NDArray[np.uint8]
    recalled: tuple[int, ...]
    scores: Floats | None
    evicted_mass: float | None
    generating: bool
    changes: int = 1

    @property
    def resident(self) -> tuple[int, ...]:
        """Chunks that were on the device, ascending."""
        return tuple(np.flatnonzero(np.unpackbits(self.bits)).tolist())

    @property
    def nbytes(self) -> int:
        scores = 0 if self.scores is None else self.scores.nbytes
        return self.bits.nbytes + 8 * len(self.recalled) + scores

    def then(self, later: Moment) -> Moment:
        """Return this moment and the next as one."""
        looked = self if later.scores is None else later
        return Moment(
            length=later.length,
            bits=later.bits,
            recalled=self.recalled + later.recalled,
            scores=looked.scores,
            evicted_mass=looked.evicted_mass,
            generating=later.generating,
            changes=self.changes + later.changes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The text beside the map. facts: rows of the table, as (name, value)."""

    facts: Sequence[tuple[str, str]] = ()


ONLY_BOUNDED = 1e3
"""Scores so far below the best belong to chunks that a policy has ranked without exact scores."""

MAX_CELLS = 4 << 20
"""Chunks x moments of scores in a file. Beyond that, every second, fourth, ... score is shown."""


def page(moments: Sequence[Moment], summary: Summary, *, title: str) -> str:
    """Return the whole file. title and facts are text and get escaped."""
    template = resources.files(__package__).joinpath("trace.html").read_text(encoding="utf-8")
    rows = "\n".join(f"<tr><th>{escape(what)}</th><td>{escape(value)}</td></tr>" for what, value in summary.facts)
    return Template(template).substitute(title=escape(title or "a run"), rows=rows, data=_json(_document(moments)))


def _json(value: Any) -> str:
    """Return JSON that can stand in a script element, whatever strings it holds."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _document(moments: Sequence[Moment]) -> dict[str, Any]:
    n_chunks = max((_chunks(moment) for moment in moments), default=0)
    scored = [i for i, moment in enumerate(moments) if moment.scores is not None]
    step = max(1, -(-len(scored) * n_chunks // MAX_CELLS))
    shown = {i: moments[i].scores for i in scored[::-1][::step]}  # the last score is always shown
    low, high = _range([scores for scores in shown.values() if scores is not None])
    return {
        "chunk": CHUNK,
        "chunks": n_chunks,
        "low": low,
        "high": high,
        "moments": [
            {
                "length": moment.length,
                "resident": _text(moment.bits),
                "in": list(moment.recalled),
                "scores": None if shown.get(i) is None else _text(levels(shown[i], low, high)),
                "mass": moment.evicted_mass,
                "answer": moment.generating,
            }
            for i, moment in enumerate(moments)
        ],
    }


def _chunks(moment: Moment) -> int:
    return max(-(-moment.length // CHUNK), moment.resident[-1] + 1 if moment.resident else 0)


def _range(scores: Sequence[npt.NDArray[np.float32]]) -> tuple[float, float]:
    """Return the range of the scores that get a colour: without the outliers at the lower end."""
    exact = [kept for each in scores if len(kept := each[_looked_at(each)])]
    if not exact:
        return 0.0, 1.0
    together = np.concatenate(exact)
    return round(float(np.quantile(together, 0.02)), 3), round(float(together.max()), 3)


def _looked_at(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    finite = np.isfinite(scores)
    if not finite.any():
        return finite
    near: npt.NDArray[np.bool_] = finite & (scores > scores[finite].max() - ONLY_BOUNDED)
    return near


def levels(scores: npt.NDArray[np.float32] | None, low: float, high: float) -> npt.NDArray[np.uint8]:
    """Return scores as 1 (low) to 255 (high), and 0 where there is no exact score."""
    assert scores is not None
    seen = _looked_at(scores)
    scale = 254 / (high - low) if high > low else 0.0
    steps = np.clip((np.where(seen, scores, low) - low) * scale, 0, 254)
    return np.where(seen, steps + 1, 0).astype(np.uint8)


def _text(data: npt.NDArray[np.uint8]) -> str:
    return base64.b64encode(data.tobytes()).decode("ascii")


MAX_MOMENTS = 2000
MAX_BYTES = 64 << 20
"""Beyond either limit, every two moments become one."""


class Trace:
    """Collects moments while a model runs; it is a `trace.Observer`. Memory stays bounded: old and new moments thin out
    alike.

    summary: gives the text beside the map of a report, when a report is written.
    """

    def __init__(self, summary: Callable[[], Summary] = Summary) -> None:
        self.moments: list[Moment] = []
        self._summary = summary
        self._stride = 1  # changes per moment
        self._bytes = 0

    @property
    def page_ins(self) -> int:
        """Chunks paged in since the recording began."""
        return sum(len(moment.recalled) for moment in self.moments)

    def changed(self, change: Change) -> None:
        """Note a moment. See `Observer`."""
        scores, resident = change.scores, tuple(change.resident)
        if scores is None and not change.recalled and self.moments and self.moments[-1].resident == resident:
            return  # a cut within a chunk, for example of rejected drafts
        bits = np.zeros(max(resident, default=-1) + 1, np.bool_)
        bits[list(resident)] = True
        moment = Moment(
            length=change.length,
            bits=np.packbits(bits),
            recalled=tuple(change.recalled),
            scores=None if scores is None else scores.astype(np.float32),
            evicted_mass=change.evicted_mass,
            generating=change.generating,
        )
        if self.moments and self.moments[-1].changes < self._stride:
            last = self.moments.pop()
            self._bytes -= last.nbytes
            moment = last.then(moment)
        self.moments.append(moment)
        self._bytes += moment.nbytes
        if len(self.moments) > MAX_MOMENTS or self._bytes > MAX_BYTES:
            self._stride *= 2
            self.moments = thinned(self.moments)
            self._bytes = sum(moment.nbytes for moment in self.moments)

    def write_html(self, path: str | Path, *, title: str = "") -> None:
        """Write the residency map: one HTML file that needs nothing else. Call it before the model is closed.

        title: what ran, such as the model's name. Raises OSError; the file is there as a whole or not at all.
        """
        write_atomically(Path(path), page(self.moments, self._summary(), title=title))


def thinned(moments: Sequence[Moment]) -> list[Moment]:
    """Return every two moments as one."""
    pairs = [a.then(b) for a, b in zip(moments[::2], moments[1::2], strict=False)]
    return pairs + list(moments[len(pairs) * 2 :])
