"""Describes a GGUF file from its head alone: no model is loaded, and no native library."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calibration import known
from ..errors import ConfigError
from ..gguf import heads, reader
from ..gguf.reader import GGUF, Tensor, all_tensors
from ..snapshot.fingerprint import ModelFile

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_KEYS = ("attn_k.weight", "attn_kv_a_mqa.weight")
_FUSED = "attn_qkv.weight"
_RECURRENT = ("ssm_", "shortconv.", "time_mix_", "attn_gate.")
_F16 = 2
_DRAFTS = ("block_size", "target_layers", "target_hidden_size", "norm_before_residual", "norm_before_fc",
           "conv_kernel_size", "selector_rank", "selector_top_k", "sample_from_anchor", "dflash.block_size",
           "dflash.target_layer_ids", "dflash.mask_token_id", "dflash.n_target_layers")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Facts of a file; None for a fact that the file does not name.

    types: tensors by type. layers: without MTP heads, which `nextn` counts. attention: layers with a KV cache. pooled:
    layers whose cache grows with the text; None where only llama.cpp knows which layers slide. token_bytes: bytes of a
    token in the pooled layers, as f16. heads: (layer, head) pairs of a calibration, empty if it found none. drafter: a
    drafter's keys about its target and its blocks.
    """

    path: str
    bytes: int
    architecture: str
    name: str | None
    types: dict[str, int]
    parameters: int
    context: int | None
    hidden: int | None
    vocab: int | None
    layers: int | None
    nextn: int
    attention: int
    window: int | None
    pooled: int | None
    token_bytes: int | None
    heads: list[tuple[int, int]] | None
    drafter: dict[str, Any] | None
    template: bool


def describe(path: Path) -> Description:
    """Describe a file. ConversionError if it is no sound GGUF file."""
    file = reader.read(path)
    tensors = all_tensors(file)
    nextn = _whole(file.own("nextn_predict_layers")) or 0
    count = _whole(file.own("block_count"))
    layers = None if count is None else max(0, count - nextn)
    attention = [layer for layer in _attention(file, tensors) if layers is None or layer < layers]
    pooled = _pooled(file, attention)
    tokens = file.fields.get("tokenizer.ggml.tokens")
    return Description(
        path=str(path),
        bytes=path.stat().st_size,
        architecture=file.architecture,
        name=_text(file.get("general.name")),
        types=dict(Counter(tensor.kind.name for tensor in tensors).most_common()),
        parameters=sum(_values(tensor) for tensor in tensors),
        context=_whole(file.own("context_length")),
        hidden=_whole(file.own("embedding_length")),
        vocab=None if tokens is None else tokens.count,
        layers=layers,
        nextn=nextn,
        attention=len(attention),
        window=_whole(file.own("attention.sliding_window")),
        pooled=None if pooled is None else len(pooled),
        token_bytes=None if pooled is None else _token_bytes(file, pooled),
        heads=_heads(path),
        drafter=_drafter(file),
        template=any(name.startswith("tokenizer.chat_template") for name in file.fields),
    )


def _attention(file: GGUF, tensors: list[Tensor]) -> list[int]:
    """Return the layers with keys: a key projection, or a fused one in a layer without recurrent state."""
    names: dict[int, set[str]] = {}
    for tensor in tensors:
        if (match := _LAYER.fullmatch(tensor.name)) is not None:
            names.setdefault(int(match[1]), set()).add(match[2])
    heads = file.own("attention.head_count_kv")  # by layer in hybrids: none where the state is recurrent
    without = {layer for layer, count in enumerate(heads) if count == 0} if isinstance(heads, list) else set()
    return sorted(
        layer
        for layer, own in names.items()
        if layer not in without
        and (own & {*_KEYS} or (_FUSED in own and not any(name.startswith(_RECURRENT) for name in own)))
    )


def _pooled(file: GGUF, attention: list[int]) -> list[int] | None:
    if not _whole(file.own("attention.sliding_window")):
        return attention
    pattern = file.own("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or (attention and len(pattern) <= attention[-1]):
        return None
    return [layer for layer in attention if not pattern[layer]]


def _token_bytes(file: GGUF, pooled: list[int]) -> int | None:
    heads = _whole(file.own("attention.head_count"))
    hidden = _whole(file.own("embedding_length"))
    if not heads or not hidden:
        return None
    rank = _whole(file.own("attention.kv_lora_rank"))
    if rank:  # a latent cache: one row for all heads, whose values are a part of its keys
        return len(pooled) * (rank + (_whole(file.own("rope.dimension_count")) or 0)) * _F16
    kv = file.own("attention.head_count_kv", heads)
    width = (_whole(file.own("attention.key_length")) or hidden // heads) + (
        _whole(file.own("attention.value_length")) or hidden // heads
    )
    counts = [kv[layer] if isinstance(kv, list) and layer < len(kv) else kv for layer in pooled]
    return sum(_whole(count) or 0 for count in counts) * width * _F16


def _heads(path: Path) -> list[tuple[int, int]] | None:
    try:
        return known.read(known.heads_file(ModelFile(path).identity())).chosen
    except (ConfigError, OSError):
        return None


def _drafter(file: GGUF) -> dict[str, Any] | None:
    """Return the keys that only drafters have; of an MTP head in its own file, how many heads there are."""
    keys = ("nextn_predict_layers",) if heads.alone(file) else _DRAFTS
    found = {key: value for key in keys if (value := file.own(key)) is not None}
    if found and (mask := file.get("tokenizer.ggml.mask_token_id")) is not None:
        found["mask_token_id"] = mask
    return found or None


def _values(tensor: Tensor) -> int:
    return tensor.nbytes // tensor.kind.size * tensor.kind.block


def _whole(value: Any) -> int | None:
    """Return a count; the largest of an array, as layers differ."""
    if isinstance(value, list):
        value = max((x for x in value if type(x) is int), default=None)
    return value if type(value) is int and value >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
