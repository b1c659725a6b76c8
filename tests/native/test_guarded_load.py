"""Files with numbers that llama.cpp asserts: an error of the call that meets them, in a process that goes on."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from support.checkpoints import rewritten

from kvflash_ggml.gguf.reader import Field

CHILD = """
import sys
from kvflash_ggml import Llama
from kvflash_ggml.gguf import purpose

kind, hostile, sound = sys.argv[1:]
purpose.check_model = lambda *args, **settings: None  # it refuses the window that no layer has
pool = {"kvflash": 256, "kvflash_calibrate": False} if "pool" in kind else {}
try:
    llm = Llama(hostile, n_ctx=256, verbose=False, **pool)
    for tokens in ([5, 6], [5, 6], [5]):  # a graph that is there is not taken again
        try:
            llm.eval(tokens)
        except RuntimeError as err:
            print(llm.n_tokens, type(err).__name__, err)
except ValueError as err:
    print(type(err).__name__, err)
llm = Llama(sound, n_ctx=256, verbose=False)
print(len(llm.create_completion([5, 6], max_tokens=1, temperature=0.0)["choices"]))
"""
"""Opens a hostile file, asks for steps if that is an object, and then for one of a sound file."""


def _nanbeige(fields: dict[str, Field]) -> None:
    """Make a model of an architecture whose layers are read several times."""
    for name in list(fields):
        if name.startswith("qwen3."):
            key = f"nanbeige.{name.removeprefix('qwen3.')}"
            fields[key] = Field.of(key, fields.pop(name).value)
    fields["general.architecture"] = Field.of("general.architecture", "nanbeige")
    fields["nanbeige.num_loops"] = Field.of("nanbeige.num_loops", 0)


def _no_length(fields: dict[str, Field]) -> None:
    """Scale attention by positions, without the length that they are divided by."""
    key = "deepseek2.attention.temperature_scale"
    fields[key] = Field.of(key, 0.5)


def _no_window(fields: dict[str, Field]) -> None:
    """Give no layer the sliding window."""
    key = "gemma3.attention.sliding_window_pattern"
    fields[key] = Field.of(key, 1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("load", r"NotMade .*nanbeige\.cpp:\d+: GGML_ASSERT\(n_loops_u >= 1\) failed"),
        ("context", r"NotMade .*llama-model\.cpp:\d+: GGML_ASSERT\(hparams\.is_swa_any\(\)\) failed"),
        ("pool", r"UnsupportedModelError .*llama-model\.cpp:\d+: GGML_ASSERT\(hparams\.is_swa_any\(\)\) failed"),
    ],
)
def test_a_number_that_llama_cpp_asserts(
    kind: str, said: str, model: Callable[[str], Path], models: dict[str, Path], tmp_path: Path
) -> None:
    """It ended the process."""
    sound = models["small"]
    source, change = (sound, _nanbeige) if kind == "load" else (model("iswa"), _no_window)
    first, last = _opened(kind, rewritten(source, tmp_path / "model.gguf", change), sound)
    assert re.match(said, first), first
    assert last == "1"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("step", r"0 DecodeError llama\.cpp says {}: convert the model again"),
        ("step in a pool", r"0 DecodeError llama_decode returned -3 for [12] tokens: {}"),
    ],
)
def test_a_number_that_a_step_asserts(
    kind: str, said: str, model: Callable[[str], Path], models: dict[str, Path], tmp_path: Path
) -> None:
    """It ended the process. The text stays as it was, and each further step fails as the first."""
    hostile = rewritten(model("latent heads"), tmp_path / "model.gguf", _no_length)
    *steps, last = _opened(kind, hostile, models["small"])
    asserted = r"llama-graph\.cpp:\d+: GGML_ASSERT\(n_attn_temp_floor_scale != 0\) failed"
    assert len(steps) == 3
    for step in steps:
        assert re.match(said.format(asserted), step), step
    assert last == "1"


SPLITTING = """
import sys
from kvflash_ggml import Llama

llm = Llama(sys.argv[1], vocab_only=True, verbose=False)
for text in (b"hello", b"hello"):
    try:
        print(llm.tokenize(text))
    except ValueError as err:
        print(type(err).__name__, err)
"""
"""Splits a text twice."""

REFUSED = r"ConfigError llama\.cpp cannot split this text: "


def _no_first(writer: gguf.GGUFWriter) -> None:
    """Begin each text with a token that the vocabulary has not."""
    writer.add_tokenizer_model("gemma4")
    writer.add_token_merges(["h e"])
    writer.add_add_bos_token(True)


def _short_table(writer: gguf.GGUFWriter) -> None:
    """Replace parts of texts by a table that ends before the node of a letter. A load asks it for a line's end."""
    writer.add_tokenizer_model("t5")
    writer.add_precompiled_charsmap(bytes([48, *bytes(3), *bytes(48), 0]))


def _no_beginning(writer: gguf.GGUFWriter) -> None:
    """Leave out the beginning of a token, "h" or "he", which is unknown then."""
    writer.add_tokenizer_model("rwkv")
    writer.add_unk_token_id(2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_no_first, REFUSED + r"llama-vocab\.cpp:\d+: GGML_ASSERT\(vocab\.token_bos\(\).*Convert the model with its"),
        (_short_table, f"{REFUSED}Index out of array bounds in XCDA"),
        (_no_beginning, r"\[2, 3, 4, 4, 5\]$"),
    ],
)
def test_a_vocabulary_that_splits_no_text(change: Callable[[gguf.GGUFWriter], None], said: str, tmp_path: Path) -> None:
    """The first text ended the process, or took all memory."""
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for count in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{count}")(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<pad>", "</s>", "<unk>", "e", "l", "o", "hex"])
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    done = subprocess.run([sys.executable, "-c", SPLITTING, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    first, second = done.stdout.splitlines()
    assert re.match(said, first), first
    assert second == first


def _opened(kind: str, hostile: Path, sound: Path) -> list[str]:
    """Run CHILD, and return what it prints."""
    command = [sys.executable, "-c", CHILD, kind, str(hostile), str(sound)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.splitlines()
