"""The child processes of doctor. `main`: load the library, list the devices, decode a little, say what would go where.

Writes one JSON object a line; "doing" lines come first, so that a crash shows where it happened. `measure`: take a
whole step. A backend grows buffers of its own at its first large product, which no measure before a load can tell:
they are what margins are for.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arrays import address
from ..constants import CHUNK
from ..errors import ConfigError, UnsupportedModelError
from ..native import library, trial
from .report import predicted

if TYPE_CHECKING:
    from ..native.sizes import Needs
    from ..placement.sizes import Device

DECODE_POOL = 512
_CONTEXT = 1024
_SMALL_FILE = 256 << 20
_TEXT = "The quick brown fox jumps over the lazy dog. "


def main(model: str) -> None:
    _say(doing="library")
    library.load()
    import llama_cpp

    _say(features=trial.built_for(ctypes.CDLL(None)))  # first, in case the next line crashes
    _say(
        library=str(library.library_folder()),
        cpu=library.cpu_library(),
        system=llama_cpp.llama_print_system_info().decode(),
    )
    _say(doing="devices")
    _say(devices=devices(), gpu=library.supports_gpu_offload())
    _say(doing="weights")
    _say(weights=trial.check_weights(ctypes.CDLL(None), _say))
    _say(doing="decode")
    _say(about=facts(model))
    _say(decode=decode(model))
    _say(doing="placement")
    _say(placement=placement(model))


def devices() -> list[dict[str, Any]]:
    """Describe every device that ggml can compute on. Memory is bytes."""
    from ..native import devices as native

    return [
        {"name": one.name, "description": one.description, "free": one.free_bytes, "total": one.total_bytes}
        for one in native.devices()
    ]


def decode(model: str) -> dict[str, Any]:
    """Decode a few tokens in a pool; with a small file or a GPU the text is longer than the pool."""
    from kvflash_ggml import Llama

    gpu = library.supports_gpu_offload()
    paging = gpu or (Path(model).is_file() and Path(model).stat().st_size < _SMALL_FILE)
    settings: dict[str, Any] = {
        "n_ctx": _CONTEXT,
        "n_batch": 128,
        "n_ubatch": 128,
        "n_gpu_layers": -1 if gpu else 0,
        "flash_attn": True,
        "verbose": False,
    }
    refused = None
    try:
        llm = Llama(model, kvflash=DECODE_POOL, **settings)
    except UnsupportedModelError as error:
        refused, llm = str(error), Llama(model, **settings)
    try:
        tokens = llm.tokenize(_TEXT.encode())
    except ConfigError:  # a file without a vocabulary
        tokens = list(range(1, 11))
    if paging:
        tokens = (tokens * _CONTEXT)[: _CONTEXT - 64]
    start = time.perf_counter()
    with closing(llm.generate(tokens, temp=0.0)) as stream:
        made = [int(next(stream)) for _ in range(3)]
        stats = llm.kvflash
        if paging and stats is not None:
            stats.pin(CHUNK, 2 * CHUNK)  # the second chunk was paged out long ago: bring it back
        made.append(int(next(stream)))
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 3),
        "prompt": len(tokens),
        "tokens": made,
        "page_outs": stats.page_outs if stats is not None else 0,
        "page_ins": stats.page_ins if stats is not None else 0,
        "paged": paging and stats is not None,
        "refused": refused,
    }


def placement(model: str) -> dict[str, Any]:
    """Predict what would go where for the whole context, with a pool if the model can have one."""
    settings: dict[str, Any] = {"n_ctx": 0, "flash_attn": True}
    settings |= {"fit": True} if library.supports_gpu_offload() else {"n_gpu_layers": 0}
    try:
        return predicted(model, {**settings, "kvflash": "auto"})
    except UnsupportedModelError:
        return predicted(model, settings)


def facts(path: str) -> dict[str, Any]:
    """Read what a model file says of itself. Bytes are of an f16 cache."""
    import llama_cpp
    from llama_cpp import _internals as internals

    from ..placement import sizing

    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    with closing(internals.LlamaModel(path_model=path, params=params, verbose=False)) as model:
        metadata = model.metadata()
        refused, slot_bytes = None, 0
        try:
            slot_bytes = sizing.slot_size(model, llama_cpp.llama_context_default_params())
        except UnsupportedModelError as error:
            refused = str(error)
        return {
            "architecture": metadata.get("general.architecture", "unknown"),
            "n_ctx_train": model.n_ctx_train(),
            "chat_template": any(name.startswith("tokenizer.chat_template") for name in metadata),
            "token_bytes": slot_bytes,
            "refused": refused,
        }


def measure(model: str) -> None:
    library.load()
    settings: dict[str, Any] = {"n_ctx": 0, "verbose": False}
    settings |= {"fit": True} if library.supports_gpu_offload() else {"n_gpu_layers": 0}
    _say(step=take(model, settings))


def take(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Load a model, take its largest step and one of a token. What each device has lost to it, in bytes."""
    from kvflash_ggml import KVFlashConfig, Llama

    from ..native import measure
    from ..placement import memory

    before = memory.devices()
    try:
        llm = Llama(model, kvflash=KVFlashConfig(reading="pool", calibrate=False), **settings)
    except UnsupportedModelError:
        llm = Llama(model, flash_attn=True, **settings)
    with closing(llm):
        n_ubatch = llm.context_params.n_ubatch
        llm.eval([token % llm.n_vocab() for token in range(n_ubatch)])
        llm.eval([0])
        counted = measure.taken(address(llm.ctx), address(llm.model))
        staging = {} if llm.kvflash is None else {x.name: x.staging_bytes for x in llm.kvflash.devices}
        return {"n_ubatch": n_ubatch, "devices": lost(before, memory.devices(), counted, staging)}


def lost(
    before: Sequence[Device], after: Sequence[Device], counted: Sequence[Needs], staging: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Compare each device but the host that has something of ours. staging: bytes by name, which no measure has."""
    from ..config import Fit
    from ..placement import memory

    left = {device.name: device.free for device in after}
    ours = {x.device: x.total + staging.get(x.device, 0) for x in counted}
    return [
        {
            "name": device.name,
            "taken": device.free - left[device.name],
            "beyond": device.free - left[device.name] - ours[device.name],
            "margin": memory.margin(device, Fit()),
        }
        for device in before
        if device.kind != "host" and ours.get(device.name)
    ]


def _say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
