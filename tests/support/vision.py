"""A projector of random weights in llama.cpp's format, and images."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import gguf
import numpy as np

SIDE, PATCH, WIDTH = 168, 14, 32
"""Pixels of an image's side and of a patch's, and the width of the image encoder."""
ROWS = (SIDE // PATCH) ** 2
"""Rows of an image: 144, which is more than two chunks."""


def write_projector(path: Path, n_embd: int) -> Path:
    """A CLIP encoder of two layers with LLaVA's projector: an image is (SIDE / PATCH)^2 embeddings."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    numbers = {"image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": 2 * WIDTH,
               "projection_dim": n_embd, "block_count": 2, "attention.head_count": 2}  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH),
        "v.position_embd.weight": ((SIDE // PATCH) ** 2, WIDTH),
        "mm.0.weight": (n_embd, WIDTH), "mm.0.bias": (n_embd,), "mm.2.weight": (n_embd, n_embd), "mm.2.bias": (n_embd,),
    }  # fmt: skip
    for block in ("v.blk.0", "v.blk.1"):
        shapes |= {f"{block}.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        shapes |= {f"{block}.{name}.{part}": (WIDTH,) for name in ("ln1", "ln2") for part in ("weight", "bias")}
        shapes |= {f"{block}.ffn_up.weight": (2 * WIDTH, WIDTH), f"{block}.ffn_down.weight": (WIDTH, 2 * WIDTH)}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


JPEGS = [
    base64.b64decode(text)
    for text in (
        "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDACgcHiMeGSgjISMtKygwPGRBPDc3PHtYXUlkkYCZlo+AjIqgtObDoKrarYqMyP/L2u71////"
        "m8H////6/+b9//j/2wBDASstLTw1PHZBQXb4pYyl+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4"
        "+Pj/wAARCAAQABgDASIAAhEBAxEB/8QAFgABAQEAAAAAAAAAAAAAAAAABAAD/8QAFxAAAwEAAAAAAAAAAAAAAAAAAAIDYf/EABYBAQEB"
        "AAAAAAAAAAAAAAAAAAMCBP/EABgRAAMBAQAAAAAAAAAAAAAAAAABAwIh/9oADAMBAAIRAxEAPwAKyNFkKWWGiywt0DnUMssIcsiCdDbm"
        "vD//2Q==",
        "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDACgcHiMeGSgjISMtKygwPGRBPDc3PHtYXUlkkYCZlo+AjIqgtObDoKrarYqMyP/L2u71////"
        "m8H////6/+b9//j/2wBDASstLTw1PHZBQXb4pYyl+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4"
        "+Pj/wgARCAAQABgDASIAAhEBAxEB/8QAFgABAQEAAAAAAAAAAAAAAAAAAwAC/8QAFgEBAQEAAAAAAAAAAAAAAAAAAgED/9oADAMBAAIQ"
        "AxAAAAENLqkp47f/xAAVEAEBAAAAAAAAAAAAAAAAAAAAEf/aAAgBAQABBQKIiIj/xAAWEQEBAQAAAAAAAAAAAAAAAAACAAH/2gAIAQMB"
        "AT8BKsV//8QAFREBAQAAAAAAAAAAAAAAAAAAABL/2gAIAQIBAT8BpT//xAAUEAEAAAAAAAAAAAAAAAAAAAAg/9oACAEBAAY/Al//xAAV"
        "EAEBAAAAAAAAAAAAAAAAAAAAAf/aAAgBAQABPyGEIQhD/9oADAMBAAIAAwAAABAL3//EABURAQEAAAAAAAAAAAAAAAAAAAAh/9oACAED"
        "AQE/EDF//8QAFREBAQAAAAAAAAAAAAAAAAAAAAH/2gAIAQIBAT8QpT//xAAWEAEBAQAAAAAAAAAAAAAAAABhABD/2gAIAQEAAT8QxRhh"
        "x//Z",
    )
]
"""Photos of 24 x 16 pixels, made with Pillow 12: a plain and a progressive one."""


def png(colour: tuple[int, int, int]) -> str:
    """An image of one colour, as a data URI."""
    pixels = zlib.compress((b"\0" + bytes(colour) * SIDE) * SIDE)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)), (b"IDAT", pixels), (b"IEND", b"")]
    data = b"".join(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
                    for kind, body in parts)  # fmt: skip
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()
