"""Says what a GGUF file is for, from its head: a model to open, or a part that llama.cpp cannot open alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConversionError, brief
from . import heads, reader
from .reader import FLOAT, GGUF, TEXT, Field, Tensor

_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_BESIDE = (
    "Open {} with a pool, and give this file beside it: --kvflash auto -md FILE on the command line, "
    'kvflash="auto", draft_model="FILE" in Python.'
)
OLD_DFLASH = ("dflash-draft", "qwen35-dflash-draft", "gemma4-dflash-draft")
"""Architectures of DFlash drafters with older names, which `kvflash-convert migrate` renames."""

_TOKENS = "tokenizer.ggml.tokens"
_NO_VOCABULARY = ("no_vocab", "none")
_REMEDY = "Fetch the file again, or convert it anew."
_OVERRIDES = "kv_overrides (--override-kv)"
_OTHER = "Leave it out, or give another value."
_MOST_LAYERS, _MOST_EXPERTS, _MOST_COUNT = 512, 1024, (1 << 31) - 1
_MOST_WINDOW, _MOST_TOKENS, _MOST_ROUNDS = 1 << 24, 1 << 22, 1000
"""Tokens of a window, for each of which a step takes memory, tokens of a vocabulary without texts, for each of which a
load does, and rounds within a step."""

_DIVISORS = (
    "attention.output_group_count", "full_attention_interval", "ssm.inner_size", "ssm.state_size", "ssm.conv_kernel",
    "ssm.time_step_rank", "wkv.head_size",
)  # fmt: skip
"""Counts that llama.cpp divides by, or makes tensors of."""

_SCALINGS = ("none", "linear", "yarn", "longrope")
_SHAPE = ("_count", "_count_kv", "_interval", "_kernel", "_layers", "_length", "_mla", "_rank", "_size", "_step")
_NO_SHAPE = ("context_length", "temperature_length", "expert_used_count", "nextn_predict_layers")
"""How keys end that say which shape the weights have, and which of them do not."""

_DELTA = ("qwen35", "qwen35moe", "qwen3next")
"""Architectures with a gated delta net. llama.cpp loads them by some of their keys, and computes with others."""

_GATED = frozenset({
    "bailingmoe2", "bailingmoe3", "deepseek32", "dots1", "dots3note", "exaone-moe", "hy_v4", "kimi-k3", "kimi-linear",
    "lfm2moe", "minimax-m2", "minimax-m3", "smallthinker",
})  # fmt: skip
"""Architectures that read how experts are gated, and take no usual way for 0."""

_MOST_GATING = 4
_TEMPERED = ("deepseek2", "mistral4")
"""Architectures that divide positions by a length where attention has a temperature."""

_FIRST_HEADS = ("cogvlm", "deepseek2-ocr", "modern-bert", "olmo2", "phimoe", "qwen")
"""Architectures that divide by the heads of the first layer."""

_MIXTURES = ("qwen35moe", "qwen4exp")
"""Architectures that divide by the experts of a token where these have no size of their own."""

_SECTIONS_OR_NONE = ("bailingmoe3", "glm4", "glm4moe", "hunyuan_vl")
"""Architectures that count positions plainly where RoPE's sections are 0."""

_NO_ROPE = frozenset({
    "arwkv7", "bert", "bloom", "deepseek2-ocr", "deepseek4", "glm5-next", "gpt2", "gptj", "jais", "jamba",
    "jina-bert-v2", "kimi-k3", "kimi-linear", "mamba", "mamba2", "mpt", "nemotron_h", "nemotron_h_moe", "refact",
    "rwkv6", "rwkv6qwen2", "rwkv7", "starcoder", "t5", "t5encoder", "wavtokenizer-dec",
})  # fmt: skip
"""Architectures that turn nothing. In others a step never ends where RoPE turns no value of a head."""

