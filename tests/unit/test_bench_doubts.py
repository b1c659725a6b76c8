"""Signals of an answer: what is noted of a pool while it answers, and how well it tells lost answers from kept ones."""

from __future__ import annotations

import numpy as np
import pytest

from kvflash_bench.doubts import Answer, Signals, Watch, against, counts, threshold, told
from kvflash_ggml.trace.events import Change


def note(watch, length, resident, recalled=(), asked=None, mass=None, generating=True):
    scores = None if asked is None else np.log(np.array([asked.get(chunk, 0.01) for chunk in range(10)]))
    watch.changed(
        Change(
            length=length, resident=resident, recalled=recalled, scores=scores, evicted_mass=mass, generating=generating
        )
    )


def test_what_was_not_there_in_time_and_what_stays_away():
    watch = Watch()
    note(watch, 640, (0, 1, 8, 9), generating=False)
    note(watch, 641, (0, 5, 8, 9), [5], {5: 0.6, 6: 0.3}, 0.2)
    note(watch, 642, (0, 5, 8, 9), (), {5: 0.9}, 0.1)
    note(watch, 643, (0, 1, 8, 9), [1], {1: 0.5})
    note(watch, 644, (0, 5, 8, 9), [5])
    found = watch.take()
    assert found.late == pytest.approx(0.6)
    assert found.left == pytest.approx(0.3)
    assert found.most == 0.2
    assert found.mean == pytest.approx(0.1)
    assert found.moves == 3 / 4
    assert found.again == 2 / 4, "1 and 5 had left within the answer"
    assert watch.take() == Signals(mean=0, most=0, late=0, left=0, moves=0, again=0)


class Reader:
    """A full cache that finds token t + 1 likeliest after t, by t / 10 nats over all others."""

    def __init__(self, tokens):
        self.input_ids = np.zeros(32, np.intc)
        self.n_tokens = 0
        self.calls = []
        self.eval(tokens)

    def eval(self, tokens):
        assert tokens, "logits of nothing"
        self.calls.append(len(tokens))
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)

    def newest_logits(self):
        newest = self.input_ids[self.n_tokens - 1]
        row = np.zeros(64, np.float32)
        row[newest + 1] = newest / 10
        return row


@pytest.mark.parametrize("known", [[9], [1, 2, 3], [1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 6, 7, 9, 9]])
def test_the_whole_text_says_which_token_it_would_not_have_drawn(known):
    """Whatever it has read before: it reads what differs, and has the logits in front of the answer."""
    full = Reader(known)
    assert against(full, np.array([1, 2, 3, 4, 5, 6, 7], np.int32), 4) == 0
    assert against(full, np.array([1, 2, 3, 4, 5, 9, 7, 8], np.int32), 4) == pytest.approx(0.9)
    assert against(full, np.array([1, 2, 3, 4, 5, 9, 7, 8], np.int32), 7) == 0
    assert full.input_ids[: full.n_tokens].tolist() == [1, 2, 3, 4, 5, 9, 7, 8]


def answer(mass, *, correct=False, fact_set="choose", full=True):
    signals = Signals(mean=mass, most=0, late=0, left=0, moves=0, again=0)
    return Answer(fact_set=fact_set, task="t", pool=512, tau=0, full=full, correct=correct, signals=signals)


def test_a_threshold_is_chosen_on_one_set_and_counted_on_the_other():
    chosen = [answer(x) for x in (0.4, 0.5, 0.6)] + [answer(x, correct=True) for x in (0.1, 0.3, 0.35)]
    assert threshold(chosen, "mean") == 0.4
    other = [answer(0.45, fact_set="confirm"), answer(0.2, fact_set="confirm")]
    other += [answer(x, correct=True, fact_set="confirm") for x in (0.1, 0.41)]
    row = told(chosen + other + [answer(0.9, full=False, fact_set="confirm")], "mean")
    assert row == {
        "signal": "mean", "AUC choose": 1.0, "AUC confirm": 0.75, "threshold": 0.4, "precision": 0.5, "hits": 1, "of": 2
    }  # fmt: skip
    assert counts(chosen, "t") == {"task": "t", "answers": 6, "full": 6, "lost": 3, "found": 0}


def test_a_signal_that_tells_nothing_has_no_threshold():
    none = [answer(0.1), answer(0.9, correct=True)]
    assert threshold(none, "mean") is None
    row = told(none, "mean")
    assert (row["threshold"], row["precision"], row["hits"]) == (None, None, 0)
