"""The child process of doctor: load the library, list the devices, decode a little, say what would go where.

Writes one JSON object a line; "doing" lines come first, so that a crash shows where it happened.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from ..constants import CHUNK
from ..errors import ConfigError, UnsupportedModelError
from ..native import library, trial
from . import about
from .dry_run import predicted

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
    _say(about=about.facts(model))
    _say(decode=decode(model))
    _say(doing="placement")
    _say(placement=placement(model))


def devices() -> list[dict[str, Any]]:
    """Every device ggml can compute on. Memory is bytes."""
    ggml = ctypes.CDLL(None)
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    for name in ("name", "description"):
        function = getattr(ggml, f"ggml_backend_dev_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_char_p
    memory = ggml.ggml_backend_dev_memory
    memory.argtypes = [ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2]
    memory.restype = None
    found = []
    for index in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        found.append(
            {
                "name": ggml.ggml_backend_dev_name(device).decode(),
                "description": ggml.ggml_backend_dev_description(device).decode(),
                "free": free.value,
                "total": total.value,
            }
        )
    return found


def decode(model: str) -> dict[str, Any]:
    """A few tokens in a pool; with a small file or a GPU the text is longer than the pool."""
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
    """What would go where for the whole context, with a pool if the model can have one."""
    settings: dict[str, Any] = {"n_ctx": 0, "flash_attn": True}
    settings |= {"fit": True} if library.supports_gpu_offload() else {"n_gpu_layers": 0}
    try:
        return predicted(model, {**settings, "kvflash": "auto"})
    except UnsupportedModelError:
        return predicted(model, settings)


def _say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
