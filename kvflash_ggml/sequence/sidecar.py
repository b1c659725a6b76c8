"""A second context on a loaded model, whose keys and queries can be read: for a drafter, and for calibration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals

from ..arrays import Int32s, address
from ..config import KVFlashConfig
from ..constants import CHUNK, POOL_STEP, round_up
from ..logs import Progress
from ..native import engine as native
from ..policy.base import ScoreRequest
from .keys import HostKeys
from .pool import Pool
from .prefill import extend
from .sequence import Sequence


class Sidecar:
    """A sequence that holds its whole context, and has the page images of its sealed chunks on the host.

    model: must outlive this. query_rows: newest queries to keep. step: tokens to evaluate at once. settings: for the
    number of threads. rope: fields for the encoding of positions, in place of the model file's. Raises the errors of
    llama.cpp's wrappers and of the engine if the model cannot run in a pool, or there is no memory.
    """

    def __init__(
        self,
        model: internals.LlamaModel,
        *,
        n_ctx: int,
        query_rows: int,
        step: int,
        settings: llama_cpp.llama_context_params,
        rope: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        with ExitStack() as stack:
            self.slot_shares(model, settings)
            context = _context(model, min(n_ctx, model.n_ctx_train()), query_rows, step, settings, rope)
            stack.callback(context.close)
            self.n_ctx = context.n_ctx() // CHUNK * CHUNK
            engine = native.PagedEngine(address(context.ctx), step)
            stack.callback(engine.close)
            config = KVFlashConfig(pool=engine.info.n_slots)
            self.session = Sequence(Pool(engine, n_ubatch=step), config, seq=0, n_ctx=context.n_ctx(), n_batch=step)
            self.session.paging.keep_images_for(self)  # their keys are scored, and they may be saved
            stack.callback(self.session.close)
            self.keys = HostKeys(engine, self.session.store)
            self._stack = stack.pop_all()

    @staticmethod
    def slot_shares(model: internals.LlamaModel, settings: llama_cpp.llama_context_params) -> tuple[int, ...]:
        """Return the bytes that a token takes of each device, and of the host. UnsupportedModelError if the model
        cannot run in a pool.
        """
        return native.probe(
            address(model.model),
            type_k=llama_cpp.GGML_TYPE_F16,
            type_v=llama_cpp.GGML_TYPE_F16,
            offload=settings.offload_kqv,
            arch=model.metadata().get("general.architecture", "unknown"),
        )

    def read(self, tokens: Int32s, *, progress: Progress | None = None) -> None:
        """Evaluate tokens, and copy the chunks that they sealed to the host."""
        extend(self.session, np.asarray(tokens, np.int32), progress=progress)
        self.session.paging.save()

    def truncate(self, length: int) -> int:
        """Forget tokens from `length` on. Returns how many are left: fewer if the memory cannot roll back just so
        far.
        """
        return self.session.truncate(length)

    def request(self, rows: int) -> ScoreRequest:
        """Return a score request for the sealed chunks, with the queries of at most `rows` of the newest tokens."""
        session, ring = self.session, self.session.queries
        rows = min(rows, ring.rows, session.length)
        queries = ring.newest_now(session.length, rows)
        return ScoreRequest(
            tokens=session.tokens,
            n_chunks=session.length // CHUNK,
            rows=rows,
            queries=queries,
            protected=frozenset(),
        )

    def close(self) -> None:
        self._stack.close()


def _context(
    model: internals.LlamaModel, n_ctx: int, query_rows: int, step: int, settings: llama_cpp.llama_context_params,
    rope: Mapping[str, Any],
) -> internals.LlamaContext:  # fmt: skip
    params = llama_cpp.llama_context_default_params()
    for name, value in rope.items():
        setattr(params, name, value)
    params.n_ctx = round_up(n_ctx, POOL_STEP)
    params.n_batch = params.n_ubatch = step
    params.n_threads = settings.n_threads
    params.n_threads_batch = settings.n_threads_batch
    params.offload_kqv = settings.offload_kqv
    params.swa_full = False
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    with native.pool_request(params.n_ctx, query_rows):
        # not "verbose" makes the wrappers redirect the streams of the whole process, and this is a worker thread
        return internals.LlamaContext(model=model, params=params, verbose=True)
