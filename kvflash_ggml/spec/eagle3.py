"""EAGLE3: one layer that reads what three layers of the target are given, fused to a state."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ..config import SPEC_DEFAULT_WINDOW
from ..convert import gguf_read, verify
from ..convert import target as target_facts
from ..native import stock
from .base import Features
from .chained import Chained
from .context import DraftContext, DraftModel
from .target import Target


class Eagle3(Chained):
    """A drafter of the architecture eagle3 beside its target.

    Raises ConversionError for a file that is not a drafter of this target, and what DraftModel and DraftContext raise.
    """

    def __init__(self, path: Path, target: Target, *, window: int = SPEC_DEFAULT_WINDOW) -> None:
        file, aim = gguf_read.read(path), target_facts.describe(gguf_read.read(target.path))
        verify.check(file, aim)
        layers = verify.target_layers(file)
        # what comes out of the last layer is no input of another one
        wants = Features(tuple(x for x in layers if x < aim.layers), nextn=aim.layers in layers)
        with ExitStack() as stack:
            model = DraftModel(path, offload=target.offload, repack=target.repack)
            stack.callback(model.close)
            shares = not {"token_embd.weight", "output.weight"} <= file.tensors.keys()
            context = DraftContext(model.address, target, window=window, shares=shares, states=stock.STATES)
            stack.callback(context.close)
            super().__init__(
                "eagle3", wants, target, path, context, stack.pop_all(), width=len(layers) * aim.hidden, place=-1,
                state=context.encode,
            )  # fmt: skip
