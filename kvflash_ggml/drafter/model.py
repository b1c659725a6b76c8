"""A small model beside the target: it finds and loads the model, and keeps it at the end of the target's text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals

from ..arrays import Floats, Int32s
from ..config import KVFlashConfig
from ..errors import ConfigError, DecodeError, SnapshotError, UnsupportedModelError
from ..gguf import purpose, reader
from ..native import measure, vocabulary
from ..policy.base import DRAFTER
from ..policy.crosstok import TextReader, token_scores
from ..policy.drafter import QUERY_ROWS, DrafterScorer, TargetReader, TokenReader
from ..policy.heads import boost_successors, every_head, over_chunks
from ..sequence import restore
from ..sequence.sidecar import Sidecar
from ..snapshot.fingerprint import ModelFile
from ..state.session import DrafterState, SessionState

logger = logging.getLogger("kvflash_ggml")


BOUND = {"dflash", "eagle3", "gemma4-assistant"}
"""Architectures of drafters that read their target's memory, and so cannot read a text by themselves."""

WORDS = ("scorer", "drafter", "draft")
FOLDERS = (".", "drafter", "draft")

STEP = 512
"""Tokens that the small model evaluates at once."""

COMPUTE_BYTES = 512 << 20
"""Device memory of a small model beside its weights, roughly."""


def find(model: str | Path, asked: Path | None, *, serves: Callable[[Path], bool] = lambda path: True) -> Path:
    """Return the drafter's file: the requested one, or one found by its name near the target.

    It searches the target's folder and its subfolders `drafter` and `draft`, in this order, for files that end in .gguf
    and have "scorer", "drafter" or "draft" in their names, in this order of preference, then by name. It passes over
    drafters that cannot read a text by themselves, such as DFlash's, and files that `serves` refuses. ConfigError if
    there is none.
    """
    if asked is not None:
        if not asked.is_file():
            raise ConfigError(f"there is no drafter {asked}: give the path of a GGUF file")
        return asked
    target = Path(model)
    for folder in FOLDERS:
        files = [file for file in sorted((target.parent / folder).glob("*")) if _is_candidate(file, target)]
        for word in WORDS:
            for file in files:
                if word in file.name.lower() and serves(file):
                    return file
    raise ConfigError(
        f"the policy '{DRAFTER}' needs a small model, and none was found beside {target.name}: give its path as "
        f"kvflash_scorer (--kvflash-scorer), or put a GGUF file with 'drafter', 'draft' or 'scorer' in its name there"
    )


def _is_candidate(file: Path, target: Path) -> bool:
    if file.suffix.lower() != ".gguf" or not file.is_file() or (target.exists() and file.samefile(target)):
        return False
    return reader.architecture(file) not in BOUND


def check(path: Path) -> None:
    """Raise ConfigError if llama.cpp cannot load the file, or cannot run it in a pool. Reads no weights."""
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = STEP
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    try:
        with measure.sketch(path, llama_cpp.llama_model_default_params()) as model:
            measure.measure(model, settings, cells=STEP, query_rows=QUERY_ROWS)
    except (ConfigError, UnsupportedModelError) as error:
        raise ConfigError(
            f"kvflash_scorer (--kvflash-scorer) {path} cannot serve: {error}. Give another small model."
        ) from error


def of_policy(path: str, config: KVFlashConfig) -> Path | None:
    """Return the small model that the policy 'drafter' asks, None for another policy.

    ConfigError if there is none, ConfigError or ConversionError if a file that was asked for is not one.
    """
    if config.policy != DRAFTER:
        return None
    found = find(path, config.scorer, serves=purpose.reads_alone)
    if config.scorer is not None:
        purpose.check_reader(found)
    return found


def reserve_bytes(path: Path) -> int:
    """Return the bytes of device memory to leave free for a small model that will be loaded later."""
    return path.stat().st_size + COMPUTE_BYTES


def make_scorer(
    path: Path, beside: internals.LlamaModel, weights: llama_cpp.llama_model_params,
    settings: llama_cpp.llama_context_params, *, n_ctx: int, idle: int,
) -> DrafterScorer:  # fmt: skip
    """Return the policy `drafter` for a target. It loads the drafter for its first score.

    weights: the parameters that the target was loaded with. idle: see DrafterScorer; the others: see `load`.
    """
    offload, repack = weights.n_gpu_layers != 0, weights.use_extra_bufts
    read = partial(load, path, beside=beside, n_ctx=n_ctx, offload=offload, repack=repack, settings=settings)
    return DrafterScorer(read, source=str(path), idle=idle)


