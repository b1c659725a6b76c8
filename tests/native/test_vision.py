"""llama_cpp's vision chat handlers on our library, with a projector of random weights."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.checkpoints import rewritten
from support.harness import MODELS, TEXT, write_iswa, write_small
from support.projecting import changed
from support.rounding import GPU_LAYERS, IMAGE, LOGITS, ON_GPU, SAID, assert_same_answer, near, where_widths_agree
from support.vision import ROWS, SIDE, WIDE, WIDE_PIXELS, png, write_mrope, write_projector

from kvflash_ggml import Llama, SpecConfig
from kvflash_ggml.convert import writer
from kvflash_ggml.convert.writer import Planned
from kvflash_ggml.errors import ConfigError, ConversionError, DecodeError
from kvflash_ggml.gguf import reader, types
from kvflash_ggml.gguf.reader import Field
from kvflash_ggml.native import library
from kvflash_ggml.snapshot.container import Container, FileSource

MODEL = MODELS / "recall-qwen3-q8_0.gguf"


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
    llm = kind(
        str(MODEL),
        n_ctx=512,
        n_gpu_layers=GPU_LAYERS,
        chat_handler=handler,
        n_threads=1,
        logits_all=True,
        verbose=False,
    )
    content = [{"type": "image_url", "image_url": png(colour)}, {"type": "text", "text": "Which colour?"}]
    answer = llm.create_chat_completion(
        [{"role": "user", "content": content}], max_tokens=1 if ON_GPU else 4, temperature=0.0, repeat_penalty=1.0
    )
    logits = llm.scores[llm.n_tokens - 1].copy()
    llm.close()
    return answer["choices"][0]["message"]["content"], logits


def test_a_handler_answers_as_on_llama_cpps_own_class(projector: Path) -> None:
    import llama_cpp

    answer, logits = asked(Llama, projector, (250, 20, 20))
    stock_answer, stock_logits = asked(llama_cpp.llama.Llama, projector, (250, 20, 20))
    assert_same_answer((answer, logits), (stock_answer, stock_logits))
    assert not np.array_equal(logits, asked(Llama, projector, (10, 30, 240))[1])


RED, BLUE = (250, 20, 20), (10, 30, 240)
SIZE = {"n_ctx": 2048, "n_batch": 128, "n_ubatch": 96, "n_gpu_layers": GPU_LAYERS, "flash_attn": True, "verbose": False,
        "n_threads": 1, "n_threads_batch": 1}  # fmt: skip
EXACT = {"kvflash_policy": "qk", "kvflash_reading": "exact", "kvflash_answer": "exact"}
WORDS = TEXT.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Pair:
    """A model and its projector. An image of `pixels` is `rows` rows, and moves the text on by `ends` positions."""

    model: Path
    projector: Path
    pixels: tuple[int, int] = (SIDE, SIDE)
    rows: int = ROWS
    ends: int = ROWS
    pool: int = 512
    steps: tuple[int, int] = (128, 96)  # n_batch and n_ubatch


KINDS = ["plain", "mrope", "hybrid", "mutual", "mutual_windows"]


@pytest.fixture(scope="module")
def pairs(projector: Path) -> dict[str, Pair]:
    folder = projector.parent
    merger = write_projector(folder / "merger.gguf", 256, "qwen2vl_merger")
    soft = write_projector(folder / "soft.gguf", 128, "gemma3")
    mutual = {"projector": soft, "pool": 768, "steps": (160, 150)}
    write_iswa(MODEL, folder / "gemma3.gguf")
    write_iswa(MODEL, folder / "gemma4.gguf", arch="gemma4")
    shape = {"pixels": WIDE_PIXELS, "rows": WIDE[0] * WIDE[1], "ends": max(WIDE)}
    return {
        "plain": Pair(MODEL, projector),
        "mrope": Pair(write_mrope(MODEL, folder / "mrope.gguf"), merger, **shape),
        "hybrid": Pair(MODELS / "recall-qwen35-q8_0.gguf", merger, **shape),  # it has recurrent state, too
        # rows of an image see each other, within windows shorter than it; or there only
        "mutual": Pair(folder / "gemma3.gguf", **mutual),
        "mutual_windows": Pair(folder / "gemma4.gguf", **mutual),
    }


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]


class Asker:
    """A chat with images on a Llama class."""

    def __init__(self, pair: Pair, kind: Any = Llama, **settings: Any) -> None:
        from llama_cpp.llama_chat_format import Llava15ChatHandler

        handler = Llava15ChatHandler(str(pair.projector), verbose=False)
        ours = {"kvflash_calibrate": False} if "kvflash" in settings else {}
        ours |= dict(zip(("n_batch", "n_ubatch"), pair.steps, strict=True))
        self.pair = pair
        self.llm = kind(str(pair.model), chat_handler=handler, **{**SIZE, **ours, **settings})
        self.messages: list[dict[str, Any]] = []

    def ask(self, *parts: Any, most: int = 4) -> tuple[str, np.ndarray]:
        """The answer to text and colours of images, and its last logits: on a GPU those of its first token."""
        content = [{"type": "text", "text": part} if isinstance(part, str) else
                   {"type": "image_url", "image_url": png(part, self.pair.pixels)} for part in parts]  # fmt: skip
        self.messages.append({"role": "user", "content": content})
        settings = {"max_tokens": 1 if ON_GPU else most, "temperature": 0.0, "repeat_penalty": 1.0}
        said = self.llm.create_chat_completion(self.messages, **settings)["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": SAID if ON_GPU else said})
        return said, self.logits()

    def logits(self) -> np.ndarray:
        row = self.llm._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(row, shape=(self.llm.n_vocab(),)).copy()


@pytest.fixture
def made() -> Iterator[Any]:
    with ExitStack() as stack:

        def made(pair: Pair, kind: Any = Llama, **settings: Any) -> Asker:
            one = Asker(pair, kind, **settings)
            stack.callback(one.llm.close)
            return one

        yield made


@pytest.fixture
def asker(made: Any, pair: Pair) -> Any:
    """Makes chats, on models of each kind in turn."""
    return lambda kind=Llama, **settings: made(pair, kind, **settings)


@pytest.fixture
def plain(made: Any, pairs: dict[str, Pair]) -> Any:
    """The same on a model whose images have the positions of tokens."""
    return lambda **settings: made(pairs["plain"], **settings)


def test_a_pool_that_holds_everything_equals_stock(asker: Any) -> None:
    """Of two images in a row, in steps that cut them."""
    import llama_cpp

    images, ours, theirs = (RED, BLUE), asker(kvflash=2048), asker(llama_cpp.llama.Llama)
    assert_same_answer(ours.ask(*images, "Which?"), theirs.ask(*images, "Which?"))
    text, pair = ours.llm.input_ids[: ours.llm.n_tokens], ours.pair
    assert (text < 0).sum() == pair.rows * len(images)
    assert len(text) - theirs.llm.n_tokens == (pair.rows - pair.ends) * len(images)  # upstream counts positions
    ours.messages, before = [], ours.logits()
    assert not np.array_equal(before, ours.ask((99, 9, 9), BLUE, "Which?")[1])


def test_ten_turns_encode_an_image_once(asker: Any, encoded: list[int]) -> None:
    """And read what is new: the turns before it, with the image, are known."""
    chat, read = asker(kvflash=2048), []
    for turn in range(10):
        before = chat.llm.n_tokens
        said, _ = chat.ask(*((RED,) if turn == 0 else ()), f"Question {turn}: which colour?")
        chat.messages[-1]["content"] = said
        read.append((chat.llm.kvflash.last.read, chat.llm.n_tokens - before))
    assert len(encoded) == 1
    assert read[0][0] > chat.pair.rows
    assert all(0 < count < new + 8 for count, new in read[1:]), read  # of an answer, other tokens may be made again
    chat.messages = []
    chat.ask(BLUE, "Question 0: which colour?")
    assert len(encoded) == 2


def test_exact_reading_equals_the_full_cache(asker: Any, pair: Pair, encoded: list[int], tmp_path: Path) -> None:
    """An image at the front, another one and a question far behind it, in a small pool; also after a restore."""
    paged, full = asker(kvflash=pair.pool, **EXACT), asker(kvflash=2048, **EXACT)
    for chat in paged, full:
        chat.ask(RED, WORDS[: 3 * pair.pool])
    paged.llm.save_snapshot(tmp_path / "text.kvs")
    restored = asker(kvflash=pair.pool, **EXACT)
    restored.llm.load_snapshot(tmp_path / "text.kvs")
    restored.messages = list(paged.messages)
    kept = restored.llm.n_tokens
    one, other, third = (chat.ask(WORDS[9000:9900], BLUE, "Which?") for chat in (paged, full, restored))
    assert_same_answer(one, other)
    assert_same_answer(third, other)
    assert restored.llm.n_tokens > kept > pair.pool == paged.llm.kvflash.pool
    assert len(encoded) == 2 * 2 + 1  # of what was restored, the new one alone
    assert paged.llm.kvflash.streamed_steps > 5


def test_another_process_goes_on_from_the_folder(asker: Any, pair: Pair, tmp_path: Path) -> None:
    """A text with an image that one process has read is not read again by another, in a pool that does not hold it."""
    first = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}
from pathlib import PosixPath
from test_vision import EXACT, RED, WORDS, Asker, Pair
chat = Asker({pair!r}, kvflash={pair.pool}, kvflash_cache={str(tmp_path)!r}, **EXACT)
print(chat.ask(RED, WORDS[:3000])[0], end="")
chat.llm.close()"""
    done = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ending = f"{WORDS[9000:9600]} Which?"
    full, restored = asker(kvflash=2048, **EXACT), asker(kvflash=pair.pool, kvflash_cache=str(tmp_path), **EXACT)
    assert full.ask(RED, WORDS[:3000])[0] == done.stdout or ON_GPU
    restored.messages = list(full.messages)
    known, wanted = full.llm.n_tokens, full.ask(ending)
    assert_same_answer(restored.ask(ending), wanted)
    assert known > pair.pool
    assert restored.llm.kvflash.last.read <= full.llm.n_tokens - known + 64
    restored.messages = []
    other = restored.ask(BLUE, WORDS[:3000])
    assert restored.llm.kvflash.last.read > known - 128, "another image is another text"
    full.messages = []
    assert_same_answer(full.ask(BLUE, WORDS[:3000]), other)


