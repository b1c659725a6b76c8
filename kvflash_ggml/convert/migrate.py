"""Renames an older DFlash file's keys and tensors as llama.cpp reads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConversionError
from ..files import replacing
from ..gguf import encoding, reader, target, types, verify
from ..gguf.drafter import ARCHITECTURE, BLOCK_SIZE, MASK, TARGET_LAYERS
from ..gguf.purpose import OLD_DFLASH
from ..gguf.reader import GGUF, Field, Tensor
from ..logs import Progress
from . import writer
from .quantize import recoded
from .writer import Planned

_TENSORS = {"dflash.fc.weight": "fc.weight", "dflash.hidden_norm.weight": "enc.output_norm.weight"}
_BLOCK, _MASK, _LAYERS, _COUNT = "block_size", "mask_token_id", "target_layer_ids", "n_target_layers"
_AGAIN = "Convert the checkpoint: kvflash-convert draft."


def migrate(
    source: Path,
    out: Path,
    *,
    model: Path | None,
    rope_differs: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write `source`, a DFlash file with older names, to `out` with llama.cpp's names. Values do not change.

    model: the target, or None. With a target the result is checked against it, and gets its tokenizer if `source` has
    none. Raises ConversionError if the file lacks what llama.cpp needs, or the result does not pass `verify`.
    """
    writer.check_output(out, source, model)
    file = reader.read(source)
    if file.architecture not in OLD_DFLASH:
        raise ConversionError(
            file.name, "general.architecture", found=file.architecture, wanted=" or ".join(OLD_DFLASH),
            remedy="There is nothing to migrate: look at it with kvflash-convert inspect.",
        )  # fmt: skip
    fields = _fields(file, model)
    if model is not None:
        fields = [field for field in fields if field.name not in target.KEYS]
        fields += target.keys_of(target.describe(reader.read(model)))
    tensors = [_planned(file, tensor) for tensor in file.tensors.values()]
    with replacing(out) as made:
        writer.write(made, fields, tensors, progress)
        made.flush()
        verify.verify(Path(made.name), model=model, rope_differs=rope_differs, called=out.name)


def _fields(file: GGUF, model: Path | None) -> list[Field]:
    own = {key: _old(file, key) for key in (_BLOCK, _MASK, _LAYERS, _COUNT)}
    mask, block, layers = own[_MASK], own[_BLOCK], own[_LAYERS]
    for key, value in ((_BLOCK, block), (_MASK, mask)):
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise _refusal(file, f"dflash.{key}", value, "a whole number", _AGAIN)
    if not isinstance(layers, list) or not layers or not all(type(x) is int and 0 <= x < 1 << 20 for x in layers):
        raise _refusal(
            file, f"dflash.{_LAYERS}", layers, "an array of the layers that it was trained on",
            "The tool that quantised the file left them out: migrate its source, or convert the checkpoint.",
        )  # fmt: skip
    if own[_COUNT] not in (None, len(layers)):
        raise _refusal(file, f"dflash.{_COUNT}", own[_COUNT], f"{len(layers)}, as many as there are layers", _AGAIN)
    prefix = f"{file.architecture}."
    dropped = {f"{start}dflash.{key}" for start in ("", prefix) for key in own}
    found = [Field.of("general.architecture", ARCHITECTURE)]
    for field in file.fields.values():
        if field.name.startswith(prefix) and field.name not in dropped:
            found.append(field.renamed(f"{ARCHITECTURE}.{field.name.removeprefix(prefix)}"))
        elif field.name not in dropped and field.name not in ("general.architecture", MASK):
            found.append(field)
    names = {field.name for field in found}
    head_dim = file.fields.get(f"{prefix}attention.key_length")
    if f"{ARCHITECTURE}.rope.dimension_count" not in names and head_dim is not None:
        found.append(head_dim.renamed(f"{ARCHITECTURE}.rope.dimension_count"))
    if "tokenizer.ggml.tokens" not in names:
        found = [field for field in found if not field.name.startswith("tokenizer.")]
        found += _tokenizer(file, model)
    return [
        *found,
        Field.of(BLOCK_SIZE, block),
        Field.of(TARGET_LAYERS, [x + 1 for x in layers]),
        Field.of(MASK, mask),
    ]


def _tokenizer(file: GGUF, model: Path | None) -> list[Field]:
    if model is None:
        raise _refusal(
            file,
            "tokenizer.ggml.tokens",
            None,
            "a tokenizer",
            "Add --target: the target's is taken.",
        )
    return [field for field in target.describe(reader.read(model)).tokenizer if field.name != MASK]


def _old(file: GGUF, key: str) -> Any:
    """Return a value of DFlash's older keys, which stood behind the architecture's name or alone."""
    return file.own(f"dflash.{key}", file.get(f"dflash.{key}"))


def _planned(file: GGUF, tensor: Tensor) -> Planned:
    vector = len(tensor.shape) == 1 and tensor.kind.name in types.FLOATS
    kind = types.BY_NAME["f32"] if vector else tensor.kind
    name = _TENSORS.get(tensor.name, tensor.name)
    return Planned(
        name=name, kind=kind, shape=tensor.shape, pieces=partial(recoded, file, tensor, kind, encoding.encode)
    )


def _refusal(file: GGUF, what: str, found: object, wanted: str, remedy: str) -> ConversionError:
    return ConversionError(file.name, what, found="not there" if found is None else found, wanted=wanted, remedy=remedy)
