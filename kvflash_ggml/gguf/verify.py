"""Checks a drafter's file by itself and against its target, by the rules of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConversionError
from ..logs import Progress
from . import drafter, encoding, heads, purpose, reader, target
from .drafter import ARCHITECTURE, MASK, DrafterFile
from .reader import GGUF
from .target import TargetFile

EAGLE3 = "eagle3"

_AGAIN = "Convert the checkpoint again: kvflash-convert draft."
_OTHER = "Give the target that it was trained for."


def verify(
    path: Path,
    *,
    model: Path | None,
    rope_differs: bool = False,
    called: str | None = None,
    progress: Progress = lambda done, total: None,
) -> str:
    """Check a drafter's file and every value of its tensors. Return a description for the user.

    model: the target's file; None checks the drafter alone. A DFlash drafter is checked as a whole, EAGLE3 drafters
    and MTP heads only for what they share with their target. rope_differs: accept another RoPE base. called: the
    name in errors. progress: called with bytes read and bytes in all. Raises ConversionError.
    """
    file = reader.read(path, called=called)
    words = check(file, None if model is None else reader.read(model), rope_differs=rope_differs)
    check_values(file, progress)
    return words


def check(file: GGUF, model: GGUF | None, *, rope_differs: bool = False) -> str:
    """Check a drafter's head, as `verify` does, without reading its weights."""
    if model is not None and heads.alone(model):
        raise ConversionError(
            model.name, "the target", found="a head for further tokens (MTP) without its model", wanted="a whole model",
            remedy="Give the file of the model.",
        )  # fmt: skip
    purpose.check_head(file)
    aim = None if model is None else target.describe(model)
    if file.architecture == ARCHITECTURE:
        words = _verify_dflash(file, aim, rope_differs=rope_differs)
    elif file.architecture == EAGLE3:
        words = _verify_eagle3(file, aim)
    elif heads.alone(file):
        words = _verify_head(file, model)
    else:
        raise ConversionError(
            file.name, "general.architecture", found=file.architecture,
            wanted=f"{ARCHITECTURE}, {EAGLE3}, or a head for further tokens without its model",
            remedy="A file with the older names of DFlash becomes one with kvflash-convert migrate.",
        )  # fmt: skip
    if aim is not None and (found := target.vocabulary(file)) != aim.vocabulary:
        raise ConversionError(
            file.name, "the hash of the tokens", found=found, wanted=f"{aim.vocabulary}, the target's", remedy=_OTHER
        )
    return words if aim is None else f"{words}; {_fits(file, aim)}"


def _fits(file: GGUF, aim: TargetFile) -> str:
    """Return a note on whether the drafter was trained for this target. ConversionError if it was not."""
    if target.check_keys(file, aim):
        return f"it fits {aim.where}, the model that it was trained for, or a fine-tuned one of the same embedding"
    return (
        f"its shape fits {aim.where}, and whether it was trained for it cannot be checked: the files do not say so "
        "(--measure tells, kvflash-convert bind writes it)"
    )


def describe(file: GGUF) -> DrafterFile:
    """Describe a DFlash file. ConversionError if a key is missing or a number is out of bounds."""
    layers = _whole(file, "block_count")
    pattern = file.own("attention.sliding_window_pattern", [])
    head_dim = _whole(file, "attention.key_length")
    found = DrafterFile(
        where=file.name,
        hidden=_whole(file, "embedding_length"),
        layers=layers,
        heads=_whole(file, "attention.head_count"),
        heads_kv=_whole(file, "attention.head_count_kv"),
        head_dim=head_dim,
        ff=_whole(file, "feed_forward_length"),
        vocab=_vocab(file),
        epsilon=_number(file, "attention.layer_norm_rms_epsilon"),
        theta=_number(file, "rope.freq_base"),
        rotary=_optional(file, "rope.dimension_count") or head_dim,
        block=_whole(file, "block_size"),
        mask=_integer(file, MASK),
        target_layers=target_layers(file),
        context=_whole(file, "context_length"),
        causal=file.own("attention.causal") is True,
        window=_optional(file, "attention.sliding_window") or None,
        sliding=tuple(pattern) if isinstance(pattern, list) else (),
    )
    if (value := file.own("attention.value_length", found.head_dim)) != found.head_dim:
        raise found.refusal("value length", value, f"{found.head_dim}, the key length", _AGAIN)
    drafter.check(found)
    return found