_WHOLE_HEADS = frozenset({
    "apertus", "arcee", "arctic", "baichuan", "chameleon", "codeshell", "cogvlm", "cohere2moe", "dbrx", "deci",
    "deepseek", "dots1", "dream", "ernie4_5", "ernie4_5-moe", "exaone", "exaone-moe", "exaone4", "falcon", "granite",
    "granite_swa", "graniteswitch", "grok", "grovemoe", "hunyuan-moe", "hunyuan_vl", "hy_v3", "internlm2", "jais2",
    "llada", "llada-moe", "llama", "llama4", "maincoder", "mellum", "mistral3", "olmo", "olmo2", "olmoe", "orion",
    "paddleocr", "pangu-embedded", "plamo", "pockettts", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl",
    "qwen3vlmoe", "rnd1", "seed_oss", "smallthinker", "smollm3", "starcoder2", "talkie", "xverse",
})  # fmt: skip
"""Architectures whose graph asserts that RoPE turns all values of a head."""

_INTEGERS = ("i8", "i16", "i32", "i64", "f64")
_TABLES = ("d2t", "tid2eid")
"""How the names of tensors of integers end; those of other tensors are computed with as numbers."""

_VECTOR = re.compile(r"(?:norm(?:_\d+)?\.weight|\.ln\d\.weight|^rope_\w+\.weight|\.bias)$")
"""How the names of a projector's vectors end that are added or multiplied, as F32 only."""

_MULTIPLIED = re.compile(r"(?:_inp_shexp\.weight|\.ssm_(?:alpha|beta)\.weight|\.input_scale)$")
"""How the names of a model's vectors end that are no F32 only: rows of a product, and what nothing reads."""

_F32 = re.compile(
    r"(?:norm(?:_(?:key|query|conv))?\.weight|\.bias|\.ssm_(?:a|d)|\.(?:ssm_conv1d(?:_[qkv])?|shortconv\.conv)\.weight"
    r"|_lerp_fused\.weight|_compressor_ape\.weight)$"
)
"""How the names of tensors of a model end that are added, multiplied or convolved by row, as F32 only."""

_ADAPTER = (
    ("general.type", TEXT, "text"), ("general.architecture", TEXT, "text"), ("adapter.type", TEXT, "text"),
    ("adapter.lora.alpha", FLOAT, "a number of 32 bits with a point"),
)  # fmt: skip
"""Fields of an adapter and their types."""

_MOST_TEXT, _MOST_FLOAT = 127, 3.4028234663852886e38
"""Bytes of a text, and the largest number, that can take the place of a field."""

_MOST_OF_PROJECTORS = {"block_count": _MOST_LAYERS, "preproc_min_tiles": 256, "preproc_max_tiles": 256}
"""How keys of projectors end that memory is taken for, and the most that they may be."""

