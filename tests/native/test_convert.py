"""What kvflash-convert writes: llama.cpp loads it, and drafts with it what the numbers say."""

from __future__ import annotations

import ctypes
import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file
from support import checkpoints
from support.archs import write_latent
from support.checkpoints import EPSILON, HEAD_DIM, HEADS, HEADS_KV, LAYERS, MASK, THETA
from support.harness import MODELS, TEXT, write_iswa
from support.rounding import F32_LOGPROB
from vendoring.source import LLAMA, pristine_tree

from kvflash_bench.tasks import needle_task
from kvflash_ggml.cli import probe
from kvflash_ggml.cli.convert import convert
from kvflash_ggml.convert import draft, quantize
from kvflash_ggml.convert.describe import describe
from kvflash_ggml.errors import ConversionError
from kvflash_ggml.gguf import encoding, heads, reader, types, verify
from kvflash_ggml.gguf.target import KEYS, LAST_INPUT, LAYER_INPUTS
from kvflash_ggml.speculation import acceptance
from kvflash_ggml.speculation.acceptance import TargetModel

TARGET, DRAFT = MODELS / "recall-qwen3-q8_0.gguf", MODELS / "recall-dflash.gguf"

Array = npt.NDArray[Any]
BLOCK = 8


# --- one block, and the same in numpy


def test_types_of_tensors_are_ggmls() -> None:
    lib = llama_cpp.llama_cpp._lib
    lib.ggml_type_size.restype = ctypes.c_size_t
    sizes = {number: (lib.ggml_blck_size(number), lib.ggml_type_size(number)) for number in range(43)}
    there = {number: size for number, size in sizes.items() if all(size)}
    activations = {llama_cpp.GGML_TYPE_Q8_1, llama_cpp.GGML_TYPE_Q8_K}
    assert {kind.id: (kind.block, kind.size) for kind in types.BY_ID.values()} == {
        number: size for number, size in there.items() if number not in activations
    }
    assert types.REMOVED.keys() <= sizes.keys() - there.keys()


def normed(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight


def turned(x: Array, positions: Array) -> Array:
    """RoPE of heads [n, heads, dim]: the first half of the dimensions against the second."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * THETA ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1)


def reference(
    drafter: dict[str, Array], target: dict[str, Array], *, features: Array, tokens: list[int], start: int
) -> Array:
    """Logits of a block of tokens that stands at `start`, beside features of everything before it, in F64."""
    w = {name: array.astype(np.float64) for name, array in drafter.items()}
    fused = normed(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    before, here = np.arange(start, dtype=np.float64), np.arange(start, start + len(tokens), dtype=np.float64)
    x = target["token_embd.weight"].astype(np.float64)[tokens]
    for layer in range(LAYERS):
        own = {name.split(".", 2)[2]: array for name, array in w.items() if name.startswith(f"layers.{layer}.")}

        def heads(values: Array, name: str, count: int, own: dict[str, Array] = own) -> Array:
            return (values @ own[f"self_attn.{name}_proj.weight"].T).reshape(len(values), count, HEAD_DIM)

        h = normed(x, own["input_layernorm.weight"])
        q = turned(normed(heads(h, "q", HEADS), own["self_attn.q_norm.weight"]), here)
        k, v = (
            np.concatenate([heads(fused, name, HEADS_KV), heads(h, name, HEADS_KV)]).repeat(HEADS // HEADS_KV, 1)
            for name in ("k", "v")
        )
        k = turned(normed(k, own["self_attn.k_norm.weight"]), np.concatenate([before, here]))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v).reshape(len(x), -1)
        x = x + mixed @ own["self_attn.o_proj.weight"].T
        h = normed(x, own["post_attention_layernorm.weight"])
        gate = h @ own["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return normed(x, w["norm.weight"]) @ target["output.weight"].astype(np.float64).T


@pytest.fixture
def exact(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of F32, and attention without rounding between."""
    usual = llama_cpp.llama_context_default_params

    def params() -> Any:
        made = usual()
        made.type_k = made.type_v = 0
        made.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return made

    monkeypatch.setattr(llama_cpp, "llama_context_default_params", params)


def test_a_block_is_what_the_numbers_say(tmp_path: Path, exact: None) -> None:
    from kvflash_ggml.speculation.dflash import DFlash

    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoints.config()))
    save_file(checkpoints.weights(), folder / "model.safetensors")
    model = checkpoints.small_target(tmp_path / "target.gguf", whole=True)
    made = tmp_path / "draft.gguf"
    draft.convert(folder, made, model=model, kind="f32")
    with ExitStack() as stack:
        target = TargetModel(model, verify.target_layers(reader.read(made)), stack)
        text = target.go_on("A text of some length, about nothing at all.", 4)
        root = len(text.tokens) - 2
        drafter = DFlash(made, target.facts)
        stack.callback(drafter.close)
        drafter.observe(0, np.array(text.tokens[:root], np.int32), text.features[:root])
        drafter.propose(text.tokens[root], BLOCK - 1)
        ids, logp = drafter._context.top(range(1, BLOCK), checkpoints.VOCAB)
    found = np.empty((BLOCK - 1, checkpoints.VOCAB))
    np.put_along_axis(found, ids, logp, axis=1)
    block = [text.tokens[root], *[MASK] * (BLOCK - 1)]
    wanted = reference(
        checkpoints.weights(), checkpoints.target_weights(), features=text.features[:root], tokens=block, start=root
    )[1:]
    assert wanted.std() > 0.5
    wanted -= np.log(np.exp(wanted).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found, wanted, atol=F32_LOGPROB.here)