def load(
    path: Path, *, beside: internals.LlamaModel, n_ctx: int, offload: bool, repack: bool,
    settings: llama_cpp.llama_context_params,
) -> TargetReader:  # fmt: skip
    """Load a drafter for the text of a target.

    beside: the target, which must outlive the reader. n_ctx: the target's context. offload: use the device. repack:
    pack weights for the CPU's kernels. settings: the target's, for the number of threads.

    Raises the errors of llama.cpp's wrappers and of the engine if the model cannot be loaded or cannot run in a pool.
    """
    drafter = SmallModel(path, n_ctx=n_ctx, offload=offload, repack=repack, settings=settings)
    try:
        same = same_vocabulary(beside.vocab, drafter.model.vocab)
        tokenizer = "the same tokenizer" if same else "a tokenizer of its own"
        logger.info("the drafter %s reads along: %s, up to %d tokens at a time", path.name, tokenizer, drafter.n_ctx)
        return TokenReader(drafter) if same else _text_reader(drafter, beside)
    except BaseException:
        drafter.close()
        raise


class SmallModel:
    """A model with a pool that holds its whole context (policy.drafter.ReadingModel).

    Sealed chunks are copied to the host, where their keys can be scored beside the device's compute.
    """

    def __init__(
        self, path: Path, *, n_ctx: int, offload: bool, repack: bool, settings: llama_cpp.llama_context_params
    ) -> None:
        self._file = ModelFile(path)
        with ExitStack() as stack:
            params = llama_cpp.llama_model_default_params()
            params.n_gpu_layers = -1 if offload else 0
            params.use_extra_bufts = repack
            params.split_mode = llama_cpp.LLAMA_SPLIT_MODE_NONE
            # not "verbose" makes the wrappers redirect the streams of the whole process, and this is a worker thread
            self.model = internals.LlamaModel(path_model=str(path), params=params, verbose=True)
            stack.callback(self.model.close)
            self._side = Sidecar(self.model, n_ctx=n_ctx, query_rows=QUERY_ROWS, step=STEP, settings=settings)
            stack.callback(self._side.close)
            self.n_ctx = self._side.n_ctx
            self._session = self._side.session
            self._keys = self._side.keys
            self._stack = stack.pop_all()

    @property
    def length(self) -> int:
        return self._session.length

    def push(self, tokens: Int32s) -> None:
        self._side.read(tokens)

    @property
    def identity(self) -> str:
        return self._file.identity()

    def state(self) -> SessionState:
        return restore.state(self._session)

    def load(self, saved: DrafterState) -> None:
        session = saved.open(self._session.paging.heap, self._session.limits(self.model.n_vocab()))
        try:
            if (session.tokens < 0).any():
                raise SnapshotError("a drafter's text has rows of media, and a drafter reads none: it is damaged")
            restore.load(self._session, session)
        finally:
            session.release()

    def truncate(self, length: int) -> int:
        return self._side.truncate(length)

    def score_chunks(self) -> Floats:
        request = self._side.request(QUERY_ROWS)
        if request.n_chunks == 0:
            return np.empty(0, np.float32)
        chunks = range(request.n_chunks)
        masses = self._keys.score_keys(chunks, request)
        scores, wholes, _ = over_chunks(masses)
        boost_successors(self._keys, request, every_head(self._keys.shapes), masses, wholes, chunks, scores)
        return _finite(scores)

    def score_tokens(self) -> Floats:
        request = self._side.request(QUERY_ROWS)
        return _finite(token_scores(self._keys, request)) if request.n_chunks else np.empty(0, np.float32)

    def close(self) -> None:
        self._stack.close()


def _finite(scores: Floats) -> Floats:
    if not np.isfinite(scores).all():
        raise DecodeError("its attention is not finite")
    return scores


def same_vocabulary(target: Any, drafter: Any, *, apart: int = 0) -> bool:
    """Return whether every token of the target means the same to the drafter. Both are llama_vocab.

    apart: how many of the target's last tokens the drafter may not know.
    """
    count, known = llama_cpp.llama_vocab_n_tokens(target), llama_cpp.llama_vocab_n_tokens(drafter)
    kind = llama_cpp.llama_vocab_type(target)
    if kind != llama_cpp.llama_vocab_type(drafter) or count > known + apart:
        return False
    if kind == llama_cpp.LLAMA_VOCAB_TYPE_NONE:  # no token has a text, and llama.cpp would end the process
        return False
    text = llama_cpp.llama_vocab_get_text
    return all(text(target, token) == text(drafter, token) for token in range(min(count, known)))


def _text_reader(drafter: SmallModel, target: internals.LlamaModel) -> TextReader:
    model = drafter.model
    decode, spell = (cache(partial(vocabulary.piece, one.vocab, special=False)) for one in (target, model))

    def encode(text: bytes) -> list[int]:
        tokens = list(model.tokenize(text, add_bos=False, special=False))
        if min(tokens, default=0) < 0:
            raise ValueError("its tokenizer has no token for a part of the text")
        return tokens

    opening = [model.token_bos()] if model.add_bos_token() else []
    return TextReader(drafter, decode=decode, encode=encode, spell=spell, opening=opening)