_DRAFTERS = {"dflash": "a DFlash drafter", "eagle3": "an EAGLE3 drafter"}


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A file that is no model by itself.

    what: a noun with its article. use: a sentence on how to use it. drafts: whether it drafts for a model.
    """

    what: str
    use: str
    drafts: bool = False


def check_model(path: Path, *, vocab_only: bool = False, overrides: Mapping[str, object] | None = None) -> None:
    """Raise an error if llama.cpp cannot open `path` as a model, and would end the process or say nothing helpful.

    ConfigError for a part of a model, and for a head that cannot be read: llama.cpp may read what is unsound in it.
    ConversionError for numbers that cannot be. vocab_only: only the vocabulary is opened, which every file may have.
    overrides: values in the place of fields. A path that does not exist, or cannot be mapped, is left to llama.cpp.
    """
    _check_forms(overrides or {})
    reader.check(path)
    if not path.exists():
        return
    try:
        file = reader.read(path)
        if not vocab_only and _is_split(file):
            file = replace(file, tensors={tensor.name: tensor for tensor in reader.all_tensors(file)})
        found = None if vocab_only else part(file)
    except ConversionError as err:
        raise ConfigError(f"Failed to load model from file: {path}: {err}") from err
    except OSError:  # a folder without mmap, say
        return
    changed = _overridden(file, overrides) if overrides else None
    check_texts(file)
    if changed is not None:
        check_texts(changed, _OTHER)
    if vocab_only:
        return
    if found is not None:
        raise ConfigError(f"{path} is {found.what}, which cannot be opened as a model. {found.use}")
    check_numbers(file)
    if changed is not None:
        check_numbers(changed, _OTHER)


def check_head(file: GGUF) -> None:
    """Raise what `check_texts` and `check_numbers` raise."""
    check_texts(file)
    check_numbers(file)


def check_texts(file: GGUF, remedy: str = _REMEDY) -> None:
    """Raise ConversionError for a key or a text of the head that is not UTF-8, and for a token that is there twice.

    Upstream decodes all keys and texts. llama.cpp ends the process for two equal tokens, whatever splits a text. A
    vocabulary without texts has as many tokens as the head says.
    """
    for name, field in file.fields.items():
        for text in (name, field.value if field.kind == TEXT else ""):
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ConversionError(file.name, name, found=text, wanted="text in UTF-8", remedy=remedy)
    if twice := _twice(file):
        raise ConversionError(file.name, _TOKENS, found=twice, wanted="each token once", remedy=remedy)
    if file.get("tokenizer.ggml.model") in _NO_VOCABULARY and (size := _count(file, "vocab_size")) > _MOST_TOKENS:
        key, wanted = f"{file.architecture}.vocab_size", f"at most {_MOST_TOKENS}"
        raise ConversionError(file.name, key, found=size, wanted=wanted, remedy=remedy)


def _twice(file: GGUF) -> str:
    """Return a token that is there twice and its two numbers, "" if each is there once.

    llama.cpp reads a token up to a zero byte, and gives an empty one a name.
    """
    field = file.fields.get(_TOKENS)
    tokens = field.value if field is not None and field.is_array else []
    if file.get("tokenizer.ggml.model") in _NO_VOCABULARY or not tokens or not isinstance(tokens[0], str):
        return ""
    texts = [token.partition("\0")[0] or f"[EMPTY_{at}]" for at, token in enumerate(tokens)]
    if len(set(texts)) == len(texts):
        return ""
    first: dict[str, int] = {}
    at = next(at for at, text in enumerate(texts) if first.setdefault(text, at) != at)
    return f"{texts[at]!r} as number {first[texts[at]]} and as number {at}"


def check_numbers(file: GGUF, remedy: str = _REMEDY) -> None:
    """Raise ConversionError for values with which llama.cpp would end the process, at the load or in the first step."""

    def refuse(name: str, value: object, wanted: str) -> None:
        raise ConversionError(file.name, name, found=value, wanted=wanted, remedy=remedy)

    own = f"{file.architecture}."
    for name, field in file.fields.items():
        if (name.startswith(own) or name.endswith("_epsilon")) and isinstance(value := field.value, float):
            if name.endswith(("_epsilon", "freq_base", "freq_base_swa")) and not 0 <= value < math.inf:
                refuse(name, value, "0 or more")
            if not math.isfinite(value):
                refuse(name, value, "a finite number")
    for key, (least, most) in _limits(file).items():
        if not least <= (count := _count(file, key)) <= most:
            refuse(f"{own}{key}", count, f"{least} to {most}")
    scaling = file.own("rope.scaling.type", _SCALINGS[0])
    if isinstance(scaling, str) and scaling not in _SCALINGS:
        refuse(f"{own}rope.scaling.type", scaling, f"one of {', '.join(_SCALINGS)}")
    for wrong in (_wrong_rope, _wrong_delta, _wrong_attention, _wrong_experts, _wrong_types):
        for key, value, wanted in wrong(file):
            refuse(key, value, wanted)


Wrong = Iterator[tuple[str, object, str]]
"""Names and values that cannot be, and what would be right."""


def _wrong_rope(file: GGUF) -> Wrong:
    """RoPE turns pairs of a head's values: all in one way, or in up to four sections (M-RoPE)."""
    own, head = f"{file.architecture}.", _head_dim(file)
    sections = file.own("rope.dimension_sections", 0 if file.architecture == "paddleocr" else None)
    if sections is not None:
        each = sections if isinstance(sections, list) else [sections] * 4
        whole = all(type(one) is int and 0 <= one <= head for one in each)
        plain = file.architecture in _SECTIONS_OR_NONE
        if not whole or sum(each[:4]) > head or not (plain or any(each[:3])):
            yield f"{own}rope.dimension_sections", sections, f"whole numbers from 0, with a sum from 1 to {head}"
    one = file.own("rope.dimension_count")
    if file.architecture in _WHOLE_HEADS and type(one) is int and one != head < _MOST_COUNT:
        yield f"{own}rope.dimension_count", one, f"{head}, the size of a head"
    least = 0 if file.architecture in _NO_ROPE or file.own("attention.key_length_mla") is not None else 2
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        turned = file.own(key, [])
        for one in turned if isinstance(turned, list) else [turned]:
            if type(one) is int and (one % 2 or not least <= one <= head):
                yield f"{own}{key}", one, f"an even number from {least} to {head}, the size of a head"


