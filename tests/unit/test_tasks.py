"""Recall tasks: exact lengths, the needle where it should be, the wording of the training data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from train_recall import templates

from kvflash_bench.tasks import MAX_DISTRACTORS, NOUNS, WORDS, ZEBRA, needle_task, zebra_task
from kvflash_ggml.errors import ConfigError

TEXT = (Path(__file__).parents[1] / "text" / "stdlib-docs.txt").read_text(encoding="utf-8")[:60_000]

SPLIT = re.compile(r"[A-Za-z]{1,5}|\d| ?[^\sA-Za-z\d]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s")


def pieces(text: str) -> list[int]:
    """Like the models' tokenizer: digits singly, words in parts, blank lines merged."""
    return [hash(piece) for piece in SPLIT.findall(text)]


def merging(text: str) -> list[int]:
    """A tokenizer that also merges across line ends, as no sum over lines expects."""
    return [hash(piece) for piece in re.findall(r"\s+[A-Za-z]{1,4}|\S|\s", text)]


@pytest.mark.parametrize("tokenize", [pieces, merging])
@pytest.mark.parametrize("n_tokens", [64, 100, 1000, 4097])
@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_length_and_position_are_exact(tokenize, n_tokens, depth):
    for seed in range(5):
        task = needle_task(TEXT, tokenize, n_tokens=n_tokens, depth=depth, seed=seed)
        assert len(tokenize(task.document)) == task.n_tokens == n_tokens
        before, found, after = task.document.partition(task.needle.sentence)
        assert found
        assert task.answer not in before + after
        assert task.position == len(tokenize(before))
        assert not before or before.endswith("\n")
        assert task.position == pytest.approx(depth * n_tokens, abs=150)
        assert (depth == 0) <= (task.position == 0)
        assert (depth == 1) <= (after == "\n")


def test_a_short_text_is_repeated():
    task = needle_task("One line.\nAnother line.\n", pieces, n_tokens=2000, depth=0.5, seed=1)
    assert len(pieces(task.document)) == 2000
    assert task.document.count(task.answer) == 1


def test_the_seed_decides():
    def make(seed):
        return needle_task(TEXT, pieces, n_tokens=900, depth=0.5, seed=seed, n_distractors=3)

    assert make(1) == make(1)
    assert make(1).document != make(2).document
    assert make(1).answer != make(2).answer


def test_distractors_are_in_the_text_and_share_no_word():
    task = needle_task(TEXT, pieces, n_tokens=8000, depth=0.5, seed=4, n_distractors=MAX_DISTRACTORS)
    facts = [task.needle, *task.distractors]
    assert len(facts) == MAX_DISTRACTORS + 1
    words = [word for fact in facts for word in fact.name.split()]
    assert len(words) == len(set(words))
    assert len({fact.value for fact in facts}) == len(facts)
    for fact in facts:
        assert fact.noun == task.needle.noun
        assert task.document.count(fact.sentence + "\n") == 1


def test_the_wording_is_the_training_data():
    needle = needle_task(TEXT, pieces, n_tokens=200, depth=0.5, seed=3).needle
    slots = {"{n}": needle.noun, "{x}": needle.name, "{v}": needle.value}

    def written(template):
        return re.sub(r"{\w}", lambda slot: slots[slot.group()], template)

    assert set(NOUNS) <= set(templates.NOUNS)
    assert needle.sentence in map(written, templates.NEEDLES)
    assert f"{needle.question} {needle.lead} {needle.value}." in map(written, templates.ASKS)
    assert (needle.question, f"{needle.lead} {needle.value}.") in [
        (written(question), written(answer)) for question, answer in templates.CHAT_ASKS
    ]


def test_prompts():
    task = needle_task(TEXT, pieces, n_tokens=300, depth=0.2, seed=8)
    name, noun = task.needle.name, task.needle.noun
    assert task.prompt.startswith(task.document)
    assert task.prompt.endswith(f"\nWhat is the {noun} for {name}? The {noun} for {name} is")
    (message,) = task.messages
    assert message == {"role": "user", "content": f"{task.document}\n{task.question}"}
    assert task.chatml == (f"<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("reply", "correct"),
    [
        (" {}.", True),
        ("The access code for amber zebra is {}.", True),
        ("{}", True),
        (" {}0", False),
        (" 0{}", False),
        (" 1234567. No, {}", False),
        ("no idea", False),
        ("", False),
    ],
)
def test_only_the_exact_digits_are_correct(reply, correct):
    task = zebra_task(TEXT, pieces, n_tokens=100)
    assert task.is_correct(reply.format(task.answer)) is correct


def test_zebra_is_always_the_same():
    task = zebra_task(TEXT, pieces, n_tokens=500)
    assert task.needle == ZEBRA
    assert task.position == 0
    assert task.document.startswith("The access code for amber zebra is 9274015.\n")
    assert ZEBRA.value not in TEXT
    assert zebra_task(TEXT, pieces, n_tokens=500, depth=0.5).position > 150


def test_words_are_distinct():
    assert len(WORDS) == len(set(WORDS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 1.5}, "depth of '.*' is 1.5"),
        ({"depth": -0.1}, "depth of '.*' is -0.1"),
        ({"n_distractors": MAX_DISTRACTORS + 1}, f"ask for 0 to {MAX_DISTRACTORS}"),
        ({"n_distractors": -1}, "n_distractors is -1"),
        ({"n_tokens": 5}, "5 tokens cannot hold 1 facts"),
        ({"text": " \n"}, "text is empty"),
    ],
)
def test_impossible_tasks_are_refused(change, message):
    arguments = {"text": TEXT, "n_tokens": 500, "depth": 0.5, "seed": 1} | change
    with pytest.raises(ConfigError, match=message):
        needle_task(arguments.pop("text"), pieces, **arguments)
