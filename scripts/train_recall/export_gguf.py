"""Write a checkpoint as a GGUF file.

  python -m scripts.train_recall.export_gguf CKPT.pt TOKENIZER.json OUT.gguf
      [--type f16|q8_0|f32] [--name NAME]
      [--target TARGET]      also ship the target's embeddings and head (dflash, eagle3: optional;
                             mtp: required, and the norm before the head too); .pt or .gguf
      [--gguf-py DIR]        llama.cpp's gguf-py instead of the installed gguf

Needs torch (to read the checkpoint), numpy and gguf. Parameter names in the checkpoint are already
the GGUF tensor names; only A_log -> ssm_a is converted. Matrices take the requested type; vectors,
norms and the conv kernel stay float32.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import MAX_POS

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TYPES = {
    "f32": ("F32", "ALL_F32"),
    "f16": ("F16", "MOSTLY_F16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}  # GGMLQuantizationType, LlamaFileType


def add_tokenizer(w: Any, path: str, *, gguf: Any, mask: bool) -> None:
    """The byte-level BPE of ``path``, its special tokens and the chat template."""
    tk = json.loads(Path(path).read_text(encoding="utf-8"))
    vocab = dict(tk["model"]["vocab"])
    special = {t["content"]: t["id"] for t in tk["added_tokens"]}
    vocab.update(special)
    tokens = [t for t, _ in sorted(vocab.items(), key=lambda kv: kv[1])]
    assert [vocab[t] for t in tokens] == list(range(len(tokens)))
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tk["model"]["merges"]]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges(merges)
    w.add_bos_token_id(special["<|endoftext|>"])
    w.add_eos_token_id(special["<|im_end|>"])
    w.add_pad_token_id(special["<|endoftext|>"])
    w.add_add_bos_token(False)
    if mask:
        w.add_mask_token_id(special["<|mask|>"])
    w.add_chat_template(CHATML)


def add_metadata(w: Any, c: dict[str, Any], *, name: str, ftype: int, info: dict[str, Any], quant_version: int) -> None:
    """The hyperparameters of checkpoint config ``c`` under llama.cpp's keys."""
    a = gguf_arch(c)
    w.add_name(name)
    w.add_description("Tiny model trained from scratch for long-context recall tests; " + json.dumps(info)[:400])
    w.add_file_type(ftype)
    w.add_quantization_version(quant_version)
    w.add_uint32(f"{a}.context_length", MAX_POS)
    w.add_uint32(f"{a}.embedding_length", c["d"])
    w.add_uint32(f"{a}.block_count", c["n_layer"] + (c["arch"] == "mtp"))
    w.add_uint32(f"{a}.feed_forward_length", c["ffn"])
    w.add_uint32(f"{a}.attention.head_count", c["n_head"])
    w.add_uint32(f"{a}.attention.head_count_kv", c["n_kv"])
    w.add_uint32(f"{a}.attention.key_length", c["d_head"])
    w.add_uint32(f"{a}.attention.value_length", c["d_head"])
    w.add_float32(f"{a}.attention.layer_norm_rms_epsilon", c["eps"])
    w.add_float32(f"{a}.rope.freq_base", c["rope_theta"])
    w.add_uint32(f"{a}.rope.dimension_count", c["n_rot"])
    if a == "qwen35":
        pairs = c["n_rot"] // 2
        t = (pairs + 2) // 3  # temporal, height, width shares; all equal for text
        w.add_array(f"{a}.rope.dimension_sections", [t, (pairs + 1) // 3, pairs - t - (pairs + 1) // 3, 0])
        w.add_uint32(f"{a}.ssm.conv_kernel", c["conv"])
        w.add_uint32(f"{a}.ssm.state_size", c["lin_dim"])
        w.add_uint32(f"{a}.ssm.group_count", c["lin_heads"])
        w.add_uint32(f"{a}.ssm.time_step_rank", c["lin_heads"])
        w.add_uint32(f"{a}.ssm.inner_size", c["lin_heads"] * c["lin_dim"])
        w.add_uint32(f"{a}.full_attention_interval", c["full_interval"])
    if c["arch"] == "mtp":
        w.add_uint32(f"{a}.nextn_predict_layers", 1)
    if a == "dflash":
        w.add_uint32(f"{a}.block_size", c["block"])
    if a == "eagle3":
        w.add_uint32(f"{a}.target_hidden_size", c["d"])
    if c["target_layers"]:
        w.add_array(f"{a}.target_layers", [int(x) for x in c["target_layers"]])


def gguf_arch(c: dict[str, Any]) -> str:
    """llama.cpp's name of a config's architecture: an MTP head is part of a qwen35."""
    return "qwen35" if c["arch"] == "mtp" else str(c["arch"])


def interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection ``[heads * dim, ...]`` for rotary pairs side by side, not halves apart."""
    return np.ascontiguousarray(x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2)).reshape(x.shape)


def shared_tensors(target: str, c: dict[str, Any]) -> dict[str, Any]:
    """The tensors of ``target`` that a drafter ships copies of."""
    if target.endswith(".gguf"):
        from .import_gguf import load_gguf

        state = load_gguf(target)[1]
    else:
        state = torch.load(target, map_location="cpu", weights_only=True)["state"]
    names = ["token_embd.weight", "output.weight"] + ["output_norm.weight"] * (c["arch"] == "mtp")
    return {k: state[k] for k in names if k in state}


def export(ckpt: str, tokenizer: str, *, out: str, kind: str, name: str, target: str, gguf: Any) -> int:
    """Write ``out`` and return the number of parameters in it."""
    ck = torch.load(ckpt, map_location="cpu", weights_only=True)
    c, state = ck["config"], dict(ck["state"])
    if target:
        state.update(shared_tensors(target, c))
    elif c["arch"] == "mtp":
        raise SystemExit("an MTP head cannot borrow its target's embeddings: name the target with --target")
    qtype = gguf.GGMLQuantizationType[TYPES[kind][0]]
    ftype = gguf.LlamaFileType[TYPES[kind][1]]
    w = gguf.GGUFWriter(out, gguf_arch(c))
    add_metadata(
        w,
        c,
        name=name or f"recall-{c['arch']}",
        ftype=ftype,
        info=ck["info"],
        quant_version=gguf.GGML_QUANT_VERSION,
    )
    add_tokenizer(w, tokenizer, gguf=gguf, mask=c["arch"] == "dflash")
    n = 0
    for key, t in state.items():
        x = t.float().numpy()
        if key.endswith(".A_log"):
            key, x = key.replace("A_log", "ssm_a"), -np.exp(x)
        if c["arch"] == "eagle3" and key.endswith(("attn_q.weight", "attn_k.weight")):
            x = interleaved(x, len(x) // c["d_head"])
        n += x.size
        if x.ndim == 1 or "conv1d" in key:
            w.add_tensor(key, np.ascontiguousarray(x, np.float32))
        else:
            w.add_tensor(key, gguf.quants.quantize(x, qtype), raw_dtype=qtype)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return n


def main() -> None:
    """The command line."""
    ap = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    ap.add_argument("ckpt")
    ap.add_argument("tokenizer")
    ap.add_argument("out")
    ap.add_argument("--type", default="f16", choices=TYPES)
    ap.add_argument("--name", default="")
    ap.add_argument("--target", default="")
    ap.add_argument("--gguf-py", default="")
    args = ap.parse_args()
    if args.gguf_py:
        sys.path.insert(0, args.gguf_py)
    n = export(
        args.ckpt,
        args.tokenizer,
        out=args.out,
        kind=args.type,
        name=args.name,
        target=args.target,
        gguf=importlib.import_module("gguf"),
    )
    print(f"{args.out}: {n / 1e6:.2f}M parameters, {args.type}")


if __name__ == "__main__":
    main()
