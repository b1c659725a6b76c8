"""The time left of a reading, from its first steps."""

from __future__ import annotations

import itertools

import pytest

from kvflash_ggml.cli import terminal
from kvflash_ggml.cli.terminal import Progress, ReadingTime

STEP = 512


def cost(n: int, own: float, seen: float) -> float:
    return own * n + seen * n**2


@pytest.mark.parametrize(("own", "seen"), [(1e-3, 0.0), (1e-3, 1e-7), (0.0, 1e-7)])
def test_it_follows_from_the_first_steps(own: float, seen: float) -> None:
    time = ReadingTime()
    for n in range(STEP, 4 * STEP + 1, STEP):
        time.add(n, cost(n, own, seen))
    assert time.seconds(65536) == pytest.approx(cost(65536, own, seen), rel=1e-6)
    pooled = cost(1024, own, seen) + (65536 - 1024) * (own + 2 * 1024 * seen)
    assert time.seconds(65536, seen=1024) == pytest.approx(pooled, rel=1e-6)


@pytest.mark.parametrize("times", [[0.4, 0.7, 0.9, 1.0], [0.0, 0.1, 0.5, 2.0], [1.0, 1.0, 1.0, 1.0]])
def test_it_never_runs_backwards(times: list[float]) -> None:
    time = ReadingTime()
    for n, seconds in zip(itertools.count(STEP, STEP), times, strict=False):
        time.add(n, seconds)
        assert 0 <= time.seconds(STEP) <= time.seconds(2 * STEP) <= time.seconds(65536)


def test_a_single_size_is_enough() -> None:
    time = ReadingTime()
    time.add(STEP, 1.0)
    assert time.seconds(2 * STEP) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("pool", "exact", "told"),
    [
        (1024, True, "left (--kvflash-reading pool: 1:19 in all)"),
        (1024, False, ", 1:16 left"),
        (None, False, ", 8:13 left"),
        (131072, True, ", 8:13 left"),
    ],
)
def test_what_takes_long_names_what_is_faster(
    pool: int | None, exact: bool, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 0.0
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: clock)
    progress = Progress(shown=True, pool=pool, exact=exact)
    for n in range(STEP, 5 * STEP, STEP):
        clock = cost(n, 1e-3, 1e-7)
        progress.update(n, 65536)
    last = capsys.readouterr().err.split("\r")[-1]
    assert told in last
    assert ("--kvflash-reading" in last) is ("--kvflash-reading" in told)
