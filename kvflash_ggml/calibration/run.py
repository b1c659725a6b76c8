"""Calibrates a loaded model, in a context of its own beside the model's other work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Event
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Floats, Int32s, address
from ..errors import CalibrationError, KVFlashError
from ..logs import Progress
from ..native import vocabulary
from ..placement import memory
from ..sequence.sidecar import Sidecar
from .choice import choose
from .known import Calibration, ModelId, rope
from .measure import QUESTION_ROWS, TOKENS, measure

if TYPE_CHECKING:
    from llama_cpp import llama_context_params
    from llama_cpp._internals import LlamaModel

logger = logging.getLogger("kvflash_ggml")

STEP = 128
"""Tokens that are evaluated at once: how soon it can be stopped."""

ROOM = 256
"""Tokens of the context beside the document: for the longest question, and rounding."""


DEVICE_BYTES = 1 << 29
"""Device memory of a context beside its cache and its logits, roughly."""

FAILURES = (KVFlashError, OSError, RuntimeError, ValueError, MemoryError)


class Stopped(Exception):
    """Nobody waits for the calibration any more."""


def calibrate(
    model: LlamaModel,
    *,
    model_id: ModelId,
    settings: llama_context_params,
    progress: Progress = lambda done, total: None,
    stop: Event | None = None,
) -> Calibration:
    """Find the retrieval heads of a model.

    model_id: its identity. settings: for the number of threads, and the encoding of positions. progress: tokens done,
    and in all, at every step.

    CalibrationError if the model cannot be calibrated. Stopped once `stop` is set.
    """
    if stop is not None and stop.is_set():
        raise Stopped
    try:
        _check_room(model, settings)
        side = Sidecar(
            model,
            n_ctx=TOKENS + ROOM,
            query_rows=QUESTION_ROWS,
            step=STEP,
            settings=settings,
            rope=rope(settings),
        )
    except FAILURES as err:
        raise CalibrationError(f"no context for it: {err}") from err

    def check(done: int, total: int) -> None:
        progress(done, total)
        if stop is not None and stop.is_set():
            raise Stopped

    try:
        reader = SidecarReader(side, opening=[model.token_bos()] if model.add_bos_token() else [], check=check)
        lacking = vocabulary.incomplete(model.vocab)
        measured = measure(reader, lambda text: _tokenize(model, text, lacking), progress=reader.report)
        layers = [layer.il for layer in side.session.engine.layers]
        return choose(measured, model_id=model_id, layers=layers, shapes=side.keys.shapes)
    except CalibrationError:
        raise
    except FAILURES as err:  # a short context, no tokenizer, or no memory for a step
        raise CalibrationError(str(err) or type(err).__name__) from err
    finally:
        side.close()


def _check_room(model: LlamaModel, settings: llama_context_params) -> None:
    """Raise MemoryError where a device has so little left that llama.cpp might end the process in the middle of a
    step.
    """
    *devices, _ = memory.of_model(address(model.model))
    *shares, _ = Sidecar.slot_shares(model, settings)
    for device, share in zip(devices, shares, strict=True):
        needed = DEVICE_BYTES + (TOKENS + ROOM) * share + STEP * 4 * model.n_vocab()
        if memory.usable(device) and device.free < needed:
            raise MemoryError(
                f"it takes about {needed >> 20} MiB of {device.name}, and {device.free >> 20} MiB of it are free"
            )


class SidecarReader:
    """A sidecar as measure.DocumentReader. check: called with tokens done and in all, at every step."""

    def __init__(self, side: Sidecar, *, opening: Sequence[int], check: Progress) -> None:
        self.n_ctx = side.n_ctx
        self.opening = opening
        self.n_heads = sum(shape.n_head for shape in side.keys.shapes)
        self._side = side
        self._check = check
        self._document: Int32s = np.empty(0, np.int32)
        self._done, self._total = 0, 1

    def report(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        self._check(done, total)

    def read(self, tokens: Int32s) -> None:
        self._side.truncate(0)
        self._document = tokens
        self._read(tokens)

    def ask(self, tokens: Int32s) -> Floats:
        self._read(tokens)
        request = self._side.request(len(tokens))
        masses = self._side.keys.score_keys(range(request.n_chunks), request)
        left = self._side.truncate(len(self._document))
        self._read(self._document[left:])  # tokens that the memory could not keep
        return masses.reshape(self.n_heads, request.rows, request.n_chunks)

    def _read(self, tokens: Int32s) -> None:
        if len(tokens):
            self._side.read(tokens, progress=lambda done, _: self._check(self._done + done, self._total))


def _tokenize(model: LlamaModel, text: str, lacking: frozenset[bytes] | None) -> list[int]:
    try:
        vocabulary.check(text.encode(), lacking)
        return list(model.tokenize(text.encode(), add_bos=False, special=False))
    except (RuntimeError, ValueError) as err:
        raise ValueError(f"its tokenizer does not take plain text: {err}") from err
