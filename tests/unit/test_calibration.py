"""Retrieval heads: documents, what is measured on a model whose heads are known, the choice, and its file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.fake_llama import Stage, staged

from kvflash_ggml.calibration import choice, measure
from kvflash_ggml.calibration.choice import choose
from kvflash_ggml.calibration.documents import FORMS, VALUES, compose, make_facts, question
from kvflash_ggml.calibration.known import Calibration, ModelId, load, save
from kvflash_ggml.calibration.measure import documents
from kvflash_ggml.cli.calibrate import table
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.policy.base import KeyShape
from kvflash_ggml.policy.heads import every_head

SHAPES = [KeyShape(n_head=4, n_head_kv=2, head=8, scale=1.0), KeyShape(n_head=4, n_head_kv=2, head=8, scale=1.0)]
LAYERS = [3, 7]
MODEL = ModelId("1234", "llama Some, 8 layers")


class Words:
    """A token a word."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.words: list[str] = []

    def __call__(self, text: str) -> list[int]:
        return [self._id(word) for word in text.split()]

    def _id(self, word: str) -> int:
        if word not in self.ids:
            self.ids[word] = len(self.words)
            self.words.append(word)
        return self.ids[word]

    def text(self, tokens: npt.NDArray[np.int32]) -> str:
        return " ".join(self.words[i] for i in tokens)


class Finder:
    """Of its heads the first finds the fact that is asked for, the second likes all facts, the rest look anywhere."""

    opening: Sequence[int] = (0,)
    n_heads = 8

    def __init__(self, words: Words, *, n_ctx: int = 4096, found: float = 6.0) -> None:
        self.n_ctx = n_ctx
        self.found = found
        self.words = words
        self.asked = 0
        self._rng = np.random.default_rng(0)

    def read(self, tokens: npt.NDArray[np.int32]) -> None:
        text = self.words.text(tokens)
        self.n = len(tokens) // CHUNK
        self.places = {}
        for seed in range(measure.DOCUMENTS):
            for fact, (lo, _) in compose(self.words, n_tokens=2048, seed=seed).facts:
                if fact.sentence in text:
                    self.places[fact.verbatim] = self.places[fact.reworded] = (lo + len(self.opening)) // CHUNK

    def ask(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        self.asked += 1
        words = self.words.text(tokens).removeprefix("Question: ").removesuffix(" Answer:")
        masses = self._rng.normal(0, 0.5, (self.n_heads, len(tokens), self.n)).astype(np.float32)
        masses[0, -1, self.places[words]] += self.found
        masses[1, -1, list(self.places.values())] += 6
        return masses


def measured(**settings: Any) -> measure.Measured:
    words = Words()
    words("<bos>")
    return measure.measure(Finder(words, **settings), words, progress=lambda done, total: None)


def test_a_document_has_a_fact_of_each_form() -> None:
    words = Words()
    document = compose(words, n_tokens=2048, seed=3)
    assert 0.9 * 2048 < len(document.tokens) < 1.1 * 2048
    assert len(document.facts) == len(FORMS)
    for fact, (lo, hi) in document.facts:
        assert words.text(document.tokens[lo:hi]) == fact.sentence
        assert fact.value in fact.sentence
        assert fact.value not in fact.verbatim + fact.reworded
    first, last = document.facts[0][1][0], document.facts[-1][1][1]
    assert first > CHUNK / 2
    assert last < len(document.tokens) - CHUNK / 2
    again = compose(words, n_tokens=2048, seed=3)
    np.testing.assert_array_equal(again.tokens, document.tokens)
    assert len(compose(words, n_tokens=6000, seed=3).tokens) > 5400, "the prose is repeated"


def test_values_are_not_in_the_prose() -> None:
    import random

    from kvflash_ggml.calibration import documents as module

    prose = " ".join(module._sentences(random.Random(0)))
    assert all(len(values) >= 6 for values in VALUES)
    assert not any(value in prose for values in VALUES for value in values if not value.isalpha())
    assert len({fact.sentence.split()[0] for fact in make_facts(random.Random(0))}) > 3


def test_the_head_that_finds_what_is_asked_for_is_chosen() -> None:
    result = measured()
    assert result.questions == measure.DOCUMENTS * len(FORMS) * 2
    assert result.score.argmax() == 0
    assert result.first[0] > 0.9
    assert result.control[1] > 0.02 > result.score[1] - 0.1
    found = choose(result, model_id=MODEL, layers=LAYERS, shapes=SHAPES)
    assert found.chosen == [(3, 0)]
    assert found.among(LAYERS).tolist() == [[0, 0]]


def test_of_a_model_that_cannot_recall_all_heads_count() -> None:
    found = choose(measured(found=0.0), model_id=MODEL, layers=LAYERS, shapes=SHAPES)
    assert found.chosen == []
    assert found.among(LAYERS) is None
    assert len(found.heads) == 8


def test_no_more_heads_than_help() -> None:
    n = len(every_head(SHAPES))
    scores = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], np.float32)
    result = measure.Measured(scores, np.zeros(n, np.float32), np.ones(n, np.float32), 10, 1000)
    chosen = choose(result, model_id=MODEL, layers=LAYERS, shapes=SHAPES).chosen
    assert chosen == [(3, 0), (3, 1), (3, 2), (3, 3), (7, 0), (7, 1)], "those below 0.4 of the best are left out"


