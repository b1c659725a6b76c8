"""A text that has been read is not read again: snapshots in another process, and the prefix cache."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import resume
from support.smollm import POOL, SETTINGS

from kvflash_bench.filler import read_text

CHUNK = 64
DOCUMENT = 800
STEPS = 16
QUESTIONS = ("What is this text about?", "Who has written it, and what may be done with it?")


@pytest.fixture(scope="module")
def ids(pooled: Any) -> list[int]:
    """Real text, longer than the pool."""
    return list(pooled.tokenize(read_text(())[:6000].encode(), add_bos=False))


def test_another_process_goes_on_with_the_same_tokens(
    smol: Callable[..., Any], smol_path: Path, ids: list[int], tmp_path: Path
) -> None:
    settings = {"kvflash": POOL, "kvflash_tau": 8}
    llm = smol(**settings)
    llm.eval(ids[:DOCUMENT])
    file = tmp_path / "text.kvs"
    llm.save_snapshot(file)
    plan = {
        "model": str(smol_path),
        "points": {"text": {"path": str(file), "then": []}},
        "settings": {k: v for k, v in SETTINGS.items() if k not in ("seed", "verbose")} | settings,
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run = subprocess.run([*resume.COMMAND, tmp_path / "plan.json"], cwd=resume.TESTS, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])["text"]
    assert found["length"] == DOCUMENT
    wanted = resume.go_on(llm, resume.STEPS)
    assert found["tokens"] == wanted["tokens"]
    assert found["digests"] == wanted["digests"]
    llm.close()


def answer(llm: Any, prompt: Sequence[int]) -> tuple[list[int], int]:
    """The tokens of a greedy answer, and how many of the prompt were evaluated for it."""
    totals = [0]
    llm.kvflash_progress = lambda done, total: totals.append(total)
    stream = llm.generate(list(prompt), temp=0.0)
    out = [next(stream) for _ in range(STEPS)]
    stream.close()
    llm.kvflash_progress = None
    return out, totals[-1]


def test_a_second_question_about_a_text_reads_the_question_only(smol: Callable[..., Any], ids: list[int]) -> None:
    from kvflash_ggml import PrefixCache

    document, other = ids[:DOCUMENT], ids[DOCUMENT : DOCUMENT + 100]
    llm = smol(kvflash=POOL, kvflash_cache=PrefixCache())
    first, second = (llm.tokenize(f"\n\nQuestion: {question}\nAnswer:".encode()) for question in QUESTIONS)
    assert answer(llm, document + first)[1] == len(document + first)
    assert answer(llm, other)[1] == len(other)
    assert 0 < answer(llm, document + second)[1] <= len(second) + CHUNK
    llm.close()
