"""Single operations of ggml on the device under test."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type

from kvflash_ggml.native import library as native
from support.rounding import ON_GPU

POINTER = ctypes.c_void_p
CPU, GPU, INTEGRATED = 0, 1, 2


class Init(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", POINTER), ("no_alloc", ctypes.c_bool))


def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    native.load()
    found = getattr(ctypes.CDLL(None), name)
    found.restype, found.argtypes = result, arguments
    return found  # type: ignore[no-any-return]


def device() -> int:
    """The device under test."""
    by_type = function("ggml_backend_dev_by_type", POINTER, ctypes.c_int)
    return by_type(GPU) or by_type(INTEGRATED) if ON_GPU else by_type(CPU)  # type: ignore[no-any-return]


@functools.cache
def has_our_kernels() -> bool:
    """Is it a GPU that our kernels are for, and are they asked for?"""
    if not ON_GPU or os.environ.get("KVFLASH_KERNELS") == "stock":
        return False
    name, describe = (
        function(f"ggml_backend_dev_{what}", ctypes.c_char_p, POINTER)(device()) for what in ("name", "description")
    )
    return name.startswith(b"CUDA") and bool(re.search(rb"\bG?H(100|200|800|20)\b", describe))


def quantised(kind: Type, values: np.ndarray) -> np.ndarray:
    """Rows of float32 as rows of blocks."""
    quantise = function(
        "ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, *[POINTER] * 2, *[ctypes.c_int64] * 3, POINTER
    )
    data = np.empty(values.nbytes, np.uint8)
    count = quantise(kind, values.ctypes.data, data.ctypes.data, 0, *values.shape, None)
    return data[:count].reshape(len(values), -1)


def new(context: int, kind: Type, *shape: int) -> int:
    """A tensor of three dimensions, the innermost first."""
    tensor = function("ggml_new_tensor_3d", POINTER, POINTER, ctypes.c_int, *[ctypes.c_int64] * 3)
    return tensor(context, kind, *shape)  # type: ignore[no-any-return]


def put(tensor: int, values: np.ndarray) -> None:
    """Write all of a tensor that has its memory."""
    set_ = function("ggml_backend_tensor_set", None, POINTER, POINTER, ctypes.c_size_t, ctypes.c_size_t)
    set_(tensor, values.ctypes.data, 0, values.nbytes)


def take(tensor: int, shape: tuple[int, ...]) -> np.ndarray:
    """Read all of a tensor of float32, with the outermost dimension first."""
    found = np.empty(shape, np.float32)
    get = function("ggml_backend_tensor_get", None, POINTER, POINTER, ctypes.c_size_t, ctypes.c_size_t)
    get(tensor, found.ctypes.data, 0, found.nbytes)
    return found


class Work:
    """Tensors of a device, and what is computed from them. Use it in a `with`."""

    def __init__(self) -> None:
        self._contexts: list[int] = []
        self._buffers: list[int] = []
        self._backend = function("ggml_backend_dev_init", POINTER, POINTER, ctypes.c_char_p)(device(), None)
        assert self._backend

    def __enter__(self) -> Work:
        return self

    def context(self) -> int:
        made: int = function("ggml_init", POINTER, Init)(Init(1 << 20, None, True))
        self._contexts.append(made)
        return made

    def place(self, context: int) -> int:
        """Memory for the context's tensors: a buffer."""
        buffer: int = function("ggml_backend_alloc_ctx_tensors", POINTER, POINTER, POINTER)(context, self._backend)
        assert buffer
        self._buffers.append(buffer)
        return buffer

    def graph(self, context: int, out: int) -> int:
        graph: int = function("ggml_new_graph", POINTER, POINTER)(context)
        function("ggml_build_forward_expand", None, POINTER, POINTER)(graph, out)
        return graph

    def compute(self, graph: int) -> None:
        assert function("ggml_backend_graph_compute", ctypes.c_int, POINTER, POINTER)(self._backend, graph) == 0

    def __exit__(self, *_: object) -> None:
        for buffer in self._buffers:
            function("ggml_backend_buffer_free", None, POINTER)(buffer)
        for context in self._contexts:
            function("ggml_free", None, POINTER)(context)
        function("ggml_backend_free", None, POINTER)(self._backend)
