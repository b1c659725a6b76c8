"""What the tests of the native library share: models made here, logits, comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kvflash_bench.shapes import SHAPES, write
from kvflash_ggml.calibration.known import Calibration, read
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.snapshot.fingerprint import ModelFile
from support.inside import inside

from .integrity import check_table
from .rounding import LAYOUT, LOGITS, ON_GPU, near

TESTS = Path(__file__).resolve().parent.parent
MODELS = TESTS / "models"
TEXT = TESTS / "text" / "stdlib-docs.txt"
CHUNK = 64
HEADS = MODELS / "heads"
KV_TYPES = {"f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}

Logits = npt.NDArray[np.float32]


def heads_of(model: str | Path) -> Calibration:
    """The retrieval heads of a trained model, which lie beside it."""
    return read(HEADS / f"{ModelFile(model).identity()}.json")


def row(llm: Any, back: int = 1) -> Logits:
    """A copy of the logits of the token `back` before the end of what was evaluated last."""
    pointer = llm._ctx.get_logits_ith(-back)
    return np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy()


def logits_along(llm: Any, prompt: Sequence[int], rest: Sequence[int]) -> Logits:
    """Logits after the prompt, and after each other token in turn: [1 + len(rest), n_vocab]."""
    llm.eval(list(map(int, prompt)))
    rows = [row(llm)]
    for token in rest:
        llm.eval([int(token)])
        rows.append(row(llm))
    return np.stack(rows)


def same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def assert_same(ours: Logits, theirs: Logits) -> None:
    """The same bits; where other nodes may have been fused, up to rounding."""
    assert near(ours, theirs, LAYOUT), f"the largest difference is {np.abs(ours - theirs).max()}"


Drawn = tuple[list[int], list[Logits]]
"""Tokens of an answer, and the logits that each was drawn from."""


def drawn(llm: Any, prompt: list[int], count: int, **sampler: Any) -> Drawn:
    """An answer of so many tokens."""
    tokens, logits = [], []
    for token in islice(llm.generate(prompt, **sampler), count):
        tokens.append(token)
        logits.append(llm.newest_logits())
    return tokens, logits


def assert_alike(one: Drawn, other: Drawn) -> None:
    """Up to rounding: at the first other token the two are as near as rounding brings them."""
    for a, b, mine, its in zip(one[0], other[0], one[1], other[1], strict=True):
        assert near(its, mine, LOGITS)
        if a != b:
            assert abs(mine[a] - mine[b]) <= 2 * LOGITS.here * np.abs(mine).max()
            break


def agreement(a: Logits, b: Logits) -> float:
    """Share of rows whose largest logit is at the same token."""
    return float((a.argmax(1) == b.argmax(1)).mean())


def reach(llm: Any) -> None:
    """Take the locks of a Llama without a prefix cache: that of its calls, and that of its page images."""
    llm.set_cache(None)
    with inside(llm).session.paging.heap.lease(()):
        pass


def looks(session: Any, tokens: int) -> int:
    """How often chunks are scored in an answer of so many tokens."""
    return int(tokens // session.scoring.selection.interval)


def wait_for_scorer(session: Any) -> None:
    """Beside a device a scorer has a thread of its own: until everything is done that it was asked for."""
    for worker in session.scoring.workers:
        worker.submit(lambda: None).result()


def check(llm: Any) -> None:
    """The page table, the cells and the mask agree."""
    session = inside(llm).session
    check_table(session.table)
    assert set(session.store) <= set(range(len(session.table.chunks)))
    held = session.engine.cells(0, session.engine.info.n_slots)
    for c, chunk in enumerate(session.table.chunks):
        if chunk.block >= 0:
            n = min(CHUNK, session.length - c * CHUNK)
            at = chunk.block * CHUNK
            assert held[at : at + n].tolist() == list(range(c * CHUNK, c * CHUNK + n))
            assert session.mask.slot_pos[at] == c * CHUNK
    resident = {chunk.block for chunk in session.table.chunks if chunk.block >= 0}
    for block in set(range(session.table.blocks.count)) - resident:
        assert (held[block * CHUNK : (block + 1) * CHUNK] == -1).all()
        assert (session.mask.slot_pos[block * CHUNK : (block + 1) * CHUNK] == -1).all()


def check_device_bytes(llm: Any, slots: int) -> None:
    """K and V of the pool; on a GPU also a staging area of up to eight pages."""
    page = llm.kvflash.page_bytes
    staging = llm.kvflash.device_bytes - slots // CHUNK * page
    assert 0 <= staging <= (8 * page + 4096 if ON_GPU else 0)


def read_block(session: Any, block: int) -> bytes:
    """The bytes of one block of the pool."""
    engine = session.engine
    size = engine.info.page_bytes
    image = engine.alloc(size)
    try:
        engine.wait(engine.page_out([block], [image]))
        return bytes(engine.view(image, size))
    finally:
        engine.free(image)


def pages(session: Any) -> list[bytes]:
    """One image per chunk, in the order of the text; the last may be partly filled."""
    return [
        session.store.bytes_of(c) if c in session.store else read_block(session, chunk.block)
        for c, chunk in enumerate(session.table.chunks)
    ]


def put_pages(engine: Any, images: Sequence[bytes]) -> None:
    """Each to the block of its number, behind the session's back."""
    size = engine.info.page_bytes
    for block, image in enumerate(images):
        address = engine.alloc(size)
        engine.view(address, size)[:] = image
        engine.wait(engine.page_in([block], [address]))
        engine.free(address)


