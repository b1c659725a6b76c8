"""Opens the model of an arm: with its retrieval heads known before anything is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import KVFlashConfig

if TYPE_CHECKING:
    from ..llama.llama import Llama

ALL_HEADS = "qk-all"
"""The policy `qk` asking every head, as it does before its heads are known."""


@contextmanager
def opened(
    model: str,
    *,
    n_ctx: int,
    options: dict[str, Any],
    pool: int | None = None,
    policy: str = "",
    fields: dict[str, Any] | None = None,
    **keywords: Any,
) -> Iterator[Llama]:
    """The Llama of an arm, closed at the end. pool: None for the full cache.

    options: keywords of `Llama`, and `heads`: a file of retrieval heads. Without one they are those in the user's cache
    folder, or are found now. fields: more of KVFlashConfig.
    """
    from ..llama.llama import Llama  # not before: it loads the library, which counting results does without

    options = dict(options)
    heads = options.pop("heads", None)
    if pool is not None:
        calibrate = False if policy == ALL_HEADS else True if heads is None else Path(heads)
        name = "qk" if policy == ALL_HEADS else policy
        keywords["kvflash"] = KVFlashConfig(pool=pool, policy=name, calibrate=calibrate, **(fields or {}))
    llm = Llama(model, n_ctx=n_ctx, flash_attn=True, verbose=False, **keywords, **options)
    try:
        if llm.kvflash is not None:
            llm.kvflash.calibrate()
        yield llm
    finally:
        llm.close()
