"""The private parts of `Llama` that measurements reach: the only file here that knows their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvflash_ggml.arrays import Int32s
    from kvflash_ggml.llama.llama import Llama
    from kvflash_ggml.sequence.sequence import Sequence
    from kvflash_ggml.spec.draft import Draft
    from kvflash_ggml.spec.loop import Speculator


def session_of(llm: Llama) -> Sequence | None:
    """The text and its pool; None without a pool."""
    return llm._session


def paged(llm: Llama) -> Sequence:
    """The text and its pool, of a model that has one."""
    assert llm._session is not None
    return llm._session


def device_of(llm: Llama) -> str:
    """The device that computes, as a report names it; "" without a pool."""
    return llm._session.engine.info.device if llm._session is not None else ""


def wait(llm: Llama) -> None:
    """Wait for the logits of the newest token, as sampling would."""
    llm._ctx.get_logits_ith(-1)


def likeliest(llm: Llama) -> int:
    """The token with the largest logit after the newest one."""
    return llm._likeliest()


def step(llm: Llama, tokens: Int32s, outputs: Any, *, stream: bool) -> None:
    """Evaluate some tokens in one step. outputs: LAST or EVERY, of `sequence.step`. stream: the whole text is seen."""
    paged(llm).evaluate(tokens, outputs, llm._after_step, stream=stream)


def verify_and_drop(llm: Llama, tokens: Int32s) -> Int32s:
    """Verify a root and its draft in one step, keep only the root; return the likeliest token after each."""
    session = paged(llm)
    session.verify(tokens, None, llm._after_step)
    picks = session.engine.argmax(range(len(tokens)))
    llm._keep(0)
    session.accept(llm._after_step)
    return picks


def speculator_of(llm: Llama) -> Speculator | None:
    """What asks the drafters; None where nobody drafts."""
    return llm._speculator


def use_speculator(llm: Llama, speculator: Speculator | None) -> None:
    """Let this one ask the drafters from now on."""
    llm._speculator = speculator


def drafted(llm: Llama, root: int) -> Draft | None:
    """What the drafter proposes after a token, without what only fills the step."""
    speculator = llm._speculator
    assert speculator is not None
    return None if llm._propose([root]) is None else speculator._drafted


def identify(llm: Llama) -> None:
    """Hash the model's file now, not when the first snapshot is loaded."""
    assert llm._snapshot_store is not None
    _ = llm._snapshot_store.fingerprint
