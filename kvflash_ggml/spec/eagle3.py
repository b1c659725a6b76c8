"""EAGLE3: one layer that reads what three layers of the target are given, fused to a state."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ..config import SPEC_DEFAULT_WINDOW
from ..gguf import reader, verify
from ..native import stock
from .chained import Chained
from .context import DraftContext, DraftModel
from .find import wants
from .target import Target


class Eagle3(Chained):
    """A drafter of the architecture eagle3 beside its target.

    Raises ConversionError for a file that is not a drafter of this target, and what DraftModel and DraftContext raise.
    """

    def __init__(self, path: Path, target: Target, *, window: int = SPEC_DEFAULT_WINDOW) -> None:
        file, model = reader.read(path), reader.read(target.path)
        verify.check(file, model)
        with ExitStack() as stack:
            weights = DraftModel(path, offload=target.offload, repack=target.repack)
            stack.callback(weights.close)
            shares = not {"token_embd.weight", "output.weight"} <= file.tensors.keys()
            context = DraftContext(weights.address, target, window=window, shares=shares, states=stock.STATES)
            stack.callback(context.close)
            super().__init__(
                "eagle3", wants(file, model), target, path, context, stack.pop_all(),
                width=len(verify.target_layers(file)) * target.n_embd, place=-1, state=context.encode,
            )  # fmt: skip
