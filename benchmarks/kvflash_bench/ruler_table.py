"""What a RULER run is and what came of it: arms, records, the tables in RULER's layout. Pure arithmetic."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvflash_ggml.errors import ConfigError

from .opening import reads_exactly
from .outcomes import Arm
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """An arm of recall, with how its answers see the text and who drafts for them ("": nobody)."""

    arm: Arm
    answer: str = "pool"
    drafts: str = ""

    @property
    def name(self) -> str:
        if self.arm.pool is None:
            return "full cache"
        more = [self.answer] * (self.answer != "pool") + [self.drafts] * bool(self.drafts)
        return ", ".join([f"{self.arm.pool} {self.arm.policy}", *more])


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One sample on one way. score: 0 to 1. tokens: of the prompt. gold: chunks that hold the answers.

    missing: chunks of these that were not on the device with the second token of the answer. never: nor later.
    """

    context: int
    way: str
    task: str
    index: int
    score: float
    answers: tuple[str, ...]
    reply: str
    tokens: int
    seconds: float
    gold: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    never: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, str, str, int]:
        return self.context, self.way, self.task, self.index


def ways(arms: Sequence[Arm], answers: Sequence[str], drafts: Sequence[str]) -> list[Way]:
    """Return every arm with every kind of answer, without drafts and with each of them.

    Answers that see the whole text need a prompt that was read exactly: other policies are left out there.
    """
    out = []
    for arm in arms:
        if arm.pool is None:
            out.append(Way(arm=arm))
            continue
        for answer in answers:
            if answer == "pool" or reads_exactly(arm.policy):
                out += [Way(arm=arm, answer=answer, drafts=who) for who in ("", *drafts)]
    return out


class Kept:
    """Finished samples in a file, one JSON object a line, after a line with the settings. path: None keeps none.

    ConfigError for a file of other settings.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self.records: dict[tuple[int, str, str, int], Record] = {}
        if path is None:
            return
        if not path.exists():
            path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
            return
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a run that was killed may have left a part of a line
        first, *lines = whole.splitlines() or [""]
        if first != json.dumps(settings):
            raise ConfigError(f"{path} has samples of other settings, {first[:200]}: name another file with --out")
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        for line in lines:
            one: dict[str, Any] = {k: tuple(x) if isinstance(x, list) else x for k, x in json.loads(line).items()}
            record = Record(**one)
            self.records[record.key] = record

    def add(self, record: Record) -> None:
        self.records[record.key] = record
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")


def summary(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row for each length and way: the mean of each task and the average of the tasks, 0 to 100.

    worse, better: samples that the full cache answered better, or worse, where it has run.
    """
    found = list(records)
    full = {(r.context, r.task, r.index): r.score for r in found if r.way == "full cache"}
    rows = []
    for context, way in dict.fromkeys((r.context, r.way) for r in found):
        some = [r for r in found if (r.context, r.way) == (context, way)]
        by_task = {task: [r.score for r in some if r.task == task] for task in TASKS}
        means = {task: 100 * sum(scores) / len(scores) for task, scores in by_task.items() if scores}
        against = [r.score - full[r.context, r.task, r.index] for r in some if (r.context, r.task, r.index) in full]
        rows.append({
            "context": context, "way": way, "samples": len(some), "tasks": means,
            "average": sum(means.values()) / len(means),
            "worse": sum(x < 0 for x in against) if against and way != "full cache" else None,
            "better": sum(x > 0 for x in against) if against and way != "full cache" else None,
        })  # fmt: skip
    return rows


def by_task(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of the table with a column for each task."""
    tasks = [task for task in TASKS if any(task in row["tasks"] for row in rows)]
    header = ["tokens", "cache", "samples", *tasks, "average", "worse", "better"]
    cells = [
        [
            row["context"], row["way"], row["samples"], *(_tenth(row["tasks"].get(task)) for task in tasks),
            _tenth(row["average"]), row["worse"], row["better"],
        ]
        for row in rows
    ]  # fmt: skip
    return header, cells


def by_length(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of the paper's main table: averages by length. Published rows stand above if all tasks ran."""
    lengths = sorted({row["context"] for row in rows})
    means: dict[str, dict[int, float]] = {}
    if all(len(row["tasks"]) == len(TASKS) for row in rows):
        means |= {name: dict(found) for name, found in PUBLISHED.items()}
    for row in rows:
        means.setdefault(row["way"], {})[row["context"]] = row["average"]
    header = ["cache", *(f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths)]
    return header, [[name, *(_tenth(found.get(n)) for n in lengths)] for name, found in means.items()]


def _tenth(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"