def pages(llm: Llama, folder: Path) -> list[bytes]:
    """The page image of each whole chunk of a text."""
    path = folder / "pages.kvs"
    llm.save_snapshot(path)
    size, count = llm.kvflash.page_bytes, llm.n_tokens // 64
    images = [bytearray(size) for _ in range(count)]
    for stored, image in zip(Container(FileSource(path)).pages("pages", size), images, strict=False):
        stored.read_into(memoryview(image))
    return [bytes(image) for image in images]


def ask_far_behind(paged: Asker, full: Asker, front: str, behind: str, folder: Path) -> int:
    """Ask for a picture between two texts: the KV of its chunks and the answer are those of the full cache. Returns the
    tokens in front of it.
    """
    for chat in paged, full:
        chat.ask(front, most=1)
        chat.ask(RED, behind, most=1)
    one, other = (chat.ask("Which colour was the picture?", most=4) for chat in (paged, full))
    ids = paged.llm.input_ids[: paged.llm.n_tokens]
    np.testing.assert_array_equal(ids, full.llm.input_ids[: full.llm.n_tokens])
    first, *_, last = np.flatnonzero(ids < 0) // 64
    mine, theirs = pages(paged.llm, folder), pages(full.llm, folder)
    for page, wanted in zip(mine[first : last + 1], theirs[first : last + 1], strict=True):
        assert near(np.frombuffer(page, np.float16), np.frombuffer(wanted, np.float16), IMAGE)
    assert len(set(mine)) == len(mine)
    assert_same_answer(one, other)
    assert paged.llm.kvflash.streamed_steps > 10
    return int(first) * 64


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hybrid", "mutual", "mutual_windows"])
def test_a_picture_far_in_front_of_its_question(kind: str, made: Any, pairs: dict[str, Pair], tmp_path: Path) -> None:
    """In a text of ten pools, behind its first 2,000 tokens."""
    size = {"n_ctx": 9000, **EXACT}  # steps that the small pool need not cut
    paged, full = made(pairs[kind], kvflash=512, **size), made(pairs[kind], kvflash=9000, **size)
    assert 1900 < ask_far_behind(paged, full, WORDS[:6000], WORDS[6000:19000], tmp_path) < 3000
    assert paged.llm.n_tokens > 10 * paged.llm.kvflash.pool == 10 * 512