def target_layers(file: GGUF) -> tuple[int, ...]:
    """Return the target layers. ConversionError without them: quantisers that know no drafters leave them out."""
    layers = file.get(f"{file.architecture}.target_layers")
    if not isinstance(layers, list):
        raise ConversionError(
            file.name, f"{file.architecture}.target_layers", found=layers, wanted="an array of layers",
            remedy="They were lost when the file was made: take the file or the checkpoint that it was made of.",
        )  # fmt: skip
    drafter.check_target_layers(file.name, layers)
    return tuple(layers)


def check_values(file: GGUF, progress: Progress) -> None:
    """Raise ConversionError for a value that is NaN or infinite, or a vector that is not F32."""
    total, done = sum(tensor.nbytes for tensor in file.tensors.values()), 0
    for tensor in file.tensors.values():
        if len(tensor.shape) == 1 and tensor.kind.name not in ("f32", "i64", "i32"):
            raise ConversionError(
                file.name,
                f"the type of {tensor.name}",
                found=tensor.kind.name,
                wanted="f32, as every norm",
                remedy=_AGAIN,
            )
        for piece in file.pieces(tensor):
            if not encoding.all_finite(piece, tensor.kind):
                raise ConversionError(
                    file.name, f"a value of {tensor.name}", found="NaN or infinite", wanted="finite numbers",
                    remedy="The training failed, or the file is damaged: fetch it again.",
                )  # fmt: skip
            done += piece.nbytes
            progress(done, total)


def _verify_dflash(file: GGUF, aim: TargetFile | None, *, rope_differs: bool) -> str:
    if file.own("hyper_connection.count"):
        raise ConversionError(
            file.name, "hyper_connection.count", found="there", wanted="none",
            remedy="Drafts of DeepSeek V4 cannot be used here: its memory cannot be pooled.",
        )  # fmt: skip
    it = describe(file)
    if aim is not None:
        drafter.check_pair(it, aim, rope_differs=rope_differs)
    found = {name: tensor.shape for name, tensor in file.tensors.items()}
    plain = drafter.shapes(it)
    # keys can serve as values
    wanted = {name: shape for name, shape in plain.items() if not name.endswith("attn_v.weight")}
    drafter.check_tensors(file.name, found, wanted=wanted, optional={**plain, **_extras(file, it)}, remedy=_AGAIN)
    _check_map(file, it.vocab)
    layers = ", ".join(map(str, it.target_layers))
    return f"a DFlash drafter of {it.layers} layers, blocks of {it.block}, that reads the inputs of layers {layers}"


