"""A saved session as a container, and back. What each section means, byte by byte: docs/snapshot-format.md."""

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
from ..state.session import (
    Blob,
    DrafterState,
    Limits,
    Origin,
    PolicyState,
    Replay,
    SavedDraft,
    SessionState,
    Statistics,
    TokenAlignment,
    done,
)
from .container import Container, Writer
from .fingerprint import Fingerprint

# --- what the directory says, believed only if it can be


LARGEST = 2**31 - 1


def count(container: Container, name: str, *, most: int = LARGEST) -> int:
    """A whole number from 0 to `most`."""
    value = container.facts.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise container.contradiction(name)
    return value


def fact(container: Container, name: str, kind: type) -> Any:
    """A value of this very type."""
    value = container.facts.get(name)
    if type(value) is not kind:
        raise container.contradiction(name)
    return value


# --- the page table


LEDGER = np.dtype([("block", "<i4"), ("scored", "<u4"), ("score", "<f8"), ("last_use", "<u8")])
"""One chunk: its block in the pool, -1 if it is on the host only, -2 for any block; whether it has a score, the score,
and the clock of its last use."""


def ledger_rows(table: PageTableState) -> npt.NDArray[np.void]:
    """A table as it is written."""
    rows = np.zeros(len(table.blocks), LEDGER)
    rows["block"] = table.blocks
    rows["last_use"] = table.last_use
    if table.scores is not None:
        known = min(len(table.scores), len(rows))
        rows["scored"][:known] = 1
        rows["score"][:known] = table.scores[:known]
    return rows


def read_ledger(container: Container, length: int) -> PageTableState:
    """The table of a text of `length` tokens. SnapshotError if there can be none such."""
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
        blocks=blocks,
        last_use=uses,
        clock=clock,
        settled=fact(container, "settled", bool),
        pins=frozenset(pins),
        scores=rows["score"][:scored].copy() if scored else None,
    )


# --- how the ends of known prompts are replayed


FOUND = "found"
MAX_FOUND = 16
"""In a file: more than a text keeps today (sequence/scoring.py), so that one that keeps more could be read here."""

MAX_TOKENS = 1 << 16
"""Of one step."""


def write_replays(writer: Writer, found: Sequence[Replay]) -> list[dict[str, Any]]:
    """A part for each, in sections of its own. Returns the facts."""
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


def read_replays(container: Container, policy: dict[str, Any], length: int) -> list[Replay]:
    """Those of a text of so many tokens; none in a file without. SnapshotError if they cannot be as they say."""
    facts = policy.get(FOUND, [])
    if not isinstance(facts, list) or len(facts) > MAX_FOUND or not all(isinstance(one, dict) for one in facts):
        raise container.contradiction(FOUND)
    return [_read_replay(container.part(f"{FOUND} {number} ", one), length) for number, one in enumerate(facts)]


