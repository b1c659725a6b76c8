"""Says what a GGUF file is for, from its head: a model to open, or a part that llama.cpp cannot open alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, ConversionError, brief
from . import heads, reader
from .reader import GGUF
from .target import TRAINED_FOR

_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_BESIDE = (
    "Open {} with a pool, and give this file beside it: --kvflash auto -md FILE on the command line, "
    'kvflash="auto", draft_model="FILE" in Python.'
)
OLD_DFLASH = ("dflash-draft", "qwen35-dflash-draft", "gemma4-dflash-draft")
"""Architectures of DFlash drafters with older names, which `kvflash-convert migrate` renames."""

_DRAFTERS = {"dflash": "a DFlash drafter", "eagle3": "an EAGLE3 drafter"}


@dataclass(frozen=True, slots=True)
class Part:
    """A file that is no model by itself.

    what: a noun with its article. use: a sentence on how to use it. drafts: whether it drafts for a model.
    """

    what: str
    use: str
    drafts: bool = False


def check_model(path: Path, *, vocab_only: bool = False) -> None:
    """Raise an error if llama.cpp cannot open `path` as a model, and would end the process or say nothing helpful.

    ConfigError for a part of a model, ConversionError for numbers that cannot be. vocab_only: only the vocabulary is
    opened, which every file may have. A path that does not exist, and a head that cannot be read, are left to
    llama.cpp.
    """
    reader.check(path)
    if vocab_only or not path.exists():
        return
    try:
        file = reader.read(path)
        found = part(file)
    except (ConversionError, OSError):
        return
    if found is not None:
        raise ConfigError(f"{path} is {found.what}, which cannot be opened as a model. {found.use}")
    check_numbers(file)


def check_numbers(file: GGUF) -> None:
    """Raise ConversionError for the epsilon of a norm for which llama.cpp would end the process in the first step."""
    for name, field in file.fields.items():
        if name.endswith("_epsilon") and isinstance(field.value, float) and not field.value >= 0:
            raise ConversionError(
                file.name,
                name,
                found=field.value,
                wanted="0 or more",
                remedy="Fetch the file again, or convert it anew.",
            )


def check_projector(path: Path) -> None:
    """Raise ConfigError unless `path` is a projector of images or sound (mmproj), as far as its head says."""
    try:
        file = reader.read(path)
    except (ConversionError, OSError) as err:
        raise ConfigError(f"mmproj (--mmproj) {path} cannot be read: {err}") from err
    if not _projects(file):
        raise ConfigError(
            f"mmproj (--mmproj) {path} is no projector of images: give the file that was made beside the model's, "
            "which is often called mmproj"
        )


def check_reader(path: Path) -> None:
    """Raise ConfigError or ConversionError unless `path` is a whole model, as the policy 'drafter' needs one."""
    file = reader.read(path)
    found = part(file)
    if found is not None:
        raise ConfigError(
            f"kvflash_drafter (--kvflash-drafter) {path} is {found.what}; the policy 'drafter' needs a small model "
            f"that reads a text by itself. {found.use}"
        )
    check_numbers(file)
    if lack := _vocabulary_lacks(file):
        raise ConfigError(
            f"kvflash_drafter (--kvflash-drafter) {path} has no {lack}; the policy 'drafter' needs a small model "
            "that reads a text by itself. Convert it with its tokenizer."
        )


def _vocabulary_lacks(file: GGUF) -> str:
    """Return what llama.cpp would miss when it splits a text into tokens, which ends the process; "" for nothing."""
    kind, field = file.get("tokenizer.ggml.model"), file.fields.get("tokenizer.ggml.tokens")
    if kind == "no_vocab" or field is None or not field.is_array:
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


def part(file: GGUF) -> Part | None:
    """Return what a file is that is no model by itself, None for a model. ConversionError without an architecture."""
    return _named(file) or _drafter(file) or _incomplete(file)


def _named(file: GGUF) -> Part | None:
    """Return what a file is whose architecture is missing or is no model's; None for others."""
    number, count = file.get("split.no"), file.get("split.count")
    if type(number) is int and number > 0:
        name = _PART.fullmatch(file.path.name)
        first = f"{name[1]}-00001-of-{name[2]}.gguf" if name else "the part whose number is 00001"
        return Part(f"part {number + 1} of {brief(count)} of a model", f"Open the first part: {first}.")
    kind, architecture = file.get("general.type"), file.get("general.architecture")
    if kind == "imatrix":
        return Part("an importance matrix", "llama.cpp's llama-quantize takes it: --imatrix FILE.")
    if architecture == "controlvector":
        return Part("a control vector", "llama.cpp's own programs take it: --control-vector FILE.")
    if kind == "adapter":
        return Part(
            f"an adapter (LoRA) of a model of the architecture {brief(architecture)}",
            'Open the model that it was trained for, and give this file beside it in Python: lora_path="FILE".',
        )
    if _projects(file):
        return Part(
            "a projector of images or sound (mmproj)",
            "Open the model that it belongs to, and give this file beside it: --mmproj FILE on the command line, "
            'mmproj="FILE" in Python.',
        )
    return None


def _projects(file: GGUF) -> bool:
    named = {"general.architecture": "clip", "general.type": "mmproj"}
    return any(file.get(field) == name for field, name in named.items())


def _drafter(file: GGUF) -> Part | None:
    architecture = file.architecture
    if architecture in _DRAFTERS:
        kind = file.get(TRAINED_FOR)
        target = f"the {brief(kind)} model" if isinstance(kind, str) else "the model"
        return Part(_DRAFTERS[architecture], _BESIDE.format(f"{target} that it was trained for"), drafts=True)
    if architecture in OLD_DFLASH:
        return Part(
            "a DFlash drafter with older names", "Give it llama.cpp's names first: kvflash-convert migrate IN OUT."
        )
    if architecture == "gemma4-assistant":
        return Part(
            "a drafter that reads the memory of its target",
            "llama.cpp's own programs draft with it: a pool pages that memory.",
        )
    if heads.alone(file):
        return Part(
            f"a head for further tokens (MTP) of a {brief(architecture)} model, without that model",
            _BESIDE.format("the model that it belongs to"),
            drafts=True,
        )
    return None


def _incomplete(file: GGUF) -> Part | None:
    split = file.get("split.count")
    if file.tensors or (type(split) is int and split > 1):
        return None
    return Part(
        "a vocabulary without weights",
        "Open a file of the whole model, or only the vocabulary in Python: vocab_only=True.",
    )
