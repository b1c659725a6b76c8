"""Ctrl-C at every line of a step, a cut, a restore: what comes after it is what would have come without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any

import pytest
from support.harness import CHUNK, check, reach, row
from support.inside import inside
from support.interrupter import Interrupter

PARTS = ("sequence", "step", "pool", "prefill", "query_ring", "paging", "checkpoints")
SESSION = tuple(f"sequence/{name}.py" for name in PARTS)
MAPPING = (*SESSION, "pool/page_table.py", "pool/plan.py")
HOST = ("heap", "image", "slabs", "store")
BYTES = (*(f"host/{name}.py" for name in HOST), "native/engine.py", "native/status.py", "llama/call_lock.py")
RESTORING = (*SESSION, "sequence/restore.py", "runtime/text.py", "runtime/saving.py", "llama/llama.py")


def loses_a_look(stack: list[str]) -> bool:
    """Was a look being taken or used? The next one comes later: other pages, but the right bytes."""
    inner = list(takewhile(lambda name: name not in ("finish", "prepare_answer"), stack))
    return len(inner) < len(stack) and {"compute", "prepare"}.isdisjoint(inner)


def make(llama: Any, kind: str, *, tau: int = 8) -> Any:
    return llama(kind, n_ctx=2048, kvflash=768, kvflash_policy="qk", kvflash_tau=tau)


def after(llm: Any, tokens: list[int], count: int = 3) -> dict[int, bytes]:
    """Logits by position, of the tokens that come next."""
    rows = {}
    for _ in range(count):
        at = llm.n_tokens
        llm.eval([tokens[at]])
        rows[at] = row(llm).tobytes()
    check(llm)
    return rows


def interrupt_each_line(llm: Any, tokens: list[int], work: Callable[[], object], files: tuple[str, ...]) -> int:
    """Do the work over and over, interrupted one line later each time, and go on. Returns how many lines it has."""
    state = llm.save_state()
    work()
    want = after(llm, tokens, 5)
    k = 0
    while True:
        k += 1
        llm.load_state(state)
        interrupter = Interrupter(k, files)
        if not interrupter.run(work, partial(reach, llm)):
            break
        inside(llm).session.settle()
        check(llm)
        got = after(llm, tokens)
        wrong = [at for at, logits in got.items() if at in want and want[at] != logits]
        assert set(got) & set(want)
        where = f"line {k}, in {interrupter.stack}"
        assert not wrong or loses_a_look(interrupter.stack), f"{where}: other logits at {wrong}"
    return k - 1


@pytest.mark.parametrize(("kind", "length"), [("small", 830), ("small", 831), ("small", 832), ("hybrid", 832)])
def test_a_step_that_recalls(kind: str, length: int, llama: Any, tokens: Any) -> None:
    """Within a chunk, where one ends, and where a new one begins."""
    llm, text = make(llama, kind, tau=4 if length == 831 else 8), tokens.tolist()  # then every step is looked at
    llm.eval(text[:length])
    gone = set(range(llm.kvflash.chunks)) - set(llm.kvflash.resident_chunks)
    for chunk in sorted(gone)[:3]:
        llm.kvflash.pin(chunk * CHUNK, chunk * CHUNK + 1)
    assert gone
    ins = llm.kvflash.page_ins
    files = MAPPING + BYTES if length == 832 else MAPPING
    lines = interrupt_each_line(llm, text, lambda: llm.eval([text[length]]), files)
    assert lines > 100
    assert llm.kvflash.page_ins > ins


def test_a_step_that_reselects(llama: Any, tokens: Any) -> None:
    llm, text = make(llama, "small"), tokens.tolist()
    llm.eval(text[:830])
    moved: set[int] = set()
    while not moved:
        state, before = llm.save_state(), set(llm.kvflash.resident_chunks)
        due = inside(llm).session.scoring.is_ready
        llm.eval([text[llm.n_tokens]])
        moved = set(llm.kvflash.resident_chunks) - before if due else set()
    llm.load_state(state)
    assert interrupt_each_line(llm, text, lambda: llm.eval([text[llm.n_tokens]]), MAPPING) > 100


@pytest.mark.parametrize("kind", ["small", "hybrid"])
def test_a_cut(kind: str, llama: Any, tokens: Any) -> None:
    """Of a model with recurrent state to the checkpoint before, from where it reads on."""
    llm, text = make(llama, kind), tokens.tolist()
    llm.eval(text[:192])
    llm.eval(text[192 : 830 if kind == "small" else 400])

    def cut() -> None:
        llm.n_tokens = 196
        inside(llm).session.truncate(196)

    files = MAPPING + BYTES if kind == "small" else SESSION
    assert interrupt_each_line(llm, text, cut, files) > 20


@pytest.mark.parametrize("kind", ["small", "hybrid"])
def test_a_restore(kind: str, llama: Any, tokens: Any) -> None:
    """What is left is the one text, or the other, or none; and the restore can be done again."""
    llm, text = make(llama, kind), tokens.tolist()
    llm.eval(text[1000:1200])
    state = llm.save_state()
    want = after(llm, text)
    llm.reset()
    llm.eval(text[:70])
    before = llm.save_state()
    texts = [[], text[1000:1200], text[:70]]
    k = 0
    while True:
        k += 1
        llm.load_state(before)
        if not Interrupter(k, RESTORING).run(partial(llm.load_state, state), partial(reach, llm)):
            break
        assert llm.input_ids[: llm.n_tokens].tolist() in texts
        assert inside(llm).session.tokens.tolist() in (llm.input_ids[: llm.n_tokens].tolist(), [])
        inside(llm).session.settle()
        check(llm)
        if k % 10 == 0:
            after(llm, text, 1)
        llm.load_state(state)
        assert after(llm, text) == want
    assert k > 100
