"""MTP: heads for further tokens, in the target's own file or in one beside it, that go on from its last state."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..config import SPEC_DEFAULT_WINDOW
from ..errors import ConversionError
from ..gguf import heads, reader
from ..native import stock
from .base import Features
from .chained import Chained
from .context import DraftContext, DraftModel, state_width
from .target import Target


class Mtp(Chained):
    """The head of a model that predicts the token after the next one, chained on itself.

    path: another file of the same model that has the head, None for the target's own, which must have been loaded with
    load_mtp. Raises ConversionError for a file without one head of this target's, and what DraftModel and DraftContext
    raise.
    """

    def __init__(self, path: Path | None, target: Target, *, window: int = SPEC_DEFAULT_WINDOW) -> None:
        file = reader.read(path or target.path)
        with ExitStack() as stack:
            address: Any = target.model
            if path is None:
                heads.check(file)
                if not stock.has_head(target.model):
                    raise ConversionError(
                        file.name, "the head for further tokens", found="not loaded", wanted="a model loaded with it",
                        remedy="Load the model with load_mtp.",
                    )  # fmt: skip
            else:
                heads.check_pair(file, reader.read(target.path))
                model = DraftModel(path, offload=target.offload, repack=target.repack, mtp=True)
                stack.callback(model.close)
                address = model.address
            context = DraftContext(address, target, window=window, mtp=True, states=stock.STATES)
            stack.callback(context.close)
            width = state_width(address)
            super().__init__(
                "mtp", Features(nextn=True), target, path or target.path, context, stack.pop_all(), width=width, place=0
            )