def _head_dim(file: GGUF) -> int:
    """Return how many values the largest head of the keys has; a number without bounds if the file does not say."""
    named = [key for key in file.fields if key.startswith(f"{file.architecture}.attention.key_length")]
    if named:
        return max(_count(file, key.removeprefix(f"{file.architecture}.")) for key in named)
    heads = file.own("attention.head_count")
    least = min(
        (one for one in (heads if isinstance(heads, list) else [heads]) if type(one) is int and one > 0), default=0
    )
    return _count(file, "embedding_length") // least if least else 1 << 31


def _wrong_delta(file: GGUF) -> Wrong:
    """Numbers of a gated delta net that do not show in the shapes of its weights."""
    if file.architecture not in _DELTA:
        return
    own = f"{file.architecture}."
    size = _count(file, "ssm.state_size") * _count(file, "ssm.time_step_rank")
    if (found := _count(file, "ssm.inner_size")) != size:
        yield f"{own}ssm.inner_size", found, f"{size}, the state's size times its heads"
    heads = file.own("attention.head_count_kv")
    if isinstance(heads, list) and len({one for one in heads if one}) > 1:
        yield f"{own}attention.head_count_kv", heads, "one number for all layers that have any"


def _wrong_attention(file: GGUF) -> Wrong:
    """Numbers of attention without which llama.cpp finds nothing: a layer with a window or an indexer, both lengths, a
    divisor.
    """
    own = f"{file.architecture}.attention."
    pattern = file.own("attention.sliding_window_pattern")
    without = not any(pattern) if isinstance(pattern, list) else type(pattern) is int and pattern == 1
    if without and (_count(file, "attention.sliding_window") > 0 or file.architecture == "llama4"):
        yield f"{own}sliding_window_pattern", pattern, "a pattern with a layer that has the window"
    types = file.own("attention.indexer.types", 1)
    if not (any(types) if isinstance(types, list) else types):
        yield f"{own}indexer.types", types, "a layer with an indexer of its own"
    heads = file.own("attention.head_count", 0)
    for key, value in (("head_count", heads), ("head_count_kv", file.own("attention.head_count_kv", heads))):
        if file.architecture in _FIRST_HEADS and (value[:1] == [0] if isinstance(value, list) else value == 0):
            yield f"{own}{key}", value, "1 or more in the first layer"
    for one, other in (("key_length_mla", "value_length_mla"), ("value_length_mla", "key_length_mla")):
        if (found := _count(file, f"attention.{one}")) and not _count(file, f"attention.{other}"):
            yield f"{own}{one}", found, f"0, or {other} too"
    tempered = file.architecture in _TEMPERED and file.own("attention.temperature_scale", 0.0)
    if tempered and not (length := _count(file, "attention.temperature_length")):
        yield f"{own}temperature_length", length, "1 or more, where temperature_scale is not 0"


