"""What a server asks of a `Llama` beside its public calls: every text of its pool, its media, and its embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError, KVFlashError
from .vision import HANDLERS

if TYPE_CHECKING:
    from ..runtime.saving import Saver
    from .embedding import Embedder, Pooling
    from .image_reader import ImageReader
    from .llama import Llama
    from .stats import PoolStats


def texts_of(llm: Llama) -> list[tuple[Saver, PoolStats]]:
    """Return all texts that a Llama's pool has room for, its own first, each with what tells of it.

    The further ones are opened now. They are closed with the Llama, which nothing else may use meanwhile. KVFlashError
    for a Llama without a pool, ConfigError for one that makes previews by itself.
    """
    texts = llm._pooled
    if texts is None:
        raise KVFlashError("a server parks conversations in a pool: make the Llama with kvflash=")
    if texts.config.reading == "preview":
        raise ConfigError("a server makes previews by request: make the Llama with kvflash_reading='auto'")
    return texts.all(llm.draft_model)


def image_reader_of(llm: Llama) -> ImageReader | None:
    """Return what reads media for a model, None for one that takes none. ConfigError where something drafts too."""
    if not isinstance(llm.chat_handler, HANDLERS):
        return None
    from .image_reader import ImageReader  # here: few models see or hear

    return ImageReader(llm, llm._at_hand, llm._call_lock.lock)


def embedder_of(llm: Llama, *, pooling: Pooling | None = None, most_tokens: int = 0) -> Embedder:
    """Return what embeds texts beside a pool, which the Llama owns and closes. ConfigError unless it was opened for it.

    pooling: see `Embedder`. most_tokens: of a text, for an encoder, which has no pool.
    """
    from .embedding import Embedder

    config = llm._opening.config
    most_tokens = most_tokens if config is None else config.embedding
    if not most_tokens:
        raise ConfigError("embeddings need a context of their own: open the model with KVFlashConfig(embedding=N)")
    return Embedder(llm, most_tokens, pooling=pooling)
