"""Checkpoints and GGUF files that are damaged, or made to harm: an error that says what, and nothing else."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import checkpoints
from support.checkpoints import (
    assembled,
    config,
    older,
    rewritten,
    small_checkpoint,
    small_target,
    target_fields,
    write_gguf,
)

from kvflash_ggml.convert import describe, draft, migrate, safetensors
from kvflash_ggml.errors import ConversionError
from kvflash_ggml.gguf import reader, verify
from kvflash_ggml.gguf.reader import Field

MUTANTS = 1000
WORDS = [0, 1, 2, 7, 8, 32, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60, 1 << 63, (1 << 64) - 1]


def mutated(data: bytes, rng: random.Random, *, head: int) -> bytes:
    """One to three changes, mostly in the first `head` bytes: a byte, a number, a cut, a piece twice or left out."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if not made:
            break
        at = rng.randrange(min(head, len(made)) if rng.random() < 0.9 else len(made))
        kind = rng.randrange(5)
        if kind == 0:
            made[at] = rng.randrange(256)
        elif kind == 1:
            size = rng.choice((4, 8))
            made[at : at + size] = (rng.choice(WORDS) % (1 << (8 * size))).to_bytes(size, "little")
        elif kind == 2:
            del made[at:]
        elif kind == 3:
            made[at:at] = made[at : at + rng.randint(1, 64)]
        else:
            del made[at : at + rng.randint(1, 64)]
    return bytes(made)


# --- a thousand of each


@pytest.mark.slow
def test_a_thousand_damaged_checkpoints(tmp_path: Path) -> None:
    target = small_target(tmp_path / "target.gguf")
    folder = small_checkpoint(tmp_path / "drafter")
    sound = {name: (folder / name).read_bytes() for name in ("model.safetensors", "config.json")}
    head = 8 + int.from_bytes(sound["model.safetensors"][:8], "little")
    rng = random.Random(0)
    outcomes = {"refused": 0, "converted": 0}
    for number in range(MUTANTS):
        name = "config.json" if number % 4 == 0 else "model.safetensors"
        (folder / name).write_bytes(mutated(sound[name], rng, head=head))
        outcomes[outcome(lambda: draft.convert(folder, tmp_path / "out.gguf", model=target))] += 1
        (folder / name).write_bytes(sound[name])
    assert outcomes["refused"] > MUTANTS * 0.8
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


@pytest.mark.slow
def test_a_thousand_damaged_ggufs(tmp_path: Path) -> None:
    target = small_target(tmp_path / "target.gguf")
    out = tmp_path / "draft.gguf"
    draft.convert(small_checkpoint(tmp_path / "drafter"), out, model=target)
    sound, broken = out.read_bytes(), tmp_path / "broken.gguf"
    head = min(tensor.offset for tensor in reader.read(out).tensors.values())
    rng = random.Random(1)
    outcomes = {"refused": 0, "converted": 0}
    for _ in range(MUTANTS):
        broken.write_bytes(mutated(sound, rng, head=head))
        outcome(lambda: describe.describe(broken))
        outcomes[outcome(lambda: verify.verify(broken, model=target))] += 1
    assert outcomes["refused"] > MUTANTS * 0.8


