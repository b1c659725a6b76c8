"""The facts that must be equal for saved KV bytes to mean the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..constants import CHUNK
from ..errors import SnapshotError
from ..native.library import build_info

if TYPE_CHECKING:
    from llama_cpp import Llama

    from ..native.engine import Layer, PagedEngine

HEAD = 32 << 20
"""Bytes at the beginning of a GGUF file that are hashed as a whole: metadata and the list of tensors."""

SAMPLES = 64
SAMPLE = 64 << 10

ROPE = (
    "rope_scaling_type", "rope_freq_base", "rope_freq_scale",
    "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx",
)  # fmt: skip

Fingerprint = dict[str, Any]


def of_engine(engine: PagedEngine) -> Fingerprint:
    """Return the facts of the cached bytes: their shape and form."""
    info = engine.info
    names = ("type_k", "type_v", "rotated", "n_pos", "n_swa", "recurrent")
    facts = {name: getattr(info, name) for name in names}
    return {"chunk": CHUNK, **facts, "layers": [_shape(layer) for layer in engine.layers]}


def of_llama(llm: Llama, engine: PagedEngine) -> Callable[[], Fingerprint]:
    """Return a function for the fingerprint of a model and build. llm: just loaded.

    The function hashes the files: most models are never saved.
    """
    params = llm.context_params
    architecture = llm.metadata.get("general.architecture", "unknown")
    trained = llm.metadata.get(f"{architecture}.rope.scaling.original_context_length")
    model = ModelFile(llm.model_path)
    lora = ModelFile(llm.lora_path) if llm.lora_path else None
    scale = llm.lora_scale
    facts = {
        "kv_overrides": repr(llm.kv_overrides),
        "n_vocab": llm.n_vocab(),
        "llama.cpp": build_info()["llama_cpp_commit"],
        **of_engine(engine),
        "rope": [float(getattr(params, name)) for name in ROPE],
        # some models have other RoPE factors for contexts that are longer than this
        "long_context": trained is not None and llm.n_ctx() > int(trained),
    }

    def read() -> Fingerprint:
        adapter = [lora.identity(), scale] if lora is not None else None
        return {"architecture": architecture, "model": model.identity(), "lora": adapter, **facts}

    return read


class ModelFile:
    """A GGUF file that has just been loaded, with all parts of a split model."""

    def __init__(self, path: str | Path) -> None:
        self._parts = tuple(_Part.of(part) for part in _parts(Path(path).absolute()))

    def identity(self) -> str:
        """Return a hash of its size, its head and samples of its tensors, which does not depend on its path.

        SnapshotError if the file has been replaced or changed since it was loaded.
        """
        for part in self._parts:
            try:
                same = _Part.of(Path(part.name)) == part
            except OSError:
                same = False
            if not same:
                raise SnapshotError(f"{part.name} has been replaced since it was loaded: load the model again")
        return _hash_parts(self._parts)


class _Part(NamedTuple):
    """A file, and the facts that change if it is replaced."""

    name: str
    size: int
    changed: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _Part:
        status = path.stat()
        return cls(str(path), status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=16)
def _hash_parts(parts: tuple[_Part, ...]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.size.to_bytes(8, "little"))
        with Path(part.name).open("rb", buffering=0) as file:
            digest.update(file.read(HEAD))
            for i in range(1, SAMPLES + 1):
                at = max(HEAD, (part.size - SAMPLE) * i // SAMPLES)
                file.seek(at)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:32]


def _parts(path: Path) -> Iterator[Path]:
    split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if split is None:
        yield path
        return
    stem, count = split.groups()
    for i in range(1, int(count) + 1):
        yield path.with_name(f"{stem}-{i:05}-of-{count}.gguf")


def _shape(layer: Layer) -> list[int]:
    values = asdict(layer)
    values.pop("scale", None)  # known only where queries are captured
    values.pop("device", None)  # where a layer is does not change its bytes
    return [int(value) for value in values.values()]
