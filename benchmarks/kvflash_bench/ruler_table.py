"""The table of a RULER run by length, as the paper has it, beside published rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .graded import tenth
from .tasks_ruler import TASKS

PUBLISHED: dict[str, dict[int, float]] = {
    "Llama 3.1 8B, published": {
        4096: 95.5, 8192: 93.8, 16384: 91.6, 32768: 87.4, 65536: 84.7, 131072: 77.0,
    },
    "Phi-3-mini 3.8B, published": {
        4096: 92.2, 8192: 91.5, 16384: 90.7, 32768: 87.5, 65536: 80.6, 131072: 66.7,
    },
}  # fmt: skip
"""Averages of the thirteen tasks by length, of full caches: the table in the README of github.com/NVIDIA/RULER."""

NOTES = (
    "Scores are RULER's, 0 to 100. cwe and fwe need all of the text at once, which an answer from a pool does not see.",
    "qa_1 and qa_2 ask for facts in passages of the text given; RULER's own are SQuAD and HotpotQA.",
    "worse, better: samples on which an arm scores less, or more, than the full cache.",
)


def by_length(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of the paper's main table: averages by length. Published rows stand above if all tasks ran."""
    lengths = sorted({row["context"] for row in rows})
    means: dict[str, dict[int, float]] = {}
    if all(len(row["tasks"]) == len(TASKS) for row in rows):
        means |= {name: dict(found) for name, found in PUBLISHED.items()}
    for row in rows:
        means.setdefault(row["way"], {})[row["context"]] = row["average"]
    header = ["cache", *(f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths)]
    return header, [[name, *(tenth(found.get(n)) for n in lengths)] for name, found in means.items()]
