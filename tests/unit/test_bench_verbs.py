"""A verb of the bench is made from the fields of its plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import gguf
import pytest
from click.testing import CliRunner, Result

from kvflash_bench import busy, main
from kvflash_bench.options import Fractions, Number, Numbers
from kvflash_bench.plans import Busy
from kvflash_bench.verb import Plan, option, verb
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.native import library


@dataclass(frozen=True, kw_only=True)
class Weighing(Plan):
    """How heavy is it?"""

    sizes: tuple[int, ...] = option("1K,2", "Of what is weighed.", type=Numbers())
    pool: int = option("2K", "Tokens.", type=Number("one pool"))
    shares: tuple[float, ...] = option("50,100", type=Fractions())
    rest: tuple[int, ...] = option((), type=Numbers())
    repeats: int = option(3, names=("-r", "--repeats"))
    full: bool = option(True)
    wet: bool = option(False)
    seed: int = 7

    def check(self) -> None:
        if self.repeats > 9:
            raise ConfigError(f"{self.repeats} repeats are too many: 9 at most")


Seen = list[tuple[str, Weighing, dict[str, Any]]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """What the measurement was called with."""
    calls: Seen = []
    room = ModuleType("kvflash_bench.weighing")
    room.run = lambda *given: calls.append(given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, room.__name__, room)
    monkeypatch.setattr(library, "load", lambda: None)
    return iter([calls])


def weigh(tmp_path: Path, *words: str, where: bool = True) -> Result:
    model = tmp_path / "m.gguf"
    model.touch()
    return CliRunner().invoke(verb("weigh", Weighing, "weighing", where=where), [str(model), *words])


def test_what_is_not_typed_is_the_plans_default(seen: Iterator[Seen], tmp_path: Path) -> None:
    (calls,) = seen
    assert weigh(tmp_path).exit_code == 0
    ((model, plan, options),) = calls
    assert model == str(tmp_path / "m.gguf")
    assert plan == Weighing()
    assert (plan.sizes, plan.pool, plan.shares, plan.full) == ((1024, 2), 2048, (0.5, 1.0), True)
    assert options["n_batch"] == options["n_ubatch"] == 512


def test_what_is_typed_is_in_the_plan(seen: Iterator[Seen], tmp_path: Path) -> None:
    (calls,) = seen
    words = ("--sizes", "4K", "--pool", "512", "--rest", "1,2", "-r", "5", "--no-full", "--wet", "-t", "2")
    assert weigh(tmp_path, *words).exit_code == 0
    ((_, plan, options),) = calls
    assert plan == Weighing(sizes=(4096,), pool=512, rest=(1, 2), repeats=5, full=False, wet=True)
    assert options["n_threads"] == options["n_threads_batch"] == 2


def test_a_verb_without_a_place(seen: Iterator[Seen], tmp_path: Path) -> None:
    (calls,) = seen
    assert weigh(tmp_path, where=False).exit_code == 0
    assert calls[0][2] == {}
    assert weigh(tmp_path, "-t", "2", where=False).exit_code == 2


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--pool", "1K,2K"), 2, "one pool at a time"),
        (("--sizes", "x"), 2, "'--sizes'"),
        (("--seed", "1"), 2, "No such option"),
        (("-r", "10"), 1, "10 repeats are too many: 9 at most"),
    ],
)
def test_what_cannot_be_measured_is_told(
    words: tuple[str, ...], code: int, message: str, seen: Iterator[Seen], tmp_path: Path
) -> None:
    (calls,) = seen
    result = weigh(tmp_path, *words)
    assert (result.exit_code, calls) == (code, [])
    assert message.lower() in result.output.lower()


def test_the_plans_docstring_is_the_help() -> None:
    made = verb("weigh", Weighing, "weighing")
    text = made.get_help(click.Context(made))
    assert "How heavy is it?" in text
    assert "[default: 1K,2]" in text
    assert "--full / --no-full" in text


# --- busy cores


def test_the_part_of_the_speed_that_is_left() -> None:
    row = busy._row("ours", [busy.Pace(8, 2.0), busy.Pace(10, 3.0), busy.Pace(90, 4.0)], [busy.Pace(5, None)])
    assert (row["idle_tps"], row["busy_tps"], row["kept"]) == (10, 5, 0.5)
    assert (row["idle_cpu_ms"], row["busy_cpu_ms"], row["slowest_busy_tps"]) == (3.0, None, 5)


def test_a_way_to_wait_is_alone_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    with busy.waiting({"GOMP_SPINCOUNT": "5"}):
        assert {name: os.environ.get(name) for name in library.WAITING} == {
            "OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": "5", "KMP_BLOCKTIME": None,
        }  # fmt: skip
    assert (os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT")) == ("active", None)


def test_loops_end_with_their_block() -> None:
    with busy.looping(1) as (loop,):
        assert loop.poll() is None
    assert loop.returncode is not None


def test_ways_to_wait_are_known() -> None:
    Busy(ways=("ours", "1000")).check()
    with pytest.raises(click.BadParameter, match="'often' is no number, and none of ours, passive"):
        Busy(ways=("ours", "often")).check()


def test_a_random_model_has_the_vocabulary_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    line = ["random-model", str(path), "--shape", "tiny-moe", "--vocab", "300"]
    assert CliRunner().invoke(main, line).exit_code == 0
    tensors = {one.name: one.shape.tolist() for one in gguf.GGUFReader(path).tensors}
    assert tensors["token_embd.weight"] == tensors["output.weight"] == [256, 300]