def go_on(llm: Any, steps: int = 64) -> list[bytes]:
    """The logits of each step of a greedy answer."""
    rows = []
    for _ in range(steps):
        logits = row(llm)
        rows.append(logits.tobytes())
        llm.eval([int(logits.argmax())])
    check(llm)
    return rows


# --- a session without a Llama


@dataclass
class Bare:
    """A context and a session on it, without the checks and the choices of Llama."""

    session: Any
    n_vocab: int
    _ctx: Any
    sessions: Sequence[Any] = ()

    def logits_along(self, prompt: npt.NDArray[np.int32], rest: Sequence[int] = ()) -> Logits:
        extend(self.session, prompt)
        rows = [self.row()]
        for token in rest:
            extend(self.session, np.array([token], np.int32))
            rows.append(self.row())
        return np.stack(rows)

    def row(self) -> Logits:
        pointer = self._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,)).copy()


def evaluate(
    bare: Bare, tokens: Sequence[int], pos: Sequence[int], slots: Sequence[int], seen: Sequence[Sequence[int]],
    query_row: Sequence[int] | None = None,
) -> Logits:  # fmt: skip
    """Logits of each of these tokens, behind the session's back: token i sees the slots `seen[i]` and its own."""
    engine, n = bare.session.engine, len(tokens)
    mask = np.full(
        (len(engine.token), engine.info.n_slots), -np.inf, np.float32 if engine.info.mask_f32 else np.float16
    )
    for i, slot in enumerate(slots):
        mask[i, [*seen[i], slot]] = 0
    engine.token[:n], engine.pos[:n], engine.slot[:n] = tokens, pos, slots
    engine.output[:n] = 1
    engine.query_row[:n] = -1 if query_row is None else query_row
    engine.use_mask(mask)
    try:
        engine.step(n, 0, [])
        engine.synchronize()
    finally:
        engine.use_mask(bare.session.pool.rows.data)
    rows = [bare._ctx.get_logits_ith(i) for i in range(n)]
    return np.stack([np.ctypeslib.as_array(x, shape=(bare.n_vocab,)).copy() for x in rows])


# --- models that are made here


