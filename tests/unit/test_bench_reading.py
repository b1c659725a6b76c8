"""Documents that refer back to themselves, and the loss of what they repeat. No model is run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvflash_bench import main
from kvflash_bench.asks import Setting
from kvflash_bench.outcomes import Arm
from kvflash_bench.reading import Reading, losses_at, summary
from kvflash_bench.references import AGAIN, ENTRIES, FIRST, PASSAGES, REFERENCES, WARM, refer
from kvflash_ggml.errors import ConfigError

TEXT = (Path(__file__).parents[1] / "text" / "stdlib-docs.txt").read_text(encoding="utf-8")[:200_000]
PIECE = re.compile(r"[A-Za-z]{1,5}|\d| ?[^\sA-Za-z\d]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s")


def pieces(text: str) -> list[str]:
    return PIECE.findall(text)


SETTING = Setting(TEXT, pieces, 4000, ())


@pytest.mark.parametrize("kind", REFERENCES)
def test_what_is_counted_has_stood_before(kind):
    for reference in refer(kind, SETTING, seed=3):
        ids = pieces(reference.document)
        assert len(ids) == 4000
        for lo, hi in reference.spans:
            repeated = "".join(ids[lo:hi])
            assert repeated in "".join(ids[: int(AGAIN * 4000) - 100])


@pytest.mark.parametrize("kind", REFERENCES)
def test_the_end_of_the_document_is_not_counted(kind):
    for reference in refer(kind, SETTING, seed=4):
        assert max(hi for _, hi in reference.spans) < 4000 - 64


@pytest.mark.parametrize("kind", REFERENCES)
def test_the_seed_decides(kind):
    assert refer(kind, SETTING, seed=1) == refer(kind, SETTING, seed=1)
    assert refer(kind, SETTING, seed=1) != refer(kind, SETTING, seed=2)


def test_a_copy_for_each_size():
    made = refer("copy", SETTING, seed=2)
    for size, reference in zip(PASSAGES, made, strict=True):
        assert reference.label == f"{size} tokens"
        ((lo, hi),) = reference.spans
        assert size - WARM - 2 <= hi - lo < size + 60


def test_a_table_stands_in_one_place_and_is_asserted_in_another_order():
    (reference,) = refer("table", SETTING, seed=2)
    given = re.findall(r"^(\w+) = (\d{7})$", reference.document, re.M)
    asserted = re.findall(r"^assert (\w+) == (\d{7})$", reference.document, re.M)
    assert len(given) == ENTRIES
    assert given != asserted
    assert sorted(given) == sorted(asserted)
    ids = pieces(reference.document)
    assert ["".join(ids[lo:hi]) for lo, hi in reference.spans] == [value for _, value in asserted]
    first = len(pieces(reference.document[: reference.document.index(given[0][0])]))
    assert first == pytest.approx(FIRST * 4000, abs=200)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="there is no kind 'essay': use one of copy"):
        refer("essay", SETTING, seed=0)


def test_losses():
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]], np.float32))
    losses, right = losses_at(logits, [0, 0, 1, 1], [(1, 2), (2, 4)])
    np.testing.assert_allclose(losses, -np.log([0.5, 0.8, 0.2]), rtol=1e-6)
    assert right.tolist() == [True, True, False]


def reading(**changes):
    made = dict(task="copy", label="a", seed=0, tokens=9, nats=1.0, right=0.5, page_ins=4, seconds=2.0)
    return Reading(**(made | changes))


def test_summary():
    arm = Arm(policy="qk", context=8192, pool=512)
    rows = summary(arm, [reading(), reading(nats=2.0, right=1.0), reading(label="b")], reselect=True)
    assert [(row["label"], row["trials"], row["nats"], row["right"]) for row in rows] == [
        ("a", 2, 1.5, 0.75),
        ("b", 1, 1.0, 0.5),
    ]
    assert rows[0]["error"] == pytest.approx(0.5)
    assert rows[1]["error"] == 0
    assert rows[0]["prefill_tps"] == 4096
    assert rows[0]["reselect"] is True


def test_a_missing_text_is_named(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"")
    (tmp_path / "t.txt").write_bytes(b"\xff")
    options = ["reading", str(tmp_path / "m.gguf"), "--text", str(tmp_path / "t.txt")]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 1
    assert "cannot read the text" in result.output
