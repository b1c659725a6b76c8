"""What a model and its contexts take, measured by a load without its data."""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..constants import KV_TYPES
from ..errors import ConfigError
from ..native import measure as native
from ..native.devices import finds
from . import memory
from .sizes import Device, DeviceBytes, LayerSizes, Measure, ModelSizes

QUANTISED = KV_TYPES["q8_0"]

Overrides = Sequence[tuple[str, str]]
"""(pattern, device): a weight whose name matches goes there, by the first pattern that does."""


@contextmanager
def sketch(path: str | os.PathLike[str], params: Any) -> Iterator[Sketch]:
    """A model without its data. params: llama_model_params. ConfigError if llama.cpp cannot load the file."""
    with native.sketch(path, params) as model:
        yield Sketch(model)


class Sketch:
    """A model that was loaded without its data, so that nothing but its vocabulary takes time and memory.

    params: llama_context_params, of which n_ctx, n_batch, n_ubatch and types count. Where weights lie is what the model
    was loaded with: sizes are those of a placement on devices if it was loaded for these.
    """

    def __init__(self, model: int) -> None:
        self.address = model
        self.weights = native.weights(model)

    def measure(self, params: Any, *, pool: int, query_rows: int = 0) -> Measure:
        """What all that takes with a pool of so many slots, 0 for a full cache.

        UnsupportedModelError if the model cannot have a pool, ConfigError for settings that make no context.
        """
        found = native.measure(self.address, params, cells=pool, query_rows=query_rows)
        host = len(found.devices) - 1
        return Measure(
            n_ubatch=params.n_ubatch,
            pool=pool,
            devices=tuple(
                DeviceBytes(device=x.device, model=x.model, context=x.context, compute=x.compute) for x in found.devices
            ),
            offloaded=all(x.device != host or x.kind == native.EMBEDDING for x in self.weights),
        )

    def devices(self) -> tuple[Device, ...]:
        """Those of the model, in its order, and the host."""
        return memory.of_model(self.address)

    def sizes(self, params: Any, *, overrides: Overrides = ()) -> ModelSizes:
        """Sizes of layers, output and embedding. overrides: the user's own, with which the model was loaded."""
        found = native.measure(self.address, params, cells=0)
        host = len(found.devices) - 1
        dense: defaultdict[int, int] = defaultdict(int)
        experts: defaultdict[int, int] = defaultdict(int)
        fixed: defaultdict[str, int] = defaultdict(int)
        output = embedding = 0
        for x in self.weights:
            if (device := _override(x.name, overrides)) is not None:
                fixed[device] += x.size
            elif x.layer >= 0:
                (experts if x.kind == native.EXPERTS else dense)[x.layer] += x.size
            elif x.kind == native.EMBEDDING or (x.kind != native.OUTPUT and x.device == host > 0):
                embedding += x.size
            else:
                output += x.size
        return ModelSizes(
            layers=tuple(
                LayerSizes(
                    dense=dense[i],
                    experts=experts[i],
                    k_row=x.k_values,
                    v_row=x.v_values,
                    window=_window(x.cells, params),
                    state=x.state,
                    query=x.query,
                    heads=x.heads,
                    heads_kv=x.heads_kv,
                )
                for i, x in enumerate(found.layers)
            ),
            output=output,
            embedding=embedding,
            fixed=dict(fixed),
            quantizable=self._quantizable(params),
            name=self._metadata("general.name"),
            n_ctx_train=_llama_cpp().llama_model_n_ctx_train(self.address),
            n_expert=self._number("expert_count"),
            n_expert_used=self._number("expert_used_count"),
        )

    def _quantizable(self, params: Any) -> bool:
        trial = copied(params, type_k=QUANTISED, type_v=QUANTISED)
        try:
            native.measure(self.address, trial, cells=0)
        except ConfigError:
            return False
        return True

    def _metadata(self, key: str) -> str:
        text = ctypes.create_string_buffer(256)
        length = _llama_cpp().llama_model_meta_val_str(self.address, key.encode(), text, len(text))
        return text.value.decode("utf-8", "replace") if length >= 0 else ""

    def _number(self, key: str) -> int:
        text = self._metadata(f"{self._metadata('general.architecture')}.{key}")
        return int(text) if text.isdigit() else 0


def copied(params: Any, **changes: Any) -> Any:
    """Parameters with some fields changed."""
    res = type(params).from_buffer_copy(params)
    for name, value in changes.items():
        setattr(res, name, value)
    return res


def _window(cells: int, params: Any) -> int:
    """Tokens: llama.cpp adds a step to it."""
    return cells and (cells if params.swa_full else cells - params.n_ubatch)


def _override(name: str, overrides: Overrides) -> str | None:
    return next((device for pattern, device in overrides if finds(pattern, name)), None)


def _llama_cpp() -> Any:
    import llama_cpp

    return llama_cpp
