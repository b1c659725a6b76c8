"""Snapshots of sessions on the fake engine, as bytes, and a policy whose scores tell one text from another."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.policy.base import Floats, Keys, Rows, ScoreRequest
from kvflash_ggml.sequence import restore
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.scoring import Scoring
from kvflash_ggml.sequence.sequence import Sequence
from kvflash_ggml.snapshot import fingerprint
from kvflash_ggml.snapshot.store import SnapshotStore
from kvflash_ggml.state.statistics import RowForm
from support.fake_engine import FakeEngine, make_session

N_VOCAB = 1000


class Digest:
    """Scores come from the keys, the newest queries and the text: any of them that differs gives other scores."""

    name = "digest"
    query_rows = 4

    def open(self, keys: Keys, n_chunks: int) -> None:
        self._keys = keys
        self._index = np.zeros((n_chunks, 1), np.uint32)

    def seal(self, chunk: int) -> None:
        (keys,) = self._keys.read(chunk)
        self._index[chunk] = zlib.crc32(keys.astype(np.uint8)[:, 0, :4].tobytes())  # of the tokens: not of the serial

    def truncate(self, n_chunks: int) -> None: ...

    def score(self, request: ScoreRequest) -> Floats | None:
        asked = zlib.crc32(request.queries.tobytes(), zlib.crc32(request.tokens.tobytes()))
        return np.array([zlib.crc32(row.tobytes(), asked) % 997 / 100 for row in self._index[: request.n_chunks]], "f4")

    @property
    def layout(self) -> RowForm:
        return RowForm("crc32", 4)

    def dump(self, n_chunks: int) -> Rows:
        return list(self._index[:n_chunks].copy().view(np.uint8))

    def load(self, rows: Rows) -> None:
        for chunk, row in enumerate(rows):
            self._index[chunk].view(np.uint8)[:] = row

    @property
    def index_bytes(self) -> int:
        return int(self._index.nbytes)

    def close(self) -> None: ...


def make(n_slots: int = 448, n_ctx: int = 4096, *, scorer: Any = Digest, **info: Any) -> Sequence:
    """A session on an engine of its own."""
    policy = scorer and scorer()
    engine = FakeEngine(n_slots, 64, **({"query_rows": 4} if policy else {}), **info)
    config = KVFlashConfig(tail=2, tau=16)
    return make_session(engine, config, n_ctx=n_ctx, n_batch=64, n_ubatch=64, scorer=policy)


@contextmanager
def making() -> Iterator[Callable[..., Sequence]]:
    """Makes sessions; all are closed at the end, and nobody holds a page then."""
    made: list[Sequence] = []

    def build(*args: Any, **kwargs: Any) -> Sequence:
        made.append(make(*args, **kwargs))
        return made[-1]

    yield build
    for session in made:
        session.close()
        assert not session.engine.slabs  # type: ignore[attr-defined]


def text(count: int, seed: int = 1) -> np.ndarray[Any, Any]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, N_VOCAB, count, dtype=np.int32)


def decode(session: Sequence, count: int) -> None:
    """Generate, as it were: one token after the other."""
    for token in text(count, 2):
        extend(session, np.array([token], np.int32))


def snapshot_store(session: Sequence) -> SnapshotStore:
    return SnapshotStore(session, fingerprint=lambda: fingerprint.of_engine(session.engine), n_vocab=N_VOCAB)


def dump(session: Sequence, length: int | None = None) -> bytes:
    """A snapshot as bytes."""
    return snapshot_store(session).dump(restore.state(session, length))


def save(session: Sequence, path: Path, *, compress: bool = False, length: int | None = None) -> int:
    """A snapshot as a file; its size."""
    each = snapshot_store(session)
    try:
        return each.save(restore.state(session, length), path, compress=compress).result()
    finally:
        each.close()


def load(session: Sequence, source: bytes | Path) -> None:
    """Put a snapshot in place of what the session holds."""
    saved = snapshot_store(session).load(source)
    try:
        restore.load(session, saved)
    finally:
        saved.release()


def settle_scores(session: Sequence) -> None:
    """Let the scoring thread finish, so that nothing changes while it is looked at."""
    if session.scoring is not None:
        session.scoring._run(lambda: None).result()


def clock(scoring: Scoring) -> tuple[int, ...]:
    saved = scoring.blank_state()
    scoring.selection.write(saved)
    return scoring.selection.interval, saved.since_score, saved.since_reselect, saved.due


def seen(session: Sequence) -> tuple[Any, ...]:
    """Everything that a refused snapshot must leave as it was."""
    settle_scores(session)
    engine: Any = session.engine
    table, scoring = session.table, session.scoring
    return (
        session.tokens.tolist(),
        (copy.deepcopy(table.layout), sorted(table.pins)),
        None if session.relevance.ranking is None else session.relevance.ranking.tobytes(),
        sorted(session.store),
        engine.cell_pos.tolist(),
        engine.settled()[0].tobytes(),
        engine.get_state(seq=0),
        engine.queries.tobytes(),
        session.queries.valid_from,
        sorted(session.checkpoints.state()),
        session.mask.slot_pos.tolist(),
        scoring and (clock(scoring), len(scoring.pending)),
    )
