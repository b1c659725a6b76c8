"""What a recall run is and what came of it: arms, outcomes, intervals, tables. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import POOL_STEP, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What is compared. pool: slots, None for the full cache. note: why the pool is not what was asked for."""

    policy: str
    context: int
    pool: int | None = None
    asked: float = 100.0
    note: str = ""

    @property
    def residency(self) -> float:
        """Per cent of the context that the pool holds."""
        return 100.0 if self.pool is None else 100 * self.pool / self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One question. page_ins and looks: while it was asked, and while its document was read where both are one call.

    resident: whether all chunks of the answer were on the device with its first token; None without a pool, or such
    chunks. gold: these chunks. began: tokens of the text when the first token of the answer was drawn.
    """

    task: str
    label: str
    seed: int
    correct: bool
    answer: str
    reply: str
    resident: bool | None
    page_ins: int
    looks: int
    look_seconds: float
    decode_tokens: int
    decode_seconds: float
    began: int = 0
    gold: tuple[int, ...] = ()

    @property
    def question(self) -> tuple[str, str, int, str]:
        """The same on every arm."""
        return self.task, self.label, self.seed, self.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One document, or a preview of it: tokens read, how long that took, and the pages that came back meanwhile.

    cpu_seconds: of all threads of the process.
    """

    tokens: int
    seconds: float
    page_ins: int
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """depths: 0..1. trials: of each task; a trial asks once at every depth. fact_set: of `forms` and `late`."""

    tasks: tuple[str, ...]
    depths: tuple[float, ...]
    trials: int
    seed: int = 0
    fact_set: str = "choose"


def arms(
    contexts: Sequence[int],
    residencies: Sequence[float],
    policies: Sequence[str],
    *,
    pools: Sequence[int] = (),
    full: bool = True,
) -> list[Arm]:
    """The full cache, then every policy in every pool, per context. A pool is never asked for twice.

    residencies: pools in per cent of the context. pools: in tokens.
    """
    least = KVFlashConfig().minimum_pool
    out = []
    for context in contexts:
        if full:
            out.append(Arm(policy="full", context=context))
        asked_for = [(f"{residency:g} %", residency, round(context * residency / 100)) for residency in residencies]
        asked_for += [(f"{pool}", 100 * pool / context, pool) for pool in pools]
        sizes: dict[int, tuple[float, str]] = {}
        for what, residency, tokens in asked_for:
            pool = round_up(max(1, tokens), POOL_STEP)
            note = f"{what} is below the minimum of {least}" if pool < least else ""
            asked, before = sizes.get(max(pool, least), (residency, ""))
            sizes[max(pool, least)] = (asked, before or note)
        for pool, (asked, note) in sizes.items():
            out += [Arm(policy=p, context=context, pool=pool, asked=asked, note=note) for p in policies]
    return out


def wilson(hits: int, trials: int, *, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a proportion, after Wilson (1927)."""
    if trials == 0:
        return 0.0, 1.0
    share = hits / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def summary(
    arm: Arm, outcomes: Sequence[Outcome], reads: Sequence[Read], full: Sequence[Outcome] = ()
) -> list[dict[str, Any]]:
    """One row per task and label. Speeds, and the pages that came back per document read, are of the whole arm.

    full: what the full cache answers to the same questions, where it has run: `kept` of those `known` to it are right,
    and `same` of all have its very reply. `found` of those `placed` in chunks were resident when the answer began; of a
    preview, all of their tokens were read. read, read_s, read_cpu_s: tokens and seconds of a document.
    """
    replies = {o.question: o.reply.split() for o in full}
    answered = {o.question for o in full if o.correct}
    prefill = sum(r.tokens for r in reads) / max(1e-9, sum(r.seconds for r in reads))
    decode = sum(o.decode_tokens for o in outcomes) / max(1e-9, sum(o.decode_seconds for o in outcomes))
    rows = []
    for task, label in dict.fromkeys((o.task, o.label) for o in outcomes):
        some = [o for o in outcomes if (o.task, o.label) == (task, label)]
        hits = sum(o.correct for o in some)
        low, high = wilson(hits, len(some))
        known = [o for o in some if o.question in answered]
        placed = [o for o in some if o.resident is not None]
        rows.append(
            {
                "context": arm.context,
                "policy": arm.policy,
                "pool": arm.pool,
                "residency": arm.residency,
                "note": arm.note,
                "task": task,
                "label": label,
                "hits": hits,
                "trials": len(some),
                "share": hits / len(some),
                "low": low,
                "high": high,
                "kept": sum(o.correct for o in known),
                "known": len(known),
                "same": sum(replies.get(o.question) == o.reply.split() for o in some) if full else None,
                "found": sum(bool(o.resident) for o in placed),
                "placed": len(placed),
                "read": sum(r.tokens for r in reads) / max(1, len(reads)),
                "read_s": sum(r.seconds for r in reads) / max(1, len(reads)),
                "read_cpu_s": sum(r.cpu_seconds for r in reads) / max(1, len(reads)),
                "read_page_ins": sum(r.page_ins for r in reads) / max(1, len(reads)),
                "page_ins": sum(o.page_ins for o in some) / len(some),
                "look_ms": 1e3 * sum(o.look_seconds for o in some) / max(1, sum(o.looks for o in some)),
                "prefill_tps": prefill,
                "decode_tps": decode,
            }
        )
    return rows


HEADER = ("context", "policy", "pool", "% of context", "task", "asked at", "right", "95 % interval",
          "of full's", "as full's", "resident", "read", "read s", "read CPU s", "page-ins", "scoring ms",
          "prefill t/s", "decode t/s", "note")  # fmt: skip


def cells(row: dict[str, Any]) -> list[Any]:
    """A summary row as the columns of HEADER."""
    return [
        row["context"],
        row["policy"],
        row["pool"],
        f"{row['residency']:.1f}",
        row["task"],
        row["label"],
        f"{row['hits']}/{row['trials']}",
        f"{row['low']:.2f}-{row['high']:.2f}",
        f"{row['kept']}/{row['known']}" if row["known"] else "-",
        "-" if row["same"] is None else f"{row['same']}/{row['trials']}",
        f"{row['found']}/{row['placed']}" if row["placed"] else "-",
        f"{row['read']:.0f}",
        f"{row['read_s']:.2f}",
        f"{row['read_cpu_s']:.2f}",
        f"{row['page_ins']:.1f}",
        f"{row['look_ms']:.1f}",
        f"{row['prefill_tps']:.0f}",
        f"{row['decode_tps']:.0f}",
        row["note"],
    ]


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each task that the model fails with its full cache: no pool can be judged by it."""
    out = []
    for row in rows:
        if row["policy"] == "full" and row["share"] < 0.5:
            out.append(
                f"{row['task']} {row['label']} at {row['context']}: the full cache itself answers "
                f"{row['hits']} of {row['trials']}; the other arms of this row say nothing about the pool"
            )
    return out
