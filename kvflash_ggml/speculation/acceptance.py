"""How many of a drafter's tokens its target accepts. Runs in a process of its own: a bad file can end it.

The target continues each text greedily, once. Then every drafter is asked at the places where it would have been asked.
Tokens up to the first difference from the target's text are accepted, and the target adds one. No step of the target is
undone, so any kind of memory will do, and all drafters are asked about the same tokens.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import pip_line, system
from ..arrays import Floats
from ..config import DFLASH, EAGLE3
from ..errors import ConversionError, LibraryError
from ..gguf import reader, verify
from ..native import library
from .base import Drafter, Target

TEXTS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The first ten prime numbers are 2, 3, 5,",
    "Question: Why is the sky blue?\nAnswer:",
    "It was a cold morning in November, and the old woman who kept the lighthouse",
)
"""Texts that are continued by default."""

TOKENS = 64
"""Tokens of a continuation by default."""

CHAIN = 8
"""Tokens of a draft, for drafters that go token by token."""

_STEP = 512
_MAX_PROMPT = 8192
_ROOM = 128  # for the last block


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """A text and the target's continuation as tokens, and the target's rows for drafters: [tokens, width]."""

    tokens: list[int]
    prompt: int
    features: Floats


def main(request: str) -> None:
    """Measure and write one JSON object to stdout.

    request: JSON with target and drafts (paths), texts, and the number of tokens to continue them by. The result has
    for each draft `accepted` (mean accepted tokens a step), `steps`, and `block` (tokens that it drafts at once).
    """
    asked = json.loads(request)
    library.load()
    answers = measure(Path(asked["target"]), [Path(x) for x in asked["drafts"]], asked["texts"], tokens=asked["tokens"])
    sys.stdout.write(json.dumps({"drafts": answers}) + "\n")


def measure(model: Path, drafts: Sequence[Path], texts: Sequence[str], *, tokens: int) -> list[dict[str, Any]]:
    """Return the result of each drafter; see `main`. The library must be loaded.

    ConversionError for a drafter that is not of this model, or cannot be loaded.
    """
    from . import find

    aim = reader.read(model)
    files = [reader.read(path) for path in drafts]
    for file in files:  # llama.cpp would abort
        verify.check(file, aim, rope_differs=True)
    wanted = {find.wants(file, aim) for file in files}
    if len(wanted) != 1:
        raise ConversionError(
            drafts[-1].name, "target layers", found=sorted(features.layers for features in wanted),
            wanted="the same in all files", remedy="Compare files of one drafter.",
        )  # fmt: skip
    features = wanted.pop()
    with ExitStack() as stack:
        target = TargetModel(model, features.layers, stack, nextn=features.nextn)
        known = [target.go_on(text, tokens) for text in texts]
        answers = []
        for path, file in zip(drafts, files, strict=True):
            draft, block = _open(path, find.kind_of(file), target.facts)
            with closing(draft):
                answers.append(answer(draft, known, block))
        return answers


def _open(path: Path, kind: str, target: Target) -> tuple[Drafter, int]:
    """Return a drafter, and how many tokens it drafts at once."""
    from .chained import Eagle3, Mtp
    from .dflash import DFlash

    if kind == DFLASH:
        blocks = DFlash(path, target)
        return blocks, blocks.size
    return (Eagle3 if kind == EAGLE3 else Mtp)(path, target), CHAIN


def answer(draft: Drafter, known: Sequence[Continued], block: int) -> dict[str, Any]:
    """Return the result of one drafter, which drafts up to `block` tokens at once; see `main`."""
    accepted: list[int] = []
    for text in known:
        tokens = np.array(text.tokens, np.int32)
        read, root = 0, text.prompt
        while root < len(tokens) - 1:
            draft.observe(read, tokens[read:root], text.features[read:root])
            rest = tokens[root + 1 :]
            proposed = draft.propose(int(tokens[root]), block)
            guess = rest[:0] if proposed is None else proposed.tokens[: len(rest)]
            same = int(np.logical_and.accumulate(guess == rest[: len(guess)]).sum())
            if same < len(rest):  # a block at the text's end shows no rejection
                accepted.append(same)
            read, root = root, root + same + 1
    return {"accepted": float(np.mean(accepted)) if accepted else 0.0, "steps": len(accepted), "block": block}


class TargetModel:
    """The target model. It gives the inputs of some of its layers, and the state before its head."""

    def __init__(self, path: Path, layers: Sequence[int], stack: ExitStack, *, nextn: bool = False) -> None:
        import llama_cpp

        from .context import DraftModel

        self._lc = lc = llama_cpp
        self.model = stack.enter_context(closing(DraftModel(path, offload=library.supports_gpu_offload()))).address
        self.width = int(lc.llama_model_n_embd(self.model))
        self.n_ctx = min(int(lc.llama_model_n_ctx_train(self.model)), _MAX_PROMPT)
        self.ctx = _context(self.model, self.n_ctx, stack)
        self.vocab = lc.llama_model_get_vocab(self.model)
        self.n_vocab = int(lc.llama_vocab_n_tokens(self.vocab))
        threads = system.cores()
        self.facts = Target(
            path=path, model=self.model, context=self.ctx, n_embd=self.width, n_vocab=self.n_vocab, n_ctx=self.n_ctx,
            threads=threads, batch_threads=threads, offload=library.supports_gpu_offload(),
        )  # fmt: skip
        self._layers = layers
        enable = _exported("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, ctypes.c_uint32, ctypes.c_bool)
        for layer in layers:
            enable(self.ctx, layer, True)
        rows = ctypes.POINTER(ctypes.c_float)
        self._inputs = _exported("_Z30llama_get_embeddings_layer_inpP13llama_contextj", rows, ctypes.c_uint32)
        self._nextn = _exported("_Z26llama_get_embeddings_nextnP13llama_context", rows) if nextn else None
        if nextn:
            masked = False  # of every token, not only where logits are asked for
            _exported("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, ctypes.c_bool, ctypes.c_bool)(
                self.ctx, True, masked
            )

    def go_on(self, text: str, count: int) -> Continued:
        """Return the text's tokens and `count` more, fewer of either where the context ends."""
        lc = self._lc
        lc.llama_memory_clear(lc.llama_get_memory(self.ctx), True)
        count = max(1, min(count, self.n_ctx // 2 - _ROOM))
        prompt = self.tokens(text)[: self.n_ctx - _ROOM - count]
        tokens, features = list(prompt), []
        for start in range(0, len(prompt), _STEP):
            features.append(self._decode(prompt[start : start + _STEP], start))
        for _ in range(count):
            logits = np.ctypeslib.as_array(lc.llama_get_logits_ith(self.ctx, -1), (self.n_vocab,))
            tokens.append(int(logits.argmax()))
            features.append(self._decode(tokens[-1:], len(tokens) - 1))
        return Continued(tokens=tokens, prompt=len(prompt), features=np.concatenate(features))

    def _decode(self, tokens: Sequence[int], start: int) -> Floats:
        lc, n = self._lc, len(tokens)
        held = (ctypes.c_int32 * n)(*tokens)  # the batch points at it
        if status := lc.llama_decode(self.ctx, lc.llama_batch_get_one(held, n)):
            raise RuntimeError(f"llama_decode returned {status} at token {start}")
        given = [(self._inputs(self.ctx, layer), self.width) for layer in self._layers]
        if self._nextn is not None:
            given.append((self._nextn(self.ctx), int(lc.llama_model_n_embd_out(self.model))))
        return np.concatenate([np.ctypeslib.as_array(rows, (n, width)) for rows, width in given], 1)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with the tokens that the model puts before it."""
        lc, data = self._lc, text.encode()
        size = -int(lc.llama_tokenize(self.vocab, data, len(data), None, 0, True, True))
        found = (ctypes.c_int32 * max(size, 1))()
        count = lc.llama_tokenize(self.vocab, data, len(data), found, size, True, True)
        if count <= 0:
            raise ConversionError("the text", "tokens", found=count, wanted="one or more", remedy="Give another text.")
        return list(found[:count])


def _context(model: Any, n_ctx: int, stack: ExitStack) -> Any:
    import llama_cpp as lc

    params = lc.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, _STEP, _STEP
    params.n_threads = params.n_threads_batch = system.cores()
    context = lc.llama_init_from_model(model, params)
    if not context:
        raise MemoryError(f"no context of {n_ctx} tokens could be made")
    stack.callback(lc.llama_free, context)
    return context


def _exported(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of a context that llama.cpp exports as C++ only."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is None:
        raise LibraryError(f"this libllama does not export {name}: {pip_line.reinstall()}")
    function.restype, function.argtypes = result, [ctypes.c_void_p, *arguments]
    return function
