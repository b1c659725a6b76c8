"""llama_cpp's vision chat handlers on our library, with a projector of random weights."""

from __future__ import annotations

import base64
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.harness import MODELS

from kvflash_ggml import Llama
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.native import library

MODEL = MODELS / "recall-qwen3-q8_0.gguf"
SIDE, PATCH, WIDTH = 28, 14, 32
"""Pixels of an image's side and of a patch's, and the width of the image encoder."""


def write_projector(path: Path, n_embd: int) -> Path:
    """A CLIP encoder of two layers with LLaVA's projector: an image is (SIDE / PATCH)^2 embeddings."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    numbers = {"image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": 2 * WIDTH,
               "projection_dim": n_embd, "block_count": 2, "attention.head_count": 2}  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH),
        "v.position_embd.weight": ((SIDE // PATCH) ** 2, WIDTH),
        "mm.0.weight": (n_embd, WIDTH), "mm.0.bias": (n_embd,), "mm.2.weight": (n_embd, n_embd), "mm.2.bias": (n_embd,),
    }  # fmt: skip
    for block in ("v.blk.0", "v.blk.1"):
        shapes |= {f"{block}.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        shapes |= {f"{block}.{name}.{part}": (WIDTH,) for name in ("ln1", "ln2") for part in ("weight", "bias")}
        shapes |= {f"{block}.ffn_up.weight": (2 * WIDTH, WIDTH), f"{block}.ffn_down.weight": (WIDTH, 2 * WIDTH)}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def png(colour: tuple[int, int, int]) -> str:
    """An image of one colour, as a data URI."""
    pixels = zlib.compress((b"\0" + bytes(colour) * SIDE) * SIDE)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)), (b"IDAT", pixels), (b"IEND", b"")]
    data = b"".join(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
                    for kind, body in parts)  # fmt: skip
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory, loaded: None) -> Path:
    llm = Llama(str(MODEL), n_ctx=64, verbose=False)
    path = write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf", llm.n_embd())
    llm.close()
    return path


def asked(kind: Any, projector: Path, colour: tuple[int, int, int]) -> tuple[str, np.ndarray]:
    """The answer of a Llama class to an image, and its last logits."""
    from llama_cpp.llama_chat_format import Llava15ChatHandler

    handler = Llava15ChatHandler(str(projector), verbose=False)
    llm = kind(str(MODEL), n_ctx=512, n_gpu_layers=0, chat_handler=handler, logits_all=True, verbose=False)
    content = [{"type": "image_url", "image_url": png(colour)}, {"type": "text", "text": "Which colour?"}]
    answer = llm.create_chat_completion(
        [{"role": "user", "content": content}], max_tokens=4, temperature=0.0, repeat_penalty=1.0
    )
    logits = llm.scores[llm.n_tokens - 1].copy()
    llm.close()
    return answer["choices"][0]["message"]["content"], logits


def test_a_handler_answers_as_on_llama_cpps_own_class(projector: Path) -> None:
    import llama_cpp

    answer, logits = asked(Llama, projector, (250, 20, 20))
    stock_answer, stock_logits = asked(llama_cpp.llama.Llama, projector, (250, 20, 20))
    assert answer == stock_answer
    np.testing.assert_array_equal(logits, stock_logits)
    assert not np.array_equal(logits, asked(Llama, projector, (10, 30, 240))[1])


def test_a_pool_refuses_it(projector: Path) -> None:
    from llama_cpp.llama_chat_format import Qwen25VLChatHandler

    handler = Qwen25VLChatHandler(str(projector), verbose=False)
    with pytest.raises(ConfigError, match=r"multimodal chat handlers .* use kvflash=None"):
        Llama(str(MODEL), n_ctx=512, kvflash=256, chat_handler=handler, verbose=False)


@pytest.mark.parametrize("first", ["import kvflash_ggml", "pass"])
def test_a_program_finds_it_by_llama_cpp_alone(first: str) -> None:
    code = f"""{first}
from llama_cpp import mtmd_cpp
print(mtmd_cpp.mtmd_context_params_default().n_threads > 0, mtmd_cpp._libmtmd._name)"""
    environment = {name: value for name, value in os.environ.items() if not name.endswith(("CPP_LIB_PATH", "CPP_LIB"))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True", str(library.library_folder() / "libmtmd.so")], done.stderr
