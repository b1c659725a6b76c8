"""Writes a saved session as a container, and reads it. docs/snapshot-format.md gives each section byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..constants import CHUNK
from ..errors import ContextFull, SnapshotError, SnapshotMismatch
from ..host.heap import PageHeap
from ..host.image import PageImage
from ..pool.page_table import ANY, PageTableState
from ..pool.plan import ABSENT
from ..state.blob import Blob
from ..state.session import DrafterState, Origin, PolicyState, SavedDraft, SessionLimits, SessionState, TokenAlignment
from ..state.statistics import Replay, Statistics
from ..threads import done
from .container import Container, Writer
from .fingerprint import Fingerprint

# --- facts of the directory, each checked before it is used


LARGEST = 2**31 - 1


def count(container: Container, name: str, *, most: int = LARGEST, least: int = 0) -> int:
    """Return a whole number from `least` to `most`. SnapshotError for anything else."""
    value = container.facts.get(name)
    if type(value) is not int or not least <= value <= most:
        raise container.contradiction(name)
    return value


def fact(container: Container, name: str, kind: type) -> Any:
    """Return a value of exactly this type. SnapshotError for anything else."""
    value = container.facts.get(name)
    if type(value) is not kind:
        raise container.contradiction(name)
    return value


def _parts(container: Container, name: str, most: int) -> list[Container]:
    """Return the parts of which a list of facts tells. SnapshotError if that is none, or has more than `most`."""
    facts = container.facts.get(name, [])
    if not isinstance(facts, list) or len(facts) > most or not all(isinstance(one, dict) for one in facts):
        raise container.contradiction(name)
    return [container.part(f"{name} {number} ", one) for number, one in enumerate(facts)]


# --- the page table


LEDGER = np.dtype([("block", "<i4"), ("scored", "<u4"), ("score", "<f8"), ("last_use", "<u8")])
"""One chunk: its block in the pool, -1 if it is on the host only, -2 for any block; whether it has a score, the score,
and the clock of its last use."""


def ledger_rows(table: PageTableState) -> npt.NDArray[np.void]:
    """Return a table as it is written."""
    rows = np.zeros(len(table.blocks), LEDGER)
    rows["block"] = table.blocks
    rows["last_use"] = table.last_use
    if table.scores is not None:
        scored = min(len(table.scores), len(rows))
        rows["scored"][:scored] = 1
        rows["score"][:scored] = table.scores[:scored]
    return rows


def read_ledger(container: Container, length: int) -> PageTableState:
    """Return the table of a text of `length` tokens. SnapshotError if it is impossible."""
    rows = container.section("ledger").array(LEDGER, most=-(-length // CHUNK))
    if len(rows) != -(-length // CHUNK):
        raise container.contradiction("ledger")
    blocks, uses, clock = rows["block"].tolist(), rows["last_use"].tolist(), count(container, "clock")
    resident = [block for block in blocks if block not in (ABSENT, ANY)]
    scored = int(rows["scored"].sum(dtype=np.int64))
    pins = fact(container, "pins", list)
    sound = (
        all(block >= 0 for block in resident)
        and len(set(resident)) == len(resident)
        and max(uses, default=0) <= clock
        and np.array_equal(rows["scored"], np.arange(len(rows)) < scored)
        and all(type(pin) is int and 0 <= pin <= LARGEST for pin in pins)
    )
    if not sound:
        raise container.contradiction("ledger")
    return PageTableState(
        blocks=blocks, last_use=uses, clock=clock, settled=fact(container, "settled", bool), pins=frozenset(pins),
        scores=rows["score"][:scored].copy() if scored else None,
    )  # fmt: skip


# --- how the ends of known prompts are replayed


FOUND = "found"
MAX_FOUND = 16
"""In a file. A text keeps fewer today (sequence/scoring.py); a later build may keep more."""

MAX_TOKENS = 1 << 16
"""Of one step."""


def write_replays(writer: Writer, found: Sequence[Replay]) -> list[dict[str, Any]]:
    """Write a part for each, and return the facts of all."""
    facts = []
    for number, one in enumerate(found):
        with writer.part(f"{FOUND} {number} "):
            writer.section("tokens", one.tokens.astype("<i4"))
            writer.section("ledger", ledger_rows(one.table))
            if one.ranking is not None:
                writer.section("ranking", one.ranking.astype("<f8"))
        table = one.table
        facts.append({
            "start": one.start, "rebuild": one.rebuild, "due": one.due,
            "clock": table.clock, "settled": table.settled, "pins": sorted(table.pins),
        })  # fmt: skip
    return facts


def _read_replay(part: Container, length: int) -> Replay:
    start = count(part, "start", most=length)
    tokens = part.section("tokens").array("<i4", most=MAX_TOKENS).astype(np.int32, copy=False)
    ranking = None
    if "ranking" in part:
        ranking = part.section("ranking").array("<f8", most=(start + len(tokens)) // CHUNK).copy()
    table = replace(read_ledger(part, start), pins=frozenset())  # pins are of a request
    rebuild, due = fact(part, "rebuild", bool), fact(part, "due", bool)
    return Replay(start=start, tokens=tokens, table=table, rebuild=rebuild, ranking=ranking, due=due)


# --- the memory of drafters


SPECULATION = "speculation"
MAX_DRAFTS = 16


def write_drafts(writer: Writer, saved: Sequence[SavedDraft]) -> list[dict[str, Any]]:
    """Write a part for each, and return the facts of all."""
    facts = []
    for number, one in enumerate(saved):
        with writer.part(f"{SPECULATION} {number} "):
            writer.section("context", one.context.read())
            writer.section("rows", one.rows.read())
        origin = one.origin
        facts.append({
            "name": origin.name, "model": origin.model, "window": origin.window, "types": list(origin.types),
            "length": one.length, "first": one.first, "end": one.end,
        })  # fmt: skip
    return facts


def _read_draft(part: Container, length: int) -> SavedDraft:
    """Return the draft of a text of `length` tokens. Its sections are read when a drafter uses them."""
    drafted = count(part, "length", most=length)
    end = count(part, "end", most=drafted)
    types = fact(part, "types", list)
    if [type(x) for x in types] != [int, int]:
        raise part.contradiction("types")
    name, model, window = fact(part, "name", str), fact(part, "model", str), count(part, "window")
    return SavedDraft(
        origin=Origin(name, model, window, (types[0], types[1])), length=drafted, first=count(part, "first", most=end),
        end=end, context=part.section("context"), rows=part.section("rows"),
    )  # fmt: skip


# --- whole sessions


KIND = "snapshot"
DRAFTER = "drafter "

ANY_TAU = 64
"""Tokens between two reselections: earlier versions want a number, and this one counts anew."""

MAX_PENDING = 8
MAX_CHECKPOINTS = 1024
MAX_LAYOUT = 1 << 20
MAX_SPELLED = 64
"""Maximum tokens of a drafter for each token of its target, on average."""


def write(
    saved: SessionState, stream: BinaryIO, fingerprint: Fingerprint, settings: dict[str, Any], *, compress: bool = False
) -> None:
    """Write a saved session as a snapshot. The stream is seekable and at its beginning."""
    writer = Writer(stream, compress=compress)
    # pages first: they lie where an earlier state of the text had them, so that a store keeps their bytes once
    writer.pages("pages", (saved.heap.bytes_of(page) for page in saved.pages))
    facts = write_sections(writer, saved)
    write_statistics(writer, saved, slice(None))
    reader = None if saved.policy is None else saved.policy.reader
    if reader is not None:
        facts["drafter"] = _write_reader(writer, reader)
    if saved.drafts:
        facts[SPECULATION] = write_drafts(writer, saved.drafts)
    writer.close(KIND, {**facts, "fingerprint": fingerprint, "settings": settings})


def write_sections(writer: Writer, saved: SessionState) -> dict[str, Any]:
    """Write all but page images and statistics, and return the facts for the directory."""
    table, policy = saved.table, saved.policy
    writer.section("tokens", saved.tokens.astype("<i4"))
    writer.section("ledger", ledger_rows(table))
    writer.section("state", saved.state.read())
    for pos, blob in sorted(saved.checkpoints.items()):
        writer.section(f"checkpoint {pos}", blob.read())
    write_whole(writer, saved.whole)
    writer.section("queries", saved.queries.astype("<f4"))
    if saved.logits is not None:
        writer.section("logits", saved.logits.astype("<f4"))
    facts: dict[str, Any] = {
        "length": saved.length, "clock": table.clock, "settled": table.settled, "pins": sorted(table.pins),
        "checkpoints": sorted(saved.checkpoints), "queries_from": saved.queries_valid_from, "rebuild": saved.rebuild,
        "seed": saved.seed, "policy": None,
    }  # fmt: skip
    if policy is not None:
        for i, scores in enumerate(policy.pending):
            writer.section(f"look {i}", np.empty(0) if scores is None else scores.astype("<f8"))
        facts["policy"] = {
            "name": policy.name, "tau": ANY_TAU, "since_look": policy.since_score,
            "since_reselect": policy.since_reselect, "due": policy.due, "looks": len(policy.pending),
            FOUND: write_replays(writer, policy.found),
        }  # fmt: skip
    return facts


def read(container: Container, fingerprint: Fingerprint, heap: PageHeap, limits: SessionLimits) -> SessionState:
    """Return a saved session whose page images are still in the file.

    SnapshotError unless it is a sound snapshot, SnapshotMismatch for another model, ContextFull for a longer text.
    """
    if container.kind != KIND:
        raise SnapshotError(f"{container.source.name} is no snapshot but a {container.kind!r}")
    compare(container, fingerprint)
    length = count(container, "length")
    if length > limits.n_ctx:
        raise ContextFull(f"the saved text has {length} tokens, the context window {limits.n_ctx}")
    saved = _read_with_pages(container, heap, limits)
    if saved.policy is not None and "statistics" in container:
        read_rows = partial(read_statistics, container, saved.length // CHUNK, heap.page_bytes)
        saved.policy.statistics = _beside(read_rows)
    if saved.policy is not None and container.facts.get("drafter") is not None:
        saved.policy.reader = _read_reader(container, saved.length)
    saved.drafts = [_read_draft(part, saved.length) for part in _parts(container, SPECULATION, MAX_DRAFTS)]
    return saved


def _write_reader(writer: Writer, reader: DrafterState) -> dict[str, Any]:
    """Write the part of a policy's drafter, and return its facts."""
    with writer.part(DRAFTER):
        writer.section("text", reader.text.astype("<i4"))
        if reader.alignment is not None:
            writer.section("ends", reader.alignment.ends.astype("<i8"))
            writer.section("drafted ends", reader.alignment.drafted_ends.astype("<i8"))
        session = reader.session
        assert isinstance(session, SessionState), "what is written is in memory"
        facts = write_sections(writer, session)
        writer.pages("pages", (session.heap.bytes_of(page) for page in session.pages))
    settled = None if reader.alignment is None else reader.alignment.settled
    return {**facts, "source": reader.source, "base": reader.base, "bridge": settled}


