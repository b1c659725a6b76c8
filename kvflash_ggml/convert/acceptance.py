"""How many of a DFlash drafter's tokens its target accepts. Runs in a process of its own: a bad file can end it.

The target goes on with each text greedily, once; then every drafter is asked at the places where it would have been: as
many tokens as are the target's own are accepted, and one more is the target's. No step of the target is undone, so any
memory will do, and all drafters are asked about the same tokens.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Floats
from ..errors import ConversionError, LibraryError
from ..native import library
from . import drafter, gguf_read, verify
from . import target as target_facts
from .drafter import Drafter

TEXTS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The first ten prime numbers are 2, 3, 5,",
    "Question: Why is the sky blue?\nAnswer:",
    "It was a cold morning in November, and the old woman who kept the lighthouse",
)
"""What is gone on with if nothing else is asked for."""

TOKENS = 64
"""How far."""

_STEP = 512
_MAX_PROMPT = 8192
_ROOM = 128  # for the last block


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """A text and the target's continuation as tokens, and what its layers were given: [tokens, layers x width]."""

    tokens: list[int]
    prompt: int
    features: Floats


def main(request: str) -> None:
    """Measure and write one JSON object to stdout.

    request: JSON with target and drafts (paths), texts, and tokens to go on for. Answered is for each draft `accepted`
    (drafted tokens a step, the mean), `steps`, and `block` (how many it drafts).
    """
    asked = json.loads(request)
    library.load()
    answers = measure(Path(asked["target"]), [Path(x) for x in asked["drafts"]], asked["texts"], tokens=asked["tokens"])
    sys.stdout.write(json.dumps({"drafts": answers}) + "\n")


def measure(model: Path, drafts: Sequence[Path], texts: Sequence[str], *, tokens: int) -> list[dict[str, Any]]:
    """The library must be loaded. ConversionError for a drafter that is not plain DFlash, or cannot be loaded."""
    aim = target_facts.describe(gguf_read.read(model))
    described = [_plain(path) for path in drafts]
    for it in described:  # llama.cpp would abort
        drafter.check_pair(it, aim, rope_differs=True)
    layers = {it.target_layers for it in described}
    if len(layers) != 1:
        raise ConversionError(
            drafts[-1].name, "target layers", found=sorted(layers), wanted="the same in all files",
            remedy="Compare files of one drafter.",
        )  # fmt: skip
    with ExitStack() as stack:
        target = TargetModel(model, layers.pop(), stack)
        known = [target.go_on(text, tokens) for text in texts]
        answers = []
        for path in drafts:
            with ExitStack() as own:
                answers.append(answer(DraftModel(path, target, own), known))
        return answers


def _plain(path: Path) -> Drafter:
    file = gguf_read.read(path)
    extras = {"markov_w1.weight", "selector_hidden.weight", "d2t"} & file.tensors.keys()
    if extras:
        raise ConversionError(
            file.name, "a tensor", found=sorted(extras)[0], wanted="none beside plain DFlash's",
            remedy="Acceptance of this kind of drafter is not measured yet.",
        )  # fmt: skip
    return verify.describe(file)


def answer(draft: DraftModel, known: Sequence[Continued]) -> dict[str, Any]:
    """One drafter's answer; see `main`."""
    accepted: list[int] = []
    for text in known:
        draft.forget()
        read, root = 0, text.prompt
        while root < len(text.tokens) - 1:
            draft.inject(text.features[read:root], read)
            rest = text.tokens[root + 1 :]
            guess = draft.block_after(text.tokens[root], root)[: len(rest)]
            same = next((i for i, (a, b) in enumerate(zip(guess, rest, strict=False)) if a != b), len(guess))
            if same < len(rest):  # a block that the text ends in tells of no rejection
                accepted.append(same)
            read, root = root, root + same + 1
    return {"accepted": float(np.mean(accepted)) if accepted else 0.0, "steps": len(accepted), "block": draft.size - 1}


