"""A model file that says given texts, for servers that are not ours: whatever the prompt, a bias chooses the text.

Each byte of a text is a token of its own. Its embedding is nearest to the output row of the next one, so that the most
likely token is always the text's next. All other embeddings are zero, and so are their logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

BIAS = 60.0
"""On a text's first token: more than a prompt's logits, which are zero, and less than the next byte's, about 200."""

WIDTH, HEADS = 512, 8


def write(path: Path, texts: Sequence[str]) -> list[int]:
    """Write a model that says these texts. Returns the first token of each, which is to have BIAS."""
    import gguf

    draw = np.random.default_rng(0)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    embedded = [np.zeros(WIDTH, np.float32) for _ in tokens]
    output = [np.zeros(WIDTH, np.float32) for _ in tokens]
    firsts = []
    for text in texts:
        firsts.append(len(tokens))
        before = np.zeros(WIDTH, np.float32)
        for byte in text.encode():
            tokens.append(f"<0x{byte:02X}>{len(tokens)}")  # llama.cpp reads the byte, and wants names to differ
            kinds.append(gguf.TokenType.BYTE)
            output.append(before)
            before = draw.standard_normal(WIDTH).astype(np.float32)
            before /= np.linalg.norm(before)
            embedded.append(before)
        output[2] = output[2] + before
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(1 << 15)
    file.add_embedding_length(WIDTH)
    file.add_block_count(1)
    file.add_feed_forward_length(32)
    file.add_head_count(HEADS)
    file.add_head_count_kv(1)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_dimension_count(WIDTH // HEADS)
    file.add_vocab_size(len(tokens))
    file.add_tokenizer_model("llama")
    file.add_token_list(tokens)
    file.add_token_scores([0.0] * len(tokens))
    file.add_token_types(kinds)
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)
    file.add_add_space_prefix(False)
    rows = {"attn_q": WIDTH, "attn_k": WIDTH // HEADS, "attn_v": WIDTH // HEADS, "attn_output": WIDTH}
    rows |= {"ffn_gate": 32, "ffn_up": 32, "ffn_down": WIDTH}
    for name, count in rows.items():
        file.add_tensor(f"blk.0.{name}.weight", np.zeros((count, 32 if name == "ffn_down" else WIDTH), np.float32))
    for name in ("attn_norm", "ffn_norm"):
        file.add_tensor(f"blk.0.{name}.weight", np.ones(WIDTH, np.float32))
    file.add_tensor("output_norm.weight", np.full(WIDTH, 10, np.float32))
    file.add_tensor("token_embd.weight", np.stack(embedded))
    file.add_tensor("output.weight", np.stack(output))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return firsts