def dequantise(source: Path, target: Path) -> None:
    """The same model with every tensor in F32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen3")
    _copy_fields(reader, writer, lambda key: key != "general.file_type")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(data, np.float32))
    _finish(writer)


def write_packed(source: Path, target: Path) -> None:
    """The same shapes with random weights in Q4_K: a CPU computes one row in another kernel than several."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen3")
    _copy_fields(reader, writer, lambda key: True)
    rng = np.random.default_rng(5)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        columns, rows = map(int, tensor.shape)
        scale = np.array([1, 7.5], np.float16) / np.float16(4.6 * columns**0.5)  # of 0 to 15, and what is taken away
        data = rng.integers(0, 256, (rows * columns // 256, 144), np.uint8)
        data[:, :4], data[:, 4:12], data[:, 12:16] = scale.view(np.uint8), 1, 0x11
        writer.add_tensor(tensor.name, data.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    _finish(writer)


def write_twins(source: Path, target: Path) -> None:
    """The same model, where another token is exactly as likely as any: of 1,024 threads the one before has it."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen3")
    _copy_fields(reader, writer, lambda key: True)
    for tensor in reader.tensors:
        data = tensor.data.copy()
        if tensor.name == "output.weight":
            data[1024:2047], data[2047:] = data[1:1024], data[0]
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    _finish(writer)


def write_reranker(source: Path, target: Path) -> None:
    """The same model with a head of random weights that ranks texts, and a template for pairs of them."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen3")
    _copy_fields(reader, writer, lambda key: True)
    writer.add_array("qwen3.classifier.output_labels", ["yes", "no"])
    writer.add_string("tokenizer.chat_template.rerank", "Query: {query}\nDocument: {document}\n")
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    width = int(reader.fields["qwen3.embedding_length"].contents())
    head = np.random.default_rng(5).standard_normal((2, width)).astype(np.float32)
    writer.add_tensor("cls.output.weight", head)
    _finish(writer)


def write_adapter(path: Path, *, layers: int, width: int, out: int, rank: int = 4) -> str:
    """A LoRA adapter of random weights for the queries of all layers."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    rng = np.random.default_rng(4)
    for i in range(layers):
        for part, shape in (("a", (rank, width)), ("b", (out, rank))):
            data = rng.standard_normal(shape).astype(np.float32) * 0.1
            writer.add_tensor(f"blk.{i}.attn_q.weight.lora_{part}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def write_iswa(source: Path, target: Path, *, head: int = 64, arch: str = "gemma3") -> None:
    """A small gemma3, or gemma4, with random weights: layers 3 and 6 see all, the others a window of 128."""
    width, heads, hidden, layers = 128, 2, 256, 6
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch)
    _copy_fields(reader, writer, lambda key: key.startswith("tokenizer."))
    writer.add_context_length(32768)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(128)
    if arch == "gemma4":
        writer.add_array("gemma4.attention.sliding_window_pattern", [(i + 1) % 3 != 0 for i in range(layers)])
        writer.add_uint32("gemma4.embedding_length_per_layer_input", 0)
        writer.add_uint32("gemma4.attention.key_length_swa", head)
        writer.add_uint32("gemma4.attention.value_length_swa", head)
        writer.add_tensor("rope_freqs.weight", np.ones(head // 2, np.float32))
    else:
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)

    rng = np.random.default_rng(3)
    n_vocab = len(reader.fields["tokenizer.ggml.tokens"].data)

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        data = rng.standard_normal((rows, columns), np.float32) * np.float32(scale / columns**0.5)
        writer.add_tensor(f"{name}.weight", data.astype(np.float16))

    def vector(name: str, size: int, value: float = 1.0) -> None:
        writer.add_tensor(f"{name}.weight", np.full(size, value, np.float32))

    matrix("token_embd", n_vocab, width)
    vector("output_norm", width, 4.0)
    for i in range(layers):
        matrix(f"blk.{i}.attn_q", heads * head, width)
        matrix(f"blk.{i}.attn_k", head, width)
        matrix(f"blk.{i}.attn_v", head, width)
        matrix(f"blk.{i}.attn_output", width, heads * head)
        matrix(f"blk.{i}.ffn_gate", hidden, width)
        matrix(f"blk.{i}.ffn_up", hidden, width)
        matrix(f"blk.{i}.ffn_down", width, hidden)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            vector(f"blk.{i}.{name}", width)
        # large enough that some keys win clearly: otherwise every mask gives almost the same mean
        vector(f"blk.{i}.attn_q_norm", head, 1.5)
        vector(f"blk.{i}.attn_k_norm", head, 1.5)
    _finish(writer)


def write_small(source: Path, target: Path, width: int = 64) -> None:
    """A qwen3 of two layers with one head, of random weights: it reads 100,000 tokens in minutes on a CPU."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen3")
    _copy_fields(reader, writer, lambda key: key.startswith("tokenizer."))
    writer.add_context_length(131072)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    rng, norms = np.random.default_rng(3), {"output_norm": width}
    matrices = {"token_embd": (len(reader.fields["tokenizer.ggml.tokens"].data), width)}
    for i in range(2):
        matrices |= {f"blk.{i}.attn_{name}": (64, width) for name in "qkv"}
        matrices[f"blk.{i}.attn_output"] = width, 64
        matrices |= {f"blk.{i}.ffn_{name}": (width, width) for name in ("gate", "up", "down")}
        norms |= {f"blk.{i}.{name}": width for name in ("attn_norm", "ffn_norm")}
        norms |= {f"blk.{i}.attn_{name}_norm": 64 for name in "qk"}
    for name, shape in matrices.items():
        data = rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
        writer.add_tensor(f"{name}.weight", data.astype(np.float16))
    for name, size in norms.items():  # large enough that some keys win clearly
        writer.add_tensor(f"{name}.weight", np.full(size, 1.5, np.float32))
    _finish(writer)


def write_latent_heads(source: Path, target: Path) -> None:
    """A small deepseek2 with random weights: two heads read one latent key (MLA). CUDA attends to no single one."""
    width, heads, hidden, layers, lora, rotary, part = 128, 2, 256, 2, 512, 64, 64
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "deepseek2")
    _copy_fields(reader, writer, lambda key: key.startswith("tokenizer."))
    writer.add_context_length(32768)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_leading_dense_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_expert_feed_forward_length(hidden)
    writer.add_expert_shared_count(1)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_key_length(lora + rotary)
    writer.add_value_length(lora)
    writer.add_key_length_mla(part + rotary)
    writer.add_value_length_mla(part)
    writer.add_q_lora_rank(width)
    writer.add_kv_lora_rank(lora)
    writer.add_rope_dimension_count(rotary)
    writer.add_layer_norm_rms_eps(1e-6)

    rng = np.random.default_rng(3)

    def matrix(name: str, *dims: int) -> None:
        data = rng.standard_normal(dims, np.float32) / np.float32(dims[-1] ** 0.5)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)

    def vector(name: str, size: int, value: float = 1.0) -> None:
        writer.add_tensor(f"{name}.weight", np.full(size, value, np.float32))

    matrix("token_embd", len(reader.fields["tokenizer.ggml.tokens"].data), width)
    vector("output_norm", width, 4.0)
    for i in range(layers):
        matrix(f"blk.{i}.attn_q_a", width, width)
        matrix(f"blk.{i}.attn_q_b", heads * (part + rotary), width)
        matrix(f"blk.{i}.attn_kv_a_mqa", lora + rotary, width)
        matrix(f"blk.{i}.attn_k_b", heads, lora, part)
        matrix(f"blk.{i}.attn_v_b", heads, part, lora)
        matrix(f"blk.{i}.attn_output", width, heads * part)
        matrix(f"blk.{i}.ffn_gate", hidden, width)
        matrix(f"blk.{i}.ffn_up", hidden, width)
        matrix(f"blk.{i}.ffn_down", width, hidden)
        for name in ("attn_norm", "ffn_norm"):
            vector(f"blk.{i}.{name}", width)
        vector(f"blk.{i}.attn_q_a_norm", width, 3.0)  # some keys win clearly, as above
        vector(f"blk.{i}.attn_kv_a_norm", lora)
    _finish(writer)


def write_uneven(source: Path, target: Path) -> None:
    """A small hybrid with random weights, whose heads of 48 values fill no whole number of blocks."""
    shape = replace(SHAPES["tiny"], heads=16, head=48, rotary=(8, 8, 8, 0))
    write(target, shape)


def _copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, wanted: Callable[[str], bool]) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or not wanted(key):
            continue
        subtype = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=subtype)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def flat_queries(engine: Any) -> npt.NDArray[np.float32]:
    """The captured rows of all layers, as the engine writes them."""
    flat = np.empty(sum(math.prod(shape) for shape in engine.query_shapes), np.float32)
    engine.wait(engine.read_queries(flat))
    return flat


def read_queries(engine: Any) -> list[Any]:
    """The captured rows per layer, each [query_rows, n_head, head_k]."""
    return query_layers(engine, flat_queries(engine))


def query_layers(engine: Any, flat: npt.NDArray[np.float32]) -> list[Any]:
    shapes = engine.query_shapes
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [
        part.reshape(shape)[: engine.info.query_rows]
        for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)
    ]