def _wrong_experts(file: GGUF) -> Wrong:
    """Layers with experts of which a token takes none. All but Nemotron's take as many as the first layer has."""
    used = file.own("expert_used_count")
    if not isinstance(used, list) or 0 not in used or not _count(file, "expert_count"):
        return
    mixed = {tensor.name.split(".")[1] for tensor in reader.all_tensors(file) if "_exps." in tensor.name}
    if file.architecture.startswith("nemotron_h"):
        none = not _count(file, "expert_feed_forward_length")  # it divides by the count of each layer then
    else:
        none = used[0] == 0
    if none or any(one == 0 and str(at) in mixed for at, one in enumerate(used)):
        yield f"{file.architecture}.expert_used_count", used, "1 or more in the first layer, and where experts are"


def _wrong_types(file: GGUF) -> Wrong:
    """Tensors of a type that llama.cpp does not compute with, and one beside which it reads what is not there."""
    shifted = file.architecture == "rwkv6qwen2" and _count(file, "token_shift_count") == 1
    must_be_f32 = _f32_of_projector if _projects(file) else _f32_of_model
    for tensor in file.tensors.values():
        kind = tensor.kind.name
        if kind in _INTEGERS and not tensor.name.endswith(_TABLES):
            yield f"the type of {tensor.name}", kind, "f32, or another type of weights"
        if kind != "f32" and must_be_f32(tensor):
            yield f"the type of {tensor.name}", kind, "f32"
        if shifted and tensor.name.endswith(".time_mix_first.weight"):
            yield tensor.name, "there", "no such tensor with rwkv6qwen2"
        bias = f"{tensor.name.removesuffix('weight')}bias"
        if bias in file.tensors and _scaled(tensor.name, file.tensors):
            yield f"the type of {tensor.name}", "nvfp4 with a scale", f"another type beside {bias}"


def _f32_of_projector(tensor: Tensor) -> bool:
    return len(tensor.shape) == 1 and _VECTOR.search(tensor.name) is not None


def _f32_of_model(tensor: Tensor) -> bool:
    """Return whether a step asserts that a tensor is F32. llama.cpp's own converter writes no other such tensors."""
    name, vector = tensor.name, len(tensor.shape) == 1
    return bool(_F32.search(name)) or (vector and not name.endswith(_TABLES) and not _MULTIPLIED.search(name))


def _limits(file: GGUF) -> dict[str, tuple[int, int]]:
    """Return the least and the most of an architecture's own counts, as llama.cpp asserts them."""
    layers, experts, groups = (_count(file, key) for key in ("block_count", "expert_count", "expert_group_count"))
    limits = {key: (1, _MOST_COUNT) for key in _DIVISORS if file.own(key) is not None}
    if file.own("expert_gating_func") is not None:
        limits["expert_gating_func"] = (int(file.architecture in _GATED), _MOST_GATING)
    windowed = file.architecture == "afmoe" or (
        file.architecture == "llama4" and file.own("attention.sliding_window") is not None
    )
    limits |= {
        "attention.sliding_window": (int(windowed), _MOST_WINDOW),
        "hyper_connection.sinkhorn_iterations": (0, _MOST_ROUNDS),
        "block_count": (1, _MOST_LAYERS),
        "decoder_block_count": (0, _MOST_LAYERS),
        "nextn_predict_layers": (0, layers),
        "n_deepstack_layers": (0, layers),
        "expert_count": (0, _MOST_EXPERTS),
    }
    if experts <= 1 and file.architecture.startswith("hunyuan"):  # llama.cpp reads it as without experts
        return limits
    if file.architecture in _MIXTURES and not _count(file, "expert_feed_forward_length"):
        limits["expert_count"] = (1, _MOST_EXPERTS)
    limits |= {"expert_used_count": (min(experts, 1), experts), "expert_group_count": (0, max(experts - 1, 0))}
    return limits | ({"expert_group_used_count": (1, groups - 1)} if groups > 1 else {})


