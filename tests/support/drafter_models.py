"""Drafters made from the trained models: with another tokenizer, a short context, or joined to the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from support.harness import _copy_fields, _finish

TOKENS = "tokenizer.ggml."
SPECIAL = 4  # the last tokens
FORGOTTEN = 300


def with_other_tokens(source: Path, target: Path) -> Path:
    """The same model whose tokens have other numbers, and which splits rare words into more of them."""
    reader = gguf.GGUFReader(source)

    def turned(values: Any) -> Any:
        return [*values[: len(values) - SPECIAL][::-1], *values[len(values) - SPECIAL :]]

    changed = {
        TOKENS + "tokens": turned(reader.fields[TOKENS + "tokens"].contents()),
        TOKENS + "token_type": turned(reader.fields[TOKENS + "token_type"].contents()),
        TOKENS + "merges": reader.fields[TOKENS + "merges"].contents()[:-FORGOTTEN],
        TOKENS + "add_bos_token": True,
    }
    order = turned(range(len(changed[TOKENS + "tokens"])))
    return _write(reader, target, changed, lambda t: t.data[order] if t.name == "token_embd.weight" else t.data)


def with_context(source: Path, target: Path, n_ctx: int) -> Path:
    """The same model, said to be trained for so many tokens."""
    return _write(gguf.GGUFReader(source), target, {"qwen3.context_length": n_ctx}, lambda t: t.data)


def not_finite(source: Path, target: Path) -> Path:
    """The same model, which computes NaN."""
    reader = gguf.GGUFReader(source)
    return _write(
        reader, target, {}, lambda t: t.data * np.float32("nan") if t.name == "blk.1.attn_norm.weight" else t.data
    )


def with_head(source: Path, head: Path, target: Path) -> Path:
    """The model of `source` with the MTP head of `head` as its last layer: one file that drafts for itself."""
    model, last = gguf.GGUFReader(source), gguf.GGUFReader(head)
    arch = model.fields["general.architecture"].contents()
    counts = [f"{arch}.block_count", f"{arch}.nextn_predict_layers"]
    writer = gguf.GGUFWriter(target, arch)
    _copy_fields(model, writer, lambda key: key not in counts)
    _copy_fields(last, writer, lambda key: key in counts)
    own = {tensor.name for tensor in model.tensors}
    for tensor in [*model.tensors, *(t for t in last.tensors if t.name not in own)]:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _finish(writer)
    return target


def with_own_vocabulary(drafter: Path, model: Path, target: Path, tokens: list[int]) -> Path:
    """The drafter with a head for these tokens alone, out of the model's own: it drafts no others."""
    reader, full = gguf.GGUFReader(drafter), gguf.GGUFReader(model)
    head = next(tensor for tensor in full.tensors if tensor.name == "output.weight")
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    _copy_fields(reader, writer, lambda key: True)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor("output.weight", head.data[tokens], raw_dtype=head.tensor_type)
    writer.add_tensor("d2t", np.array(tokens, np.int64), raw_dtype=gguf.GGMLQuantizationType.I64)
    _finish(writer)
    return target


def _write(reader: Any, target: Path, changed: dict[str, Any], data: Any) -> Path:
    writer = gguf.GGUFWriter(target, "qwen3")
    _copy_fields(reader, writer, lambda key: key not in changed)
    for key, value in changed.items():
        field = reader.fields[key]
        subtype = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, field.types[0], sub_type=subtype)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, data(tensor).copy(), raw_dtype=tensor.tensor_type)
    _finish(writer)
    return target
