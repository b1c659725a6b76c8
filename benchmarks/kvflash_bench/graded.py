"""Samples with a score, by arm: what is kept of each, and the tables. Pure arithmetic."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvflash_ggml.errors import ConfigError

from .opening import reads_exactly
from .outcomes import Arm


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A question about a text of its own. body: the message of the user. lead: how the answer begins.

    answers: texts that the reply should hold. most: tokens of a reply. gold: sentences of the body that hold the
    answers; none where the whole text does. plain: no chat template stands around it.
    """

    task: str
    index: int
    body: str
    answers: tuple[str, ...]
    most: int
    lead: str = ""
    gold: tuple[str, ...] = ()
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """An arm of recall, with how its answers see the text and who drafts for them ("": nobody). width: of steps that
    verify drafts, None for as many rows as pay.
    """

    arm: Arm
    answer: str = "pool"
    drafts: str = ""
    width: int | None = None

    @property
    def name(self) -> str:
        if self.arm.pool is None:
            return "full cache"
        more = [self.answer] * (self.answer != "pool") + [self.drafts] * bool(self.drafts)
        more += [f"{self.width} rows"] * bool(more and self.width)
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


def ways(arms: Sequence[Arm], answers: Sequence[str], drafts: Sequence[str], width: int | None = None) -> list[Way]:
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
                out += [Way(arm=arm, answer=answer, drafts=who, width=width) for who in ("", *drafts)]
    return out


def settings_of(model: str, **more: Any) -> dict[str, Any]:
    """Return what samples in a file must have in common to be compared."""
    return {"model": Path(model).name, "bytes": Path(model).stat().st_size, **more}


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
        scores = {task: [r.score for r in some if r.task == task] for task in dict.fromkeys(r.task for r in some)}
        means = {task: 100 * sum(found) / len(found) for task, found in scores.items()}
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
    tasks = list(dict.fromkeys(task for row in rows for task in row["tasks"]))
    header = ["tokens", "cache", "samples", *tasks, "average", "worse", "better"]
    cells = [
        [
            row["context"], row["way"], row["samples"], *(tenth(row["tasks"].get(task)) for task in tasks),
            tenth(row["average"]), row["worse"], row["better"],
        ]
        for row in rows
    ]  # fmt: skip
    return header, cells


def tenth(value: float | None) -> str | None:
    """Return a figure with one digit after the point."""
    return None if value is None else f"{value:.1f}"
