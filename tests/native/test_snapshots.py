"""Rung 5 of the exactness ladder: what is saved and restored in another process goes on bit for bit."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from support import resume
from support.harness import CHUNK, KV_TYPES, TEXT, check, logits_along, pages, row, same_bits
from support.inside import inside

from kvflash_bench.tasks import needle_task
from kvflash_ggml import KVFlashConfig
from kvflash_ggml.errors import SnapshotError

pytestmark = pytest.mark.usefixtures("known_heads")

POOL = 512
N_CTX = 4096
PART, PROMPT, CUT = 1024, 1500, 1300
KINDS = ("dense", "hybrid", "iswa")
SETTINGS = {"n_ctx": N_CTX, "n_batch": 256, "n_ubatch": 256, "n_threads": 1, "n_threads_batch": 1}


def make(llama: Any, kind: str = "dense", pool: int = POOL, **settings: Any) -> Any:
    """With the default policy, and looks at steps that do not depend on the clock."""
    return llama(kind, **SETTINGS, kvflash=KVFlashConfig(pool=pool, tau=8), **settings)


class Points:
    """Snapshots of one model, and what the one that was never saved goes on with."""

    def __init__(self, llm: Any, folder: Path) -> None:
        self.llm = llm
        self.folder = folder
        self.points: dict[str, Any] = {}
        self.wanted: dict[str, Any] = {}

    def save(self, name: str, then: list[int] = [], **how: Any) -> Any:  # noqa: B006 (read only)
        path = self.folder / f"{name}.kvs"
        self.points[name] = {"path": str(path), "then": then}
        return self.llm.save_snapshot(path, **how)

    def go_on(self, *names: str) -> None:
        """What follows, for the points that lead here."""
        after = resume.go_on(self.llm)
        self.wanted.update(dict.fromkeys(names, after))

    def resume(self, model: Path, **settings: Any) -> dict[str, Any]:
        """Go on from every point in one fresh process."""
        plan = {"model": str(model), "points": self.points, "settings": settings | SETTINGS}
        file = self.folder / "plan.json"
        file.write_text(json.dumps(plan))
        run = subprocess.run([*resume.COMMAND, file], cwd=resume.TESTS, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-3000:]
        results: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return results


@pytest.mark.parametrize(
    ("kind", "kv"),
    [*(("dense", kv) for kv in KV_TYPES), *((kind, kv) for kind in ("hybrid", "iswa") for kv in ("f16", "q8_0"))],
)
def test_another_process_goes_on_bit_for_bit(
    kind: str, kv: str, llama: Any, model: Any, tokens: Any, tmp_path: Path
) -> None:
    """Saved within a prompt, after it (while decoding goes on), in an answer, and after a cut."""
    cache = {"type_k": KV_TYPES[kv], "type_v": KV_TYPES[kv]}
    llm = make(llama, kind, **cache)
    assert llm.kvflash.policy == "qk"
    points = Points(llm, tmp_path)
    prompt = tokens[:PROMPT].tolist()
    llm.eval(prompt[:PART])
    points.save("part", prompt[PART:])
    llm.eval(prompt[PART:])
    done = points.save("prompt", wait=False)
    points.go_on("part", "prompt")
    assert done.result() == (tmp_path / "prompt.kvs").stat().st_size
    resume.go_on(llm, 3)  # a look is under way, or its scores are not used yet
    points.save("answer")
    points.go_on("answer")
    llm.n_tokens = CUT
    points.save("cut", [5, 6, 7])
    llm.eval([5, 6, 7])
    points.go_on("cut")
    check(llm)

    results = points.resume(model(kind), kvflash=POOL, kvflash_tau=8, **cache)
    lengths = {"part": PART, "prompt": PROMPT, "answer": PROMPT + resume.STEPS + 3, "cut": CUT}
    for name, wanted in points.wanted.items():
        ours = results[name]
        assert ours["length"] == lengths[name]
        if name != "answer":  # where what the prompt has found may outlast the few tokens
            assert ours["page_ins"] > 0, f"{name}: nothing was recalled, so little was tested"
        assert ours["tokens"] == wanted["tokens"], name
        assert ours["digests"] == wanted["digests"], name
        assert len(set(ours["digests"])) == resume.STEPS + 1


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_fact_is_recalled_after_a_restore(kind: str, llama: Any, model: Any, tmp_path: Path) -> None:
    """The question comes in another process: the fact has left the pool long before the text was saved."""
    llm = make(llama, kind)
    points, answers = Points(llm, tmp_path), {}

    def tokenize(text: str) -> list[int]:
        return list(llm.tokenize(text.encode(), add_bos=False, special=False))

    for seed in range(1, 13):
        task = needle_task(TEXT.read_text(), tokenize, n_tokens=2048, depth=0.3, seed=seed)
        prompt = tokenize(task.prompt)
        llm.reset()
        llm.eval(prompt[:2000])
        if task.position // CHUNK in llm.kvflash.resident_chunks or len(answers) == 3:
            continue  # the end of the text happened to ask for it
        points.save(f"{seed}", prompt[2000:])
        answers[f"{seed}"] = task
    results = points.resume(model(kind), kvflash=POOL, kvflash_tau=8)
    right = [answers[name].is_correct(llm.detokenize(found["tokens"][:12]).decode()) for name, found in results.items()]
    assert len(right) == 3
    assert sum(right) >= 2
    assert all(found["page_ins"] > 0 for found in results.values())


@pytest.mark.parametrize(("kind", "length"), [("dense", 704), ("dense", 710), ("hybrid", None), ("iswa", None)])
def test_the_beginning_of_a_text(kind: str, length: int | None, llama: Any, tokens: Any, tmp_path: Path) -> None:
    """It goes on as the text does that is cut there, in which nothing of the rest is left."""
    llm, other = make(llama, kind), make(llama, kind)
    llm.eval(tokens[:1000].tolist())
    llm.eval(tokens[1000:1500].tolist())
    if length is None:
        length = min(inside(llm).session.checkpoints.state())
        with pytest.raises(SnapshotError, match=re.escape(f"{length}")):
            llm.save_snapshot(tmp_path / "x", length=length - 1)
    for impossible in (1501, -1):
        with pytest.raises(SnapshotError, match="1500"):
            llm.save_snapshot(tmp_path / "x", length=impossible)
    assert not list(tmp_path.iterdir())
    llm.save_snapshot(tmp_path / "x", length=length)
    assert llm.n_tokens == llm.kvflash.length == 1500
    assert other.load_snapshot(tmp_path / "x") == length
    check(other)
    assert other.kvflash.length == length
    assert pages(inside(other).session)[: length // CHUNK] == pages(inside(llm).session)[: length // CHUNK]
    llm.n_tokens = length
    assert inside(llm).session.can_truncate(length) or kind != "dense"
    ours, theirs = (logits_along(one, tokens[2000:2100], tokens[2100:2140]) for one in (other, llm))
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("pool", [512, 1024, N_CTX])
@pytest.mark.parametrize("kind", KINDS)
def test_into_another_pool(kind: str, pool: int, llama: Any, tokens: Any, tmp_path: Path) -> None:
    llm = make(llama, kind, 768)
    llm.eval(tokens[:PROMPT].tolist())
    resume.go_on(llm, 20)
    llm.save_snapshot(tmp_path / "x")
    other = make(llama, kind, pool)
    other.load_snapshot(tmp_path / "x")
    check(other)
    assert same_bits(row(other), row(llm))
    resident, before = set(other.kvflash.resident_chunks), set(llm.kvflash.resident_chunks)
    if pool == 512:
        assert resident < before
        assert len(resident) == 8
        scores = inside(llm).session.relevance.ranking
        head = other.n_tokens // CHUNK
        chosen = [c for c in resident - inside(other).session.table.protected(head, head) if c < len(scores)]
        assert max(scores[c] for c in before - resident if c < len(scores)) <= min(scores[c] for c in chosen)
    elif pool == 1024:
        assert resident == before
    else:
        assert resident == set(range(other.kvflash.chunks))
    sealed = other.n_tokens // CHUNK
    assert pages(inside(other).session)[:sealed] == pages(inside(llm).session)[:sealed]
    resume.go_on(other, 80)
    other.eval(tokens[3000:3300].tolist())
    check(other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_goes_on_and_is_cut_while_the_file_is_written(
    kind: str, llama: Any, tokens: Any, tmp_path: Path
) -> None:
    llm, other = make(llama, kind), make(llama, kind)
    llm.eval(tokens[:PROMPT].tolist())
    gate = threading.Event()
    inside(llm).snapshot_store._writer.submit(gate.wait)
    done = llm.save_snapshot(tmp_path / "x", wait=False)
    after = resume.go_on(llm)
    llm.n_tokens = 300
    llm.eval(tokens[5000:5900].tolist())
    llm.reset()
    llm.eval(tokens[7000:7700].tolist())
    check(llm)
    assert not done.done()
    assert not list(tmp_path.iterdir())
    gate.set()
    assert done.result() == (tmp_path / "x").stat().st_size
    other.load_snapshot(tmp_path / "x")
    assert resume.go_on(other) == after
    held = {page for page in inside(llm).session.store.heap._pages if page.holders != 1}
    assert not held, "what was saved has been let go"


def test_closing_waits_for_the_file(llama: Any, tokens: Any, tmp_path: Path) -> None:
    llm, other = make(llama), make(llama)
    llm.eval(tokens[:PROMPT].tolist())
    done = llm.save_snapshot(tmp_path / "x", wait=False)
    llm.close()
    assert done.done()
    assert other.load_snapshot(tmp_path / "x") == PROMPT


def test_a_file_that_cannot_be_written(llama: Any, tokens: Any, tmp_path: Path) -> None:
    llm, fresh = make(llama), make(llama)
    for one in (llm, fresh):
        one.eval(tokens[:700].tolist())
    for path in (tmp_path, tmp_path / "absent" / "x"):
        with pytest.raises(SnapshotError, match="folder"):
            llm.save_snapshot(path)
    assert not list(tmp_path.iterdir())
    assert isinstance(llm.save_snapshot(tmp_path / "absent" / "x", wait=False).exception(), SnapshotError)
    ours, theirs = (logits_along(one, tokens[700:800], tokens[800:820]) for one in (llm, fresh))
    assert same_bits(ours, theirs)


def test_a_damaged_file_changes_nothing(llama: Any, tokens: Any, tmp_path: Path) -> None:
    llm, fresh = make(llama), make(llama)
    for one in (llm, fresh):
        one.eval(tokens[:700].tolist())
    llm.save_snapshot(tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for data in (b"", whole[:-1], whole[:40], bytes(flipped), whole + whole, b"GGUF" + whole[4:]):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(SnapshotError):
            load_and_read_all(llm, tmp_path / "x")
        llm.n_tokens = min(llm.n_tokens, 700)
    ours, theirs = (logits_along(one, tokens[700:800], tokens[800:820]) for one in (llm, fresh))
    assert same_bits(ours, theirs)


def load_and_read_all(llm: Any, path: Path) -> None:
    llm.load_snapshot(path)
    pages(inside(llm).session)
