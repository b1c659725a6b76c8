"""Who is to draft for a model: what its file and the files beside it say, what is asked for, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import checkpoints
from support.checkpoints import HIDDEN, VOCAB, rewritten, small_checkpoint, small_target, target_fields, write_gguf
from support.harness import MODELS

from kvflash_ggml.convert import draft
from kvflash_ggml.errors import ConfigError, ConversionError
from kvflash_ggml.gguf import reader
from kvflash_ggml.gguf.reader import Field


@pytest.fixture(autouse=True)
def _library(loaded: None) -> None:
    """The module is one of a package that needs it."""


def find(model: Path, *types: str, draft: Path | None = None) -> list[tuple[str, str | None]]:
    from kvflash_ggml.speculation.find import find

    return [(it.type, None if it.file is None else it.file.name) for it in find(model, types, draft)]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return small_target(tmp_path / "model.gguf")


def dflash(target: Path, name: str, *extra: str) -> Path:
    """A drafter of the target beside it. extra: tensors of other kinds of DFlash."""
    out = target.parent / name
    out.parent.mkdir(exist_ok=True)
    draft.convert(small_checkpoint(target.parent / "checkpoint"), out, model=target)
    if extra:
        file = reader.read(out)
        arrays = {
            tensor: np.frombuffer(raw, np.float32 if kind == "f32" else np.float16).reshape(shape[::-1])
            for tensor, (kind, shape, raw) in checkpoints.tensor_bytes(out).items()
        }
        arrays |= {tensor: np.zeros((VOCAB, 4), np.float32) for tensor in extra}
        write_gguf(out, list(file.fields.values()), arrays)
    return out


def eagle3(target: Path, name: str, **changes: Any) -> Path:
    values = {
        "block_count": 1, "embedding_length": HIDDEN, "feed_forward_length": HIDDEN, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16,
        "target_hidden_size": HIDDEN, "target_layers": [1, 2, 3], "attention.layer_norm_rms_epsilon": 1e-6,
    } | changes  # fmt: skip
    matrices = {
        "fc": (HIDDEN, 3 * HIDDEN), "blk.0.attn_q": (64, 2 * HIDDEN), "blk.0.attn_k": (32, 2 * HIDDEN),
        "blk.0.attn_v": (32, 2 * HIDDEN), "blk.0.attn_output": (HIDDEN, 64),
        **{f"blk.0.ffn_{name}": (HIDDEN, HIDDEN) for name in ("gate", "up", "down")},
    }  # fmt: skip
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm")
    shapes: dict[str, tuple[int, ...]] = {**matrices, **dict.fromkeys(norms, (HIDDEN,))}
    fields = [Field.of("general.architecture", "eagle3"), *(Field.of(f"eagle3.{k}", v) for k, v in values.items())]
    tokens = reader.read(target).fields["tokenizer.ggml.tokens"]
    arrays = {f"{part}.weight": np.zeros(shape, np.float32) for part, shape in shapes.items()}
    return write_gguf(target.parent / name, [*fields, tokens], arrays)


def head(path: Path, *, architecture: str = "qwen35", trunk: bool = True, count: int = 1, **changes: Any) -> Path:
    """A model with heads for further tokens, or its heads alone."""
    arrays = {
        "output_norm.weight": np.ones(HIDDEN, np.float32),
        **({"blk.0.attn_norm.weight": np.ones(HIDDEN, np.float32)} if trunk else {}),
        f"blk.{checkpoints.TARGET_LAYERS}.nextn.eh_proj.weight": np.zeros((HIDDEN, 2 * HIDDEN), np.float32),
    }
    more = Field.of(f"{architecture}.nextn_predict_layers", count)
    layers = {"block_count": checkpoints.TARGET_LAYERS + count}
    return write_gguf(path, [*target_fields(architecture, **layers, **changes), more], arrays)


# --- by itself


def test_nothing_but_the_text(target: Path) -> None:
    assert find(target) == [("ngram", None)]
    small_target(target.parent / "small-draft.gguf")  # a small model is not taken by itself
    (target.parent / "broken-mtp.gguf").write_bytes(b"GGUF")
    (target.parent / "folder.gguf").mkdir()
    assert find(target) == [("ngram", None)]


def test_the_best_that_fits(target: Path, caplog: Any) -> None:
    eagle3(target, "a.gguf")
    assert find(target)[1] == ("draft-eagle3", "a.gguf")
    dflash(target, "drafter/z.gguf")
    assert find(target)[1] == ("draft-dflash", "z.gguf")
    dflash(target, "drafter/y.gguf")
    assert find(target)[1] == ("draft-dflash", "y.gguf")
    dflash(target, "w.gguf", "markov_w1.weight")
    assert find(target)[1] == ("draft-dflash", "w.gguf")
    checkpoints.rewritten(
        target.parent / "w.gguf", target.parent / "a0.gguf", lambda fields: fields.pop("dflash.target_layers")
    )
    with caplog.at_level("INFO"):
        assert find(target)[1] == ("draft-dflash", "w.gguf")
    assert "passed over as a drafter: a0.gguf: dflash.target_layers is None" in caplog.text


def test_the_models_own_head_comes_first(tmp_path: Path) -> None:
    model = head(tmp_path / "model.gguf")
    dflash(model, "a.gguf")
    assert find(model) == [("ngram", None), ("draft-mtp", None)]
    assert find(model, "draft-mtp", "draft-dflash") == [("draft-mtp", None), ("draft-dflash", "a.gguf")]


@pytest.mark.parametrize("what", [{"count": 2}, {"architecture": "qwen3"}])
def test_a_head_that_cannot_be_used(tmp_path: Path, what: dict[str, Any]) -> None:
    model = head(tmp_path / "model.gguf", **what)
    assert find(model) == [("ngram", None)]
    with pytest.raises(ConfigError, match=r"draft-mtp needs a file, and none is beside model\.gguf"):
        find(model, "draft-mtp")


def test_heads_beside_the_model(tmp_path: Path) -> None:
    model = small_target(tmp_path / "model.gguf", architecture="qwen35")
    head(tmp_path / "mtp-model.gguf", trunk=False)
    assert find(model) == [("ngram", None), ("draft-mtp", "mtp-model.gguf")]
    head(tmp_path / "mtp-model.gguf", trunk=True)  # another model
    assert find(model) == [("ngram", None)]


# --- as asked


def test_a_file_says_what_it_is(target: Path) -> None:
    for path, kind in (
        (dflash(target, "d.gguf"), "draft-dflash"),
        (eagle3(target, "e.gguf"), "draft-eagle3"),
        (small_target(target.parent / "s.gguf"), "draft-simple"),
    ):
        assert find(target, draft=path) == [("ngram", None), (kind, path.name)]
        assert find(target, kind, draft=path) == [(kind, path.name)]
        assert find(target, kind, "ngram", draft=path) == [(kind, path.name), ("ngram", None)]


def test_what_is_not_there(target: Path) -> None:
    for name in ("draft-dflash", "draft-eagle3", "draft-mtp"):
        with pytest.raises(ConfigError, match=rf"{name} needs a file, and none is beside model\.gguf"):
            find(target, name)
    with pytest.raises(ConfigError, match="draft-simple needs a file, and a small model is taken only if it is named"):
        find(target, "draft-simple")
    with pytest.raises(ConfigError, match=r"d\.gguf is for draft-dflash, and ngram is asked for"):
        find(target, "ngram", draft=dflash(target, "d.gguf"))
    with pytest.raises(ConversionError, match="not there"):
        find(target, draft=target.parent / "none.gguf")


def _wide(target: Path) -> Path:
    return eagle3(target, "e.gguf", target_hidden_size=128)


def _deep(target: Path) -> Path:
    return eagle3(target, "e.gguf", block_count=2)


def _narrow(target: Path) -> Path:
    return eagle3(target, "e.gguf", **{"attention.value_length": 8})


def _no_number(target: Path) -> Path:
    return eagle3(target, "e.gguf", **{"attention.layer_norm_rms_epsilon": float("nan")})


def _behind(target: Path) -> Path:
    return eagle3(target, "e.gguf", target_layers=[1, 2, 9])


def _endless(target: Path) -> Path:
    name = "qwen3.attention.layer_norm_rms_epsilon"
    return rewritten(
        MODELS / "scorer-qwen3-q8_0.gguf", target.parent / "e.gguf", lambda f: f.update({name: Field.of(name, -1.0)})
    )


def _assistant(target: Path) -> Path:
    return small_target(target.parent / "e.gguf", architecture="gemma4-assistant")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_wide, "fc.weight"),
        (_deep, r"eagle3.block_count is 2; wanted: 1"),
        (_narrow, r"eagle3.attention.value_length is 8; wanted: 16"),
        (_no_number, "layer_norm_rms_epsilon is nan"),
        (_behind, r"target layers is \[1, 2, 9\]"),
        (_endless, "layer_norm_rms_epsilon is -1.0; wanted: 0 or more"),
        (_assistant, "gemma4-assistant; wanted: a drafter with a memory of its own"),
    ],
)
def test_a_file_that_does_not_fit(target: Path, make: Callable[[Path], Path], why: str) -> None:
    """Refused if it is asked for, passed over if it is not."""
    path = make(target)
    with pytest.raises(ConversionError, match=why):
        find(target, draft=path)
    assert find(target) == [("ngram", None)]
    if make not in {_assistant, _endless}:
        with pytest.raises(ConversionError, match=why):
            find(target, "draft-eagle3")


def test_a_drafter_of_a_sister_is_passed_over_or_refused(tmp_path: Path) -> None:
    target = small_target(tmp_path / "model.gguf", whole=True)
    path = dflash(target, "d.gguf")
    assert find(target) == [("ngram", None), ("draft-dflash", "d.gguf")]
    write_gguf(target, target_fields(), checkpoints.target_weights(seed=2))
    assert find(target) == [("ngram", None)]
    with pytest.raises(ConversionError, match=r"d\.gguf: the model that it was trained for is another one"):
        find(target, draft=path)


def test_another_models_heads(tmp_path: Path) -> None:
    model = small_target(tmp_path / "model.gguf", architecture="qwen35")
    path = head(tmp_path / "mtp.gguf", trunk=False, architecture="qwen35moe", expert_feed_forward_length=8)
    with pytest.raises(ConversionError, match=r"mtp\.gguf: general\.architecture is qwen35moe; wanted: qwen35"):
        find(model, draft=path)