def test_it_is_told_how_many_heads_each_document_alone_would_choose() -> None:
    result = measured()
    assert [part.questions for part in result.alone] == [len(FORMS) * 2] * measure.DOCUMENTS
    assert sum(part.tokens for part in result.alone) == result.tokens
    np.testing.assert_allclose(np.mean([part.found for part in result.alone], axis=0), result.found, rtol=1e-5)
    assert choose(result, model_id=MODEL, layers=LAYERS, shapes=SHAPES).agreed == 1

    def means(*scores: float) -> measure.Measured:
        none = np.zeros(len(scores), np.float32)
        return measure.Measured(np.array(scores, np.float32), none, none + 1, 10, 1000)

    first, second = means(0.9, 0.8, 0.5, 0, 0, 0, 0, 0), means(0.9, 0.8, 0.1, 0.6, 0, 0, 0, 0)
    whole = replace(means(0.9, 0.8, 0.4, 0.3, 0, 0, 0, 0), alone=(first, second))
    found = choose(whole, model_id=MODEL, layers=LAYERS, shapes=SHAPES)
    assert (found.agreed, len(found.chosen)) == (2, 3)
    assert table(found)[-1] == "2 of these 3 would be chosen by each of the documents alone, too"


def test_a_short_context_is_refused() -> None:
    with pytest.raises(ValueError, match="context of 1000"):
        documents(Words(), 1000)
    assert len(documents(Words(), 1400)[0].tokens) < 1400


def test_the_time_is_told_from_the_second_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(measure.time, "monotonic", lambda: now)
    told = measure.Eta(128)
    assert told.seconds(0, 1280) is None
    now += 30
    assert told.seconds(128, 1280) is None, "whatever has to be made ready first"
    now += 1
    assert told.seconds(200, 1280) is None
    now += 1
    assert told.seconds(256, 1280) == 20
    now += 8
    assert told.seconds(384, 1280) == 50


def test_attention_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        measured(found=np.nan)


def test_progress_comes_to_its_end() -> None:
    words, seen = Words(), []
    words("<bos>")
    measure.measure(Finder(words), words, progress=lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1]
    assert sorted(seen) == seen


@pytest.fixture
def found() -> Calibration:
    return choose(measured(), model_id=MODEL, layers=LAYERS, shapes=SHAPES)


