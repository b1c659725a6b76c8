"""Converts a plain DFlash checkpoint to a file that llama.cpp drafts with, for one target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import ConversionError
from ..files import replacing
from ..gguf import drafter, encoding, reader, target, types
from ..gguf.drafter import ARCHITECTURE, BLOCK_SIZE, MASK, TARGET_LAYERS, DrafterFile
from ..gguf.reader import Field
from ..gguf.target import TargetFile
from ..gguf.types import Bytes, TensorType
from ..logs import Progress
from . import checkpoint, safetensors, writer
from .safetensors import TensorSource
from .writer import Planned

FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18,
    "bf16": 32,
}  # fmt: skip
"""llama.cpp's numbers of file types. The type of most tensors gives the name."""

TYPES = ("f16", "bf16", "f32", "q8_0")
"""Types that a checkpoint can be written as."""

QUANTIZATION_VERSION = 2


def convert(
    folder: Path,
    out: Path,
    *,
    model: Path,
    kind: str = "f16",
    own_head: bool | None = None,
    rope_differs: bool = False,
    progress: Progress = lambda done, total: None,
) -> DrafterFile:
    """Write the drafter in `folder` for the target `model` to `out`, as a whole or not at all.

    kind: one of TYPES, for matrices; norms are F32. own_head: True keeps embeddings and head of the checkpoint, False
    leaves them out, and None is an error if it has them. rope_differs: accept another RoPE base than the target's.
    progress: called with bytes written and bytes in all.

    Raises ConversionError if the drafter is not sound or does not fit, ConfigError if `out` cannot be written.
    """
    writer.check_output(out, model, folder)
    if not folder.is_dir():
        raise ConversionError(
            str(folder), "the checkpoint", found="no folder", wanted="one with config.json and .safetensors files",
            remedy="Give the folder that was fetched.",
        )  # fmt: skip
    it = checkpoint.read(folder)
    aim = target.describe(reader.read(model))
    drafter.check_pair(it, aim, rope_differs=rope_differs)
    sources = _chosen(it, checkpoint.named(safetensors.read_folder(folder).values()), own_head=own_head)
    tensors = [_planned(name, source, kind) for name, source in sources.items()]
    with replacing(out) as file:
        writer.write(file, fields(it, aim, kind=kind), tensors, progress)
    return it


def fields(it: DrafterFile, aim: TargetFile, *, kind: str) -> list[Field]:
    """Return the fields of a drafter's file. The tokenizer is the target's, byte for byte."""
    own: dict[str, bool | int | float | list[int] | list[bool]] = {
        "context_length": it.context or aim.context,  # llama.cpp loads no file without one
        "embedding_length": it.hidden,
        "block_count": it.layers,
        "feed_forward_length": it.ff,
        "attention.head_count": it.heads,
        "attention.head_count_kv": it.heads_kv,
        "attention.key_length": it.head_dim,
        "attention.value_length": it.head_dim,
        "attention.layer_norm_rms_epsilon": it.epsilon,
        "rope.freq_base": it.theta,
        "rope.dimension_count": it.rotary,
    }
    if it.causal is not None:
        own["attention.causal"] = it.causal
    if it.window is not None:
        own["attention.sliding_window"] = it.window
        own["attention.sliding_window_pattern"] = list(it.sliding)
    if aim.sections:  # a draft turns by the temporal position alone
        own["rope.dimension_sections"] = [it.head_dim // 2, 0, 0, 0]
    found = [
        Field.of("general.architecture", ARCHITECTURE),
        Field.of("general.name", it.where),
        Field.of("general.file_type", FILE_TYPES[kind]),
        Field.of("general.quantization_version", QUANTIZATION_VERSION),
        *(Field.of(f"{ARCHITECTURE}.{key}", value) for key, value in own.items()),
        Field.of(BLOCK_SIZE, it.block),
        Field.of(TARGET_LAYERS, list(it.target_layers)),
        *aim.tokenizer,
    ]
    if aim.mask is None:
        found.append(Field.of(MASK, it.mask))
    return [*found, *target.keys_of(aim)]


def _chosen(it: DrafterFile, sources: dict[str, TensorSource], *, own_head: bool | None) -> dict[str, TensorSource]:
    """Return the tensors to write, in llama.cpp's order."""
    head = drafter.own_head(it)
    if own_head is None and (there := sorted(head.keys() & sources.keys())):
        raise ConversionError(
            it.where, "embeddings and head", found=", ".join(there), wanted="none, or a word on what becomes of them",
            remedy="--own-head keeps them; --target-head leaves them out, and the draft uses its target's.",
        )  # fmt: skip
    found = {name: tuple(reversed(source.shape)) for name, source in sources.items()}
    drafter.check_tensors(
        it.where, found, wanted=drafter.shapes(it), optional=head,
        remedy="config.json and tensors are not of one checkpoint, or it is of another kind. " + checkpoint.UPSTREAM,
    )  # fmt: skip
    order = [*drafter.shapes(it), *(head if own_head else ())]
    return {name: sources[name] for name in order if name in sources}


def _planned(name: str, source: TensorSource, kind: str) -> Planned:
    chosen = fitting(kind, width=source.shape[-1]) if len(source.shape) > 1 else types.BY_NAME["f32"]
    if source.kind.name not in types.FLOATS:
        raise _refusal(source, "its dtype", source.kind.name, "F32, F16 or BF16", checkpoint.UPSTREAM)
    shape = tuple(reversed(source.shape))
    return Planned(name=name, kind=chosen, shape=shape, pieces=partial(_encoded, source, chosen))


def fitting(kind: str, *, width: int) -> TensorType:
    """Return the type of this name, or F16 if a row of `width` values is not whole blocks of it."""
    chosen = types.BY_NAME[kind]
    return chosen if width % chosen.block == 0 else types.BY_NAME["f16"]


def _encoded(source: TensorSource, kind: TensorType) -> Iterator[Bytes]:
    for piece in source.pieces():
        if source.kind == kind:
            if not encoding.all_finite(piece, kind):
                raise _not_finite(source)
            yield piece
            continue
        values = encoding.decode(piece, source.kind)
        largest = float(np.abs(values).max())
        if not np.isfinite(largest):
            raise _not_finite(source)
        if kind.name == "f16" and largest > encoding.F16_MAX:
            raise _refusal(source, "a value", f"{largest:g}", f"{encoding.F16_MAX:g} at most", "Add --type bf16.")
        yield encoding.encode(values, kind)


def _not_finite(source: TensorSource) -> ConversionError:
    return _refusal(source, "a value", "NaN or infinite", "finite numbers", "Fetch the checkpoint again.")


def _refusal(source: TensorSource, what: str, found: object, wanted: str, remedy: str) -> ConversionError:
    return ConversionError(source.path.name, f"{what} of {source.name}", found=found, wanted=wanted, remedy=remedy)
