"""Recurrent state in front of drafts: on the device, or on the host where that has no room."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine, Faults, make_session
from support.fake_session import accept

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.sequence.copies import DeviceStates
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.self_draft import SelfDraft
from kvflash_ggml.sequence.sequence import Sequence

PROMPT = 300


def session(engine: FakeEngine) -> Sequence:
    one = make_session(engine, KVFlashConfig(pool=448), n_ctx=2048, n_batch=128, n_ubatch=128)
    extend(one, np.arange(PROMPT, dtype=np.int32))
    return one


def counted(engine: FakeEngine, name: str) -> list[Any]:
    """Takes the arguments of each call."""
    calls: list[Any] = []
    call = getattr(engine, name)

    def count(*args: Any, seq: int) -> Any:
        calls.append(args)
        return call(*args, seq=seq)

    setattr(engine, name, count)
    return calls


@pytest.mark.parametrize("full", [False, True])
def test_what_is_drafted_and_rejected_has_never_been(full: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens that the pool has sketched, and others that were verified. Without room on the device it says so once."""
    engine = FakeEngine(448, 128, recurrent=True)
    one, text = session(engine), [*range(PROMPT)]
    engine.faults = Faults(full=full)
    copies, kept = counted(engine, "get_state"), counted(engine, "put_state")
    for accepted in (0, 2, 4):
        with SelfDraft(one, 4) as sketch:
            for token in (7, 8, 9):
                sketch.write([token])
            assert engine.tokens == [*text, 7, 8, 9]
        one.finish(one.prepare_drafts(np.arange(1000, 1004, dtype=np.int32), None))
        accept(one, accepted)
        text += range(1000, 1000 + accepted)
        assert one.tokens.tolist() == engine.tokens == text
    extend(one, np.array([5], np.int32))
    assert engine.tokens == [*text, 5]
    assert len(kept) == (0 if full else 5), "after each sketch, and before what was accepted in part or not at all"
    assert len(copies) == 6, "the fake one has no other way to keep it"
    told = [x for x in caplog.messages if "to the host and back" in x]
    assert len(told) == full
    one.close()


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_sketch_goes_on_behind_the_rows_that_stay(recurrent: bool) -> None:
    """As often as it likes; where the memory cannot go back over the others nothing follows, and nothing is lost."""
    engine = FakeEngine(448, 128, recurrent=recurrent)
    one, text = session(engine), [*range(PROMPT)]
    with SelfDraft(one, 8) as sketch:
        assert sketch.room_ahead == (1 if recurrent else 8), "without planes there is no way back"
        sketch.write([7])
        assert sketch.retain(PROMPT + 1)
        sketch.write([1, 2, 3])
        assert sketch.retain(PROMPT + 2) == (not recurrent)
        kept = [7, 1, 2, 3] if recurrent else [7, 1]
        assert sketch.tokens.tolist() == engine.tokens == [*text, *kept]
        if not recurrent:
            sketch.write([4, 5])
            assert sketch.retain(PROMPT + 4)
            assert sketch.tokens.tolist() == engine.tokens == [*text, 7, 1, 4, 5]
            assert (sketch.left, sketch.room_ahead) == (4, 4)
    assert one.tokens.tolist() == engine.tokens == text
    extend(one, np.array([5], np.int32))
    assert engine.tokens == [*text, 5]
    one.close()


def test_a_device_keeps_the_newest_one() -> None:
    engine = FakeEngine(448, 128, recurrent=True)
    states = DeviceStates(engine)  # type: ignore[arg-type]
    first = states.keep(0)
    second = states.keep(0)
    states.put(second, 0, 0)
    with pytest.raises(AssertionError, match="another state"):
        states.put(first, 0, 0)
    engine.faults = Faults(full=True)
    third, fourth = states.keep(0), states.keep(0)
    for kept in (fourth, third):
        states.put(kept, 0, 0)
    with pytest.raises(AssertionError, match="another state"):
        states.put(second, 0, 0)
    engine.close()
