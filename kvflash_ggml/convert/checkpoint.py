"""Reads the config.json of a DFlash checkpoint. It guesses no value that belongs to the training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConversionError
from ..gguf import drafter
from ..gguf.drafter import DrafterFile
from .safetensors import TensorSource, read_json

CONFIG = "config.json"

_ROPES = ("rope_parameters", "rope_scaling")

PLAIN = "DFlashDraftModel"

NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Weights by Hugging Face's name and llama.cpp's. Weights of a layer stand without its number."""

UPSTREAM = "Give --target-model-dir, the target's Hugging Face folder, and llama.cpp's own converter takes it."
_DAMAGED = "It is part of the training and cannot be guessed: fetch the whole checkpoint, config.json included."


def read(folder: Path) -> DrafterFile:
    """Read the drafter that a folder's configuration describes. ConversionError if a value is missing or unknown."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConversionError(folder.name, CONFIG, found="not there", wanted="the checkpoint's own", remedy=_DAMAGED)
    config = _Config(path, read_json(path, what=CONFIG))
    _refuse_other_kinds(config, folder)
    layers, head_dim = config.whole("num_hidden_layers"), config.whole("head_dim")
    theta, rotary = config.rope(head_dim)
    window, sliding = config.window(layers)
    found = DrafterFile(
        where=folder.resolve().name,
        hidden=config.whole("hidden_size"),
        layers=layers,
        heads=config.whole("num_attention_heads"),
        heads_kv=config.whole("num_key_value_heads"),
        head_dim=head_dim,
        ff=config.whole("intermediate_size"),
        vocab=config.whole("vocab_size"),
        epsilon=config.number("rms_norm_eps"),
        theta=theta,
        rotary=rotary,
        block=config.whole("block_size", "draft_block_size"),
        mask=config.whole("mask_token_id"),
        target_layers=config.target_layers(),
        context=config.whole("max_position_embeddings") if "max_position_embeddings" in config.top else None,
        causal=config.truth("is_causal", "causal"),
        window=window,
        sliding=sliding,
    )
    drafter.check(found)
    return found


def check_others(folder: Path) -> None:
    """Raise ConversionError if a DFlash2 or DSpark drafter names no block size or RoPE base.

    llama.cpp's converter would guess blocks of 16, and transformers' usual RoPE base.
    """
    config = read_json(folder / CONFIG, what=CONFIG)
    names = config.get("architectures")
    if not isinstance(names, list) or not any(word in str(names) for word in ("DFlash", "DSpark")):
        return
    inner = ("dflash_config", "transformer_layer_config")
    places = [config, *(place for name in inner if isinstance(place := config.get(name), dict))]
    places += [rope for place in places for name in _ROPES if isinstance(rope := place.get(name), dict)]
    for key, kinds, wanted in (("block_size", (int,), "a whole number"), ("rope_theta", (int, float), "a number")):
        if not any(type(place.get(key)) in kinds for place in places):
            raise ConversionError(folder.name, key, found="not there", wanted=wanted, remedy=_DAMAGED)


def eagle3_layers(folder: Path) -> list[object] | None:
    """Return the target layers that an EAGLE3 drafter's configuration names at any place; None if it names none."""
    config = read_json(folder / CONFIG, what=CONFIG)
    places = [config, *(place for place in config.values() if isinstance(place, dict))]
    named = (place.get("eagle_aux_hidden_state_layer_ids") for place in places)
    return next((layers for layers in named if isinstance(layers, list) and layers), None)


def named(sources: Iterable[TensorSource]) -> dict[str, TensorSource]:
    """Return tensors by llama.cpp's name. ConversionError for a tensor without one, or two with the same."""
    found: dict[str, TensorSource] = {}
    for source in sources:
        name = _name(source.name)
        if name is None:
            raise ConversionError(
                source.path.name, f"the tensor {source.name}", found=list(source.shape),
                wanted="only tensors of a plain DFlash drafter", remedy=UPSTREAM,
            )  # fmt: skip
        if name in found:
            raise ConversionError(
                source.path.name, f"the tensor {source.name}", found=f"the same as {found[name].name}", wanted="one",
                remedy="The checkpoint was put together from several; fetch it again.",
            )  # fmt: skip
        found[name] = source
    return found


def _name(name: str) -> str | None:
    words = name.removeprefix("model.").split(".")
    prefix = ""
    if words[0] == "layers" and len(words) > 2 and words[1].isascii() and words[1].isdecimal():
        if words[1] != str(int(words[1][:4])):
            return None
        prefix, words = f"blk.{words[1]}.", words[2:]
    if words[-1] != "weight":
        return None
    known = NAMES.get(".".join(words[:-1]))
    return None if known is None or bool(prefix) != known.startswith(("attn", "ffn")) else f"{prefix}{known}.weight"


