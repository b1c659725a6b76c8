"""The arithmetic around recall runs: arms, intervals, tables, curves. No model is run."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from kvflash_bench import main, plot
from kvflash_bench.outcomes import HEADER, Arm, Outcome, Read, arms, cells, summary, verdicts, wilson
from kvflash_ggml import pip_line
from kvflash_ggml.errors import ConfigError


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(16, 16, 0.806, 1.0), (0, 16, 0.0, 0.194), (8, 16, 0.280, 0.720), (15, 16, 0.717, 0.989), (0, 0, 0.0, 1.0)],
)
def test_wilson(hits, trials, low, high):
    assert wilson(hits, trials) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))


def test_arms():
    made = arms((8192, 32768), (6.25, 3), ("qk", "lru"))
    assert [(a.context, a.policy, a.pool) for a in made] == [
        (8192, "full", None),
        (8192, "qk", 512),
        (8192, "lru", 512),
        (32768, "full", None),
        (32768, "qk", 2048),
        (32768, "lru", 2048),
        (32768, "qk", 1024),
        (32768, "lru", 1024),
    ]
    assert made[0].residency == 100
    assert made[1].residency == 6.25
    assert [a.note for a in made if a.note] == ["3 % is below the minimum of 512"] * 2
    assert all(a.pool == 512 and a.asked == 6.25 for a in made if a.note)


def test_a_pool_below_the_minimum_says_so():
    (arm,) = arms((8192,), (3,), ("qk",), full=False)
    assert (arm.pool, arm.note, arm.asked) == (512, "3 % is below the minimum of 512", 3)


def test_pools_in_tokens_stand_beside_those_in_per_cent():
    made = arms((8192,), (6.25,), ("qk",), pools=(512, 1000, 100), full=False)
    assert [(a.pool, a.asked, a.note) for a in made] == [
        (512, 6.25, "100 is below the minimum of 512"),
        (1024, pytest.approx(12.2, abs=0.1), ""),
    ]


def outcome(**changes):
    made = dict(
        task="single", label="10%", seed=0, correct=True, answer="1", reply="1", resident=None, page_ins=2, looks=1,
        look_seconds=0.002, decode_tokens=8, decode_seconds=0.5,
    )  # fmt: skip
    return Outcome(**(made | changes))


def test_summary():
    arm = Arm(policy="qk", context=8192, pool=512)
    outcomes = [outcome(), outcome(correct=False, page_ins=4), outcome(label="50%")]
    rows = summary(arm, outcomes, [Read(tokens=8000, seconds=4.0, page_ins=7)])
    assert [(r["task"], r["label"], r["hits"], r["trials"]) for r in rows] == [
        ("single", "10%", 1, 2),
        ("single", "50%", 1, 1),
    ]
    assert rows[0]["page_ins"] == 3
    assert rows[0]["read_page_ins"] == 7
    assert rows[0]["look_ms"] == pytest.approx(2)
    assert rows[0]["prefill_tps"] == 2000
    assert rows[0]["decode_tps"] == 16
    assert len(cells(rows[0])) == len(HEADER)


def test_what_the_full_cache_knows_is_counted_by_itself():
    arm = Arm(policy="qk", context=8192, pool=512)
    full = [outcome(answer="a"), outcome(answer="b"), outcome(answer="c", correct=False)]
    found = [
        outcome(answer="a", resident=True),
        outcome(answer="b", resident=False, correct=False),
        outcome(answer="c", resident=True),
        outcome(answer="a", seed=1, resident=None),
    ]
    (row,) = summary(arm, found, [], full)
    assert (row["hits"], row["trials"]) == (3, 4)
    assert (row["kept"], row["known"]) == (1, 2)
    assert (row["found"], row["placed"]) == (2, 3)
    shown = dict(zip(HEADER, cells(row), strict=True))
    assert (shown["pool"], shown["of full's"], shown["resident"]) == (512, "1/2", "2/3")


def test_without_the_full_cache_nothing_is_said_of_it():
    (row,) = summary(Arm(policy="qk", context=8192, pool=512), [outcome()], [])
    shown = dict(zip(HEADER, cells(row), strict=True))
    assert shown["of full's"] == shown["resident"] == "-"


def test_a_task_the_full_cache_fails_is_named():
    full = Arm(policy="full", context=8192)
    rows = summary(full, [outcome(), outcome(task="words", label="all", correct=False)], [])
    (line,) = verdicts(rows)
    assert line.startswith("words all at 8192: the full cache itself answers 0 of 1")


def rows():
    full, pool = Arm(policy="full", context=8192), Arm(policy="qk", context=8192, pool=512)
    good, bad = outcome(), outcome(task="words", label="all", correct=False)
    return summary(full, [good, bad], []) + summary(pool, [good, good, outcome(correct=False), bad], [])


def test_curves_leave_out_what_the_full_cache_fails():
    assert plot.points(rows()) == {(8192, "full"): [(100.0, 1, 1)], (8192, "qk"): [(6.25, 2, 3)]}


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot.recall(rows(), tmp_path / "r.png", title="a model")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_no_picture_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=re.escape(pip_line.install("plot"))):
        plot.check()
    model = tmp_path / "m.gguf"
    model.write_bytes(b"")
    result = CliRunner().invoke(main, ["recall", str(model), "--plot", str(tmp_path / "r.png")])
    assert result.exit_code == 1
    assert "[plot]" in result.output


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--residency", "half"], "not a list of per cents"),
        (["--depths", "10,150"], "between 0 and 100"),
        (["--contexts", "8k,big"], "not a list of numbers"),
        (["--pools", "many"], "not a list of numbers"),
        (["--set", "test"], "'test' is not one of 'choose', 'confirm'"),
    ],
)
def test_what_is_typed_wrong_is_named(option, message, tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"")
    result = CliRunner().invoke(main, ["recall", str(model), *option])
    assert result.exit_code == 2
    assert message in result.output
