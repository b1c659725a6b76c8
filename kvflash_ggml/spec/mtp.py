"""MTP: heads for further tokens, in the target's own file or in one beside it, that go on from its last state."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..convert import gguf_read
from ..convert import target as target_facts
from ..convert.gguf_read import GGUF
from ..errors import ConversionError
from ..native import stock
from .base import Features
from .chained import Chained
from .context import WINDOW, DraftContext, DraftModel, state_width
from .target import Target

GRAPHS = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "hy_v3", "mimo2",
    "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35",
})  # fmt: skip
"""Architectures whose heads llama.cpp computes; it would compute something else for others, or abort."""


def heads(file: GGUF) -> int:
    """How many further tokens the heads in this file predict: 0 if it has none, and none that can be used."""
    count, layers = file.own("nextn_predict_layers", 0), file.own("block_count", 0)
    if type(count) is not int or type(layers) is not int or not 0 < count <= layers:
        return 0
    return count if f"blk.{layers - count}.nextn.eh_proj.weight" in file.tensors else 0


class Mtp(Chained):
    """The head of a model that predicts the token after the next one, chained on itself.

    path: another file of the same model that has the head, None for the target's own, which must have been loaded with
    load_mtp. Raises ConversionError for a file without one head of this target's, and what DraftModel and DraftContext
    raise.
    """

    def __init__(self, path: Path | None, target: Target, *, window: int = WINDOW) -> None:
        file = gguf_read.read(path or target.path)
        _check(file)
        with ExitStack() as stack:
            address: Any = target.model
            if path is None:
                _check_loaded(file, target)
            else:
                _check_pair(file, gguf_read.read(target.path))
                model = DraftModel(path, offload=target.offload, mtp=True)
                stack.callback(model.close)
                address = model.address
            context = DraftContext(address, target, window=window, mtp=True, states=stock.STATES)
            stack.callback(context.close)
            width = state_width(address)
            super().__init__("mtp", Features(nextn=True), target, context, stack.pop_all(), width=width, place=0)


def _check(file: GGUF) -> None:
    if file.architecture not in GRAPHS:
        raise ConversionError(
            file.name, "general.architecture", found=file.architecture,
            wanted=f"one whose heads llama.cpp computes: {', '.join(sorted(GRAPHS))}",
            remedy="Draft with a file of its own, or with the text itself (ngram).",
        )  # fmt: skip
    if (found := heads(file)) != 1:
        raise ConversionError(
            file.name, f"{file.architecture}.nextn_predict_layers", found=found or "0, or their tensors are missing",
            wanted="1 head for further tokens", remedy="Take a conversion of the model that kept it.",
        )  # fmt: skip


def _check_loaded(file: GGUF, target: Target) -> None:
    if not stock.has_head(target.model):
        raise ConversionError(
            file.name, "the head for further tokens", found="not loaded", wanted="the model loaded with it",
            remedy="Load the model with load_mtp.",
        )  # fmt: skip


def _check_pair(file: GGUF, target: GGUF) -> None:
    other = "Give the file of heads that was split from this target."
    aim = target_facts.describe(target)
    for what, found, wanted in (
        ("general.architecture", file.architecture, aim.architecture),
        ("embedding_length", file.own("embedding_length"), aim.hidden),
        ("the hash of the tokens", target_facts.vocabulary(file), aim.vocabulary),
    ):
        if found != wanted:
            raise ConversionError(file.name, what, found=found, wanted=f"{wanted}, the target's", remedy=other)
