"""Projectors of random weights in llama.cpp's format, a model with M-RoPE, and images."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import gguf
import numpy as np

from .sounds import FRAME

SIDE, PATCH, WIDTH = 168, 14, 32
"""Pixels of an image's side and of a patch's, and the width of the image encoder."""
ROWS = (SIDE // PATCH) ** 2
"""Rows of an image: 144, which is more than two chunks."""
WIDE = (12, 11)
"""Columns and rows of embeddings that Qwen2-VL's projector makes of an image of `WIDE_PIXELS`."""
WIDE_PIXELS = (WIDE[0] * 2 * PATCH, WIDE[1] * 2 * PATCH)


def write_projector(path: Path, n_embd: int, kind: str = "mlp", *, hears: bool = False) -> Path:
    """A CLIP encoder of two layers and a projector, and one of sound beside it where it hears.

    kind: "mlp", as LLaVA has it: an image is (SIDE / PATCH)^2 embeddings. "qwen2vl_merger": it has its own size, and
    2 * 2 patches are one embedding. "gemma3": as many as "mlp", and the text model sees them as a whole. "blind": none
    of images. Sound is one embedding for 640 samples at 16,000 Hz, as Gemma 4's larger models have it.
    """
    writer = gguf.GGUFWriter(path, "clip")
    shapes: dict[str, tuple[int, ...]] = {}
    if kind != "blind":
        shapes |= _image_encoder(writer, n_embd, kind)
    if hears:
        writer.add_bool("clip.has_audio_encoder", True)
        writer.add_string("clip.audio.projector_type", "gemma4ua")
        numbers = {"embedding_length": FRAME, "feed_forward_length": FRAME, "projection_dim": n_embd, "block_count": 0,
                   "attention.head_count": 1, "num_mel_bins": FRAME}  # fmt: skip
        for name, number in numbers.items():
            writer.add_uint32(f"clip.audio.{name}", number)
        writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-6)
        shapes["mm.a.input_projection.weight"] = (n_embd, FRAME)
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _image_encoder(writer: gguf.GGUFWriter, n_embd: int, kind: str) -> dict[str, tuple[int, ...]]:
    """Write the numbers of an encoder of images; the shapes of its tensors."""
    merger = kind == "qwen2vl_merger"
    patches = 4 if merger else 1  # of one embedding
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.vision.projector_type", kind)
    numbers = {"image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": 2 * WIDTH,
               "projection_dim": n_embd, "block_count": 2, "attention.head_count": 2}  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH),
    }  # fmt: skip
    if kind == "gemma3":
        writer.add_uint32("clip.vision.projector.scale_factor", 1)
        shapes |= {"mm.input_projection.weight": (WIDTH, n_embd), "mm.soft_emb_norm.weight": (WIDTH,)}
    else:
        shapes |= {"mm.0.weight": (n_embd, patches * WIDTH), "mm.0.bias": (n_embd,)}
        shapes |= {"mm.2.weight": (n_embd, n_embd), "mm.2.bias": (n_embd,)}
    if merger:
        shapes["v.patch_embd.weight.1"] = shapes["v.patch_embd.weight"]
    else:
        shapes["v.position_embd.weight"] = ((SIDE // PATCH) ** 2, WIDTH)
    for block in ("v.blk.0", "v.blk.1"):
        shapes |= {f"{block}.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        shapes |= {f"{block}.attn_{name}.bias": (WIDTH,) for name in ("q", "k", "v") if merger}
        shapes |= {f"{block}.{name}.{part}": (WIDTH,) for name in ("ln1", "ln2") for part in ("weight", "bias")}
        shapes |= {f"{block}.ffn_up.weight": (2 * WIDTH, WIDTH), f"{block}.ffn_down.weight": (WIDTH, 2 * WIDTH)}
    return shapes


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


def write_mrope(source: Path, target: Path) -> Path:
    """A qwen3 model as a qwen3vl one: the same weights, and four positions a row."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen3vl")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            subtype = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key.replace("qwen3.", "qwen3vl."), field.contents(), field.types[0], sub_type=subtype)
    writer.add_rope_dimension_sections([12, 10, 10, 0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def png(colour: tuple[int, int, int], size: tuple[int, int] = (SIDE, SIDE)) -> str:
    """An image of one colour, as a data URI. size: its width and height."""
    width, height = size
    pixels = zlib.compress((b"\0" + bytes(colour) * width) * height)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", pixels), (b"IEND", b"")]
    data = b"".join(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
                    for kind, body in parts)  # fmt: skip
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()