class TargetModel:
    """The model that decides, which gives the inputs of some of its layers."""

    def __init__(self, path: Path, layers: Sequence[int], stack: ExitStack) -> None:
        import llama_cpp

        self._lc = lc = llama_cpp
        self.model = _load(path, stack)
        self.width = int(lc.llama_model_n_embd(self.model))
        self.n_ctx = min(int(lc.llama_model_n_ctx_train(self.model)), _MAX_PROMPT)
        self.ctx = _context(self.model, self.n_ctx, None, stack)
        self.vocab = lc.llama_model_get_vocab(self.model)
        self.n_vocab = int(lc.llama_vocab_n_tokens(self.vocab))
        self._layers = layers
        enable = _exported("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, ctypes.c_uint32, ctypes.c_bool)
        for layer in layers:
            enable(self.ctx, layer, True)
        self._inputs = _exported(
            "_Z30llama_get_embeddings_layer_inpP13llama_contextj", ctypes.POINTER(ctypes.c_float), ctypes.c_uint32
        )

    def go_on(self, text: str, count: int) -> Continued:
        """The text's tokens and `count` more, fewer of either where the context ends."""
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
        return np.concatenate(
            [np.ctypeslib.as_array(self._inputs(self.ctx, layer), (n, self.width)).copy() for layer in self._layers], 1
        )

    def tokens(self, text: str) -> list[int]:
        """With what the model puts before a text."""
        lc, data = self._lc, text.encode()
        size = -int(lc.llama_tokenize(self.vocab, data, len(data), None, 0, True, True))
        found = (ctypes.c_int32 * max(size, 1))()
        count = lc.llama_tokenize(self.vocab, data, len(data), found, size, True, True)
        if count <= 0:
            raise ConversionError("the text", "tokens", found=count, wanted="one or more", remedy="Give another text.")
        return list(found[:count])


class DraftModel:
    """A drafter beside the target, whose embeddings and head it uses."""

    def __init__(self, path: Path, target: TargetModel, stack: ExitStack) -> None:
        import llama_cpp

        self._lc = lc = llama_cpp
        it = verify.describe(gguf_read.read(path))
        self.size, self._mask, self._n_vocab = it.block, it.mask, target.n_vocab
        self._ctx = _context(_load(path, stack), target.n_ctx, target.ctx, stack)
        lc.llama_set_causal_attn(self._ctx, False)
        self._memory = lc.llama_get_memory(self._ctx)
        self._batch = lc.llama_batch_ext_init(self._ctx)
        stack.callback(lc.llama_batch_ext_free, self._batch)

    def forget(self) -> None:
        self._lc.llama_memory_clear(self._memory, True)

    def inject(self, features: Floats, start: int) -> None:
        """What the target's layers were given for the tokens from `start` on."""
        lc = self._lc
        for first in range(0, len(features), _STEP):
            lc.llama_batch_ext_clear(self._batch)
            rows = np.ascontiguousarray(features[first : first + _STEP], np.float32)
            for i, row in enumerate(rows):
                data = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
                embedding = lc.llama_cpp.llama_embd(data=data, n_rows=1, n_embd=rows.shape[1])
                self._place(lc.llama_batch_ext_add_embd(self._batch, 0, embedding), start + first + i)
            self._compute()

    def logits_after(self, root: int, position: int) -> Floats:
        """Of the block's tokens after the root, which stands at `position`: [block - 1, vocabulary]."""
        lc = self._lc
        lc.llama_batch_ext_clear(self._batch)
        for i in range(self.size):
            row = lc.llama_batch_ext_add_token(self._batch, 0, self._mask if i else root)
            self._place(row, position + i)
            lc.llama_batch_ext_set_output_logits(self._batch, row, True)
        self._compute()
        rows = range(1, self.size)
        found = [np.ctypeslib.as_array(lc.llama_get_logits_ith(self._ctx, i), (self._n_vocab,)).copy() for i in rows]
        lc.llama_memory_seq_rm(self._memory, 0, position, -1)
        return np.stack(found)

    def block_after(self, root: int, position: int) -> list[int]:
        return [int(token) for token in self.logits_after(root, position).argmax(1)]

    def _place(self, row: int, position: int) -> None:
        if row < 0:
            raise RuntimeError(f"llama.cpp takes no row at position {position}")
        self._lc.llama_batch_ext_set_pos(self._batch, row, (ctypes.c_int32 * 4)(position, position, position, 0))

    def _compute(self) -> None:
        lc = self._lc
        if status := lc.llama_process(self._ctx, lc.llama_cpp.LLAMA_PROCESS_TYPE_DECODE, self._batch):
            raise RuntimeError(f"llama_process returned {status}")


def _load(path: Path, stack: ExitStack) -> Any:
    import llama_cpp as lc

    params = lc.llama_model_default_params()
    params.n_gpu_layers = -1 if library.supports_gpu_offload() else 0
    model = lc.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise ConversionError(
            path.name, "the file", found="refused by llama.cpp", wanted="a model that it loads",
            remedy="kvflash-convert inspect tells what it is.",
        )  # fmt: skip
    stack.callback(lc.llama_model_free, model)
    return model


def _context(model: Any, n_ctx: int, other: Any, stack: ExitStack) -> Any:
    import llama_cpp as lc

    params = lc.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, _STEP, _STEP
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    if other is not None:
        params.ctx_other = other
    context = lc.llama_init_from_model(model, params)
    if not context:
        raise MemoryError(f"no context of {n_ctx} tokens could be made")
    stack.callback(lc.llama_free, context)
    return context


def _exported(name: str, result: Any, *arguments: Any) -> Any:
    """A function of a context that llama.cpp exports as C++ only."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is None:
        raise LibraryError(f"this libllama does not export {name}: {library.REINSTALL}")
    function.restype, function.argtypes = result, [ctypes.c_void_p, *arguments]
    return function