def _read_replay(part: Container, length: int) -> Replay:
    start = count(part, "start", most=length)
    tokens = part.section("tokens").array("<i4", most=MAX_TOKENS).astype(np.int32, copy=False)
    ranking = None
    if "ranking" in part:
        ranking = part.section("ranking").array("<f8", most=(start + len(tokens)) // CHUNK).copy()
    return Replay(
        start=start,
        tokens=tokens,
        table=replace(read_ledger(part, start), pins=frozenset()),  # these are of a request
        rebuild=fact(part, "rebuild", bool),
        ranking=ranking,
        due=fact(part, "due", bool),
    )


# --- what drafters knew of the text


SPECULATION = "speculation"
MAX_DRAFTS = 16


def write_drafts(writer: Writer, saved: Sequence[SavedDraft]) -> list[dict[str, Any]]:
    """A part for each, in sections of its own. Returns the facts."""
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


def read_drafts(container: Container, length: int) -> list[SavedDraft]:
    """The parts of a text of so many tokens; none in a file without. SnapshotError if they cannot be as they say.

    Their sections are read when a drafter adopts them.
    """
    facts = container.facts.get(SPECULATION, [])
    if not isinstance(facts, list) or len(facts) > MAX_DRAFTS:
        raise container.contradiction(SPECULATION)
    return [_read_draft(container, number, fact, length) for number, fact in enumerate(facts)]


def _read_draft(container: Container, number: int, facts: object, length: int) -> SavedDraft:
    if not isinstance(facts, dict):
        raise container.contradiction(SPECULATION)
    name, model, types = (facts.get(key) for key in ("name", "model", "types"))
    told, first, end, window = (facts.get(key) for key in ("length", "first", "end", "window"))
    whole = [x for x in (told, first, end, window) if type(x) is int and 0 <= x <= LARGEST]
    sound = isinstance(name, str) and isinstance(model, str) and len(whole) == 4
    if not sound or not whole[1] <= whole[2] <= whole[0] <= length:
        raise container.contradiction(SPECULATION)
    if not isinstance(types, list) or [type(x) for x in types] != [int, int]:
        raise container.contradiction(SPECULATION)
    part = container.part(f"{SPECULATION} {number} ", facts)
    return SavedDraft(
        origin=Origin(str(name), str(model), whole[3], (types[0], types[1])),
        length=whole[0],
        first=whole[1],
        end=whole[2],
        context=part.section("context"),
        rows=part.section("rows"),
    )


# --- the whole of it


KIND = "snapshot"
DRAFTER = "drafter "

MAX_LOOKS = 8
MAX_CHECKPOINTS = 1024
MAX_LAYOUT = 1 << 20
MAX_SPELLED = 64
"""Tokens of a drafter for one of the target's, on average."""


def write(
    saved: SessionState, stream: BinaryIO, fingerprint: Fingerprint, settings: dict[str, Any], *, compress: bool = False
) -> None:
    """Write a saved session as a snapshot. The stream is seekable and at its beginning."""
    writer = Writer(stream, compress=compress)
    # first: so they lie where they lay in an earlier state of the text, and a store has their bytes once
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
    """Everything but the chunks' images and statistics. Returns the facts for the directory."""
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
        "length": saved.length,
        "clock": table.clock,
        "settled": table.settled,
        "pins": sorted(table.pins),
        "checkpoints": sorted(saved.checkpoints),
        "queries_from": saved.queries_valid_from,
        "rebuild": saved.rebuild,
        "seed": saved.seed,
        "policy": None,
    }
    if policy is not None:
        for i, scores in enumerate(policy.looks):
            writer.section(f"look {i}", np.empty(0) if scores is None else scores.astype("<f8"))
        facts["policy"] = {
            "name": policy.name,
            "tau": policy.tau,
            "since_look": policy.since_look,
            "since_reselect": policy.since_reselect,
            "due": policy.due,
            "looks": len(policy.looks),
            FOUND: write_replays(writer, policy.found),
        }
    return facts


