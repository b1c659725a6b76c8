"""Read a target model back from its GGUF file, for training a drafter against what is shipped.

Needs gguf beside torch. The values are those that llama.cpp multiplies with: dequantised, not the
ones that were quantised.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

from .config import Config
from .params import Params


def read_config(reader: Any) -> Config:
    """The shape that ``export_gguf.add_metadata`` wrote."""
    arch = reader.fields["general.architecture"].contents()

    def key(name: str) -> Any:
        return reader.fields[f"{arch}.{name}"].contents()

    names = {t.name for t in reader.tensors}
    shape = dict(
        arch=arch,
        vocab=len(reader.fields["tokenizer.ggml.tokens"].data),
        n_layer=key("block_count"),
        d=key("embedding_length"),
        n_head=key("attention.head_count"),
        n_kv=key("attention.head_count_kv"),
        d_head=key("attention.key_length"),
        n_rot=key("rope.dimension_count"),
        ffn=key("feed_forward_length"),
        tied="output.weight" not in names,
        rope_theta=key("rope.freq_base"),
        eps=key("attention.layer_norm_rms_epsilon"),
    )
    if arch == "qwen35":
        shape.update(
            full_interval=key("full_attention_interval"),
            lin_heads=key("ssm.group_count"),
            lin_dim=key("ssm.state_size"),
            conv=key("ssm.conv_kernel"),
        )
    return Config(**shape)


def load_gguf(path: str, device: str = "cpu") -> tuple[Config, Params, dict[str, Any]]:
    """The shape, float32 parameters and (empty) training record of a qwen3 or qwen35 file."""
    reader = gguf.GGUFReader(path)
    p: Params = {}
    for t in reader.tensors:
        name, x = t.name, np.array(gguf.quants.dequantize(t.data, t.tensor_type), np.float32)
        if name.endswith(".ssm_a"):
            name, x = name.replace("ssm_a", "A_log"), np.log(-x)
        p[name] = torch.from_numpy(x).to(device)
    return read_config(reader), p, {}
