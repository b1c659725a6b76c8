"""The arithmetic of the restore bench. No model is run."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from click.testing import CliRunner

from kvflash_bench import main

bench = importlib.import_module("kvflash_bench.restore")  # the package has a command of that name


def row(*warm: Any) -> dict[str, Any]:
    plan = bench.Plan(
        context=1000, pool=512, policy="qk", question=64, answer=3, repeats=len(warm), compress=False, options={}
    )
    cold = bench.Cold(
        pool=512, read_s=10.0, turn_s=2.0, save_blocking_s=0.1, save_s=1.0, file_bytes=3 << 20, answer=[1, 2, 3],
        logits=b"abc", device="CPU",
    )  # fmt: skip
    made: dict[str, Any] = bench.row(plan, cold, list(warm))
    return made


def warm(restore_s: float, turn_s: float, answer: tuple[int, ...] = (1, 2, 3), logits: bytes = b"abc") -> Any:
    return bench.Warm(identify_s=restore_s / 2, restore_s=restore_s, turn_s=turn_s, answer=list(answer), logits=logits)


def test_a_row_has_medians_and_ratios() -> None:
    it = row(warm(0.1, 0.4), warm(0.2, 0.4), warm(0.9, 0.9))
    assert (it["restore_s"], it["question_s"], it["question_tps"]) == (0.2, 0.4, pytest.approx(160))
    assert it["warm_turn_s"] == pytest.approx(0.6)
    assert it["cold_turn_s"] == 12
    assert it["identify_s"] == 0.1
    assert it["ratio"] == pytest.approx(20)
    assert (it["pool"], it["read_tps"]) == (512, 100)
    assert it["file_mib"] == 3
    assert it["same_answer"] is it["same_logits"] is True


def test_one_answer_that_differs_is_told() -> None:
    it = row(warm(0.1, 0.4), warm(0.1, 0.4, answer=(1, 2, 4)))
    assert (it["same_answer"], it["same_logits"]) == (False, True)
    assert row(warm(0.1, 0.4, logits=b"abd"))["same_logits"] is False


def test_one_pool_at_a_time(tmp_path: Any) -> None:
    (tmp_path / "m.gguf").touch()
    result = CliRunner().invoke(main, ["restore", str(tmp_path / "m.gguf"), "--pool", "1K,2K"])
    assert result.exit_code == 2
    assert "one pool at a time" in result.output