def read(container: Container, fingerprint: Fingerprint, heap: PageHeap, limits: Limits) -> SessionState:
    """A saved session whose page images are still in the file. SnapshotError unless the file is one of this model.

    ContextFull if it is longer than the context.
    """
    if container.kind != KIND:
        raise SnapshotError(f"{container.source.name} is no snapshot but a {container.kind!r}")
    compare(container, fingerprint)
    length = count(container, "length")
    if length > limits.n_ctx:
        raise ContextFull(f"the saved text has {length} tokens, the context window {limits.n_ctx}")
    saved = read_sections(container, heap, limits)
    stored = container.pages("pages", heap.page_bytes, count=len(saved.table.blocks))
    saved.pages = [PageImage(source=page) for page in stored]
    if saved.policy is not None and "statistics" in container:
        read_rows = partial(read_statistics, container, saved.length // CHUNK, heap.page_bytes)
        saved.policy.statistics = _beside(read_rows)
    if saved.policy is not None and container.facts.get("drafter") is not None:
        saved.policy.reader = _read_reader(container, saved.length)
    saved.drafts = read_drafts(container, saved.length)
    return saved


def _write_reader(writer: Writer, reader: DrafterState) -> dict[str, Any]:
    """A drafter's part, in sections of its own. Returns its facts."""
    with writer.part(DRAFTER):
        writer.section("text", reader.text.astype("<i4"))
        if reader.bridge is not None:
            writer.section("ends", reader.bridge.ends.astype("<i8"))
            writer.section("drafted ends", reader.bridge.drafted_ends.astype("<i8"))
        session = reader.session
        assert isinstance(session, SessionState), "what is written is in memory"
        facts = write_sections(writer, session)
        writer.pages("pages", (session.heap.bytes_of(page) for page in session.pages))
    settled = None if reader.bridge is None else reader.bridge.settled
    return {**facts, "source": reader.source, "base": reader.base, "bridge": settled}


def _read_reader(container: Container, length: int) -> DrafterState:
    """A drafter's part, for a text of `length` tokens. Its session is read when the drafter is loaded."""
    facts = container.facts["drafter"]
    if not isinstance(facts, dict):
        raise container.contradiction("drafter")
    part = container.part(DRAFTER, facts)
    most = MAX_SPELLED * (length + 1)
    bridge = None
    if facts.get("bridge") is not None:
        bridge = TokenAlignment(
            ends=part.section("ends").array("<i8", most=length).astype(np.int64),
            drafted_ends=part.section("drafted ends").array("<i8", most=most).astype(np.int64),
            settled=count(part, "bridge"),
        )
    return DrafterState(
        source=fact(part, "source", str),
        text=part.section("text").array("<i4", most=most).astype(np.int32),
        base=count(part, "base"),
        bridge=bridge,
        session=partial(_open_reader, part),
    )


def _open_reader(part: Container, heap: PageHeap, limits: Limits) -> SessionState:
    session = read_sections(part, heap, limits)
    session.pages = [
        PageImage(source=page) for page in part.pages("pages", heap.page_bytes, count=len(session.table.blocks))
    ]
    return session


def compare(container: Container, fingerprint: Fingerprint) -> None:
    """SnapshotMismatch at the first fact that differs."""
    theirs = container.facts.get("fingerprint")
    if not isinstance(theirs, dict):
        raise SnapshotError(f"{container.source.name} does not say what model it belongs to")
    for field, value in fingerprint.items():
        if theirs.get(field) != value:
            raise SnapshotMismatch(container.source.name, field, theirs.get(field), value)


def read_sections(container: Container, heap: PageHeap, limits: Limits) -> SessionState:
    """Everything but the chunks' images and statistics, checked against itself and read only if it can be.

    Queries of another number, as another policy has them, are of no use and left out.
    """
    length, n_vocab = count(container, "length", most=limits.n_ctx), limits.n_vocab
    tokens = container.section("tokens").array("<i4", most=length).astype(np.int32, copy=False)
    if length != len(tokens) or (length and tokens.max() >= n_vocab):
        raise container.contradiction("tokens")
    queries = container.section("queries")
    if queries.size % 4:
        raise container.contradiction("queries")
    return SessionState(
        tokens=tokens,
        whole=read_whole(container, length),
        table=read_ledger(container, length),
        heap=heap,
        pages=[],
        state=container.section("state"),
        checkpoints=_checkpoints(container, length),
        queries=(
            queries.array("<f4").astype(np.float32, copy=False)
            if queries.size == 4 * limits.queries
            else np.empty(0, np.float32)
        ),
        queries_valid_from=count(container, "queries_from", most=length),
        policy=_policy(container, length),
        logits=_logits(container, n_vocab),
        rebuild="rebuild" in container.facts and bool(fact(container, "rebuild", bool)),
        seed=_seed(container),
    )


# --- parts


def write_whole(writer: Writer, whole: npt.NDArray[np.bool_]) -> None:
    writer.section("whole", np.packbits(whole))


def read_whole(container: Container, length: int) -> npt.NDArray[np.bool_]:
    """Which of the first tokens have seen the whole text before them; none where that was not noted."""
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
    numbers = [facts.get(key) for key in ("tau", "since_look", "since_reselect", "due", "looks")]
    whole = [x for x in numbers if type(x) is int and -LARGEST <= x <= LARGEST]
    if len(whole) != len(numbers) or whole[0] < 1 or not 0 <= whole[4] <= MAX_LOOKS:
        raise container.contradiction("policy")
    tau, since_look, since_reselect, due, looks = whole
    return PolicyState(
        name=facts["name"],
        tau=tau,
        since_look=since_look,
        since_reselect=since_reselect,
        due=due,
        looks=[_look(container, i, length // CHUNK) for i in range(looks)],
        statistics=done(None),
        found=read_replays(container, facts, length),
    )


def _look(container: Container, number: int, chunks: int) -> npt.NDArray[np.float32] | None:
    scores = container.section(f"look {number}").array("<f8", most=chunks)
    return scores.astype(np.float32) if len(scores) else None


def write_statistics(writer: Writer, saved: SessionState, chunks: slice) -> None:
    """What the policy keeps of these chunks, if it keeps anything."""
    statistics = None if saved.policy is None else saved.policy.statistics.result()
    if statistics is not None and len(statistics.rows[chunks]):
        writer.section("statistics", np.concatenate(statistics.rows[chunks]))
        writer.section("layout", statistics.name.encode())


def read_statistics(container: Container, chunks: int, page_bytes: int) -> Statistics:
    """The statistics of so many chunks, which cannot be larger than what they are about."""
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


def _seed(container: Container) -> int:
    seed: int = fact(container, "seed", int)
    if abs(seed) > 2**63:  # -1 asks for a random one
        raise container.contradiction("seed")
    return seed


def _beside(work: Callable[[], Statistics]) -> Future[Statistics | None]:
    """On a thread of its own: statistics of a long text are as large as what is resident."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="kvflash-statistics")
    future: Future[Statistics | None] = executor.submit(work)
    executor.shutdown(wait=False)
    return future
