"""The training data of the recall models: reproducible, and every question can be answered."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from train_recall import templates
from train_recall.config import IM_END, IM_START, MAX_POS
from train_recall.source import Corpus
from train_recall.synth import Synth

WORDS = ["amber", "falcon", "copper", "meadow", "quiet", "summit", "silver", "timber", "marble"]


@dataclass
class Encoded:
    ids: list[int]


class ByteTokenizer:
    """One token per byte: what a stretch of tokens says can be read off."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Encoded:
        assert not add_special_tokens
        return Encoded(list(sequence.encode()))

    def decode(self, ids: list[int]) -> str:
        return bytes(i if i < 256 else 0 for i in ids).decode("latin-1")


def make_synth(seed: int) -> Synth:
    rng = random.Random(0)
    docs = [" ".join(rng.choices(WORDS, k=900)).replace(" quiet", ".\n") + "\n" for _ in range(12)]
    corpus = Corpus(
        tok=np.frombuffer("".join(docs).encode(), np.uint8).astype(np.uint16),
        start=np.cumsum([0] + [len(d) for d in docs]),
        is_doc=np.arange(len(docs)) % 2 == 0,
    )
    return Synth(ByteTokenizer(), corpus, words=WORDS, seed=seed)


def read(ids: np.ndarray) -> str:
    return ByteTokenizer().decode(ids.tolist())


def answers(w: np.ndarray) -> list[slice]:
    """The stretches that carry the weight of an answer."""
    edges = np.flatnonzero(np.diff(np.pad(w == templates.W_ANSWER, 1)))
    return [slice(a, b) for a, b in edges.reshape(-1, 2)]


def test_same_seed_same_batches():
    one, two, other = make_synth(3), make_synth(3), make_synth(4)
    for seq in (2048, 4096, 2048):  # a byte a token: shorter ones cannot hold their facts
        a, b, c = (s.batch(seq, 8192) for s in (one, two, other))
        assert a[0] == seq
        assert a[1].shape == (8192 // seq, seq + 1)
        assert all(np.array_equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))
        assert not np.array_equal(a[1], c[1])


@pytest.mark.parametrize("kind", ["needles", "tables"])
def test_answers_are_in_the_text(kind):
    synth = make_synth(5)
    asked = found = 0
    for _ in range(60):
        ids, w = getattr(synth, kind)(4096)
        assert len(ids) == len(w) == 4096
        for span in answers(w):
            asked += 1
            found += read(ids[span]).strip() in read(ids[: span.start])
    assert asked > 100
    # a sequence that comes out too long loses its first tokens, and with them now and then a fact
    assert found >= 0.99 * asked


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
def test_haystack_asks_for_its_needle(depth):
    ids, digits = make_synth(6).haystacks(2048, depth=depth, rows=4)
    assert ids.shape == (4, 2049)
    for row, mask in zip(ids, digits, strict=True):
        value = read(row[1:][mask]).strip()
        assert len(value) == 7
        assert value.isdigit()
        text = read(row)
        assert text.count(value) == 2
        at = text.index(value)
        assert abs(at / 2048 - depth) < 0.1
        fact = text[text.rindex("The access code for", 0, at) : at + 7]
        assert text.endswith(fact)


def test_chat_needles_are_well_formed():
    synth = make_synth(7)
    chats = 0
    for _ in range(60):
        ids, _ = synth.needles(2048)
        starts, ends = (np.flatnonzero(ids == t) for t in (IM_START, IM_END))
        if not len(starts):
            continue
        chats += 1
        assert ids[0] == IM_START
        assert len(starts) == len(ends)
        assert all(starts < ends)
        assert all(starts[1:] > ends[:-1])
    assert chats > 5


def test_copies_repeat_a_block():
    synth = make_synth(8)
    for _ in range(10):
        ids, w = synth.copies(2048)
        block = ids[w == templates.W_COPY]
        assert len(block) > 0
        assert read(ids).count(read(block)) >= 2


def test_positions_only_skip_forward():
    synth = make_synth(9)
    skipped = 0
    for _ in range(40):
        pos = synth.positions(1024)
        assert all(b > a for a, b in pairwise(pos))
        assert pos[0] >= 0
        assert pos[-1] < MAX_POS
        skipped += pos[-1] > 1023
    assert 5 < skipped < 35


def test_every_template_names_its_fact():
    chat = [question + answer for question, answer in templates.CHAT_ASKS]
    for template in templates.NEEDLES + templates.ASKS + chat:
        assert all(slot in template for slot in ("{n}", "{x}", "{v}"))


def test_the_trained_tokenizer_splits_digits():
    pytest.importorskip("tokenizers")
    from train_recall.source import open_tokenizer, open_words

    folder = str(Path(templates.__file__).parent)
    encode = open_tokenizer(folder).encode
    assert len(encode("1234567", add_special_tokens=False).ids) == 7
    train, held_out = (set(open_words(folder, split)) for split in ("train", "valid"))
    assert not train & held_out
