"""Run GGUF models in a KV cache of fixed size: a drop-in for llama-cpp-python's `Llama`.

>>> from kvflash_ggml import Llama
>>> llm = Llama("model.gguf", n_ctx=131072, kvflash=4096)

Nothing native is loaded before one of the names that need it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .config import Fit, KVFlashConfig, PrefixCache, SpecConfig
from .errors import KVFlashError
from .native import library
from .native.library import build_info

if TYPE_CHECKING:
    from .batching.engine import Engine
    from .batching.messages import Sampling
    from .llama.install import install
    from .llama.llama import Llama

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "Fit",
    "KVFlashConfig",
    "KVFlashError",
    "Llama",
    "PrefixCache",
    "Sampling",
    "SpecConfig",
    "__version__",
    "build_info",
    "errors",
    "install",
]

# a program may import llama_cpp between this import and its first use of Llama
library.announce()


def __getattr__(name: str) -> Any:
    if name == "Sampling":
        return import_module(".batching.messages", __name__).Sampling
    rooms = {"Engine": ".batching.engine", "Llama": ".llama.llama", "install": ".llama.install"}
    if name not in rooms:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    library.load()
    return getattr(import_module(rooms[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
