"""Quantises a drafter's file: matrices shrink; norms and every key stay."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from ..arrays import Floats
from ..errors import ConversionError, LibraryError
from ..files import replacing
from ..gguf import encoding, heads, reader, types, verify
from ..gguf.drafter import ARCHITECTURE
from ..gguf.encoding import Encoder
from ..gguf.reader import GGUF, Field, Tensor
from ..gguf.types import Bytes, TensorType
from ..logs import Progress
from ..native import library
from . import writer
from .draft import FILE_TYPES, QUANTIZATION_VERSION
from .writer import Planned


def encode_natively(rows: Floats, kind: TensorType) -> Bytes:
    """Encode finite rows, [n, width], as rows of bytes. LibraryError if ggml must do it and is not there."""
    if kind.name in encoding.WITHOUT_LIBRARY:
        return encoding.encode(rows, kind)
    try:
        library.load()
    except LibraryError as error:
        ours = ", ".join(sorted(encoding.WITHOUT_LIBRARY))
        raise LibraryError(f"{kind.name} is made by ggml itself; without it there are {ours}. {error}") from error
    quantize = ctypes.CDLL(None).ggml_quantize_chunk
    floats, number = ctypes.POINTER(ctypes.c_float), ctypes.c_int64
    quantize.argtypes = [ctypes.c_int, floats, ctypes.c_void_p, number, number, number, floats]
    quantize.restype = ctypes.c_size_t
    values = np.ascontiguousarray(rows, np.float32)
    n, width = values.shape
    made = np.empty((n, width // kind.block * kind.size), np.uint8)
    size = quantize(kind.id, values.ctypes.data_as(floats), made.ctypes.data, 0, n, width, None)
    if size != made.nbytes:
        raise ValueError(f"ggml made {size} bytes of {kind.name}, {made.nbytes} were expected")
    return made


TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q5_1", "q5_0", "q4_1", "q4_0", "bf16", "f16")
"""Types that a file can be quantised to. A mixture (_m) keeps attn_v and ffn_down at six bits."""

_MIXTURES = {"q5_k_m": ("q5_k", "q6_k"), "q4_k_m": ("q4_k", "q6_k")}
_BLOCK = re.compile(r"blk\.\d+\.(attn_(?:q|k|v|output)|ffn_(?:gate|up|down))(?:_exps|_shexp)?\.weight")
_NEXTN = re.compile(r"blk\.\d+\.nextn\.(?:eh_proj|embed_tokens|shared_head_head)\.weight")
_RICH = {"attn_v", "ffn_down"}
_STEERING = {"fc.weight", "token_embd.weight", "output.weight", "markov_w1.weight", "markov_w2.weight",
             "selector_predecessor.weight", "selector_successor.weight", "selector_hidden.weight"}  # fmt: skip
"""Matrices that every draft goes through: eight bits at least."""

_CHANGED = {"general.file_type", "general.quantization_version"}
_SMALL = "q8_0"


def needs_library(kind: str) -> bool:
    """Report whether only ggml itself makes this type."""
    return any(name not in encoding.WITHOUT_LIBRARY for name in _MIXTURES.get(kind, (kind,)))


def quantize(
    source: Path,
    out: Path,
    *,
    kind: str,
    encode: Encoder = encoding.encode,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the drafter in `source`, of F32, F16 or BF16 tensors, to `out` in the type `kind` of TYPES.

    The drafter is DFlash, EAGLE3, or an MTP head without its model. encode: `encode_natively` for types that ggml
    itself makes. progress: called with bytes written and bytes in all.

    Raises ConversionError if the source is another file or lacks a key that a drafter needs. At the end every key but
    the file's type is compared with the source's.
    """
    writer.check_output(out, source)
    file = reader.read(source)
    if file.architecture in (ARCHITECTURE, verify.EAGLE3):
        verify.target_layers(file)
    elif heads.alone(file):
        heads.check(file)
    else:
        raise ConversionError(
            file.name, "general.architecture", found=file.architecture,
            wanted=f"{ARCHITECTURE}, {verify.EAGLE3}, or a head for further tokens without its model",
            remedy="For whole models there is llama.cpp's llama-quantize.",
        )  # fmt: skip
    tensors = [_planned(file, tensor, kind, encode) for tensor in file.tensors.values()]
    with replacing(out) as made:
        writer.write(made, fields(file, kind), tensors, progress)
        made.flush()
        _check_keys(file, reader.read(Path(made.name), called=out.name))


def recoded(file: GGUF, tensor: Tensor, kind: TensorType, encode: Encoder) -> Iterator[Bytes]:
    """Yield a tensor's rows in another type. ConversionError for a value that the type cannot hold."""
    for piece in file.pieces(tensor):
        if kind == tensor.kind:
            yield piece
            continue
        values = encoding.decode(piece, tensor.kind)
        largest = float(np.abs(values).max())
        most = encoding.F16_MAX if kind.name not in ("f32", "bf16") else float(np.finfo(np.float32).max)
        if not largest <= most:
            raise ConversionError(
                file.name, f"a value of {tensor.name}", found=f"{largest:g}", wanted=f"numbers up to {most:g}",
                remedy="The training failed, or the file is damaged: fetch it again.",
            )  # fmt: skip
        yield encode(values, kind)


def _planned(file: GGUF, tensor: Tensor, kind: str, encode: Encoder) -> Planned:
    wanted = chosen(tensor, kind)
    if wanted != tensor.kind and tensor.kind.name not in types.FLOATS:
        raise ConversionError(
            file.name, f"the type of {tensor.name}", found=tensor.kind.name, wanted="f32, f16 or bf16",
            remedy="Quantise the file that this one was made of: what was lost twice is lost for good.",
        )  # fmt: skip
    pieces = partial(recoded, file, tensor, wanted, encode)
    return Planned(name=tensor.name, kind=wanted, shape=tensor.shape, pieces=pieces)


def chosen(tensor: Tensor, kind: str) -> TensorType:
    """Return the type that a tensor gets. A row that is not whole blocks of it gets a larger type."""
    block = _BLOCK.fullmatch(tensor.name)
    steering = tensor.name in _STEERING or _NEXTN.fullmatch(tensor.name)
    if len(tensor.shape) < 2 or not (block or steering):
        return tensor.kind
    plain, rich = _MIXTURES.get(kind, (kind, kind))
    name = rich if block and block[1] in _RICH else plain
    if not block and name not in (*types.FLOATS, _SMALL):
        name = _SMALL
    for candidate in (name, _SMALL):
        if tensor.shape[0] % types.BY_NAME[candidate].block == 0:
            return types.BY_NAME[candidate]
    return tensor.kind


def fields(file: GGUF, kind: str) -> list[Field]:
    """Return the fields of the file with another file type."""
    found = [field for field in file.fields.values() if field.name not in _CHANGED]
    found[1:1] = [
        Field.of("general.file_type", FILE_TYPES[kind]),
        Field.of("general.quantization_version", QUANTIZATION_VERSION),
    ]
    return found


def _check_keys(before: GGUF, after: GGUF) -> None:
    """Raise ConversionError unless every key is the same, byte for byte."""
    kept = {name: field for name, field in after.fields.items() if name not in _CHANGED}
    for name, field in before.fields.items():
        if name in _CHANGED or name == "general.alignment":
            continue
        if kept.get(name) != field:
            raise ConversionError(
                after.name, name, found=kept.get(name, "missing"), wanted="the source's", remedy="Nothing was written."
            )
