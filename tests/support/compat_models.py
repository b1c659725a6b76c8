"""Models that upstream's tests need and that tests/models does not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np


def write_mamba(source: Path, target: Path) -> None:
    """A purely recurrent model with random weights and the tokenizer of `source`."""
    width, inner, states, rank, kernel, layers = 64, 128, 16, 4, 4, 2
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "mamba")
    _copy_fields(reader, writer, lambda key: key.startswith("tokenizer."))
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(layers)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(states)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)

    rng = np.random.default_rng(5)

    def add(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        writer.add_tensor(name, values)

    add("token_embd.weight", len(reader.fields["tokenizer.ggml.tokens"].data), width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for i in range(layers):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(width, np.float32))
        add(f"blk.{i}.ssm_in.weight", 2 * inner, width)
        add(f"blk.{i}.ssm_conv1d.weight", inner, kernel)
        add(f"blk.{i}.ssm_conv1d.bias", inner)
        add(f"blk.{i}.ssm_x.weight", rank + 2 * states, inner)
        add(f"blk.{i}.ssm_dt.weight", inner, rank)
        add(f"blk.{i}.ssm_dt.bias", inner)
        decay = -np.arange(1, states + 1, dtype=np.float32)
        writer.add_tensor(f"blk.{i}.ssm_a", np.tile(decay, (inner, 1)))
        writer.add_tensor(f"blk.{i}.ssm_d", np.ones(inner, np.float32))
        add(f"blk.{i}.ssm_out.weight", width, inner)
    _finish(writer)


def write_embedding(source: Path, target: Path) -> None:
    """The model of `source`, declared to give one embedding per text: the mean over its tokens."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    _copy_fields(reader, writer, lambda key: True)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _finish(writer)


def _copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, wanted: Callable[[str], bool]) -> None:
    for key, field in reader.fields.items():
        if wanted(key) and key != "general.architecture" and not key.startswith("GGUF."):
            item = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=item)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
