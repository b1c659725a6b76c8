"""Checks LoRA adapters before upstream adds them to a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import llama_cpp

from ..errors import ConfigError, ConversionError
from ..gguf import purpose, reader


def check(path: str, scale: float, model: Path) -> None:
    """Raise ConfigError for a LoRA adapter that is no regular file: llama.cpp would wait for who writes a pipe.

    The same for a scale that is not finite. ConversionError for one that would end the process with this model.
    """
    if not math.isfinite(scale):
        raise ConfigError(f"lora_scale={scale!r}: a finite number, 1.0 for the adapter as it was trained")
    if not Path(path).is_file():
        raise _no_adapter(path)
    try:
        file = reader.read(Path(path))
    except (ConversionError, OSError) as err:
        raise _no_adapter(path, f" ({err})") from err
    purpose.check_adapter(file, model)


def _no_adapter(path: str, why: str = "") -> ConfigError:
    return ConfigError(
        f"Failed to initialize LoRA adapter from lora path: {path}: it is not there, or no adapter"
        f" of this model{why}. Convert it for this one with llama.cpp's convert_lora_to_gguf.py"
    )


def _refuse(result: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
    """Stop an adapter that is none before it is used: upstream compares a null pointer with None."""
    if not result:
        raise _no_adapter(arguments[1].decode())
    return result


llama_cpp.llama_adapter_lora_init.errcheck = _refuse