def _count(file: GGUF, key: str) -> int:
    """Return an own number of the architecture, the largest of several; 0 if the file has none, 1 for its layers."""
    value = file.own(key, int(key == "block_count"))
    found = [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]
    return max(found, default=0)


def _check_forms(overrides: Mapping[str, object]) -> None:
    """Raise ConfigError for a key or a value that llama.cpp cannot be given, whatever the file is.

    It reads both up to a zero byte. So a key with one would replace another field than the field that is checked here.
    """
    for name, value in overrides.items():
        if not (isinstance(name, str) and name and _fits(name)):
            wanted = f"1 to {_MOST_TEXT} bytes of UTF-8, none of them zero"
            raise ConfigError(f"{_OVERRIDES} has the key {brief(name)}; wanted: {wanted}. Give a key of the file.")
        if not isinstance(value, bool | int | float | str):
            wanted = "a bool, int, float or str"
        elif isinstance(value, str) and not _fits(value):
            wanted = f"at most {_MOST_TEXT} bytes of UTF-8, none of them zero"
        elif isinstance(value, float) and not abs(value) <= _MOST_FLOAT:
            wanted = "a finite number of 32 bits"
        elif isinstance(value, int) and not -1 <= value < 1 << 32:
            wanted = f"-1 to {(1 << 32) - 1}"
        else:
            continue
        raise ConfigError(f"{_OVERRIDES} {name} is {brief(value)}; wanted: {wanted}. {_OTHER}")


def _fits(text: str) -> bool:
    """Return whether llama.cpp reads all of a text, and as it is."""
    data = text.encode(errors="replace")
    return data.decode() == text and 0 not in data and len(data) <= _MOST_TEXT


def _overridden(file: GGUF, overrides: Mapping[str, Any]) -> GGUF:
    """Return the head as llama.cpp reads it with `overrides`. ConfigError for a value that it would not read so."""
    fields, own = dict(file.fields), f"{file.architecture}."
    for name, value in overrides.items():
        field = fields.get(name)
        other = field is None or field.value != value
        if field is not None and type(field.value) is not type(value):
            wanted = f"the type of the file's value, which is {type(field.value).__name__}"
        elif name == "general.architecture" and other:
            wanted = "the file's own: the weights are of that architecture"
        elif name.startswith(own) and name.endswith(_SHAPE) and not name.endswith(_NO_SHAPE) and other:
            wanted = "the file's own: the weights have that shape"
        else:
            fields[name] = Field.of(name, (1 << 32) - 1 if type(value) is int and value < 0 else value)
            continue
        raise ConfigError(f"{_OVERRIDES} {name} is {brief(value)}; wanted: {wanted}. {_OTHER}")
    return replace(file, name=_OVERRIDES, fields=fields)


def check_adapter(file: GGUF, model: Path) -> None:
    """Raise ConversionError for a LoRA adapter with which llama.cpp would end the process, at the load or in a step.

    model: the file that it is added to. An adapter of another model, and a model that is not there or cannot be mapped,
    are left to llama.cpp.
    """
    if not model.exists():
        return
    try:
        base = reader.read(model)
        weights = {tensor.name: tensor for tensor in reader.all_tensors(base)}
    except OSError:
        return
    tied = "output.weight" not in weights and base.own("attention.causal") is not False  # an encoder has no output
    remedy = "Give another adapter, or convert it anew: this one cannot be used with this model."
    for key, value, wanted in _wrong_adapter(file, weights, tied=tied):
        raise ConversionError(file.name, key, found=value, wanted=wanted, remedy=remedy)


