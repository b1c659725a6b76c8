"""A question about a text that was saved, against reading the text again: both in one run, on the same tokens."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import numpy.typing as npt

from . import report
from .inside import device_of, identify, paged, wait
from .plans import Restore

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

Tokens = npt.NDArray[np.int32]

WARM_UP = 128
"""Tokens that a fresh model evaluates and forgets: a server that goes on from a file has computed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """question, answer: tokens. repeats: restored sessions, each in a model of its own. options: for `Llama`."""

    context: int
    pool: int
    policy: str
    question: int
    answer: int
    repeats: int
    compress: bool
    options: dict[str, Any]
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cold:
    """A session that is not interrupted. pool: as it was made. A turn ends with the first token of its answer."""

    pool: int
    read_s: float
    turn_s: float
    save_blocking_s: float
    save_s: float
    file_bytes: int
    answer: list[int]
    logits: bytes
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """A session that goes on from the file.

    restore_s: until the resident set is on the device; identify_s of it to know the model by its file, which a process
    does once.
    """

    identify_s: float
    restore_s: float
    turn_s: float
    answer: list[int]
    logits: bytes


COLUMNS = {
    "context": "context", "pool": "pool", "read_tps": "read t/s", "save_blocking_s": "save blocks s",
    "save_s": "save s", "file_mib": "MiB", "restore_s": "restore s", "question_s": "question s", "question_tps": "t/s",
    "cold_turn_s": "cold turn s", "warm_turn_s": "warm turn s", "ratio": "cold/warm", "same_answer": "same answer",
}  # fmt: skip


def run(model: str, asked: Restore, options: dict[str, Any]) -> None:
    rows, device = [], ""
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        for context in asked.contexts:
            plan = Plan(
                context=context, pool=asked.pool, policy=asked.policy, question=asked.question, answer=asked.answer,
                repeats=asked.repeats, compress=asked.compress, options=options,
            )  # fmt: skip
            row, device = measure(model, Path(place) / "session.kvs", plan, fresh_process=asked.fresh_process)
            rows.append(row)
            turns = f"read again {row['cold_turn_s']:.2f} s, restored {row['warm_turn_s']:.3f} s"
            click.echo(f"{context} tokens: {turns}, {row['ratio']:.1f} times", err=True)
    shown = [row | {"same_answer": "yes" if row["same_answer"] else "no"} for row in rows]
    report.columns(COLUMNS, shown)
    settings = options | asdict(asked)
    report.told(
        "restore", model, settings, device, fresh_process=asked.fresh_process, compress=asked.compress, rows=rows
    )


def measure(model: str, path: Path, plan: Plan, *, fresh_process: bool) -> tuple[dict[str, Any], str]:
    """Read, save, ask; then restore and ask the same. Returns one row of results and the device."""
    cold = run_cold(model, path, plan)
    run = _elsewhere if fresh_process else run_warm
    warm = [run(model, path, plan) for _ in range(plan.repeats)]
    return row(plan, cold, warm), cold.device


def run_cold(model: str, path: Path, plan: Plan) -> Cold:
    text, question = _text(plan)
    with _opened(model, plan) as llm:
        began = time.perf_counter()
        llm.eval(text.tolist())
        _finish(llm)
        read = time.perf_counter() - began

        began = time.perf_counter()
        done = llm.save_snapshot(path, compress=plan.compress, wait=False)
        blocking = time.perf_counter() - began
        size = done.result()
        saved = time.perf_counter() - began

        turn, answer, logits = _turn(llm, question, plan.answer)
        assert llm.kvflash is not None
        return Cold(
            pool=llm.kvflash.pool,
            read_s=read,
            turn_s=turn,
            save_blocking_s=blocking,
            save_s=saved,
            file_bytes=size,
            answer=answer,
            logits=logits,
            device=device_of(llm),
        )


def run_warm(model: str, path: Path, plan: Plan) -> Warm:
    _, question = _text(plan)
    with _opened(model, plan) as llm:
        began = time.perf_counter()
        identify(llm)
        identified = time.perf_counter() - began
        llm.load_snapshot(path)
        paged(llm).engine.synchronize()
        restored = time.perf_counter() - began
        turn, answer, logits = _turn(llm, question, plan.answer)
        return Warm(
            identify_s=identified,
            restore_s=restored,
            turn_s=turn,
            answer=answer,
            logits=logits,
        )


def _elsewhere(model: str, path: Path, plan: Plan) -> Warm:
    """`run_warm` in a new process. Spawned, not forked: a device does not survive a fork."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(run_warm, model, path, plan).result()


def row(plan: Plan, cold: Cold, warm: list[Warm]) -> dict[str, Any]:
    """What was seen, the medians of the restored sessions, and the ratios."""
    restore, turn = median(x.restore_s for x in warm), median(x.turn_s for x in warm)
    total = median(x.restore_s + x.turn_s for x in warm)
    return {
        "context": plan.context,
        "pool": cold.pool,
        "policy": plan.policy,
        "question": plan.question,
        "read_s": cold.read_s,
        "read_tps": plan.context / cold.read_s,
        "save_blocking_s": cold.save_blocking_s,
        "save_s": cold.save_s,
        "file_mib": cold.file_bytes / 2**20,
        "restore_s": restore,
        "identify_s": median(x.identify_s for x in warm),
        "question_s": turn,
        "question_tps": plan.question / turn,
        "question_cold_s": cold.turn_s,
        "warm_turn_s": total,
        "cold_turn_s": cold.read_s + cold.turn_s,
        "ratio": (cold.read_s + cold.turn_s) / total,
        "same_answer": all(x.answer == cold.answer for x in warm),
        "same_logits": all(x.logits == cold.logits for x in warm),
        "repeats": [[x.identify_s, x.restore_s, x.turn_s] for x in warm],
    }


def _turn(llm: Llama, question: Tokens, count: int) -> tuple[float, list[int], bytes]:
    """Seconds to the first token of the answer, the answer, and the logits of its first token."""
    began = time.perf_counter()
    llm.eval(question.tolist())
    logits = llm.newest_logits()
    answer = [int(logits.argmax())]
    seconds = time.perf_counter() - began
    first = logits.tobytes()
    while len(answer) < count:
        llm.eval(answer[-1:])
        answer.append(int(llm.newest_logits().argmax()))
    return seconds, answer, first


def _text(plan: Plan) -> tuple[Tokens, Tokens]:
    # below the vocabulary of every model that the benches make, so that both sides read the same without asking it
    tokens = np.random.default_rng(plan.seed).integers(10, 400, plan.context + plan.question).astype(np.int32)
    return tokens[: plan.context], tokens[plan.context :]


@contextmanager
def _opened(model: str, plan: Plan) -> Iterator[Llama]:
    from .opening import opened

    n_ctx = plan.context + plan.question + plan.answer
    # a fixed tau: an adaptive one depends on the clock, and so would the answer
    fields = {"tau": 64}
    with opened(
        model, n_ctx=n_ctx, options=plan.options, pool=plan.pool, policy=plan.policy, fields=fields
    ) as llm:  # fmt: skip
        llm.eval(_text(plan)[0][:WARM_UP].tolist())
        _finish(llm)
        llm.reset()
        yield llm


def _finish(llm: Llama) -> None:
    """Wait for the logits, as sampling would."""
    wait(llm)
