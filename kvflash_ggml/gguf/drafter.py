"""Describes a DFlash drafter, and checks it by itself, against its target, and tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConversionError
from .target import LAST_INPUT, LAYER_INPUTS, TargetFile

ARCHITECTURE = "dflash"
TARGET_LAYERS = f"{ARCHITECTURE}.target_layers"
BLOCK_SIZE = f"{ARCHITECTURE}.block_size"
MASK = "tokenizer.ggml.mask_token_id"

MAX_LAYERS, MAX_HEADS, MAX_TARGET_LAYERS = 64, 1024, 16
MIN_BLOCK, MAX_BLOCK = 2, 64
MIN_WINDOW = 64
_MAX_WIDTH, _MAX_HEAD_DIM, _MAX_VOCAB, _MAX_CONTEXT = 1 << 16, 1024, 1 << 22, 1 << 31

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by tensor name, in ggml's order: the length of a row first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFile:
    """A plain DFlash drafter. Widths count values.

    where: the name in errors. theta: RoPE's base. rotary: dimensions that RoPE turns. block: tokens of a draft. mask:
    the mask token. target_layers: layers of the target whose *inputs* the drafter reads, which is Hugging Face's output
    index plus one. window: tokens that the layers marked in `sliding` see; None without sliding windows. context:
    trained length in tokens; it sizes nothing.
    """

    where: str
    hidden: int
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    ff: int
    vocab: int
    epsilon: float
    theta: float
    rotary: int
    block: int
    mask: int
    target_layers: tuple[int, ...]
    context: int | None = None
    causal: bool | None = None
    window: int | None = None
    sliding: tuple[bool, ...] = ()

    def refusal(self, what: str, found: object, wanted: str, remedy: str) -> ConversionError:
        return ConversionError(self.where, what, found=found, wanted=wanted, remedy=remedy)


# --- by itself


def check(it: DrafterFile) -> None:
    """Raise ConversionError for the first number that is out of bounds."""
    damaged = "The checkpoint is damaged or of another kind; fetch it again."
    limits = {
        "hidden size": (it.hidden, 1, _MAX_WIDTH),
        "layers": (it.layers, 1, MAX_LAYERS),
        "heads": (it.heads, 1, MAX_HEADS),
        "KV heads": (it.heads_kv, 1, it.heads),
        "head dimension": (it.head_dim, 2, _MAX_HEAD_DIM),
        "feed-forward size": (it.ff, 1, 16 * _MAX_WIDTH),
        "vocabulary": (it.vocab, 2, _MAX_VOCAB),
        "rotary dimensions": (it.rotary, 2, it.head_dim),
        "block size": (it.block, MIN_BLOCK, MAX_BLOCK),
        "context length": (it.context or 1, 1, _MAX_CONTEXT),
        "sliding window": (it.window or MIN_WINDOW, MIN_WINDOW, _MAX_CONTEXT),
    }
    for what, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise it.refusal(what, value, f"{least} to {most}", damaged)
    if it.heads % it.heads_kv:
        raise it.refusal("KV heads", it.heads_kv, f"a divisor of {it.heads} heads", damaged)
    if it.rotary % 2:
        raise it.refusal("rotary dimensions", it.rotary, "an even number", damaged)
    if not (math.isfinite(it.theta) and 1 <= it.theta <= 1e12):
        raise it.refusal("RoPE theta", it.theta, "a number from 1 to 1e12", damaged)
    if not 0 < it.epsilon < 1:
        raise it.refusal("RMS norm epsilon", it.epsilon, "a number between 0 and 1", damaged)
    if not 0 <= it.mask < it.vocab:
        raise it.refusal("mask token", it.mask, f"a token of the vocabulary, 0 to {it.vocab - 1}", damaged)
    if it.window is not None and len(it.sliding) != it.layers:
        raise it.refusal("layers that slide", len(it.sliding), f"one word for each of {it.layers} layers", damaged)
    if it.window is not None and not any(it.sliding):  # llama.cpp would abort
        raise it.refusal("layers that slide", "none", "one or more, as there is a sliding window", damaged)
    check_target_layers(it.where, it.target_layers)


def check_target_layers(where: str, layers: Sequence[int]) -> None:
    """Raise ConversionError unless `layers` are 1 to MAX_TARGET_LAYERS different numbers in ascending order."""
    wanted = f"1 to {MAX_TARGET_LAYERS} different layers in ascending order"
    ordered = all(type(x) is int for x in layers) and list(layers) == sorted(set(layers))
    if not (1 <= len(layers) <= MAX_TARGET_LAYERS and ordered and layers[0] >= 0):
        raise ConversionError(
            where, "target layers", found=list(layers), wanted=wanted,
            remedy="They are part of the training: take them from the checkpoint that this was made of.",
        )  # fmt: skip


# --- beside its target


def check_pair(it: DrafterFile, target: TargetFile, *, rope_differs: bool = False) -> None:
    """Raise ConversionError if the drafter does not fit the target. rope_differs: accept another RoPE base."""
    check_inputs(it.where, it.target_layers, target)
    other = f"Give the target that it was trained for; {target.where} is not it."
    if it.hidden != target.hidden:
        raise it.refusal("hidden size", it.hidden, f"{target.hidden}, the target's", other)
    if it.vocab != target.vocab:
        raise it.refusal("vocabulary", f"{it.vocab} tokens", f"{target.vocab}, the target's", other)
    if target.mask is not None and it.mask != target.mask:
        raise it.refusal("mask token", it.mask, f"{target.mask}, the target's", other)
    if not rope_differs and not math.isclose(it.theta, target.theta, rel_tol=1e-6):
        raise it.refusal(
            "RoPE theta", f"{it.theta:g}", f"{target.theta:g}, the target's",
            "A base that is not the trained one costs most of the acceptance: look into both models' configuration. "
            "If the drafter was trained with its own, add --rope-differs.",
        )  # fmt: skip


def check_inputs(where: str, layers: Sequence[int], target: TargetFile, *, output: bool = False) -> None:
    """Raise ConversionError if llama.cpp cannot give a drafter the inputs of these layers of the target.

    output: the drafter gets the last layer's output in another way, so it counts as an input.
    """
    if target.architecture not in LAYER_INPUTS:
        raise ConversionError(
            target.where, "architecture", found=target.architecture,
            wanted=f"one whose layer inputs llama.cpp gives: {', '.join(sorted(LAYER_INPUTS))}",
            remedy="llama.cpp cannot draft for this model; a small model of the same vocabulary can.",
        )  # fmt: skip
    last = target.layers if output or target.architecture in LAST_INPUT else target.layers - 1
    if max(layers) > last:
        raise ConversionError(
            where, "target layers", found=list(layers),
            wanted=f"inputs up to {last}: {target.where} has {target.layers} layers",
            remedy="Give the target that it was trained for.",
        )  # fmt: skip


# --- its tensors


def shapes(it: DrafterFile) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a plain DFlash drafter's tensors, without embeddings and head."""
    q, kv = it.heads * it.head_dim, it.heads_kv * it.head_dim
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (len(it.target_layers) * it.hidden, it.hidden),
        "enc.output_norm.weight": (it.hidden,),
        "output_norm.weight": (it.hidden,),
    }
    for layer in range(it.layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (it.hidden,), "attn_q": (it.hidden, q), "attn_k": (it.hidden, kv), "attn_v": (it.hidden, kv),
            "attn_output": (q, it.hidden), "attn_q_norm": (it.head_dim,), "attn_k_norm": (it.head_dim,),
            "ffn_norm": (it.hidden,), "ffn_gate": (it.hidden, it.ff), "ffn_up": (it.hidden, it.ff),
            "ffn_down": (it.ff, it.hidden),
        }  # fmt: skip
        found.update({f"blk.{layer}.{name}.weight": shape for name, shape in block.items()})
    return found


def own_head(it: DrafterFile) -> dict[str, tuple[int, ...]]:
    """Return the shapes of embeddings and head, which a drafter may have instead of its target's."""
    return {"token_embd.weight": (it.hidden, it.vocab), "output.weight": (it.hidden, it.vocab)}


def check_tensors(where: str, found: Shapes, *, wanted: Shapes, optional: Shapes, remedy: str) -> None:
    """Raise ConversionError for the first tensor that is missing, wrongly shaped or unknown."""
    for name, shape in wanted.items():
        if name not in found:
            raise ConversionError(where, f"the tensor {name}", found="missing", wanted=f"{list(shape)}", remedy=remedy)
    known = {**optional, **wanted}
    for name, shape in found.items():
        if name not in known:
            raise ConversionError(
                where, f"the tensor {name}", found=list(shape), wanted="none of that name in a drafter of this kind",
                remedy=remedy,
            )  # fmt: skip
        if shape != known[name]:
            raise ConversionError(
                where, f"the shape of {name}", found=list(shape), wanted=f"{list(known[name])}", remedy=remedy
            )