def _wrong_adapter(file: GGUF, weights: Mapping[str, Tensor], *, tied: bool) -> Wrong:
    """Fields of another type than llama.cpp asserts, an alpha that spoils the weights, and pairs of tensors that cannot
    be multiplied, or added.
    """
    for key, kind, wanted in _ADAPTER:
        if (field := file.fields.get(key)) is not None and field.kind != kind:
            yield key, field.value, wanted
    alpha = file.get("adapter.lora.alpha")
    if isinstance(alpha, float) and not 0 < alpha < math.inf:  # llama.cpp takes 0 for the rank
        yield "adapter.lora.alpha", alpha, "a finite number above 0"
    if (invocation := file.get("adapter.alora.invocation_tokens")) is not None:  # llama.cpp would not wait for them
        yield "adapter.alora.invocation_tokens", invocation, "an adapter that counts for the whole text"
    for name, one in file.tensors.items():
        base, other = name.removesuffix(".lora_a"), file.tensors.get(f"{name[:-1]}b")
        if ".lora_" in name[: -len(".lora_a")]:  # llama.cpp would take it out of there too, and pair another name
            yield "the name of a tensor", name, ".lora_a or .lora_b at its end alone"
        if base == name or other is None or base not in weights:
            continue
        if _scaled(base, weights):
            yield base, "nvfp4 with a scale", "weights of another type: llama.cpp adds no adapter to these"
        for tensor in (one, other):
            if tensor.kind.name in _INTEGERS:
                yield f"the type of {tensor.name}", tensor.kind.name, "f32, or another type of weights"
            shape = weights[base].shape
            if _planes(tensor.shape) != _planes(shape):
                yield f"the shape of {tensor.name}", list(tensor.shape), f"as many planes as {list(shape)} has"
        if base.endswith("token_embd.weight") and one.shape[0] != other.shape[0]:
            yield f"the shape of {other.name}", list(other.shape), f"rows of {one.shape[0]}, as {name} has"
        if base == "token_embd.weight" and tied:
            yield base, "the output too", "an output.weight in the model: llama.cpp adds no adapter to these"


def _scaled(name: str, weights: Mapping[str, Tensor]) -> bool:
    """Return whether a matrix of a feed-forward net is NVFP4 with a scale, which is applied behind the product."""
    stem = name.removesuffix(".weight")
    feeds = stem.endswith((".ffn_up", ".ffn_gate", ".ffn_down"))
    return feeds and weights[name].kind.name == "nvfp4" and f"{stem}.scale" in weights


