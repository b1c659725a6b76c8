"""The bench of drafts on trained models: they win what they are told to, and the text stays what it is."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.harness import TEXT

from kvflash_bench import main
from kvflash_ggml.errors import ConfigError

pytestmark = pytest.mark.usefixtures("known_heads")


def bench(*args: Any, verb: str = "spec") -> dict[str, Any]:
    result = CliRunner().invoke(main, [str(x) for x in (verb, *args, "-t", 1)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return document


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_wins_as_much_as_it_is_told_to(kind: str, models: dict[str, Path], loaded: None) -> None:
    document = bench(
        models[kind], "--depth", 200, "--pool", "1K", "--tokens", 100, "--widths", "2,6", "--accept", "1.5,4",
        "--repeats", 2,
    )  # fmt: skip
    assert document["bench"] == "spec"
    plain, two, six, more = document["points"]
    assert [(p["width"], p["accept"]) for p in document["points"]] == [(1, 1), (2, 1.5), (6, 1.5), (6, 4)]
    assert plain["won"] == plain["break_even"] == plain["speedup"] == 1
    assert plain["with_room"] > 0
    for point in (two, six, more):
        assert point["won"] == pytest.approx(point["accept"], rel=0.2)
        assert point["step_ms"] > 0
    assert all(point["same_text"] == 1 for point in document["points"])


def test_a_slow_drafter_has_more_to_win(models: dict[str, Path], loaded: None) -> None:
    document = bench(
        models["dense"], "--depth", "100,200", "--tokens", 40, "--widths", "4", "--accept", "3", "--draft-ms", 50,
        "--repeats", 1, "--no-bare",
    )  # fmt: skip
    plain, drafted, longer, again = document["points"]
    assert drafted["tps"] < 4 / 0.05
    assert drafted["break_even"] == pytest.approx((drafted["step_ms"] + 50) / plain["step_ms"], rel=0.01)
    assert (plain["depth"], longer["depth"]) == (100, 200)
    assert drafted["won"] == again["won"], "so that depths can be compared"


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_lossless_answers_are_drafted_by_the_pool(kind: str, models: dict[str, Path], loaded: None) -> None:
    document = bench(
        models[kind], "--depth", "1500", "--pool", 1024, "--tokens", 60, "--lossless", "2,5", "--right", "80,100",
        "--repeats", 1, "-ub", 128,
    )  # fmt: skip
    points = {(p["arm"], p["right"], round(p["drafts"])): p for p in document["points"] if p["arm"] != "chosen"}
    plain = [(name, None, 0) for name in ("full", "exact", "pool")]
    assert [*points][:3] == plain
    assert [p["arm"] for p in document["points"][-2:]] == ["chosen", "chosen"]
    for key in plain:
        assert points[key]["won"] == 1
    for right, drafts in ((0.8, 2), (1.0, 2), (0.8, 5), (1.0, 5)):
        point = points["lossless", right, drafts]
        assert point["won"] == pytest.approx(sum(right**n for n in range(drafts + 1)), rel=0.25)
        assert point["draft_ms"] > 0
        assert point["of_formula"] == pytest.approx(point["tps"] / point["formula_tps"])
        assert point["of_exact"] == pytest.approx(point["tps"] / points["exact", None, 0]["tps"])
    assert all(p["same_text"] == 1 for p in document["points"] if p["arm"] != "pool")


def test_somebody_drafts_for_the_pool(models: dict[str, Path], loaded: None) -> None:
    document = bench(
        models["hybrid"], "--depth", "1100", "--pool", 512, "--tokens", 40, "--lossless", "6", "--right", "90",
        "--source", "80", "--source-rows", 3, "--repeats", 1, "--no-full", "-ub", 128,
    )  # fmt: skip
    alone, nested = (p for p in document["points"] if p["arm"] == "lossless")
    assert (alone["source"], nested["source"]) == (None, 0.8)
    assert alone["won"] == nested["won"] > 1, "who drafts for the pool changes nothing of what it drafts"
    assert alone["pool_steps"] == alone["drafts"]
    assert nested["pool_steps"] == pytest.approx(alone["drafts"] / (1 + 0.8 + 0.8**2), rel=0.3)
    assert alone["same_text"] == nested["same_text"] == 1


def test_real_drafters_are_measured_beside_plain_decoding(models: dict[str, Path], loaded: None) -> None:
    document = bench(
        models["dense"], "--types", f"wrong,ngram,draft-eagle3={models['eagle3']}", "--passage", 40, "--depth", 170,
        "--pool", "1K", "--tokens", 120, "--repeats", 2, "--width", 4, "--text", TEXT, verb="drafters",
    )  # fmt: skip
    plain, wrong, ngram, eagle3 = document["outcomes"]
    assert plain["of_plain"] == 1
    assert plain["drafted"] == 0
    assert wrong["drafted"] > 0
    assert wrong["accepted"] == 0
    assert ngram["drafted"] > 0
    assert eagle3["drafted"] > 0
    assert all(one["same_text"] == 1 for one in document["outcomes"])


def test_models_of_random_weights_count(tmp_path: Path, loaded: None) -> None:
    """Each token is followed by the next one, whatever the rounding."""
    from kvflash_bench.shapes import SHAPES, write
    from kvflash_ggml import Llama

    path = tmp_path / "tiny.gguf"
    write(path, SHAPES["tiny"])
    llm = Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    assert [*islice(llm.generate([900, 30, 500], temp=0.0), 8)] == [*range(501, 509)]
    for asked in (lambda: llm.tokenize(b"text"), lambda: llm.detokenize([5]), lambda: llm("text")):
        with pytest.raises(ConfigError, match="no vocabulary"):
            asked()
    llm.close()


def test_models_of_random_weights_are_not_served(tmp_path: Path, loaded: None) -> None:
    """Llama.cpp would end the process at the first token's text."""
    from kvflash_bench.shapes import SHAPES, write
    from kvflash_ggml import Engine, Llama

    path = tmp_path / "tiny.gguf"
    write(path, SHAPES["tiny"])
    with Engine(Llama(str(path), n_ctx=256, kvflash=256, n_threads=1, n_threads_batch=1, verbose=False)) as engine:
        answers = engine.generate_many([[900, 30, 500], [7]], max_tokens=4)
    assert ["no vocabulary" in str(answer.error) for answer in answers] == [True, True]


def test_models_of_random_weights_read_and_write_text(tmp_path: Path, loaded: None) -> None:
    from kvflash_bench.shapes import SHAPES, write
    from kvflash_ggml import Llama

    path = tmp_path / "tiny.gguf"
    write(path, SHAPES["tiny"], words=True)
    llm = Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    text = "Größe: \t€ 5\n".encode()
    ids = llm.tokenize(text, add_bos=False)
    assert len(ids) == len(text)
    assert llm.detokenize(ids) == text
    first = ids[-1] + 1
    answer = llm(text.decode(), max_tokens=3, temperature=0.0)["choices"][0]["text"]
    assert answer == f" {first} {first + 1} {first + 2}"
    llm.close()


@pytest.mark.parametrize(("option", "value"), [("--accept", "many"), ("--pool", "1K,2K")])
def test_says_what_it_cannot_read(option: str, value: str, models: dict[str, Path]) -> None:
    result = CliRunner().invoke(main, ["spec", str(models["dense"]), option, value])
    assert result.exit_code == 2
    assert option in result.output