def test_a_thousand_damaged_targets(tmp_path: Path) -> None:
    sound = small_target(tmp_path / "target.gguf").read_bytes()
    folder, broken = small_checkpoint(tmp_path / "drafter"), tmp_path / "broken.gguf"
    rng = random.Random(2)
    for _ in range(MUTANTS // 4):
        broken.write_bytes(mutated(sound, rng, head=len(sound)))
        outcome(lambda: draft.convert(folder, tmp_path / "out.gguf", model=broken))


ODD = [True, 0, 1, 1 << 31, -(1 << 40), 0.5, 1e300, "", "word", [1], [1, 2], [True]]
"""What a value can be instead."""

HUGE = [10**30, -(10**400), float("nan"), [], {}, [[1]], {"rope_theta": []}, None]


def stored(name: str, value: Any) -> Field:
    if isinstance(value, int) and not isinstance(value, bool) and not 0 <= value < 1 << 32:
        return Field(name, 11, struct.pack("<q", value))
    return Field(name, 12, struct.pack("<d", value)) if value == 1e300 else Field.of(name, value)


@pytest.mark.slow
def test_every_field_of_another_type(tmp_path: Path) -> None:
    target, sound, broken = small_target(tmp_path / "t.gguf"), tmp_path / "draft.gguf", tmp_path / "broken.gguf"
    folder = small_checkpoint(tmp_path / "drafter")
    draft.convert(folder, sound, model=target)
    more = ("nextn_predict_layers", "attention.sliding_window", "attention.sliding_window_pattern", "conv_kernel_size",
            "conv_group_size", "selector_rank", "hyper_connection.count", "attention.kv_lora_rank")  # fmt: skip
    for source, prefix in ((sound, "dflash"), (target, "qwen3")):
        names = [*reader.read(source).fields, *(f"{prefix}.{key}" for key in more)]
        for name in names:
            for value in ODD:
                put = {name: stored(name, value)}
                rewritten(source, broken, lambda fields, put=put: fields.update(put))
                outcome(lambda: describe.describe(broken))
                if source == sound:
                    outcome(lambda: verify.verify(broken, model=target))
                else:
                    outcome(lambda: draft.convert(folder, tmp_path / "new.gguf", model=broken))


@pytest.mark.slow
def test_every_field_of_an_older_file_of_another_type(tmp_path: Path) -> None:
    target, sound, broken = small_target(tmp_path / "t.gguf"), tmp_path / "draft.gguf", tmp_path / "broken.gguf"
    draft.convert(small_checkpoint(tmp_path / "drafter"), sound, model=target)
    old = older(sound, tmp_path / "old.gguf")
    for name in reader.read(old).fields:
        for value in ODD:
            put = {name: stored(name, value)}
            rewritten(old, broken, lambda fields, put=put: fields.update(put))
            outcome(lambda: migrate.migrate(broken, tmp_path / "new.gguf", model=target))


@pytest.mark.slow
def test_every_key_of_a_configuration_of_another_type(tmp_path: Path) -> None:
    target = small_target(tmp_path / "t.gguf")
    folder = small_checkpoint(tmp_path / "drafter")
    more = ["rope_parameters", "layer_types", "sliding_window", "partial_rotary_factor", "is_causal", "mask_token_id"]
    for key in [*config(), *more]:
        for value in [*ODD, *HUGE]:
            for place in ({key: value}, {"dflash_config": {**config()["dflash_config"], key: value}}):
                settings = {**config(use_sliding_window=True, sliding_window=64), **place}
                (folder / "config.json").write_text(json.dumps(settings))
                outcome(lambda: draft.convert(folder, tmp_path / "out.gguf", model=target))


def outcome(work: Callable[[], Any]) -> str:
    try:
        work()
    except ConversionError as error:
        text = str(error)
        assert "wanted: " in text
        assert text.isprintable()
        assert len(text) < 1500
        return "refused"
    return "converted"


# --- safetensors, one thing at a time


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}


HEADERS: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "the length of the header"),
    ("a length alone", struct.pack("<Q", 100), "the length of the header"),
    ("a header longer than the file", struct.pack("<Q", 1 << 62) + b"{}", "the length of the header"),
    ("no JSON", assembled({}, b"")[:8] + b"}{", "the header"),
    ("a list", assembled([], b""), "the header"),
    ("bytes that are no text", struct.pack("<Q", 2) + b"\xff\xfe", "the header"),
    ("a deep header", struct.pack("<Q", 200_000) + b"[" * 200_000, "the header"),
    ("a name twice", struct.pack("<Q", 17) + b'{"a": 1, "a": 2} ', "the header"),
    ("an entry in words", assembled({"a": "F32"}, b""), "the entry of 'a'"),
    ("an unknown dtype", assembled({"a": entry(dtype="F8_E4M3")}, bytes(16)), "the dtype of 'a'"),
    ("a dtype that is no word", assembled({"a": entry(dtype=["F32"])}, bytes(16)), "the dtype of 'a'"),
    ("a negative length", assembled({"a": entry(shape=[-4])}, bytes(16)), "the shape of 'a'"),
    ("a length of none", assembled({"a": entry(shape=[0])}, bytes(16)), "the shape of 'a'"),
    ("a length in words", assembled({"a": entry(shape=["4"])}, bytes(16)), "the shape of 'a'"),
    ("a shape of 2^60 values", assembled({"a": entry(shape=[1 << 30, 1 << 30])}, bytes(16)), "the place of 'a'"),
    ("a shape that is not there", assembled({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, b""), "the shape of 'a'"),
    ("many dimensions", assembled({"a": entry(shape=[1] * 9)}, bytes(16)), "the shape of 'a'"),
    ("a place beyond the file", assembled({"a": entry(data_offsets=[16, 32])}, bytes(16)), "the place of 'a'"),
    ("a place backwards", assembled({"a": entry(data_offsets=[16, 0])}, bytes(16)), "the place of 'a'"),
    ("a place before the data", assembled({"a": entry(data_offsets=[-16, 0])}, bytes(16)), "the place of 'a'"),
    ("one number for a place", assembled({"a": entry(data_offsets=[0])}, bytes(16)), "the place of 'a'"),
    ("fewer bytes than values", assembled({"a": entry(data_offsets=[0, 15])}, bytes(16)), "the place of 'a'"),
    ("two in one place", assembled({"a": entry(), "b": entry()}, bytes(16)), "the place of 'b'"),
]


