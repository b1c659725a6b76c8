"""Checks MTP heads ("nextn" in llama.cpp), in a model's file or in one of their own."""

from __future__ import annotations

from ..errors import ConversionError
from .reader import GGUF, all_tensors

GRAPHS = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "hy_v3", "mimo2",
    "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35",
})  # fmt: skip
"""Architectures whose heads llama.cpp computes. For others it would compute something else, or abort."""


def count(file: GGUF) -> int:
    """Return how many MTP heads the file has; 0 if it names some and their tensors are missing."""
    further, layers = file.own("nextn_predict_layers", 0), file.own("block_count", 0)
    if type(further) is not int or type(layers) is not int or not 0 < further <= layers:
        return 0
    name = f"blk.{layers - further}.nextn.eh_proj.weight"
    return further if any(tensor.name == name for tensor in all_tensors(file)) else 0


def alone(file: GGUF) -> bool:
    """Report whether the file has heads and no other layers, by llama.cpp's rule."""
    return count(file) > 0 and all(tensor.name != "blk.0.attn_norm.weight" for tensor in all_tensors(file))


def check(file: GGUF) -> None:
    """Raise ConversionError unless the file has one head, of an architecture in GRAPHS."""
    if file.architecture not in GRAPHS:
        raise ConversionError(
            file.name, "general.architecture", found=file.architecture,
            wanted=f"one whose heads llama.cpp computes: {', '.join(sorted(GRAPHS))}",
            remedy="Draft with a file of its own, or with the text itself (ngram).",
        )  # fmt: skip
    if (found := count(file)) != 1:
        raise ConversionError(
            file.name, f"{file.architecture}.nextn_predict_layers", found=found or "0, or their tensors are missing",
            wanted="1 head for further tokens", remedy="Take a conversion of the model that kept it.",
        )  # fmt: skip
