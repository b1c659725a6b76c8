"""Embeds and ranks texts, in a stock context of its own on the weights of a model, beside the pool."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals
from llama_cpp._utils import suppress_stdout_stderr

from ..arrays import Floats, Int32s, address
from ..config import KVFlashConfig
from ..errors import (
    ConfigError,
    ContextFull,
    ConversionError,
    DecodeError,
    EncoderError,
    HostMemoryError,
    NotFinite,
    UnsupportedModelError,
)
from ..gguf import reader
from ..native import measure, vocabulary
from ..native.sizes import Measure, Needs

Pooling = Literal["mean", "cls", "last", "rank"]

_POOLING = {
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
    "rank": llama_cpp.LLAMA_POOLING_TYPE_RANK,
}

_HEADS = ("cls.output.weight", "cls.weight")
"""Tensors that a model for reranking has."""


def no_writer(loaded: Any) -> UnsupportedModelError:
    """Return the error for a model that writes no text by itself. loaded: `Llama.model`."""
    if llama_cpp.llama_model_has_encoder(loaded) and llama_cpp.llama_model_has_decoder(loaded):
        return UnsupportedModelError(
            "this model's decoder reads what its encoder has made of a text, and Llama asks no encoder: "
            "use a model without one, or a program of llama.cpp"
        )
    return EncoderError(
        "this model is an encoder: it embeds texts and writes none. Make it with embedding=True, and call embed"
    )


def reserve_bytes(model: int, settings: Any, config: KVFlashConfig) -> int:
    """Return what the context of an `Embedder` will take of all devices together; of the host if there is no other.

    model: address of a llama_model, with or without its data. settings: as of `_params`. 0 if none is asked for.
    """
    if not config.embedding:
        return 0
    found: Measure = measure.measure(model, _params(settings, config.embedding, None), cells=0)
    return _bytes(found.devices[:-1] or found.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """values: the embedding [n_embd] of length 1, or of a reranker the scores of its classes. tokens: how many."""

    values: Floats
    tokens: int


class Embedder:
    """Embeds one text at a time, on one thread at a time. The model owns it, and closes it.

    most_tokens: of a text; `KVFlashConfig(embedding=N)` leaves memory for N. pooling: None for the model's own, or
    "mean" if it has none; "rank" for a reranker. most: tokens of a text. template: of a query and a document; None for
    one with the tokens of `marks` (bos, eos, sep) between them. ConfigError if the model cannot do what is asked.
    """

    def __init__(self, llm: llama_cpp.Llama, most_tokens: int, *, pooling: Pooling | None = None) -> None:
        if pooling == "rank":
            _check_ranks(Path(llm.model_path))
        self.most = min(most_tokens, llama_cpp.llama_model_n_ctx_train(llm.model))
        self._remedy = "" if self.most < most_tokens else ", or start the server with a larger --embedding-tokens"
        self._llm = llm
        self._context = self._open(pooling)
        kind = llama_cpp.llama_pooling_type(self._context)
        if kind == llama_cpp.LLAMA_POOLING_TYPE_NONE:
            llama_cpp.llama_free(self._context)
            self._context = self._open("mean")
            kind = _POOLING["mean"]
        self.pooling = next(name for name, value in _POOLING.items() if value == kind)
        stack = llm._stack
        stack.callback(llama_cpp.llama_free, self._context)
        self._batch = internals.LlamaBatch(n_tokens=self.most, embd=0, n_seq_max=1, verbose=False)
        stack.callback(self._batch.close)
        model, vocab = llm.model, vocabulary.of(llm.model)
        ranks = self.pooling == "rank"
        self._width = int((llama_cpp.llama_model_n_cls_out if ranks else llama_cpp.llama_model_n_embd_out)(model))
        marks = {"bos": llama_cpp.llama_vocab_bos, "eos": llama_cpp.llama_vocab_eos, "sep": llama_cpp.llama_vocab_sep}
        adds = {name: getattr(llama_cpp, f"llama_vocab_get_add_{name}")(vocab) for name in marks}
        self.marks: Mapping[str, list[int]] = {
            name: [token(vocab)] if adds[name] and token(vocab) != -1 else [] for name, token in marks.items()
        }
        self.template: str | None = llm.metadata.get("tokenizer.chat_template.rerank")

    @property
    def bytes(self) -> int:
        """Bytes of its context on all devices and the host."""
        return _bytes(measure.taken(address(self._context), address(self._llm.model)))

    def check(self, count: int) -> None:
        """Raise ContextFull for a text of so many tokens if it is too long, or has none."""
        if not 0 < count <= self.most:
            raise ContextFull(
                f"a text of {count} tokens, and {self.most} is the most that is embedded at once: "
                f"shorten it{self._remedy}"
            )

    def embed(self, tokens: Int32s) -> Embedded:
        """Evaluate a text and return its embedding. ContextFull as `check`, DecodeError if it fails."""
        self.check(len(tokens))
        memory = llama_cpp.llama_get_memory(self._context)
        if memory:
            llama_cpp.llama_memory_clear(memory, True)
        self._batch.set_batch(np.asarray(tokens, np.int32).tolist(), n_past=0, logits_all=True)
        if llama_cpp.llama_decode(self._context, self._batch.batch) != 0:
            raise DecodeError("llama.cpp could not evaluate a text for its embedding")
        found = llama_cpp.llama_get_embeddings_seq(self._context, 0)
        if not found:
            raise DecodeError("llama.cpp computed no embedding of this text")
        values = np.ctypeslib.as_array(found, shape=(self._width,)).astype(np.float32)
        if not np.isfinite(values).all():
            raise NotFinite("an embedding is not finite: the model computed no number")
        if self.pooling != "rank":
            values /= max(float(np.linalg.norm(values)), 1e-12)
        return Embedded(values=values, tokens=len(tokens))

    def _open(self, pooling: Pooling | None) -> Any:
        params = _params(self._llm.context_params, self.most, pooling)
        with suppress_stdout_stderr(disable=self._llm.verbose):
            context = llama_cpp.llama_init_from_model(self._llm.model, params)
        if not context:
            raise HostMemoryError(
                f"no context of {params.n_ctx} tokens could be made for embeddings: lower --embedding-tokens"
            )
        adapter: Any = self._llm._lora_adapter
        if adapter is not None:  # upstream gives it to the model's own context alone
            adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
            if llama_cpp.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(self._llm.lora_scale)):
                raise DecodeError("llama.cpp did not add the adapter to the context of embeddings")
        return context


def _bytes(needs: Iterable[Needs]) -> int:
    return sum(need.kv + need.state + need.compute for need in needs)


def _params(settings: Any, n_tokens: int, pooling: Pooling | None) -> Any:
    """Return llama_context_params of a text that takes one step. settings: those of the model's other context."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = n_tokens
    params.n_threads, params.n_threads_batch = settings.n_threads, settings.n_threads_batch
    params.offload_kqv = settings.offload_kqv
    params.embeddings = True
    if pooling is not None:
        params.pooling_type = _POOLING[pooling]
    return params


def _check_ranks(path: Path) -> None:
    try:
        names = {tensor.name for tensor in reader.all_tensors(reader.read(path))}
    except ConversionError as err:
        raise ConfigError(f"--reranking: the tensors of {path.name} cannot be read: {err}") from err
    if names.isdisjoint(_HEADS):
        raise ConfigError(
            f"--reranking: {path.name} has no head that ranks texts ({' or '.join(_HEADS)}): serve a reranker, such as "
            f"Qwen3-Reranker, or leave it out"
        )
