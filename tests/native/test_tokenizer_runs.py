"""Any text has tokens: long runs of one character, and any bytes. The words are upstream's where upstream survives."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.archs import missing_sources
from support.checkpoints import rewritten
from support.partitions import CONTROL, LSTRIP, RSTRIP, UNKNOWN, USER_DEFINED, Partitioner
from support.partitions import build as build_partitions
from support.serving import serve
from support.splitters import Splitter, build, pre_tokenizers

from kvflash_ggml.gguf.reader import Field

pytestmark = pytest.mark.skipif(bool(missing_sources()), reason="there are no sources of llama.cpp")

RUNS = ["A", " ", "=", "\n", "1", "\u4e00", "\u0301", "\U0001f600", "\t", "\r\n", "'"]
MORE = ["aA", "a ", "1a", " \n", "0.", "\u00e9", "\u3000", "Ab'll", "'s", "\u0915\u093e", "\u0663"]
TAILS = ["", "x", "1", "\n"]
MARK = b"<|im_start|>"
NAMES = "tokenizer.ggml.tokens"

CHILD = """
import json, sys, threading
from kvflash_ggml import Llama

def tokenize(name, llm):
    for text in map(bytes.fromhex, asked["texts"]):
        print(name, text[:12], len(llm.tokenize(text, add_bos=False)), flush=True)

asked = json.load(sys.stdin)
threading.stack_size(256 << 10)
for name in asked["names"]:
    llm = Llama(asked["model"], vocab_only=True, verbose=False, kv_overrides={"tokenizer.ggml.pre": name})
    thread = threading.Thread(target=tokenize, args=[name, llm])
    thread.start()
    thread.join()
    llm.close()
