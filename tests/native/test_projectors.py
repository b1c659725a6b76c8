"""Projectors of strangers: each is refused by name, or answers. None ends the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.harness import MODELS, write_iswa
from support.projecting import changed, ends
from support.rounding import ON_GPU
from support.vision import SIDE, WIDE_PIXELS, WIDTH, write_mrope, write_projector

from kvflash_ggml.gguf import reader, types

pytestmark = pytest.mark.skipif(
    ON_GPU or not hasattr(os, "fork"), reason="each projector has a fork, which a process with CUDA cannot have"
)
MODEL = MODELS / "recall-qwen3-q8_0.gguf"
KINDS = ["mlp", "qwen2vl_merger", "gemma3", "blind"]


class Kind:
    """A model, its projector, and the size of an image; None where it hears."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.model, width = folder, MODEL, 256
        self.pixels: tuple[int, int] | None = None if name == "blind" else (SIDE, SIDE)
        if name == "qwen2vl_merger":
            self.model, self.pixels = write_mrope(MODEL, folder / "mrope.gguf"), WIDE_PIXELS
        if name == "gemma3":
            self.model, width = folder / "gemma3.gguf", 128
            write_iswa(MODEL, self.model)
        self.projector = write_projector(folder / "mmproj.gguf", width, name, hears=name == "blind")
        self.tensors = reader.read(self.projector).tensors

    def ends(self, *changes: dict[str, Any]) -> list[str]:
        """How the projector ends with each of these changes of `changed`."""
        paths = [changed(self.projector, self.folder / f"{i}.gguf", **change) for i, change in enumerate(changes)]
        return ends(self.model, paths, self.pixels)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, loaded: None) -> Kind:
    return Kind(request.param, tmp_path_factory.mktemp(request.param))


def assert_typed(changes: list[dict[str, Any]], told: list[str]) -> None:
    for change, said in zip(changes, told, strict=True):
        assert said == "answered" or said.removeprefix("of the image, ").startswith(
            ("ConfigError: ", "ConversionError: ", "DecodeError: ")
        ), (change, said)


def test_a_projector_that_lacks_a_tensor(kind: Kind) -> None:
    """Of each tensor alone: ggml followed null, at the load or at the first image."""
    names = [name for name in kind.tensors if "blk.1" not in name]
    whole, *told = kind.ends({}, *({"without": name} for name in names))
    assert whole == "answered"
    assert_typed([{"without": name} for name in names], told)
    for name, said in zip(names, told, strict=True):
        if name.endswith(("attn_q.weight", "attn_k.bias", "patch_embd.weight", "mm.2.weight", "mm.0.bias")):
            assert said.startswith("ConfigError: mmproj (--mmproj) ")
            assert "cannot be used: llama.cpp says " in said
            assert "missing" in said or f"unable to find tensor {name}" in said


def test_a_tensor_of_another_type(kind: Kind) -> None:
    """An operation of the CPU asserted the types of its operands within the first image."""
    changes = [
        {"kinds": {name: other}}
        for name, tensor in kind.tensors.items()
        if "blk.1" not in name
        for other in ("f16", "q8_0")
        if tensor.shape[0] % types.BY_NAME[other].block == 0
    ]
    told = kind.ends(*changes)
    assert_typed(changes, told)
    positions = [
        said
        for change, said in zip(changes, told, strict=True)
        if change["kinds"].get("v.position_embd.weight") == "f16"
    ]
    if kind.model.name == "gemma3.gguf":
        assert "no device computes ADD of " in positions[0]
        assert "position_embd.weight (f16 32x144)" in positions[0]
    else:
        assert positions in ([], ["answered"]), "rows of them are picked, and converted"


def test_fewer_positions_than_an_image_has(tmp_path: Path, loaded: None) -> None:
    """Rows were looked for within the step. The text goes on."""
    kind = Kind("mlp", tmp_path)
    (said,) = kind.ends({"shapes": {"v.position_embd.weight": (WIDTH, 143)}})
    assert said.startswith("of the image, DecodeError: the projector ")
    assert "cannot encode an image or a sound of 144 rows (there are fewer rows than an image needs" in said