FAR = int(os.environ.get("KVFLASH_TEST_FAR", "3500"))
"""Tokens between a picture and the question about it, on a model that reads them quickly: 100,000 at most."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "mrope"])
def test_a_picture_as_far_as_one_likes(kind: str, made: Any, tmp_path: Path) -> None:
    pool, steps = (512, (128, 96)) if FAR < 50_000 else (4096, (512, 512))
    context = min(131072, FAR * 4 // 3 + 4096)
    write_small(MODEL, tmp_path / "plain.gguf")
    write_mrope(tmp_path / "plain.gguf", tmp_path / "mrope.gguf")
    shape = ("mlp", (SIDE, SIDE)) if kind == "plain" else ("qwen2vl_merger", WIDE_PIXELS)
    projector = write_projector(tmp_path / "mmproj.gguf", 64, shape[0])
    pair = Pair(tmp_path / f"{kind}.gguf", projector, shape[1], steps=steps)
    size = {"n_ctx": context, **EXACT}
    paged, full = made(pair, kvflash=pool, **size), made(pair, kvflash=context, **size)
    tokens = full.llm.tokenize(WORDS[6000:].encode())[:FAR]
    text = full.llm.detokenize(tokens).decode(errors="ignore")
    assert 1900 < (first := ask_far_behind(paged, full, WORDS[:6000], text, tmp_path)) < 3000
    assert paged.llm.n_tokens - first > 0.98 * FAR
    assert paged.llm.n_tokens > 10 * paged.llm.kvflash.pool == 10 * pool


def test_a_small_pool_brings_an_image_back(asker: Any, pair: Pair) -> None:
    """The pages of an image move like any others, and its chat can be cut back to within the image and read again."""
    steps = {} if pair.rows <= pair.steps[1] else {"n_batch": 64, "n_ubatch": 64}
    chat = asker(kvflash=pair.pool, **steps, kvflash_policy="qk", kvflash_reading="pool")
    chat.ask(RED, WORDS[: 4 * pair.pool])
    chat.ask(WORDS[9000:10000])
    llm = chat.llm
    assert llm.kvflash.page_ins > 0
    first = int(np.flatnonzero(llm.input_ids < 0)[0])
    text = llm.input_ids[: llm.n_tokens].copy()
    llm.n_tokens = first + 70
    llm.eval(text[first + 70 : first + chat.pair.rows + 100].tolist())
    np.testing.assert_array_equal(llm.input_ids[: llm.n_tokens], text[: first + chat.pair.rows + 100])


def test_a_step_that_fails_within_an_image_leaves_no_trace(
    asker: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that share a position llama.cpp forgets all, those of steps before it too."""
    from kvflash_ggml.native.engine import PagedEngine

    chat, fresh, step, left = (
        asker(kvflash=2048),
        asker(kvflash=2048),
        PagedEngine.step,
        [-(-pair.rows // pair.steps[1])],
    )

    def fails(engine: Any, count: int, wait: int, codes: list[int], streamed: Any = None, media: Any = None) -> None:
        if media is None:
            step(engine, count, wait, codes, streamed)
            return
        left[0] -= 1
        step(engine, count, wait, codes, streamed, media)
        if left[0] == 0:
            codes[:] = [1]
            raise DecodeError("llama_decode returned 1")

    chat.ask("Hello.")
    fresh.ask("Hello.")
    with monkeypatch.context() as patched:
        patched.setattr(PagedEngine, "step", fails)
        with pytest.raises(DecodeError):
            chat.ask(RED, "Which?")
    assert left == [0]
    chat.messages.pop()
    if "qwen35" in chat.pair.model.name:
        fresh.llm.reset()  # recurrent state cannot go back to "Hello.", so all of it is read again
    else:
        assert chat.llm.kvflash.length >= fresh.llm.n_tokens
    assert_same_answer(chat.ask(RED, "Which?"), fresh.ask(RED, "Which?"))


@where_widths_agree
@pytest.mark.parametrize("kind", ["mrope", "hybrid"])
def test_drafts_behind_an_image_change_no_token(kind: str, made: Any, pairs: dict[str, Pair], tmp_path: Path) -> None:
    """Of a text that was restored where something drafts: rows are taken back by positions that are not theirs."""
    chat, known = made(pairs[kind], kvflash=2048), []

    def draft(text: np.ndarray, **settings: Any) -> np.ndarray:
        """One token that is right, and three that are not."""
        right = [*known, 0, 0][len(text) : len(text) + 1]
        return np.array([*right, 5, 5, 5], np.intc)

    chat.ask(RED, "Which?")
    chat.llm.save_snapshot(tmp_path / "text.kvs")
    drafting = made(pairs[kind], kvflash=2048, draft_model=draft, kvflash_spec=SpecConfig(width=5))
    drafting.llm.load_snapshot(tmp_path / "text.kvs")
    text = chat.llm.input_ids[: chat.llm.n_tokens].tolist()
    settings = {"max_tokens": 40, "temperature": 0.0, "repeat_penalty": 1.0}
    one = chat.llm.create_completion(text, **settings)["choices"][0]["text"]
    known += chat.llm.input_ids[: chat.llm.n_tokens].tolist()
    assert one == drafting.llm.create_completion(text, **settings)["choices"][0]["text"]
    assert 5 < drafting.llm.kvflash.spec.last.accepted < drafting.llm.kvflash.spec.last.drafted


def test_an_image_that_is_none_costs_one_request(plain: Any) -> None:
    chat = plain(kvflash=2048)
    first = chat.ask(RED, "Which?")
    bad = [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,iVBORw0KGgpub25l"}]}]
    with pytest.raises(ValueError, match="cannot be decoded"):
        chat.llm.create_chat_completion(bad)
    chat.messages = []
    assert_same_answer(chat.ask(RED, "Which?"), first)


def test_images_whose_rows_see_each_other_are_refused_by_name(
    made: Any, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_cpp import mtmd_cpp

    with pytest.raises(ConfigError, match=r"144 rows that see each other .* a step has 96: n_ubatch and n_batch must"):
        made(pairs["mutual"], kvflash=768, n_ubatch=96).ask(RED, "Which?")
    monkeypatch.setattr(mtmd_cpp, "mtmd_decode_use_non_causal", lambda *args: True)
    with pytest.raises(ConfigError, match=r"with ALiBi or M-RoPE.* use kvflash=None"):
        made(pairs["mrope"], kvflash=512).ask(RED, "Which?")


@pytest.mark.parametrize("axis", ["t", "x", "z"])
def test_positions_of_another_rule_are_refused_by_name(
    axis: str, made: Any, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_cpp import mtmd_cpp

    stock = mtmd_cpp.mtmd_helper_image_get_decoder_pos

    def others(image: Any, first: int, out: Any) -> None:
        stock(image, first, out)
        for i, pos in enumerate(out):
            setattr(pos, axis, getattr(pos, axis) + first * i)

    monkeypatch.setattr(mtmd_cpp, "mtmd_helper_image_get_decoder_pos", others)
    with pytest.raises(ConfigError, match=r"132 rows with positions that a pool does not know.* use kvflash=None"):
        made(pairs["mrope"], kvflash=512).ask(RED, "Which?")


def with_projector(projector: Path, **settings: Any) -> Llama:
    return Llama(str(MODEL), mmproj=projector, **{**SIZE, **settings})


def test_mmproj_answers_by_the_models_own_template(projector: Path) -> None:
    """In a pool as on upstream's own path; a template that knows no parts gets texts."""
    rows, read = [], []
    photo = {"type": "image_url", "image_url": {"url": png(RED)}}
    for settings in ({"kvflash": 2048, "kvflash_calibrate": False}, {}):
        llm = with_projector(projector, **settings)
        parts = [photo, {"type": "text", "text": "Which colour?"}]
        most = 1 if ON_GPU else 4
        llm.create_chat_completion([{"role": "user", "content": parts}], max_tokens=most, temperature=0.0)
        read.append(llm.input_ids[: llm.n_tokens].copy())
        rows.append(np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy())
        text = llm.detokenize([token for token in read[-1].tolist() if token > 0], special=True).decode()
        assert "<|im_start|>user\n" in text
        assert "Which colour?<|im_end|>" in text
        llm.close()
    assert (read[0] < 0).sum() == ROWS
    assert near(rows[0], rows[1], IMAGE)


@pytest.mark.parametrize("pool", [None, 2048])
@pytest.mark.parametrize(
    ("template", "why"),
    [
        # the loops are for a chat alone, not where the template is tried
        (
            "{% if tools is none %}" + "{% for i in range(3000) %}" * 2 + "{% endfor %}" * 2 + "{% endif %}hi",
            "change them",
        ),
        ("{{ 'x' | center(1000000) | length }}", "change them"),
        ("{{ 'a' * 9000000 }}", "give a chat_format"),
        ("{{" * 8, "give a chat_format"),
    ],
)
def test_mmproj_and_a_hostile_template(template: str, why: str, pool: int | None, projector: Path) -> None:
    """Upstream's handler renders with Jinja, without bounds."""
    with closing(with_projector(projector, kvflash=pool)) as llm:
        llm.metadata["tokenizer.chat_template"] = template
        with pytest.raises(ConfigError, match=f"the chat template .*{why}"):
            llm.create_chat_completion([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], max_tokens=1)


@pytest.mark.parametrize("pool", [{}, {"kvflash": 2048, "kvflash_calibrate": False}])
@pytest.mark.parametrize("kind", ["MTMDChatHandler", "Gemma4ChatHandler"])
def test_a_handler_of_upstreams_and_a_hostile_file(
    kind: str, pool: dict[str, Any], projector: Path, tmp_path: Path
) -> None:
    """Only `mmproj=` rendered the file's template within bounds."""
    from llama_cpp import llama_chat_format

    template = "{% for i in range(3000) %}" * 2 + "{% endfor %}" * 2 + "{{ messages[0].content[0].text }}"

    def change(fields: dict[str, Field]) -> None:
        fields["tokenizer.chat_template"] = Field.of("tokenizer.chat_template", template)

    stock = getattr(llama_chat_format, kind)
    chat = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    hostile = rewritten(MODEL, tmp_path / "model.gguf", change)
    handler = stock(str(projector), verbose=False)
    with (
        closing(Llama(hostile, chat_handler=handler, **SIZE, **pool)) as llm,
        pytest.raises(ConfigError, match=r"the chat template .*takes more than 8000000 steps"),
    ):
        llm.create_chat_completion(chat, max_tokens=1)
    assert isinstance(handler, stock)
    read = []
    for given in ({"chat_handler": stock(str(projector), verbose=False)}, {"mmproj": projector}):
        with closing(Llama(MODEL, **given, **SIZE, **pool)) as llm:
            photo = {"type": "image_url", "image_url": {"url": png(RED)}}
            llm.create_chat_completion([{"role": "user", "content": [photo, *chat[0]["content"]]}], max_tokens=1)
            read.append(llm.input_ids[: llm.n_tokens].tolist())
    assert read[0] == read[1]


def test_a_handler_of_ones_own_renders_as_it_likes(projector: Path) -> None:
    from llama_cpp import llama_chat_format

    class Own(llama_chat_format.MTMDChatHandler):
        def _get_chat_template(self, llama_model: Any) -> str:
            return "{{ 'a'.center(5) }}"

    with closing(Llama(MODEL, chat_handler=Own(str(projector), verbose=False), **SIZE)) as llm:
        llm.create_chat_completion([{"role": "user", "content": "hi"}], max_tokens=1)
        assert llm.detokenize(llm.input_ids[: llm.n_tokens].tolist()).startswith(b"  a  ")


def test_mmproj_keeps_the_parts_that_a_template_goes_through(projector: Path) -> None:
    from kvflash_ggml.llama.vision import Projector

    handler = pickle.loads(pickle.dumps(Projector(projector)))
    parts = [{"type": "image_url", "image_url": "x"}, {"type": "text", "text": "b"}]
    knows = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
    for source, whole in ((knows, False), ("{% for m in messages %}{{ m.content }}{% endfor %}", True)):
        model = SimpleNamespace(metadata={"tokenizer.chat_template": source})
        handler._get_chat_template(model)
        (made,) = handler._get_template_messages([{"role": "user", "content": parts}], "<m>")
        assert made["content"] == ("<m>b" if whole else [{"type": "text", "text": "<m>"}, parts[1]])


def test_a_plan_leaves_room_for_a_projector(projector: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `--dry-run` and `fit`; where it is loaded later than the pool is made, of "auto" too."""
    # the margin is a part of what is free, which other programs change
    monkeypatch.setattr("kvflash_ggml.system.host_memory", lambda: (64 << 30, 16 << 30))
    from llama_cpp.llama_chat_format import Llava15ChatHandler

    from kvflash_ggml.llama import fitting, vision

    size = projector.stat().st_size + vision.COMPUTE_BYTES
    handler = Llava15ChatHandler(str(projector), verbose=False)
    for pool in ({"kvflash": "auto"}, {}):
        keywords = {"n_ctx": 4096, "flash_attn": True, **pool}
        totals = []
        for more in ({}, {"mmproj": projector}, {"chat_handler": handler}):
            placement, _ = fitting.without_loading(str(MODEL), {**keywords, **more})
            totals.append(placement.needs[0].total - placement.needs[0].margin)  # a device with nothing has none
        assert [total - totals[0] for total in totals] == [0, size, size]
    assert vision.reserve_bytes(handler) == size
    llm = with_projector(projector, kvflash="auto", kvflash_calibrate=False)
    assert vision.reserve_bytes(llm.chat_handler) == vision.COMPUTE_BYTES, "its weights are taken already"
    llm.close()


def test_what_a_projector_takes_is_not_lost(projector: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU it is told what others have taken while a model was loaded."""
    from kvflash_ggml.llama import vision

    free = {"CUDA0": 100, "CPU": 7}
    monkeypatch.setattr(vision.memory, "devices", lambda: [SimpleNamespace(name=n, free=f) for n, f in free.items()])
    monkeypatch.setattr(vision.Projector, "_init_mtmd_context", lambda self, llm: free.update(CUDA0=70))
    known = {"CUDA0": 150}
    vision.open_projector(SimpleNamespace(), vision.Projector(projector), known)
    assert known == {"CUDA0": 120}


def test_mmproj_is_refused_where_it_cannot_be_used(projector: Path, tmp_path: Path) -> None:
    from llama_cpp.llama_chat_format import Llava15ChatHandler

    with pytest.raises(ConfigError, match=r"mmproj.* is no projector"):
        with_projector(MODEL)
    with pytest.raises(ConfigError, match=r"mmproj.* cannot be read"):
        with_projector(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match=r"mmproj=.* and chat_handler"):
        with_projector(projector, chat_handler=Llava15ChatHandler(str(projector)))
    other = write_projector(tmp_path / "other.gguf", 64)
    with pytest.raises(ConfigError, match=r"other.gguf is no projector for this model"):
        with_projector(other, kvflash=512)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("clip.has_vision_encoder", "yes", "cannot be used: llama.cpp says .*GGML_ASSERT"),
        ("clip.vision.attention.layer_norm_epsilon", 13, "cannot be used: llama.cpp says .*GGML_ASSERT"),
        ("clip.vision.patch_size", 3, "cannot be used: llama.cpp says .*GGML_ASSERT"),
        ("clip.vision.image_size", -1.0, "cannot be used: llama.cpp says .*GGML_ASSERT"),
        ("clip.vision.embedding_length", 64, "is no projector for this model|cannot be used"),
    ],
)
def test_a_projector_that_would_end_the_process_is_refused(
    projector: Path, tmp_path: Path, key: str, value: Any, why: str
) -> None:
    """Fields of another type, and sizes that its tensors have not: ggml's assertions are errors while it is loaded."""
    hostile = rewritten(projector, tmp_path / "hostile.gguf", lambda fields: fields.update({key: Field.of(key, value)}))
    for pool in (None, 512):
        with pytest.raises(ConfigError, match=rf"mmproj \(--mmproj\) .*hostile.gguf ({why})"):
            with_projector(hostile, kvflash=pool)
    with closing(with_projector(projector, kvflash=512)) as llm:
        assert llm.kvflash is not None


@pytest.mark.parametrize("pool", [None, 1024])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_handlers_projector_that_would_end_the_process_is_refused(
    pool: int | None, value: float, projector: Path, tmp_path: Path
) -> None:
    """Only the files of `mmproj=` were checked, and not those of a handler."""
    from llama_cpp.llama_chat_format import Llava15ChatHandler

    key = "clip.vision.attention.layer_norm_epsilon"
    handler = Llava15ChatHandler(str(changed(projector, tmp_path / "mmproj.gguf", fields={key: value})), verbose=False)
    given = {} if pool is None else {"kvflash": pool, "kvflash_calibrate": False}
    with closing(Llama(str(MODEL), n_ctx=1024, verbose=False, chat_handler=handler, **given)) as llm:
        with pytest.raises(ConversionError, match=rf"mmproj\.gguf: {key} is {value}; wanted: 0 or more"):
            llm.create_chat_completion([{"role": "user", "content": "Hi"}], max_tokens=1)
        handler.clip_model_path = str(projector)  # the model goes on
        assert llm.create_chat_completion([{"role": "user", "content": "Hi"}], max_tokens=1)["choices"]


def test_a_projector_with_vectors_of_another_type_is_refused(projector: Path, tmp_path: Path) -> None:
    """llama.cpp would end the process in the first image."""
    file, planned = reader.read(projector), []
    for name, tensor in file.tensors.items():
        kind, pieces = tensor.kind, [np.concatenate(list(file.pieces(tensor)), axis=None)]
        if name == "v.blk.0.ln1.bias":
            kind, pieces = types.BY_NAME["f16"], [np.zeros(2 * tensor.shape[0], np.uint8)]
        planned.append(Planned(name=name, kind=kind, shape=tensor.shape, pieces=lambda pieces=pieces: iter(pieces)))
    with (path := tmp_path / "half.gguf").open("wb") as made:
        writer.write(made, list(file.fields.values()), planned, lambda done, total: None)
    with pytest.raises(ConversionError, match=r"v\.blk\.0\.ln1\.bias is f16; wanted: f32"):
        with_projector(path, kvflash=512)


@where_widths_agree
def test_texts_with_images_are_drafted_out_of_themselves(asker: Any) -> None:
    """By n-grams, behind images and between them: the answers are the same, up to rounding. Some drafts are wrong."""
    again, answers = f"{WORDS[400:700]} " * 2, []
    for spec in ({}, {"kvflash_spec": SpecConfig(types=("ngram",), width=5)}):
        chat = asker(kvflash=2048, **spec)
        answers.append([chat.ask(RED, again, most=32), chat.ask(BLUE, RED, f"{again} Once more.", most=48)])
    for (said, logits), (other, theirs) in zip(*answers, strict=True):
        assert said == other
        assert near(logits, theirs, LOGITS)
    (source,) = chat.llm.kvflash.spec.total.by_source.values()
    assert source.drafted > source.accepted > 8


def test_other_drafts_beside_images_are_refused(plain: Any) -> None:
    with pytest.raises(ConfigError, match="only kvflash_spec='ngram' drafts in texts with images"):
        plain(kvflash=512, draft_model=lambda ids, **_: ids[-2:]).ask(RED, "Which?")
    for answer in ("lossless", "auto"):
        with pytest.raises(ConfigError, match=f"'{answer}'.*not for answers that the whole text verifies"):
            plain(kvflash=512, kvflash_spec="ngram", kvflash_answer=answer).ask(RED, "Which?")


@pytest.mark.parametrize("first", ["import kvflash_ggml", "pass"])
def test_a_program_finds_it_by_llama_cpp_alone(first: str) -> None:
    code = f"""{first}
from llama_cpp import mtmd_cpp
print(mtmd_cpp.mtmd_context_params_default().n_threads > 0, mtmd_cpp._libmtmd._name)"""
    environment = {name: value for name, value in os.environ.items() if not name.endswith(("CPP_LIB_PATH", "CPP_LIB"))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True", str(library.library_folder() / "libmtmd.so")], done.stderr