"""


def counts(model: Path, names: list[str], texts: list[bytes]) -> list[int]:
    """How many tokens each text has with each pre-tokenizer, on a stack of 256 KiB, in a child."""
    asked = json.dumps({"model": str(model), "names": names, "texts": [text.hex() for text in texts]})
    env = os.environ | {"GGML_NO_BACKTRACE": "1"}
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, input=asked, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.returncode, done.stdout[-200:], done.stderr[-2000:])
    found = [int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(found) == len(names) * len(texts), done.stderr[-2000:]
    return found


def test_a_long_run_has_tokens(models: dict[str, Path]) -> None:
    """With every pre-tokenizer. std::regex takes stack for each character: more than 256 KiB for 8,192 of them."""
    names = pre_tokenizers()
    assert len(names) >= 91
    counts(models["dense"], names, [(run * 8192)[:8192].encode() for run in RUNS])


def test_any_bytes_have_tokens(models: dict[str, Path]) -> None:
    """Also those that are no text: numbers above those of Unicode, halves of a pair, cut and stray bytes."""
    bad = [b"\xf4\x90\x80\x80", b"\xf7\xbf\xbf\xbf", b"\xed\xa0\x80", b"\xe4\xb8", b"\x80", b"\xff\xfe", b"\x00", b"  "]
    texts = [*bad, *(b"a" + text + b"b" for text in bad)]
    counts(models["dense"], pre_tokenizers(), texts)
    found = counts(models["dense"], ["qwen2"], [*texts[:2], "\ufffd".encode() * 4, b"\xf4\x8f\xbf\xbf"])
    assert found[0] == found[1] == found[2], "as other bytes that are no text: one replacement for each"


def test_many_marks(models: dict[str, Path], loaded: None) -> None:
    """Tokens are those of the parts. llama.cpp took the square of their number in time: minutes for 200,000."""
    from kvflash_ggml import Llama

    with closing(Llama(str(models["dense"]), vocab_only=True, verbose=False)) as llm:
        tokenize = partial(llm.tokenize, add_bos=False, special=True)
        (mark,) = tokenize(MARK)
        for before, between, after in ((b"a", b" b c", b"d"), (b"", b"", b""), (b"  ", b"\n", b" ")):
            found = tokenize(before + between.join([MARK] * 200_000) + after)
            parts = [tokenize(part) if part else [] for part in (before, between, after)]
            wanted = [*parts[0], *[mark, *parts[1]] * 199_999, mark, *parts[2]]
            assert (found[:9], len(found), found == wanted) == (wanted[:9], len(wanted), True)


def test_many_spelled_characters(models: dict[str, Path], loaded: None, tmp_path: Path) -> None:
    """Characters that SentencePiece spells in bytes took the square of their number in time: minutes for a million."""
    from kvflash_ggml import Llama

    def change(fields: dict[str, Field]) -> None:
        names = [*fields[NAMES].value[:-256], *(f"<0x{byte:02X}>" for byte in range(256))]
        texts = [name.encode() for name in names]
        raw = struct.pack("<IQ", 8, len(texts)) + b"".join(struct.pack("<Q", len(text)) + text for text in texts)
        fields[NAMES] = Field(NAMES, 9, raw)
        fields["tokenizer.ggml.model"] = Field.of("tokenizer.ggml.model", "llama")

    path = rewritten(models["dense"], tmp_path / "spelled.gguf", change)
    with closing(Llama(str(path), vocab_only=True, verbose=False)) as llm:
        first = llm.n_vocab() - 256
        for text in ("\r", "\u00a0", "\u3000"):
            found = llm.tokenize(text.encode() * 1_000_000, add_bos=False)
            wanted = [first + byte for byte in text.encode()] * 1_000_000
            assert (found[-9:], found[-len(wanted) :] == wanted) == (wanted[-9:], True), ascii(text)


@pytest.fixture(scope="module")
def partitioner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Partitioner]:
    with closing(Partitioner(build_partitions(tmp_path_factory.mktemp("marks")))) as found:
        yield found


KINDS = st.sampled_from([USER_DEFINED, USER_DEFINED, CONTROL, UNKNOWN, CONTROL | USER_DEFINED])
STRIPS = st.sampled_from([0, 0, LSTRIP, RSTRIP, LSTRIP | RSTRIP])
LETTERS = st.sampled_from(["a", "ab", "a< ", "ab \n", "<|> \t", "\u00e9a "])


@st.composite
def marked(draw: st.DrawFn, marks: list[tuple[int, bytes]]) -> bytes:
    """A text of marks, beginnings and ends of marks, spaces, and letters."""
    one = st.sampled_from([mark for _, mark in marks])
    cut = st.integers(0, 12)
    plain = st.text("ab<|> \n\u00e9", max_size=5).map(str.encode)
    parts = st.one_of(
        one,
        st.builds(lambda mark, end: mark[:end], one, cut),
        st.builds(lambda mark, start: mark[start:], one, cut),
        st.builds(lambda mark, times: mark * times, one, cut),
        plain,
    )
    return b"".join(draw(st.lists(parts, min_size=1, max_size=20))) or b" "


@st.composite
def vocabularies(draw: st.DrawFn) -> list[tuple[int, bytes]]:
    """Attributes and texts of marks that overlap, hold each other, and occur twice."""
    letters = draw(LETTERS)
    texts = st.text(letters, min_size=1, max_size=8).map(str.encode)
    return draw(st.lists(st.tuples(st.builds(int.__or__, KINDS, STRIPS), texts), min_size=1, max_size=24))


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_marks_are_those_of_upstream(partitioner: Partitioner, data: st.DataObject) -> None:
    """Each mark takes its places before a shorter one, in what longer ones have left."""
    marks = data.draw(vocabularies())
    theirs, ours = partitioner.divide(data.draw(marked(marks)), marks, special=data.draw(st.booleans()))
    assert ours == theirs


@cache
def real_marks(model: Path) -> list[tuple[int, bytes]]:
    """The special tokens of a model's vocabulary."""
    import llama_cpp

    from kvflash_ggml import Llama

    with closing(Llama(str(model), vocab_only=True, verbose=False)) as llm:
        vocab = llama_cpp.llama_model_get_vocab(llm.model)
        tokens = range(llama_cpp.llama_vocab_n_tokens(vocab))
        found = [(llama_cpp.llama_vocab_get_attr(vocab, i), llama_cpp.llama_vocab_get_text(vocab, i)) for i in tokens]
    return [(kind, mark) for kind, mark in found if kind & (USER_DEFINED | CONTROL | UNKNOWN)]