def _read_reader(container: Container, length: int) -> DrafterState:
    """Return the drafter's part, for a text of `length` tokens. Its session is read when the drafter is loaded."""
    facts = container.facts["drafter"]
    if not isinstance(facts, dict):
        raise container.contradiction("drafter")
    part = container.part(DRAFTER, facts)
    most = MAX_SPELLED * (length + 1)
    alignment = None
    if facts.get("bridge") is not None:
        alignment = TokenAlignment(
            ends=part.section("ends").array("<i8", most=length).astype(np.int64),
            drafted_ends=part.section("drafted ends").array("<i8", most=most).astype(np.int64),
            settled=count(part, "bridge"),
        )
    return DrafterState(
        source=fact(part, "source", str), text=part.section("text").array("<i4", most=most).astype(np.int32),
        base=count(part, "base"), alignment=alignment, session=partial(_read_with_pages, part),
    )  # fmt: skip


def _read_with_pages(container: Container, heap: PageHeap, limits: SessionLimits) -> SessionState:
    saved = read_sections(container, heap, limits)
    stored = container.pages("pages", heap.page_bytes, count=len(saved.table.blocks))
    saved.pages = [PageImage(source=page) for page in stored]
    return saved


def compare(container: Container, fingerprint: Fingerprint) -> None:
    """Raise SnapshotMismatch at the first fact that differs."""
    theirs = container.facts.get("fingerprint")
    if not isinstance(theirs, dict):
        raise SnapshotError(f"{container.source.name} does not say what model it belongs to")
    for field, value in fingerprint.items():
        if theirs.get(field) != value:
            raise SnapshotMismatch(container.source.name, field, theirs.get(field), value)