def test_a_file_brings_it_back(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "heads" / "x.json"
    save(found, path)
    assert load(path, model_id=MODEL, layers=LAYERS, shapes=SHAPES) == found


def test_a_file_without_the_agreement_is_as_good(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save(found, path)
    facts = json.loads(path.read_text())
    assert facts.pop("agreed") == 1
    path.write_text(json.dumps(facts))
    old = load(path, model_id=MODEL, layers=LAYERS, shapes=SHAPES)
    assert old == replace(found, agreed=None)
    assert "documents" not in table(old)[-1]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none", model_id=MODEL, layers=LAYERS, shapes=SHAPES)


def test_a_file_of_another_model(found: Calibration, tmp_path: Path) -> None:
    save(replace(found, title="llama Some\x1b[2J, 8 layers"), tmp_path / "x.json")
    model_id = ModelId("5678", "qwen Other, 8 layers")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "x.json", model_id=model_id, layers=LAYERS, shapes=SHAPES)
    for words in (r"llama Some\x1b[2J, 8 layers (1234)", "qwen Other, 8 layers (5678)", "kvflash-run calibrate"):
        assert words in str(caught.value)
    save(replace(found, title=None), tmp_path / "x.json")
    with pytest.raises(ConfigError, match=r"made for another model \(1234\)"):
        load(tmp_path / "x.json", model_id=model_id, layers=LAYERS, shapes=SHAPES)


def test_a_file_of_the_same_model_in_another_quantisation(found: Calibration, tmp_path: Path) -> None:
    save(found, tmp_path / "x.json")
    assert load(tmp_path / "x.json", model_id=replace(MODEL, identity="5678"), layers=LAYERS, shapes=SHAPES) == found


def test_a_file_whose_heads_are_not_in_the_pool(found: Calibration, tmp_path: Path) -> None:
    save(found, tmp_path / "x.json")
    with pytest.raises(ConfigError, match=r"head 3\.0, which this model does not have"):
        load(tmp_path / "x.json", model_id=MODEL, layers=[4, 7], shapes=SHAPES)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "x"},
        {"version": 2},
        {"heads": None},
        {"heads": [1]},
        {"heads": [{"layer": 3}]},
        {"heads": [{"layer": "3", "head": 0, "found": 1, "control": 0, "first": 1, "chosen": True}]},
        {"heads": [{"layer": 3, "head": 1.5, "found": 1, "control": 0, "first": 1, "chosen": True}]},
        {"questions": None},
        {"agreed": 1.5},
    ],
)
def test_a_damaged_file_is_refused(change: dict[str, Any], found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save(found, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match="no file of retrieval heads"):
        load(path, model_id=MODEL, layers=LAYERS, shapes=SHAPES)


@pytest.mark.parametrize("head", [-1, 4, 10**12])
def test_a_head_out_of_range_is_refused(head: int, found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save(found, path)
    facts = json.loads(path.read_text())
    facts["heads"][0]["head"] = head
    path.write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="does not have"):
        load(path, model_id=MODEL, layers=LAYERS, shapes=SHAPES)


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"null", b"{" * 100_000, b"[" * 100_000])
def test_what_is_no_file_at_all_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(ConfigError, match="no file of retrieval heads"):
        load(tmp_path / "x", model_id=MODEL, layers=LAYERS, shapes=SHAPES)


@pytest.mark.parametrize("kind", ["pipe", "folder", "too large"])
def test_what_is_no_ordinary_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"x is no file of retrieval heads.*kvflash-run calibrate"):
        load(path, model_id=MODEL, layers=LAYERS, shapes=SHAPES)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    yield from staged(monkeypatch)


@pytest.mark.parametrize("kind", ["pipe", "folder", "below a file"])
def test_a_result_that_cannot_be_written_is_said_before_the_model_is_loaded(
    kind: str, cli: Stage, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        path = path / "heads.json"
    result = cli("calibrate", "m.gguf", "--save", path)
    assert str(tmp_path / "x") in " ".join(result.stderr.split())
    assert (result.exit_code in (1, 2), cli.made) == (True, [])


def test_a_cache_folder_that_cannot_be_made_is_said_before_the_model_is_loaded(
    cli: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVFLASH_HEADS", str(tmp_path / "file"))
    result = cli("calibrate", "m.gguf")
    assert (result.exit_code, cli.made) == (1, [])
    assert f"{tmp_path}/file" in " ".join(result.stderr.split())
    assert "--save" in result.stderr


def test_the_question_is_what_the_model_is_asked() -> None:
    assert question("Who?") == "\n\nQuestion: Who?\nAnswer:"
    assert choice.MAX_HEADS >= 3
