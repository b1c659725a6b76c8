"""The private parts of `Llama` that measurements reach: the only file here that knows their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvflash_ggml.arrays import Int32s
    from kvflash_ggml.llama.llama import Llama
    from kvflash_ggml.native.engine import PagedEngine
    from kvflash_ggml.runtime.text import Text
    from kvflash_ggml.sequence.sequence import Sequence
    from kvflash_ggml.speculation.draft import Draft
    from kvflash_ggml.speculation.loop import Speculator


def session_of(llm: Llama) -> Sequence | None:
    """The text and its pool; None without a pool."""
    return llm._at_hand.sequence


def paged(llm: Llama) -> Sequence:
    """The text and its pool, of a model that has one."""
    assert llm._at_hand.sequence is not None
    return llm._at_hand.sequence


def text_of(llm: Llama) -> Text:
    """The text of a model, which evaluates tokens and draws them."""
    return llm._at_hand


def device_of(llm: Llama) -> str:
    """The device that computes, as a report names it; "" without a pool."""
    return llm._at_hand.sequence.engine.info.device if llm._at_hand.sequence is not None else ""


def wait(llm: Llama) -> None:
    """Wait for the logits of the newest token, as sampling would."""
    llm._ctx.get_logits_ith(-1)


def likeliest(llm: Llama) -> int:
    """The token with the largest logit after the newest one."""
    return int(paged(llm).engine.argmax([-1])[0])


def decode_seconds(engine: PagedEngine) -> float:
    """Time spent inside llama_decode since the engine was made."""
    from kvflash_ggml.native._kvf import lib

    return float(lib.kvf_decode_ns(engine._engine)) * 1e-9


def plain_copy(engine: PagedEngine, size: int, *, to_device: bool, device: int = 0) -> float:
    """Measure the seconds of one plain copy of `size` bytes between page-locked memory and a device.

    device: index in `info.devices`.
    """
    from kvflash_ggml.native._kvf import ffi, lib

    from kvflash_ggml.native.status import value

    seconds = ffi.new("double *")
    return float(value(lib.kvf_bench_copy(engine._engine, device, size, to_device, seconds), seconds))


def step(llm: Llama, tokens: Int32s, outputs: Any, *, stream: bool) -> None:
    """Evaluate some tokens in one step. outputs: LAST or EVERY, of `sequence.step`. stream: the whole text is seen."""
    paged(llm).evaluate(tokens, outputs, llm._at_hand.after_step, stream=stream)


def verify_and_drop(llm: Llama, tokens: Int32s) -> Int32s:
    """Verify a root and its draft in one step, keep only the root; return the likeliest token after each."""
    session = paged(llm)
    session.finish(session.prepare_drafts(tokens, None))
    picks = session.engine.argmax(range(len(tokens)))
    llm._at_hand.keep(0)
    session.settle()
    return picks


def speculator_of(llm: Llama) -> Speculator | None:
    """What asks the drafters; None where nobody drafts."""
    return llm._at_hand.speculator


def use_speculator(llm: Llama, speculator: Speculator | None) -> None:
    """Let this one ask the drafters from now on."""
    llm._at_hand.speculator = speculator


def drafted(llm: Llama, root: int) -> Draft | None:
    """What the drafter proposes after a token, without what only fills the step."""
    speculator = llm._at_hand.speculator
    assert speculator is not None
    return None if speculator.propose(paged(llm), root) is None else speculator._draft


def identify(llm: Llama) -> None:
    """Hash the model's file now, not when the first snapshot is loaded."""
    _ = llm._saver.snapshots.fingerprint