# --- files


def test_other_readers_read_them(tmp_path: Path) -> None:
    folder = checkpoints.small_checkpoint(tmp_path / "drafter")
    made = tmp_path / "draft.gguf"
    draft.convert(folder, made, model=checkpoints.small_target(tmp_path / "target.gguf"))
    ours, theirs = reader.read(made), gguf.GGUFReader(made)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert {name: field.contents() for name, field in fields.items()} == {
        name: field.value for name, field in ours.fields.items()
    }
    for tensor in theirs.tensors:
        assert b"".join(piece.tobytes() for piece in ours.pieces(ours.tensors[tensor.name])) == tensor.data.tobytes()


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_types_made_without_the_library_are_ggmls_own(loaded: None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(3).standard_normal((16, 256)).astype(np.float32)
    ours = encoding.encode(rows, types.BY_NAME[kind])
    monkeypatch.setattr(encoding, "WITHOUT_LIBRARY", set[str]())
    assert quantize.encode_natively(rows, types.BY_NAME[kind]).tobytes() == ours.tobytes()


@pytest.mark.parametrize("kind", ["q4_k_m", "q5_k_m", "q6_k"])
def test_types_of_ggml(tmp_path: Path, kind: str) -> None:
    made = tmp_path / "made.gguf"
    quantize.quantize(DRAFT, made, kind=kind, encode=quantize.encode_natively)
    verify.verify(made, model=TARGET)
    before, after = reader.read(DRAFT), reader.read(made)
    for name, tensor in after.tensors.items():
        raw = np.concatenate(list(after.pieces(tensor)))
        was = encoding.decode(np.concatenate(list(before.pieces(before.tensors[name]))), before.tensors[name].kind)
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(tensor.kind.id)).reshape(was.shape)
        assert np.abs(values - was).max() < 0.08 * np.abs(was).max(), name


def test_a_quantised_drafter_is_accepted_as_often(loaded: None, tmp_path: Path) -> None:
    """The recall task, through the verb, which prints both."""
    with ExitStack() as stack:
        model = TargetModel(TARGET, (), stack)
        asked = [
            needle_task(TEXT.read_text(), model.tokens, n_tokens=1200, depth=depth, seed=seed).prompt
            for seed, depth in enumerate((0.2, 0.5, 0.8, 0.3, 0.6, 0.9))
        ]
    files = []
    for number, text in enumerate(asked):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(text)
    texts = [word for file in files for word in ("--text", str(file))]
    for kind in ("q8_0", "q4_k_m"):
        made = tmp_path / f"{kind}.gguf"
        command = ["quantize", str(DRAFT), str(made), "--type", kind, "--target", str(TARGET), "-n", "32", *texts]
        said = CliRunner().invoke(convert, command, catch_exceptions=False)
        assert said.exit_code == 0, said.output
        print(kind, said.stdout)
        before, after = (float(x) for x in re.findall(r"([\d.]+) of 15 drafted", said.stdout))
        assert before > 0.5
        assert (1 + after) / (1 + before) > 0.95
        assert "tokens a step" in said.stdout