@pytest.mark.parametrize(("data", "what"), [x[1:] for x in HEADERS], ids=[x[0] for x in HEADERS])
def test_a_header_is_refused(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ConversionError) as caught:
        safetensors.read_header(path)
    assert caught.value.what == what


def test_a_sound_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    path.write_bytes(checkpoints.safetensors({"a": values, "b": values[0]}))
    found = {source.name: source for source in safetensors.read_header(path)}
    assert found["a"].shape == (2, 3)
    assert np.concatenate(list(found["a"].pieces())).tobytes() == values.tobytes()


INDEXES: list[tuple[str, Any, str]] = [
    ("no map", {}, "weight_map"),
    ("a list", {"weight_map": []}, "weight_map"),
    ("a number for a file", {"weight_map": {"a": 1}}, "weight_map"),
    ("a file above the folder", {"weight_map": {"a": "../model.safetensors"}}, "a file in weight_map"),
    ("a file elsewhere", {"weight_map": {"a": "/etc/passwd"}}, "a file in weight_map"),
    ("a file in a folder", {"weight_map": {"a": "x/model.safetensors"}}, "a file in weight_map"),
    ("the folder itself", {"weight_map": {"a": ".."}}, "a file in weight_map"),
    ("a file that is not there", {"weight_map": {"a": "other.safetensors"}}, "the file"),
    ("a tensor that is not there", {"weight_map": {"zzz": "model.safetensors"}}, "the tensor 'zzz'"),
]


@pytest.mark.parametrize(("index", "what"), [x[1:] for x in INDEXES], ids=[x[0] for x in INDEXES])
def test_an_index_is_refused(tmp_path: Path, index: Any, what: str) -> None:
    folder = small_checkpoint(tmp_path / "drafter")
    (folder / safetensors.INDEX).write_text(json.dumps(index))
    with pytest.raises(ConversionError) as caught:
        safetensors.read_folder(folder)
    assert caught.value.what == what


