"""A session on an engine of numpy bytes: every byte is where the page table says."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.fake_engine import PAGE_BYTES, ROW_BYTES, Faults
from support.fake_session import (
    FaultyFile,
    accept,
    check,
    check_protected,
    close,
    ints,
    make,
    settle_ahead,
    small_slabs,
    some,
)
from support.saving import Digest, dump, load, seen, settle_scores, snapshot_store

from kvflash_ggml.constants import CHUNK, POOL_STEP, round_up
from kvflash_ggml.errors import ConfigError, ContextFull, DecodeError, HostMemoryError, SnapshotError
from kvflash_ggml.pool.plan import ABSENT
from kvflash_ggml.sequence import restore
from kvflash_ggml.sequence.prefill import extend, rewind_to
from kvflash_ggml.sequence.sequence import Sequence
from kvflash_ggml.state.session import SessionState

ROOT = Path(__file__).parents[2]


@pytest.fixture
def world() -> Iterator[Any]:
    made: list[Sequence] = []

    def build(*args: Any, **kwargs: Any) -> Sequence:
        made.append(make(*args, **kwargs))
        return made[-1]

    with small_slabs():
        yield build
        for session in made:
            close(session)


# --- random use


@dataclass
class Saved:
    """A snapshot, and what it must bring back. whole: not cut when it was saved."""

    truth: list[bytes] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    whole: bool = True
    data: bytes = b""
    frozen: SessionState | None = None


PLACES = st.integers(0, 1 << 20)
"""A place of the text, modulo its length: that depends on threads where memory ends while one of them has a lease."""


class SessionMachine(RuleBasedStateMachine):
    KINDS: tuple[dict[str, Any], ...] = ({}, {"alibi": True}, {"mask_f32": True})
    SCORER: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(small_slabs())
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.session: Sequence | None = None

    @initialize(
        blocks=st.integers(6, 12),
        n_ctx=st.sampled_from([512, 1300, 2048]),
        n_ubatch=st.sampled_from([32, 64, 100, 300]),
        n_batch=st.sampled_from([100, 256, 512]),
        sinks=st.integers(0, 2),
        tail=st.integers(1, 2),
        pins=st.sampled_from([(), ((130, 140),), ((700, 704),)]),
        kind=st.integers(0, 2),
        timing=st.sampled_from(["lazy", "eager", "random"]),
        limit=st.sampled_from([None, 1, 2, 4, 7]),
        checkpoints=st.integers(0, 3),
        stage=st.sampled_from([0, 0, 1, 3, 8]),
        answer=st.sampled_from(["pool", "exact"]),
        seed=st.integers(0, 99),
    )
    def begin(self, **choice: Any) -> None:
        blocks, seed = choice["blocks"], choice["seed"]
        self.random = random.Random(seed)
        order = list(range(blocks))
        self.random.shuffle(order)
        limit = choice["limit"]
        config = {name: choice[name] for name in ("sinks", "tail", "pins", "checkpoints")}
        if blocks - config["sinks"] - config["tail"] - 2 < 1:
            config["pins"] = ()
        if choice["stage"]:
            config |= {"answer": choice["answer"]}
        stage = choice["stage"] and round_up((blocks + 4) * CHUNK, POOL_STEP) + choice["stage"] * POOL_STEP
        if limit is not None:
            config |= {"host_limit": limit * PAGE_BYTES, "spill": self.folder}

        def build(timing: str, more: int = 0) -> Sequence:
            session = make(
                (blocks + more) * CHUNK,
                n_ctx=choice["n_ctx"],
                n_batch=choice["n_batch"],
                n_ubatch=min(choice["n_ubatch"], choice["n_batch"]),
                order=None if more else order,
                timing=timing,
                config=config,
                scorer=self.SCORER and self.SCORER(),
                stage=stage,
                **self.KINDS[choice["kind"]],
            )
            session.checkpoints._step = 200
            return session

        self.build = build
        self.session = build(choice["timing"])
        self.blocks = blocks
        self.tokens: list[int] = []
        self.saved: Saved | None = None
        self.frozen: list[Saved] = []

    def text(self, count: int) -> np.ndarray[Any, Any]:
        count = max(1, min(count, self.session.n_ctx - len(self.tokens)))
        return np.array([self.random.randrange(1000) for _ in range(count)], np.int32)

    def full(self) -> bool:
        return len(self.tokens) >= self.session.n_ctx

    def settle(self, new: list[int], before: int | None = None) -> None:
        """The session may hold less than what was asked, but a prefix of it."""
        left = self.session.length
        assert left <= len(new)
        self.tokens = new[:left]
        self.check()

    def check(self) -> None:
        check(self.session, self.tokens, [saved.frozen for saved in self.frozen])

    # --- what may happen

    @rule(count=st.integers(1, 400), output_all=st.booleans())
    def extend(self, count: int, output_all: bool) -> None:
        if self.full():
            with pytest.raises(ContextFull):
                extend(self.session, ints(1))
            return
        new = self.text(count)
        calls: list[tuple[int, int]] = []
        extend(self.session, new, output_all=output_all, progress=lambda done, total: calls.append((done, total)))
        if len(new) > 1:
            assert calls[-1] == (len(new), len(new))
        self.tokens += new.tolist()
        self.check()
        check_protected(self.session)

    @rule(count=st.integers(1, 80))
    def decode(self, count: int) -> None:
        for _ in range(count):
            if not self.full():
                new = self.text(1)
                extend(self.session, new)
                self.tokens += new.tolist()
        self.check()

    @rule(at=PLACES)
    def truncate(self, at: int) -> None:
        length = at % (len(self.tokens) + 1)
        sure = self.session.can_truncate(length)
        left = self.session.truncate(length)
        assert left <= length
        assert left == length or not sure
        assert left == self.session.length
        self.settle(self.tokens[:left])

    @rule(at=PLACES)
    def rewind(self, at: int) -> None:
        length = at % (len(self.tokens) + 1)
        rewind_to(self.session, length)
        assert self.session.length == length
        self.settle(self.tokens[:length])

    @rule()
    def reset(self) -> None:
        self.session.reset()
        assert self.session.length == 0
        self.settle([])

    @rule(at=st.integers(0, 1500))
    def pin(self, at: int) -> None:
        with contextlib.suppress(ConfigError):
            self.session.pin_range(at, at + 70)
        self.check()

    @rule(count=st.integers(1, 12), accepted=st.integers(0, 12), interrupted=st.booleans())
    def verify(self, count: int, accepted: int, interrupted: bool) -> None:
        """Rows ahead of the text, of which the first are taken over."""
        session = self.session
        count = min(count, session.n_ubatch, session.table.room(session.length), session.n_ctx - session.length)
        if count <= 0:
            return
        new, before = self.text(count), len(self.tokens)
        session.finish(session.prepare_drafts(new, None))
        assert (session.length, session.ahead) == (before, count)
        assert max(session.store, default=-1) < before // CHUNK, "what is not accepted is kept"
        if interrupted:
            accepted = 0
            session.settle()
        else:
            accepted = min(accepted, count)
            accept(session, accepted)
        self.settle(self.tokens + new[:accepted].tolist())

    # --- what may go wrong

    @rule(
        count=st.integers(1, 400),
        step=st.integers(0, 4),
        late=st.booleans(),
        spoil=st.booleans(),
        ctrl_c=st.booleans(),
    )
    def fail_a_step(self, count: int, step: int, late: bool, spoil: bool, ctrl_c: bool) -> None:
        if self.full():
            return
        new, before = self.text(count), len(self.tokens)
        error = KeyboardInterrupt if ctrl_c else DecodeError
        self.session.engine.faults = Faults(step, lambda: error("on purpose"), late, spoil)
        try:
            extend(self.session, new)
        except error:
            assert self.session.length >= before or self.session.engine.info.recurrent
        else:
            assert self.session.length == before + len(new)
        self.session.engine.faults = Faults()
        self.settle(self.tokens + new.tolist())

    @rule(count=st.integers(1, 400), at=st.integers(1, 5))
    def interrupt(self, count: int, at: int) -> None:
        if self.full():
            return
        new, before, steps = self.text(count), len(self.tokens), []

        def progress(done: int, total: int) -> None:
            steps.append(done)
            if len(steps) == at:
                raise KeyboardInterrupt

        try:
            extend(self.session, new, progress=progress)
        except KeyboardInterrupt:
            assert self.session.length == before + steps[-1]
        self.settle(self.tokens + new.tolist())

    @rule(
        count=st.integers(1, 400),
        trouble=st.sampled_from(["alloc", "full", "half", "short", "broken"]),
    )
    def host_trouble(self, count: int, trouble: str) -> None:
        if self.full():
            return
        new, before = self.text(count), len(self.tokens)
        settle_ahead(self.session)
        self.session.engine.refuse_alloc = trouble == "alloc"
        FaultyFile.trouble = trouble
        with contextlib.suppress(HostMemoryError):
            extend(self.session, new)
        settle_ahead(self.session)
        settle_scores(self.session)
        if self.session.scoring is not None:
            with contextlib.suppress(HostMemoryError):  # a page that could not be read is told of at the next look
                self.session.scoring._raise_failure()
        self.session.engine.refuse_alloc = False
        FaultyFile.trouble = None
        assert self.session.engine.info.recurrent or self.session.length >= before
        self.settle(self.tokens + new.tolist())

    # --- save and load

    def freeze(self, length: int | None) -> Saved | None:
        session = self.session
        try:
            frozen = restore.state(session, length)
        except SnapshotError:
            assert session.engine.info.recurrent or session.engine.info.n_swa
            assert length not in (None, session.length, *session.checkpoints.state())
            return None
        assert frozen.length == (session.length if length is None else length)
        chunks = -(-frozen.length // CHUNK)
        return Saved(
            list(session.engine.truth[: frozen.length]),
            self.tokens[: frozen.length],
            [chunk.block for chunk in session.table.chunks[:chunks]],
            frozen.length == session.length,
            frozen=frozen,
        )

    @precondition(lambda self: len(self.frozen) < 3)
    @rule(at=PLACES, kept=st.booleans(), whole=st.booleans())
    def put_aside(self, at: int, kept: bool, whole: bool) -> None:
        """To be written, or restored, when the text has gone on or has been cut."""
        known = [0, *self.session.checkpoints.state(), len(self.tokens)] if kept else range(len(self.tokens) + 1)
        length = known[at % len(known)]
        saved = self.freeze(None if whole else length)
        if saved is not None:
            self.frozen.append(saved)
        self.check()

    @precondition(lambda self: self.frozen)
    @rule(at=st.integers(0, 2))
    def write(self, at: int) -> None:
        saved = self.frozen.pop(at % len(self.frozen))
        saved.data = snapshot_store(self.session).dump(saved.frozen)
        saved.frozen = None
        self.saved = saved
        self.check()

    @rule()
    def dump(self) -> None:
        saved = self.freeze(None)
        saved.data = snapshot_store(self.session).dump(saved.frozen)
        saved.frozen = None
        self.saved = saved
        self.check()

    @precondition(lambda self: self.frozen)
    @rule(at=st.integers(0, 2))
    def thaw(self, at: int) -> None:
        """Back to a text that was only put aside, which can be done again."""
        saved = self.frozen[at % len(self.frozen)]
        restore.load(self.session, saved.frozen)
        self.restored(saved)

    @precondition(lambda self: self.saved is not None)
    @rule(
        fresh=st.booleans(),
        more=st.sampled_from([0, 0, -1, 1, 30]),
        timing=st.sampled_from(["lazy", "eager", "random"]),
    )
    def load(self, fresh: bool, more: int, timing: str) -> None:
        if fresh:
            self.let_go()
            close(self.session)
            self.tokens = []
            try:
                self.session = self.build(timing, more)
            except ConfigError:
                self.session = self.build(timing)
        before = seen(self.session)
        try:
            load(self.session, self.saved.data)
        except ConfigError:  # a smaller pool cannot hold the pins
            assert seen(self.session) == before
            self.check()
            return
        self.restored(self.saved)

    def restored(self, saved: Saved) -> None:
        self.session.engine.adopt(saved.truth, saved.tokens)
        blocks, count = [chunk.block for chunk in self.session.table.chunks], self.session.table.blocks.count
        if all(block < count for block in saved.blocks) and self.session.bounded:
            assert blocks == saved.blocks
        assert self.session.bounded or ABSENT not in blocks
        self.settle(list(saved.tokens))
        assert len(self.tokens) == len(saved.tokens)

    @precondition(lambda self: self.saved is not None)
    @rule(harm=st.integers(0, 1 << 30))
    def load_damaged(self, harm: int) -> None:
        """Refused, or the damage is in a page that is not needed yet, or in no page at all."""
        data = bytearray(self.saved.data)
        data[harm % len(data)] ^= 1 << harm % 8
        before = seen(self.session)
        try:
            load(self.session, bytes(data))
        except (SnapshotError, ConfigError):
            assert seen(self.session) == before
            self.check()
            return
        for c in self.session.store:
            with contextlib.suppress(SnapshotError):
                assert self.session.store.bytes_of(c)[: (len(self.saved.tokens) - c * CHUNK) * ROW_BYTES] in (
                    b"".join(self.saved.truth[c * CHUNK : (c + 1) * CHUNK]),
                )
        load(self.session, self.saved.data)
        self.restored(self.saved)

    def let_go(self) -> None:
        for saved in self.frozen:
            saved.frozen.release()
        self.frozen.clear()

    def teardown(self) -> None:
        try:
            if self.session is not None:
                self.let_go()
                self.check()
                close(self.session)
                assert not list(self.folder.iterdir()), "something is left in the spill folder"
        finally:
            self.stack.close()


class StatefulMemoryMachine(SessionMachine):
    """The same for memories that cannot go back everywhere."""

    KINDS = ({"recurrent": True}, {"n_swa": 100}, {"n_swa": 40, "mask_f32": True})


class ScoringMachine(SessionMachine):
    """The same under a policy, whose looks are replayed, cut, saved and restored."""

    KINDS = ({}, {"asynchronous": True}, {"n_swa": 100, "asynchronous": True})
    SCORER = Digest


class ScoringStatefulMachine(SessionMachine):
    KINDS = ({"recurrent": True}, {"recurrent": True, "asynchronous": True}, {"n_swa": 100})
    SCORER = Digest


TestSession = SessionMachine.TestCase
TestStatefulSession = StatefulMemoryMachine.TestCase
TestScoringSession = ScoringMachine.TestCase
TestScoringStatefulSession = ScoringStatefulMachine.TestCase


# --- one thing at a time


def test_importing_the_session_loads_nothing_native() -> None:
    code = (
        "import sys, kvflash_ggml.sequence.sequence, kvflash_ggml.snapshot.store\n"
        "names = ['llama_cpp', 'kvflash_ggml.native._kvf', 'kvflash_ggml.native.engine']\n"
        "bad = [name for name in names if name in sys.modules]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_small_context_takes_any_protections(world: Any) -> None:
    session = world(256, n_ctx=256, config={"sinks": 1, "tail": 4, "pins": ((0, 256),)})
    tokens = some(256)
    extend(session, tokens)
    check(session, tokens.tolist())
    assert session.paging.page_outs == 0


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(128, 64), (100, 30), (512, 512), (100, 64)])
def test_a_whole_context_pool_splits_and_places_as_stock_does(world: Any, n_batch: int, n_ubatch: int) -> None:
    session = world(
        1024,
        n_ctx=1024,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        config={"tail": 4, "pins": ((900, 910),)},
    )
    rng = random.Random(n_batch)
    for _ in range(30):
        session.truncate(rng.randrange(session.length + 1))
        count = rng.randrange(1, 1025 - session.length)
        del session.engine.steps[:]
        extend(session, some(count))
        stock = [
            min(n_ubatch, end - at)
            for start in range(0, count, n_batch)
            for end in [min(count, start + n_batch)]
            for at in range(start, end, n_ubatch)
        ]
        assert session.engine.steps == stock
        assert [chunk.block for chunk in session.table.chunks] == list(range(len(session.table.chunks)))


def test_logits_are_kept_of_the_last_token_of_each_step_only(world: Any) -> None:
    session = world()
    extend(session, some(200))
    assert [sum(flags) for flags in session.engine.outputs] == [1, 1, 1, 1]
    assert all(flags[-1] for flags in session.engine.outputs)
    extend(session, some(3), output_all=True)
    assert session.engine.outputs[-1] == [1, 1, 1]
    extend(session, some(1))
    assert session.engine.outputs[-1] == [1]


def test_a_sealed_chunk_is_copied_once(world: Any) -> None:
    session = world()
    extend(session, some(2000))
    assert session.paging.page_outs == 2000 // CHUNK
    assert session.paging.page_ins == 0


def test_the_chunk_before_a_step_stays_whatever_its_score(world: Any) -> None:
    """A window of one chunk, and steps of two that begin where one does: llama.cpp wants the position before them."""
    for seed in range(20):
        session = world(256 + 64 * (seed % 4), config={"sinks": 1, "tail": 1}, n_ubatch=128, scorer=Digest())
        extend(session, some(1500, seed))
        extend(session, some(300, seed + 50))
        check(session, [*some(1500, seed).tolist(), *some(300, seed + 50).tolist()])


def test_too_many_tokens_change_nothing(world: Any) -> None:
    session = world()
    extend(session, some(100))
    with pytest.raises(ContextFull, match=r"2049.*2048.*512"):
        extend(session, some(1949))
    check(session, some(100).tolist())


def test_a_recall_of_more_chunks_than_host_memory_holds(world: Any, tmp_path: Path) -> None:
    """Images on their way to the device must not be spilled over before they were read."""
    session = world(config={"tail": 4, "host_limit": PAGE_BYTES, "spill": tmp_path})
    tokens = some(1900)
    extend(session, tokens)
    session.truncate(800)
    extend(session, some(1, 1))
    check(session, [*tokens[:800].tolist(), *some(1, 1).tolist()])
    assert session.paging.page_ins >= 5


def test_a_step_that_seals_more_chunks_than_host_memory_holds(world: Any, tmp_path: Path) -> None:
    session = world(n_batch=512, n_ubatch=512, config={"host_limit": 2 * PAGE_BYTES, "spill": tmp_path})
    tokens = some(1900)
    extend(session, tokens)
    check(session, tokens.tolist())


def test_a_state_is_restored_under_a_ceiling(world: Any, tmp_path: Path) -> None:
    config = {"host_limit": 2 * PAGE_BYTES, "spill": tmp_path}
    session, other = world(config=config), world(config=config)
    tokens = some(1900)
    extend(session, tokens)
    load(other, dump(session))
    other.engine.adopt(session.engine.truth, session.engine.tokens)
    check(other, tokens.tolist())


def test_a_long_text_is_restored_under_a_ceiling_without_a_spill_folder(world: Any) -> None:
    """Its pages are in the snapshot; what is written after it has to fit."""
    session, other = world(), world(config={"host_limit": 2 * PAGE_BYTES})
    tokens = some(1700)
    extend(session, tokens)
    load(other, dump(session))
    other.engine.adopt(session.engine.truth, session.engine.tokens)
    check(other, tokens.tolist())
    other.pin_range(12 * CHUNK, 14 * CHUNK)
    extend(other, some(70, 1))
    check(other, [*tokens.tolist(), *some(70, 1).tolist()])
    assert {12, 13} <= set(other.table.resident_chunks)
    extend(other, some(70, 2))
    with pytest.raises(HostMemoryError):
        extend(other, some(140, 3))
    whole = [*tokens.tolist(), *some(70, 1).tolist(), *some(70, 2).tolist(), *some(140, 3).tolist()]
    check(other, whole[: other.length])


def test_a_session_that_cannot_be_put_aside_holds_nothing(world: Any) -> None:
    session = world(config={"host_limit": 5 * PAGE_BYTES})
    extend(session, some(5 * CHUNK + 10))
    with pytest.raises(HostMemoryError):
        restore.state(session)
    check(session, some(5 * CHUNK + 10).tolist())
    restore.state(session, 5 * CHUNK).release()
    check(session, some(5 * CHUNK + 10).tolist())


def test_without_a_spill_folder_the_ceiling_is_an_error_and_the_text_stays(world: Any) -> None:
    session = world(config={"host_limit": 5 * PAGE_BYTES})
    tokens = some(1000)
    with pytest.raises(HostMemoryError, match="host_limit"):
        extend(session, tokens)
    kept = session.length
    assert kept >= 5 * CHUNK
    check(session, tokens[:kept].tolist())
    with pytest.raises(HostMemoryError):
        extend(session, some(100))
    check(session, tokens[:kept].tolist())
    session.truncate(3 * CHUNK)
    extend(session, some(CHUNK, 1))
    check(session, [*tokens[: 3 * CHUNK].tolist(), *some(CHUNK, 1).tolist()])


def test_memory_that_was_refused_once_is_asked_for_again(world: Any) -> None:
    session = world()
    session.engine.refuse_alloc = True
    with pytest.raises(HostMemoryError, match="could not get"):
        extend(session, some(500))
    kept = session.length
    session.engine.refuse_alloc = False
    extend(session, some(600)[kept:])
    assert session.length == 600


@pytest.mark.parametrize(
    "kind",
    [{}, {"n_swa": 70}, {"recurrent": True}, {"asynchronous": True}, {"recurrent": True, "asynchronous": True}],
    ids=lambda kind: "-".join(kind) or "plain",
)
@pytest.mark.parametrize("scorer", [None, Digest])
def test_a_restored_session_goes_on_as_the_saved_one(scorer: Any, kind: dict[str, Any], world: Any) -> None:
    """Same blocks at every later step, so the same bits; under a policy too, with a look under way or not."""
    for seed in range(6):
        rng = random.Random(seed)
        config = {"tau": 16}
        session, other = (world(scorer=scorer and scorer(), config=config, **kind) for _ in range(2))
        for _ in range(rng.randrange(1, 6)):
            extend(session, some(rng.randrange(1, 500), rng.randrange(99)))
            session.truncate(rng.randrange(session.length + 1))
        for token in some(rng.randrange(40)):
            extend(session, ints(token))
        load(other, dump(session))
        other.engine.adopt(session.engine.truth, session.engine.tokens)
        start = len(session.engine.rows)
        for _ in range(6):
            tokens = some(rng.randrange(1, 200), rng.randrange(99))
            cut = rng.randrange(session.length + 1) if rng.random() < 0.5 else session.length
            for each in (session, other):
                each.truncate(cut)
                extend(each, tokens)
                for token in tokens[:24]:
                    extend(each, ints(token))
            assert [c.block for c in session.table.chunks] == [c.block for c in other.table.chunks]
        assert session.engine.rows[start:] == other.engine.rows


def test_a_checkpoint_that_cannot_be_restored_empties_the_session(world: Any) -> None:
    session = world(recurrent=True)
    extend(session, some(400))
    extend(session, some(100, 1))
    assert session.checkpoints._states
    with mock.patch.object(session.engine, "set_state", side_effect=SnapshotError("no")):
        assert session.truncate(450) == 0
    check(session, session.tokens.tolist())
    extend(session, some(100))


def test_a_foreign_recurrent_state_changes_nothing(world: Any) -> None:
    session, other = world(recurrent=True), world(recurrent=True)
    extend(session, some(300))
    extend(other, some(200, 1))
    with mock.patch.object(session.engine, "get_state", return_value=b"some other shape"):
        data = dump(session)
    with pytest.raises(SnapshotError, match="recurrent"):
        load(other, data)
    check(other, some(200, 1).tolist())
    extend(other, some(100))
    check(other, [*some(200, 1).tolist(), *some(100).tolist()])


def test_config_pins_survive_a_reset(world: Any) -> None:
    session = world(config={"pins": ((64, 65),)})
    extend(session, some(1000))
    session.reset()
    extend(session, some(1000))
    assert session.table.chunks[1].block != ABSENT


def test_a_transposed_v_is_refused_only_where_it_would_be_paged() -> None:
    with small_slabs():
        with pytest.raises(ConfigError, match="flash attention"):
            make(v_trans=True)
        close(make(512, n_ctx=512, v_trans=True))