def read_sections(container: Container, heap: PageHeap, limits: SessionLimits) -> SessionState:
    """Return all but page images and statistics. SnapshotError if they contradict each other.

    Queries of another number are those of another policy, and are left out.
    """
    length, n_vocab = count(container, "length", most=limits.n_ctx), limits.n_vocab
    tokens = container.section("tokens").array("<i4", most=length).astype(np.int32, copy=False)
    if length != len(tokens) or (length and tokens.max() >= n_vocab):
        raise container.contradiction("tokens")
    section, queries = container.section("queries"), np.empty(0, np.float32)
    if section.size % 4:
        raise container.contradiction("queries")
    if section.size == 4 * limits.queries:
        queries = section.array("<f4").astype(np.float32, copy=False)
    return SessionState(
        tokens=tokens, whole=read_whole(container, length), table=read_ledger(container, length), heap=heap, pages=[],
        state=container.section("state"), checkpoints=_checkpoints(container, length), queries=queries,
        queries_valid_from=count(container, "queries_from", most=length), policy=_policy(container, length),
        logits=_logits(container, n_vocab),
        rebuild="rebuild" in container.facts and bool(fact(container, "rebuild", bool)),
        seed=count(container, "seed", most=2**63, least=-(2**63)),  # -1 asks for a random one
    )  # fmt: skip