def _refuse_other_kinds(config: _Config, folder: Path) -> None:
    """Raise ConversionError for kinds of drafters that only llama.cpp's own converter knows."""
    names = config.top.get("architectures")
    if names != [PLAIN]:
        raise config.refusal("architectures", names, f"[{PLAIN!r}]", UPSTREAM)
    nested = ("conv_kernel_size", "selector_rank", "attention_value_scale", "output_multiplier", "use_swa",
              "input_embedding_scale", "final_logit_softcapping")  # fmt: skip
    usual: dict[str, tuple[object, ...]] = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "rope_is_neox_style": (None, True),
        "sample_from_anchor": (None,),
        "draft_vocab_size": (None, config.top.get("vocab_size")),
        **dict.fromkeys(nested, (None, False)),
    }
    for key, wanted in usual.items():
        if (value := config.find(key)) not in wanted:
            words = ["nothing", *(repr(x) for x in wanted if x is not None)]
            raise config.refusal(key, value, " or ".join(words), UPSTREAM)
    if (folder / "mask_embedding.pt").exists():
        raise config.refusal("mask_embedding.pt", "there", "a mask token of the target's", UPSTREAM)


class _Config:
    """A configuration that checks its values. A value in `dflash_config` takes precedence over the top level."""

    def __init__(self, path: Path, top: Mapping[str, Any]) -> None:
        self._where = path.resolve().parent.name
        self.top = top
        self._own = top.get("dflash_config") or {}
        if not isinstance(self._own, dict):
            raise self.refusal("dflash_config", self._own, "an object", _DAMAGED)

    def refusal(self, what: str, found: object, wanted: str, remedy: str) -> ConversionError:
        return ConversionError(self._where, what, found=found, wanted=wanted, remedy=remedy)

    def find(self, *keys: str) -> Any:
        for key in keys:
            for place in (self._own, self.top):
                if place.get(key) is not None:
                    return place[key]
        return None

    def whole(self, *keys: str) -> int:
        value = self.find(*keys)
        if type(value) is not int or abs(value) >= 1 << 48:
            raise self.refusal(keys[0], "not there" if value is None else value, "a whole number", _DAMAGED)
        return value

    def number(self, key: str) -> float:
        return self._float(key, self.find(key))

    def truth(self, *keys: str) -> bool | None:
        value = self.find(*keys)
        if not isinstance(value, bool | None):
            raise self.refusal(keys[0], value, "true or false", _DAMAGED)
        return value

    def rope(self, head_dim: int) -> tuple[float, int]:
        """Return RoPE's base and the dimensions that it turns. Newer configurations nest the base. No default."""
        nested = self.top.get("rope_parameters") or self.top.get("rope_scaling") or {}
        if not isinstance(nested, dict):
            raise self.refusal("rope_parameters", nested, "an object", _DAMAGED)
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind != "default":
            raise self.refusal("rope_type", kind, "'default'", UPSTREAM)
        both = {**self.top, **{key: value for key, value in nested.items() if value is not None}}
        part = self._float("partial_rotary_factor", both.get("partial_rotary_factor", 1))
        if not 0 < part <= 1:
            raise self.refusal("partial_rotary_factor", part, "more than 0 and at most 1", _DAMAGED)
        return self._float("rope_theta", both.get("rope_theta")), int(head_dim * part)

    def target_layers(self) -> tuple[int, ...]:
        """Return the layers whose inputs the drafter reads. Hugging Face counts outputs: one less."""
        ids = self.find("target_layer_ids")
        if not isinstance(ids, list) or not all(type(x) is int for x in ids) or min(ids, default=0) < 0:
            found = "not there" if ids is None else ids
            raise self.refusal("target_layer_ids", found, "the target's layers, counted from 0", _DAMAGED)
        return tuple(x + 1 for x in ids)

    def window(self, layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """Return the sliding window in tokens, and for each layer whether it has one; (None, ()) if none has."""
        if not self.truth("use_sliding_window") or self.find("sliding_window") is None:
            return None, ()
        kinds = self.find("layer_types")
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise self.refusal("layer_types", kinds, f"a kind for each of {layers} layers", _DAMAGED)
        for kind in kinds:
            if kind not in ("sliding_attention", "full_attention"):
                raise self.refusal("layer_types", kind, "sliding_attention or full_attention", UPSTREAM)
        return self.whole("sliding_window"), tuple(kind == "sliding_attention" for kind in kinds)

    def _float(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(key, "not there" if value is None else value, "a number", _DAMAGED)
        try:
            return float(value)
        except OverflowError:
            raise self.refusal(key, "larger than any float", "a number", _DAMAGED) from None
