"""The residency map as one HTML file, made from the template `trace.html`. It carries its data and fetches nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from ..constants import CHUNK
from .moment import Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What stands beside the map. facts: rows of the table, as (what, value). evicted_mass: of the newest answer."""

    facts: Sequence[tuple[str, str]] = ()
    evicted_mass: float | None = None


HIGH_MASS = 0.2
"""An estimated share of attention on paged-out text from which a larger pool is worth a word."""

ONLY_BOUNDED = 1e3
"""Scores so far below the best belong to chunks that a policy has ranked without looking at them exactly."""

MAX_CELLS = 4 << 20
"""Chunks x moments of scores in a file: beyond, they are shown at every second look, or fourth, and so on."""


def mass_warning(mass: float | None) -> str | None:
    """What to say about the share of attention that missed the pool; None if it is small or unknown."""
    if mass is None or mass < HIGH_MASS:
        return None
    return f"about {mass * 100:.0f} % of the attention went to paged-out text; a larger pool would help"


def page(moments: Sequence[Moment], summary: Summary, *, title: str) -> str:
    """The whole file. title and facts are text and get escaped."""
    warning = mass_warning(summary.evicted_mass)
    template = resources.files(__package__).joinpath("trace.html").read_text(encoding="utf-8")
    rows = "\n".join(f"<tr><th>{escape(what)}</th><td>{escape(value)}</td></tr>" for what, value in summary.facts)
    box = f'<p class="warning" role="alert"><strong>Warning:</strong> {escape(warning)}.</p>' if warning else ""
    return Template(template).substitute(
        title=escape(title or "a run"), rows=rows, warning=box, data=_json(_document(moments))
    )


def _json(value: Any) -> str:
    """JSON that can stand in a script element, whatever strings it holds."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _document(moments: Sequence[Moment]) -> dict[str, Any]:
    n_chunks = max((_chunks(moment) for moment in moments), default=0)
    scored = [i for i, moment in enumerate(moments) if moment.scores is not None]
    step = max(1, -(-len(scored) * n_chunks // MAX_CELLS))
    shown = {i: moments[i].scores for i in scored[::-1][::step]}  # the last look is always shown
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
    """Of the scores that are worth a colour: without the outliers at the lower end."""
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
    """Scores as 1 (low) to 255 (high); 0 where there is no exact score."""
    assert scores is not None
    seen = _looked_at(scores)
    scale = 254 / (high - low) if high > low else 0.0
    steps = np.clip((np.where(seen, scores, low) - low) * scale, 0, 254)
    return np.where(seen, steps + 1, 0).astype(np.uint8)


def _text(data: npt.NDArray[np.uint8]) -> str:
    return base64.b64encode(data.tobytes()).decode("ascii")
