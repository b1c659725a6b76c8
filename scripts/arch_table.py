#!/usr/bin/env python3
"""Runs a tiny model of every architecture in a pool and writes docs/architectures.md from what happened.

With names, runs only those and prints the table instead.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TABLE = REPO / "docs" / "architectures.md"

if str(REPO / "tests") not in sys.path:  # run by hand; tests may be run against another package than the checkout's
    sys.path[:0] = [str(REPO), str(REPO / "tests")]

from support import archs  # noqa: E402

HEAD = """\
# Architectures

What each architecture of the pinned llama.cpp does with `kvflash=`. A row is a model; some architectures have two.
{pooled} models run in a pool, {refused} are refused with the reason below when they are loaded, {stock} cannot run
without a pool either, and {missing} were not tried. So {pooled_archs} architectures run in a pool, and {refused_archs}
are refused. `python scripts/arch_table.py` writes this, and `tests/native/test_archs.py` runs every model again.

A model here is a few random layers, made from the fixtures of upstream's `test-llama-archs`. "yes" means:

- with a pool that holds the whole context, the logits of {tokens} tokens (a prompt in steps of {ubatch}, then single
  steps) are bitwise those of the full cache with flash attention; for plain memories also after a cut in the middle;
- with a pool of {pool} slots, chunks are paged out; they reach the host, and come back from it, bit for bit; a saved
  state continues bitwise as the session it was saved from; every logit is finite;
- with a pool of {pool} slots, exact reading and exact answers, the same logits are bitwise those of the full cache;
- a calibration, with one document instead of two, measures each query head of its pooled layers.

"layers" counts those whose cache is pooled. The others keep a sliding window, a recurrent state or nothing, none of
which grows with the context, or they read another layer's cache.

| architecture | in a pool | memory | layers | why not |
| --- | --- | --- | --- | --- |
"""
WORD = {"pooled": "yes", "refused": "refused", "stock": "fails anyway", "missing": "not tried", "failed": "FAILS"}


def render(results: Sequence[archs.Result]) -> str:
    """The text of docs/architectures.md."""
    missing = [archs.Result(file=name, arch=name, status="missing", reason=why) for name, why in archs.NO_MODEL.items()]
    rows = sorted([*results, *missing], key=lambda r: (r.arch, r.mixture))
    counts = Counter({"stock": 0}) + Counter(r.status for r in rows)
    archs_of = {status: len({r.arch for r in rows if r.status == status}) for status in WORD}
    head = HEAD.format(
        **{status: counts[status] for status in WORD},
        pooled_archs=archs_of["pooled"],
        refused_archs=archs_of["refused"],
        tokens=archs.PROMPT + archs.STEPS,
        ubatch=archs.N_UBATCH,
        pool=archs.POOL,
    )
    return head + "".join(_row(r) for r in rows)


def _row(r: archs.Result) -> str:
    name = r.arch + (" (MoE)" if r.mixture else "")
    return f"| {name} | {WORD[r.status]} | {r.memory} | {r.layers} | {r.reason} |\n"


def main(names: Sequence[str]) -> int:
    results = archs.survey(names)
    if names:
        print("".join(_row(r) for r in results), end="")
    else:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(render(results), encoding="utf-8")
        print(TABLE)
    return any(r.status == "failed" for r in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
