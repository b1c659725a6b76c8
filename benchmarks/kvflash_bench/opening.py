"""Opens the model of an arm: with its retrieval heads known before anything is measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvflash_ggml.config import KVFlashConfig, SpecConfig
from kvflash_ggml.errors import ConfigError

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

ALL_HEADS = "qk-all"
"""The policy `qk` asking every head, as it does before its heads are known."""

DRAFTER = "drafter"
"""The policy of a small model; of a preview, the model that ranks its passages."""

EXACT = ":exact"
"""Ends the policy of an arm that reads prompts with the whole text in view. Others read with what the pool holds."""


_PREVIEW = re.compile(r":preview(\d+(?:\.\d+)?)\Z")
"""Ends the policy of an arm that reads so many per cent of each prompt, as a preview does."""


def preview_share(policy: str) -> float | None:
    """The part of a prompt that an arm of this policy reads, 0 to 1; None if it reads all. ConfigError above 100 %."""
    found = _PREVIEW.search(policy)
    if found is None:
        return None
    if not 0 < float(found[1]) <= 100:
        raise ConfigError(f"{policy}: a preview reads more than 0 and at most 100 % of a prompt, as in qk:preview5")
    return float(found[1]) / 100


def base_policy(policy: str) -> str:
    """The policy of an arm without what says how it reads."""
    return _PREVIEW.sub("", policy).removesuffix(EXACT)


def reads_exactly(policy: str) -> bool:
    return policy.endswith(EXACT)


def answering(answer: str, width: int | None, drafts: str = "") -> dict[str, Any]:
    """Fields of KVFlashConfig for answers of a kind. width: of steps that verify drafts, None for as many as pay.

    drafts: who drafts for the pool, as --kvflash-spec takes it; "" for nobody, or with a width for the text itself.
    """
    fields: dict[str, Any] = {"answer": answer}
    if drafts or (width is not None and answer in ("lossless", "auto")):
        spec = SpecConfig.read(drafts) if drafts else None
        fields["spec"] = replace(spec or SpecConfig(types=("ngram",)), width=width)
    return fields


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
    """The Llama of an arm, closed at the end. pool: None for the full cache. policy: with EXACT, a preview's share, or
    neither.

    options: keywords of `Llama`, and `heads`: a file of retrieval heads. Without one they are those in the user's cache
    folder, or are found now. fields: more of KVFlashConfig.
    """
    from kvflash_ggml.llama.llama import Llama  # not before: it loads the library, which counting results does without

    options = dict(options)
    heads, index = options.pop("heads", None), options.pop("kvflash_index", None)
    if pool is not None:
        name, previews = base_policy(policy), preview_share(policy) is not None
        reading = "exact" if previews or reads_exactly(policy) else "pool"
        if previews and name == DRAFTER:  # it ranks passages
            name = "qk"
        calibrate = False if name == ALL_HEADS else True if heads is None else Path(heads)
        settings = {
            "policy": "qk" if name == ALL_HEADS else name, "reading": reading, "calibrate": calibrate, "index": index,
            **(fields or {}),
        }  # fmt: skip
        keywords["kvflash"] = KVFlashConfig(pool=pool, **settings)
    llm = Llama(model, n_ctx=n_ctx, flash_attn=True, verbose=False, **keywords, **options)
    try:
        if llm.kvflash is not None:
            llm.kvflash.calibrate()
        yield llm
    finally:
        llm.close()