def _planes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions behind the second one, without those of 1."""
    return tuple(length for length in shape[2:] if length > 1)


def check_projector(path: Path, name: str = "mmproj (--mmproj)") -> None:
    """Raise ConfigError unless `path` is a projector of images or sound (mmproj), as far as its head says.

    name: of the setting that gave the path. ConversionError for numbers and types of tensors that would end the
    process, or take all memory.
    """
    try:
        file = reader.read(path)
    except (ConversionError, OSError) as err:
        raise ConfigError(f"{name} {path} cannot be read: {err}") from err
    if not _projects(file):
        raise ConfigError(
            f"{name} {path} is no projector of images: give the file that was made beside the model's, "
            "which is often called mmproj"
        )
    check_numbers(file)
    for key, field in file.fields.items():
        for end, most in _MOST_OF_PROJECTORS.items():
            if key.endswith(end) and type(field.value) is int and field.value > most:
                raise ConversionError(file.name, key, found=field.value, wanted=f"at most {most}", remedy=_REMEDY)


def check_reader(path: Path) -> None:
    """Raise ConfigError or ConversionError unless `path` is a whole model, as the policy 'drafter' needs one."""
    file = reader.read(path)
    found = part(file)
    if found is not None:
        raise ConfigError(
            f"kvflash_scorer (--kvflash-scorer) {path} is {found.what}; the policy 'drafter' needs a small model "
            f"that reads a text by itself. {found.use}"
        )
    check_head(file)
    if lack := _vocabulary_lacks(file):
        raise ConfigError(
            f"kvflash_scorer (--kvflash-scorer) {path} has no {lack}; the policy 'drafter' needs a small model "
            "that reads a text by itself. Convert it with its tokenizer."
        )


def _vocabulary_lacks(file: GGUF) -> str:
    """Return what llama.cpp would miss when it splits a text into tokens, which ends the process; "" for nothing."""
    kind, field = file.get("tokenizer.ggml.model"), file.fields.get(_TOKENS)
    if kind in _NO_VOCABULARY or field is None or not field.is_array:
        return "vocabulary"
    if kind == "llama":  # text that is no token is spelled in bytes
        tokens = frozenset(field.value)
        for byte in range(256):
            if f"<0x{byte:02X}>" not in tokens and (byte > 127 or chr(byte) not in tokens):
                return f"token for the byte {byte} of a text"
    return ""


def reads_alone(path: Path) -> bool:
    """Report whether a file is a model by itself, as far as its head says. One that cannot be read counts as one."""
    try:
        return part(reader.read(path)) is None
    except (ConversionError, OSError):
        return True


def part(file: GGUF) -> ModelPart | None:
    """Return what a file is that is no model by itself, None for a model. ConversionError without an architecture."""
    return _named(file) or _drafter(file) or _incomplete(file)


def _named(file: GGUF) -> ModelPart | None:
    """Return what a file is whose architecture is missing or is no model's; None for others."""
    number, count = file.get("split.no"), file.get("split.count")
    if type(number) is int and number > 0:
        name = _PART.fullmatch(file.path.name)
        first = f"{name[1]}-00001-of-{name[2]}.gguf" if name else "the part whose number is 00001"
        return ModelPart(f"part {number + 1} of {brief(count)} of a model", f"Open the first part: {first}.")
    kind, architecture = file.get("general.type"), file.get("general.architecture")
    if kind == "imatrix":
        return ModelPart("an importance matrix", "llama.cpp's llama-quantize takes it: --imatrix FILE.")
    if architecture == "controlvector":
        return ModelPart("a control vector", "llama.cpp's own programs take it: --control-vector FILE.")
    if kind == "adapter":
        return ModelPart(
            f"an adapter (LoRA) of a model of the architecture {brief(architecture)}",
            'Open the model that it was trained for, and give this file beside it in Python: lora_path="FILE".',
        )
    if _projects(file):
        return ModelPart(
            "a projector of images or sound (mmproj)",
            "Open the model that it belongs to, and give this file beside it: --mmproj FILE on the command line, "
            'mmproj="FILE" in Python.',
        )
    return None


def _projects(file: GGUF) -> bool:
    named = {"general.architecture": "clip", "general.type": "mmproj"}
    return any(file.get(field) == name for field, name in named.items())


def _drafter(file: GGUF) -> ModelPart | None:
    architecture = file.architecture
    if architecture in _DRAFTERS:
        from .target import TRAINED_FOR  # here: few files are drafters

        kind = file.get(TRAINED_FOR)
        target = f"the {brief(kind)} model" if isinstance(kind, str) else "the model"
        return ModelPart(_DRAFTERS[architecture], _BESIDE.format(f"{target} that it was trained for"), drafts=True)
    if architecture in OLD_DFLASH:
        return ModelPart(
            "a DFlash drafter with older names", "Give it llama.cpp's names first: kvflash-convert migrate IN OUT."
        )
    if architecture == "gemma4-assistant":
        return ModelPart(
            "a drafter that reads the memory of its target",
            "llama.cpp's own programs draft with it: a pool pages that memory.",
        )
    if heads.alone(file):
        return ModelPart(
            f"a head for further tokens (MTP) of a {brief(architecture)} model, without that model",
            _BESIDE.format("the model that it belongs to"),
            drafts=True,
        )
    return None


def _incomplete(file: GGUF) -> ModelPart | None:
    if file.tensors or _is_split(file):
        return None
    return ModelPart(
        "a vocabulary without weights",
        "Open a file of the whole model, or only the vocabulary in Python: vocab_only=True.",
    )


def _is_split(file: GGUF) -> bool:
    split = file.get("split.count")
    return type(split) is int and split > 1