def test_a_drafter_of_another_target_is_not_accepted(tmp_path: Path, loaded: None) -> None:
    def forget(fields: dict[str, Any]) -> None:
        for key in KEYS:
            fields.pop(key)

    silent = checkpoints.rewritten(DRAFT, tmp_path / "silent.gguf", forget)
    own, other = (
        acceptance.measure(MODELS / f"{name}.gguf", [silent], acceptance.TEXTS[:2], tokens=32)[0]["accepted"]
        for name in ("recall-qwen3-q8_0", "recall-qwen35-q8_0")
    )
    assert own > 0.2
    assert other < own / 4
    with pytest.raises(ConversionError, match=r"kvflash\.target\.architecture is qwen3; wanted: qwen35"):
        acceptance.measure(MODELS / "recall-qwen35-q8_0.gguf", [DRAFT], acceptance.TEXTS[:2], tokens=32)


@pytest.mark.parametrize(
    ("drafter", "target"), [("recall-eagle3", "recall-qwen3"), ("mtp-recall-qwen35", "recall-qwen35")]
)
def test_drafters_of_one_token_after_the_other_are_measured_too(loaded: None, drafter: str, target: str) -> None:
    files = [MODELS / f"{name}-q8_0.gguf" for name in (target, drafter)]
    verify.verify(files[1], model=files[0])
    (found,) = acceptance.measure(files[0], files[1:], acceptance.TEXTS[:2], tokens=32)
    assert (found["block"], found["accepted"] > 0.5) == (acceptance.CHAIN, True)


def test_what_would_abort_is_refused_before(tmp_path: Path, loaded: None) -> None:
    wide = checkpoints.small_target(tmp_path / "target.gguf", whole=True)
    with pytest.raises(ConversionError, match="target layers"):
        acceptance.measure(wide, [DRAFT], ["text"], tokens=4)


# --- what is known of llama.cpp


def test_architectures_whose_heads_are_computed() -> None:
    source = pristine_tree() / LLAMA / "src"
    names = dict(re.findall(r"\{ LLM_ARCH_(\w+),\s+\"([\w.-]+)\"", (source / "llama-arch.cpp").read_text()))
    models = [path for path in (source / "models").glob("*.cpp") if "make_unique<graph_mtp>" in path.read_text()]
    assert {names[path.stem.upper().replace("-", "_")] for path in models} == set(heads.GRAPHS)


def test_architectures_whose_layer_inputs_are_given() -> None:
    source = pristine_tree() / LLAMA / "src"
    names = dict(re.findall(r"\{ LLM_ARCH_(\w+),\s+\"([\w.-]+)\"", (source / "llama-arch.cpp").read_text()))
    declared = (source / "models/models.h").read_text()
    shared = re.findall(r"struct llama_model_(\w+) :[^;]*?\{(?:(?!\n\};).)*?using graph = llama_model_(\w+)::graph\b",
                        declared, re.DOTALL)  # fmt: skip
    for kind, pattern in ((LAYER_INPUTS, r"t_layer_inp\[il\] ="), (LAST_INPUT, r"t_layer_inp\[n_layer\] =")):
        own = {
            path.stem.replace("-", "_")
            for path in (source / "models").glob("*.cpp")
            if re.search(pattern, path.read_text())
        }
        own |= {model for model, base in shared if base in own}
        found = {names[model.upper()] for model in own} - {"llama-embed"}  # an embedding model writes no text
        assert found == set(kind)


def test_bytes_a_token_are_those_of_the_pool(loaded: None, tmp_path: Path) -> None:
    files = [TARGET, MODELS / "recall-qwen35-q8_0.gguf", tmp_path / "latent.gguf", tmp_path / "iswa.gguf"]
    write_latent(TARGET, files[2])
    write_iswa(TARGET, files[3])
    for path in files:
        found = describe(path)
        assert found.token_bytes is None or found.token_bytes == probe.facts(str(path))["token_bytes"], path.name
    assert describe(TARGET).token_bytes == 3072
    assert describe(files[1]).pooled == 2