GEMMA = [
    *((CONTROL, mark) for mark in (b"<pad>", b"<eos>", b"<bos>", b"<start_of_turn>", b"<end_of_turn>")),
    (UNKNOWN, b"<unk>"),
    *((USER_DEFINED, b"<unused%d>" % i) for i in range(6242)),
    *((USER_DEFINED, b"\n" * i) for i in range(1, 32)),
    *((USER_DEFINED, "\u2581".encode() * i) for i in range(2, 32)),
    *((USER_DEFINED, mark) for mark in (b"<table>", b"<tr>", b"<th>", b"</th>", b"[multimodal]", b"[toxicity=0]")),
]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_marks_of_vocabularies(partitioner: Partitioner, models: dict[str, Path], data: st.DataObject) -> None:
    """Those of a model, and as many as Gemma 3 has."""
    for marks in (real_marks(models["dense"]), GEMMA):
        theirs, ours = partitioner.divide(data.draw(marked(marks)), marks, special=data.draw(st.booleans()))
        assert ours == theirs


def test_a_server_answers_a_long_run(models: dict[str, Path]) -> None:
    """On every road, with a pre-tokenizer that died of it, and goes on."""
    options = ("--kvflash", "512", "-c", "8192", "--kvflash-calibrate", "off", "-q")
    with serve(models["dense"], *options, "--override-kv", "tokenizer.ggml.pre=str:gpt-4o") as served:
        for run in ("A", " ", "=", "\n", "1"):
            text = run * 60_000
            status, reply = served.post("/tokenize", {"content": text})
            assert (status, len(reply["tokens"]) > 100) == (200, True)
            assert served.post("/detokenize", {"tokens": reply["tokens"]})[1]["content"] == text
            assert served.post("/v1/completions", {"prompt": text, "max_tokens": 1})[0] in (200, 400)
            chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
            assert served.post("/v1/chat/completions", chat)[0] in (200, 400)
        assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("splits"))


@pytest.fixture(scope="module")
def splitters(programs: tuple[Path, Path]) -> Iterator[tuple[Splitter, Splitter]]:
    with closing(Splitter(programs[0])) as upstream, closing(Splitter(programs[1])) as ours:
        yield upstream, ours


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Of all classes that the expressions tell apart, and of single ones, repeated."""
    spaces = " \t\r\n\v\f\x1c\x85\xa0\u1680\u2028\u200b\u202f\u3000"
    letters = "abzABZ\u00b5\u00e9\u01ba\u0434\u0416\u03b1\u4e00\u9fa5\u3041\u30f3\uac00\ud7a3\u3131\u0800\u0e17\u05d0"
    marks = "\u0301\u093e\u094d\ufe0f\u200d"
    digits = "0123456789\u0663\u096b\u2167\u00b2"
    signs = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~\u2026\u3002\uff0c\u060c\u06d4\uff5e\u20ac\U0001f600"
    words = ["<sentinel:12>", "IMGIMGABZ", "IMG", "'s", "'T", "'re", "'VE", "'ll", "'x", "I'm", "\r\n", " 1234567 "]
    plain = st.one_of(*map(st.sampled_from, (spaces, letters, marks, digits, signs, words)))
    anything = st.characters(exclude_categories=["Cs"])
    repeated = st.tuples(plain | anything, st.integers(1, 40)).map(lambda pair: pair[0] * pair[1])
    return "".join(draw(st.lists(plain | plain | repeated | anything, max_size=24)))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=texts().filter(bool))
def test_words_are_those_of_upstream(splitters: tuple[Splitter, Splitter], text: str) -> None:
    """For every list of expressions of the pinned source, so a new pin extends this."""
    upstream, ours = splitters
    words = ours.split(text.encode())
    assert words == upstream.split(text.encode())
    assert len(words) >= 31


def steps(program: Path, runs: list[str], tails: list[str], *lengths: int) -> list[list[int]]:
    """What our matcher takes for each run with each tail and each list of expressions, at these lengths."""
    asked = "".join(f"{run.encode().hex()} {tail.encode().hex()}\n" for run in runs for tail in tails)
    command = [program, *map(str, lengths)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=600, check=True)
    return [list(map(int, line.split())) for line in done.stdout.splitlines() if line != "end"]


def test_a_run_takes_linear_work(programs: tuple[Path, Path]) -> None:
    """Where llama.cpp has a splitter of its own, nothing is counted."""
    found = steps(programs[1], RUNS + MORE, TAILS, 1 << 13, 1 << 15)
    assert all(long <= 4.1 * short + 1000 for short, long in found), "for four times the length"
    longest = steps(programs[1], ["A", " ", "1"], ["x"], 1 << 20)
    assert 1 << 24 < max(one for (one,) in longest) < 100 << 20
