"""Opens the model of an arm: with its retrieval heads known before anything is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvflash_ggml.config import KVFlashConfig

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

ALL_HEADS = "qk-all"
"""The policy `qk` asking every head, as it does before its heads are known."""

EXACT = ":exact"
"""Ends the policy of an arm that reads prompts with the whole text in view. Others read with what the pool holds."""


def reads_exactly(policy: str) -> bool:
    return policy.endswith(EXACT)


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
    """The Llama of an arm, closed at the end. pool: None for the full cache. policy: with EXACT or without.

    options: keywords of `Llama`, and `heads`: a file of retrieval heads. Without one they are those in the user's cache
    folder, or are found now. fields: more of KVFlashConfig.
    """
    from kvflash_ggml.llama.llama import Llama  # not before: it loads the library, which counting results does without

    options = dict(options)
    heads = options.pop("heads", None)
    if pool is not None:
        name, reading = policy.removesuffix(EXACT), "exact" if reads_exactly(policy) else "pool"
        calibrate = False if name == ALL_HEADS else True if heads is None else Path(heads)
        settings = {
            "policy": "qk" if name == ALL_HEADS else name, "reading": reading, "calibrate": calibrate, **(fields or {})
        }  # fmt: skip
        keywords["kvflash"] = KVFlashConfig(pool=pool, **settings)
    llm = Llama(model, n_ctx=n_ctx, flash_attn=True, verbose=False, **keywords, **options)
    try:
        if llm.kvflash is not None:
            llm.kvflash.calibrate()
        yield llm
    finally:
        llm.close()