# --- parts


def write_whole(writer: Writer, whole: npt.NDArray[np.bool_]) -> None:
    writer.section("whole", np.packbits(whole))


def read_whole(container: Container, length: int) -> npt.NDArray[np.bool_]:
    """Return which tokens have seen the whole text before them; none for a file of an older build."""
    if "whole" not in container:
        return np.zeros(length, np.bool_)
    bits = container.section("whole").array("u1", most=-(-length // 8))
    if len(bits) != -(-length // 8):
        raise container.contradiction("whole")
    return np.unpackbits(bits, count=length).astype(np.bool_)


def _checkpoints(container: Container, length: int) -> dict[int, Blob]:
    positions = fact(container, "checkpoints", list)
    sound = all(type(pos) is int and 0 < pos <= length for pos in positions)
    if not sound or len(positions) > MAX_CHECKPOINTS:
        raise container.contradiction("checkpoints")
    return {pos: container.section(f"checkpoint {pos}") for pos in positions}


def _policy(container: Container, length: int) -> PolicyState | None:
    facts = container.facts.get("policy")
    if facts is None:
        return None
    if not isinstance(facts, dict) or not isinstance(facts.get("name"), str):
        raise container.contradiction("policy")
    part = container.part("", facts)
    since_score, since_reselect, due = (
        count(part, name, least=-LARGEST) for name in ("since_look", "since_reselect", "due")
    )
    return PolicyState(
        name=facts["name"], since_score=since_score, since_reselect=since_reselect, due=due,
        pending=[_scores(part, i, length // CHUNK) for i in range(count(part, "looks", most=MAX_PENDING))],
        statistics=done(None), found=[_read_replay(one, length) for one in _parts(part, FOUND, MAX_FOUND)],
    )  # fmt: skip


def _scores(container: Container, number: int, chunks: int) -> npt.NDArray[np.float32] | None:
    scores = container.section(f"look {number}").array("<f8", most=chunks)
    return scores.astype(np.float32) if len(scores) else None


def write_statistics(writer: Writer, saved: SessionState, chunks: slice) -> None:
    """Write the policy's statistics of these chunks, if it keeps any."""
    statistics = None if saved.policy is None else saved.policy.statistics.result()
    if statistics is not None and len(statistics.rows[chunks]):
        writer.section("statistics", np.concatenate(statistics.rows[chunks]))
        writer.section("layout", statistics.name.encode())


def read_statistics(container: Container, chunks: int, page_bytes: int) -> Statistics:
    """Return the statistics of `chunks` chunks, at most as large as their images."""
    rows = container.section("statistics").array(np.uint8, most=chunks * page_bytes)
    if chunks == 0 or len(rows) % chunks:
        raise container.contradiction("statistics")
    name = container.section("layout").array(np.uint8, most=MAX_LAYOUT) if "layout" in container else rows[:0]
    return Statistics(name.tobytes().decode("utf-8", "replace"), list(rows.reshape(chunks, len(rows) // chunks)))


def _logits(container: Container, n_vocab: int) -> npt.NDArray[np.float32] | None:
    if "logits" not in container:
        return None
    logits = container.section("logits").array("<f4", most=n_vocab).astype(np.float32, copy=False)
    if len(logits) != n_vocab:
        raise container.contradiction("logits")
    return logits


def _beside(work: Callable[[], Statistics]) -> Future[Statistics | None]:
    """Do this on another thread: statistics of a long text are as large as its resident chunks."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="kvflash-statistics")
    future: Future[Statistics | None] = executor.submit(work)
    executor.shutdown(wait=False)
    return future