def _extras(file: GGUF, it: DrafterFile) -> dict[str, tuple[int, ...]]:
    """Return the shapes that llama.cpp also accepts: heads, sinks, and tensors of DFlash2 and DSpark."""
    rank, kernel = _length(file, "markov_w1.weight"), _optional(file, "conv_kernel_size") or 0
    group, selector = _optional(file, "conv_group_size") or 1, _optional(file, "selector_rank") or 0
    draft = _length(file, "d2t") or it.vocab
    projected = 2 * kernel * (it.hidden // group)
    found: dict[str, tuple[int, ...]] = {
        "d2t": (draft,),
        "token_embd.weight": (it.hidden, it.vocab),
        "output.weight": (it.hidden, draft),
        "markov_w1.weight": (rank, it.vocab),
        "markov_w2.weight": (rank, draft),
        "conf_proj.weight": (it.hidden + rank, 1),
        "conf_proj.bias": (1,),
        "selector_predecessor.weight": (selector, it.vocab),
        "selector_successor.weight": (selector, it.vocab),
        "selector_hidden.weight": (it.hidden, selector),
        "rope_freqs.weight": (it.head_dim // 2,),
    }
    for layer in range(it.layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_sinks.weight": (it.heads,), "post_attention_norm.weight": (it.hidden,),
            "post_ffw_norm.weight": (it.hidden,), "layer_output_scale.weight": (1,),
            "attn_conv_base": (it.hidden, kernel, 2), "attn_conv_proj.weight": (it.hidden, projected),
            "ffn_conv_base": (it.hidden, kernel, 2), "ffn_conv_proj.weight": (it.hidden, projected),
        }  # fmt: skip
        found.update({f"blk.{layer}.{name}": shape for name, shape in block.items()})
    return found


def _verify_eagle3(file: GGUF, aim: TargetFile | None) -> str:
    layers = target_layers(file)
    if len(layers) != 3:
        raise ConversionError(file.name, "target layers", found=list(layers), wanted="three", remedy=_AGAIN)
    # llama.cpp would abort
    for key, wanted in (("block_count", 1), ("attention.value_length", _whole(file, "attention.key_length"))):
        if (found := _whole(file, key)) != wanted:
            raise ConversionError(file.name, f"eagle3.{key}", found=found, wanted=str(wanted), remedy=_AGAIN)
    if not 0 < (epsilon := _number(file, "attention.layer_norm_rms_epsilon")) < 1:
        raise ConversionError(
            file.name, "RMS norm epsilon", found=epsilon, wanted="a number between 0 and 1", remedy=_AGAIN
        )  # fmt: skip
    hidden, width = _whole(file, "target_hidden_size"), _whole(file, "embedding_length")
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    drafter.check_tensors(file.name, shapes, wanted=_eagle3(file), optional=_eagle3_extras(file), remedy=_AGAIN)
    if aim is not None:
        for name in ("token_embd.weight", "output.weight"):
            if name not in file.tensors and width != aim.hidden:
                raise ConversionError(
                    file.name, f"the tensor {name}", found="missing", wanted=f"its own, as rows have {width} values "
                    f"and the target's {aim.hidden}", remedy=_AGAIN,
                )  # fmt: skip
        drafter.check_inputs(file.name, layers, aim, output=True)
        if hidden != aim.hidden:
            raise ConversionError(
                file.name, "target_hidden_size", found=hidden, wanted=f"{aim.hidden}, the target's", remedy=_OTHER
            )
        _check_map(file, aim.vocab)
    return f"an EAGLE3 drafter that reads the inputs of layers {', '.join(map(str, layers))}"


def _eagle3(file: GGUF) -> dict[str, tuple[int, ...]]:
    """Return an EAGLE3 drafter's shapes. Its layer reads a token's embedding beside the target's features."""
    width, ff, head_dim = (_whole(file, f"{key}_length") for key in ("embedding", "feed_forward", "attention.key"))
    q, kv = (_whole(file, f"attention.{key}") * head_dim for key in ("head_count", "head_count_kv"))
    read = 3 * _whole(file, "target_hidden_size")
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (width,), "attn_norm_2": (width,), "attn_q": (2 * width, q), "attn_k": (2 * width, kv),
        "attn_v": (2 * width, kv), "attn_output": (q, width), "ffn_norm": (width,), "ffn_gate": (width, ff),
        "ffn_up": (width, ff), "ffn_down": (ff, width),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {"fc.weight": (read, width), "output_norm.weight": (width,)}
    if file.own("norm_before_fc") is True:
        found["enc.output_norm.weight"] = (read,)
    return found | {f"blk.0.{name}.weight": shape for name, shape in block.items()}


def _eagle3_extras(file: GGUF) -> dict[str, tuple[int, ...]]:
    """Return the shapes that it may also have: its own vocabulary, embeddings and head, and RoPE factors."""
    width, tokens = _whole(file, "embedding_length"), _vocab(file)
    rotary = _optional(file, "rope.dimension_count") or _whole(file, "attention.key_length")
    draft = _length(file, "d2t") or tokens
    return {
        "d2t": (draft,),
        "token_embd.weight": (width, tokens),
        "output.weight": (width, draft),
        "rope_freqs.weight": (rotary // 2,),
    }


def _verify_head(file: GGUF, model: GGUF | None) -> str:
    if model is None:
        heads.check(file)
    else:
        check_heads(file, model)
    return f"a head for further tokens (MTP) of the architecture {file.architecture}"


def check_heads(file: GGUF, model: GGUF) -> None:
    """Raise ConversionError unless the file has one head, and the target's architecture, tokens and shape."""
    heads.check(file)
    other = "Give the file of heads that was split from this target."
    aim = target.describe(model)
    for what, found, wanted in (
        ("general.architecture", file.architecture, aim.architecture),
        ("the hash of the tokens", target.vocabulary(file), aim.vocabulary),
        *((key, file.get(key), model.get(key)) for key in sorted(_shape(file) & _shape(model))),
    ):
        if found != wanted:
            raise ConversionError(file.name, what, found=found, wanted=f"{wanted}, the target's", remedy=other)


def _shape(file: GGUF) -> set[str]:
    """Return the keys of the model's shape: its own numbers, without those that count layers and context."""
    own = f"{file.architecture}."
    counts = {f"{own}{key}" for key in ("block_count", "nextn_predict_layers", "context_length")}
    return {key for key in file.fields if key.startswith(own) and not isinstance(file.get(key), list)} - counts


def _check_map(file: GGUF, vocab: int) -> None:
    """Raise ConversionError unless a drafter's own vocabulary maps to different tokens of the target."""
    tensor = file.tensors.get("d2t")
    if tensor is None:
        return
    found = tensor.kind.name
    if "output.weight" not in file.tensors and tensor.shape[0] != vocab:
        raise ConversionError(
            file.name, "d2t", found=f"{tensor.shape[0]} tokens, and no output.weight",
            wanted=f"{vocab} tokens, those of the target's output", remedy=_AGAIN,
        )  # fmt: skip
    if found == "i64":
        ids = np.concatenate([piece.reshape(-1).view(np.int64) for piece in file.pieces(tensor)])
        if ids.min() >= 0 and ids.max() < vocab and len(np.unique(ids)) == len(ids):
            return
        found = f"{len(np.unique(ids))} different tokens of {len(ids)}, {ids.min()} to {ids.max()}"
    raise ConversionError(
        file.name, "d2t", found=found, wanted=f"different tokens as i64, 0 to {vocab - 1}", remedy=_AGAIN
    )


def _vocab(file: GGUF) -> int:
    tokens = file.fields.get("tokenizer.ggml.tokens")
    return 0 if tokens is None else tokens.count


def _length(file: GGUF, name: str) -> int:
    tensor = file.tensors.get(name)
    return 0 if tensor is None else tensor.shape[0]


def _optional(file: GGUF, key: str) -> int | None:
    return None if file.own(key) is None else _whole(file, key)


def _whole(file: GGUF, key: str) -> int:
    return _integer(file, f"{file.architecture}.{key}")


def _integer(file: GGUF, key: str) -> int:
    value: Any = file.get(key)
    if type(value) is not int:
        raise _missing(file, key, value, "a whole number")
    return value


def _number(file: GGUF, key: str) -> float:
    value = file.own(key)
    if not isinstance(value, float):
        raise _missing(file, f"{file.architecture}.{key}", value, "a number")
    return value


def _missing(file: GGUF, key: str, value: object, wanted: str) -> ConversionError:
    return ConversionError(file.name, key, found="not there" if value is None else value, wanted=wanted, remedy=_AGAIN)