def test_two_files_without_an_index_are_refused(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path / "drafter")
    (folder / "second.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ConversionError, match="without an index"):
        safetensors.read_folder(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path / "drafter")
    (folder / "second.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = {"weight_map": {"fc.weight": "model.safetensors", "norm.weight": "second.safetensors"}}
    (folder / safetensors.INDEX).write_text(json.dumps(index))
    with pytest.raises(ConversionError, match=r"in model\.safetensors too"):
        safetensors.read_folder(folder)


# --- GGUF, one thing at a time


def numbers(version: int = 3, tensors: int = 0, fields: int = 0, rest: bytes = b"") -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, fields) + rest


def field(kind: int, value: bytes, name: str = "a.b") -> bytes:
    return checkpoints.text(name) + struct.pack("<I", kind) + value


def info(shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, name: str = "x") -> bytes:
    return checkpoints.text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


GGUFS: list[tuple[str, bytes, str]] = [
    ("another file", b"PK\3\4" + bytes(100), "the file"),
    ("nothing", b"", "the file"),
    ("the name alone", b"GGUF", "a number"),
    ("version 1", numbers(1), "its version"),
    ("the other end first", numbers(int.from_bytes(b"\3\0\0\0", "big")), "its version"),
    ("2^60 fields", numbers(fields=1 << 60), "the number of fields"),
    ("2^60 tensors", numbers(tensors=1 << 60), "the number of tensors"),
    ("a key of 2^60 bytes", numbers(fields=1, rest=struct.pack("<Q", 1 << 60)), "the length of a key"),
    ("an empty key", numbers(fields=1, rest=field(4, bytes(4), "")), "the length of a key"),
    ("a type of none", numbers(fields=1, rest=field(99, bytes(8))), "the type of 'a.b'"),
    ("a string beyond the end", numbers(fields=1, rest=field(8, struct.pack("<Q", 1 << 50))), "a.b"),
    ("an array of arrays", numbers(fields=1, rest=field(9, struct.pack("<IQ", 9, 1))), "the type in 'a.b'"),
    ("2^60 numbers", numbers(fields=1, rest=field(9, struct.pack("<IQ", 4, 1 << 60))), "a.b"),
    ("2^40 strings", numbers(fields=1, rest=field(9, struct.pack("<IQ", 8, 1 << 40))), "the length of 'a.b'"),
    ("a key twice", numbers(fields=2, rest=2 * field(4, bytes(4))), "the key 'a.b'"),
    ("no alignment", numbers(fields=1, rest=field(4, bytes(4), "general.alignment")), "general.alignment"),
    ("an odd one", numbers(fields=1, rest=field(4, b"\x0c\0\0\0", "general.alignment")), "general.alignment"),
    ("one of 64 bits", numbers(fields=1, rest=field(10, b"\x20" + bytes(7), "general.alignment")), "general.alignment"),
    ("five dimensions", numbers(tensors=1, rest=info((1,) * 5)), "the dimensions of 'x'"),
    ("no dimension of a block", numbers(tensors=1, rest=info((), kind=8)), "the shape of 'x'"),
    ("a length of none", numbers(tensors=1, rest=info((32, 0))), "the shape of 'x'"),
    ("2^64 values", numbers(tensors=1, rest=info((1 << 32, 1 << 32))), "the shape of 'x'"),
    ("half a block", numbers(tensors=1, rest=info((33,), kind=8)), "the shape of 'x'"),
    ("another type", numbers(tensors=1, rest=info(kind=77)), "the type of 'x'"),
    ("a tensor beyond the end", numbers(tensors=1, rest=info((1 << 30,))), "the end of 'x'"),
    ("a place between", numbers(tensors=1, rest=info(offset=5) + bytes(500)), "the place of 'x'"),
    ("two in one place", numbers(tensors=2, rest=info() + info(name="y") + bytes(500)), "the place of 'y'"),
    ("a tensor twice", numbers(tensors=2, rest=info() + info(offset=128) + bytes(500)), "the tensor 'x'"),
    ("a long name", numbers(tensors=1, rest=info(name="x" * 100)), "the length of a tensor's name"),
]


@pytest.mark.parametrize(("data", "what"), [x[1:] for x in GGUFS], ids=[x[0] for x in GGUFS])
def test_a_gguf_is_refused(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ConversionError) as caught:
        reader.read(path)
    assert caught.value.what == what


@pytest.mark.parametrize(("kind", "named"), [(31, r"31 \(q4_0_4_4\)"), (77, "77")])
def test_an_unknown_type_asks_for_another_quantisation(tmp_path: Path, kind: int, named: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(numbers(tensors=1, rest=info(kind=kind)))
    with pytest.raises(ConversionError, match=rf"the type of 'x' is {named}; .* Fetch another quantisation"):
        reader.read(path)


@pytest.mark.parametrize("alignment", [1, 4, 1 << 21])
def test_every_alignment_is_read(tmp_path: Path, alignment: int) -> None:
    """As llama.cpp does: any power of two. A tensor without dimensions is one number there."""
    path, aligned = tmp_path / "model.gguf", field(4, struct.pack("<I", alignment), "general.alignment")
    head = numbers(tensors=2, fields=1, rest=aligned + info(()) + info((2,), offset=max(4, alignment), name="y"))
    start = -(-len(head) // alignment) * alignment
    with path.open("wb") as file:
        file.write(head)
        file.truncate(start + max(4, alignment) + 8)
    tensors = reader.read(path).tensors.values()
    assert [(one.shape, one.offset) for one in tensors] == [((1,), start), ((2,), start + max(4, alignment))]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="not there"):
        reader.read(tmp_path / "none.gguf")


def test_a_folder_is_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="is a folder"):
        reader.read(tmp_path)


@pytest.mark.parametrize(
    "value",
    [True, 7, 0.5, "a word", [1, -2, 3], [True, False]],
    ids=lambda value: type(value).__name__,
)
def test_a_field_says_what_it_was_made_of(tmp_path: Path, value: Any) -> None:
    path = write_gguf(tmp_path / "a.gguf", [Field.of("a.b", value)], {})
    assert reader.read(path).get("a.b") == value


def test_every_type_of_field_is_read(tmp_path: Path) -> None:
    fields = target_fields()
    path = write_gguf(tmp_path / "a.gguf", fields, {})
    assert list(reader.read(path).fields.values()) == fields
    assert reader.read(path).get("tokenizer.ggml.tokens")[:3] == ["<unk>", "<s>", "</s>"]


def test_a_file_that_is_cut_off_meanwhile_is_an_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", target_fields(), {"x": np.ones(64, np.float32)})
    file = reader.read(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConversionError, match="shorter than it was"):
        list(file.pieces(file.tensors["x"]))
