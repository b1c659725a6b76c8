"""The recall bench on the trained models: the default policy answers where recency cannot."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.harness import TEXT, heads_of
from support.rounding import NATS, NEARLY_ALL

from kvflash_bench import main
from kvflash_ggml.calibration.run import calibrate
from kvflash_ggml.policy.base import ScoreRequest

pytestmark = pytest.mark.usefixtures("known_heads")


def bench(*args: Any) -> dict[str, Any]:
    texts = [word for path in sorted(TEXT.parent.glob("*.txt")) for word in ("--text", path)]
    result = CliRunner().invoke(main, [str(arg) for arg in (*args, *texts, "-t", 1)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return data


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_the_default_policy_recalls(kind: str, models: dict[str, Path], loaded: None) -> None:
    data = bench(
        "recall", models[kind], "--contexts", "2K", "--residency", "25", "--policies", "qk,lru",
        "--tasks", "multikey4", "--depths", "10,40", "--trials", 3, "--seed", 5,
    )  # fmt: skip
    assert data["bench"] == "recall"
    hits = {(row["policy"], row["label"]): row["hits"] for row in data["rows"]}
    assert hits["full", "10%"] == hits["full", "40%"] == 3
    assert hits["qk", "10%"] + hits["qk", "40%"] >= 5
    assert hits["lru", "10%"] + hits["lru", "40%"] <= 1
    recalled = [row for row in data["rows"] if row["policy"] == "qk"]
    assert all(row["page_ins"] > 0 and row["look_ms"] > 0 for row in recalled)
    assert len(data["outcomes"]) == 18


def test_a_question_in_chat_form_is_seen_past_its_template(models: dict[str, Path], loaded: None) -> None:
    data = bench(
        "recall", models["dense"], "--contexts", "2K", "--residency", "25", "--policies", "qk", "--no-full",
        "--tasks", "chat", "--depths", "10,40", "--trials", 3, "--seed", 5,
    )  # fmt: skip
    assert sum(row["hits"] for row in data["rows"]) >= 5


def test_scores_rank_the_answer(models: dict[str, Path], loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def known(*args: Any, **keywords: Any) -> Any:
        signature(calibrate).bind(*args, **keywords)  # it could be called so
        return heads_of(models["dense"])

    monkeypatch.setattr("kvflash_bench.study.calibrate", known)
    data = bench(
        "scores", models["dense"], "--contexts", "2K", "--residency", "25", "--tasks", "multikey4",
        "--depths", "10,40", "--trials", 2, "--seed", 5,
    )  # fmt: skip
    rows = {row["variant"]: row for row in data["rows"]}
    assert rows["qk"]["top 8%"] == rows["oracle"]["top 8%"] == 1
    assert rows["qk-mean"]["mean rank"] > rows["qk"]["mean rank"]
    assert all(row["trials"] == 4 for row in rows.values())


def test_columns_give_what_the_engine_gives(models: dict[str, Path], loaded: None, tokens: Any) -> None:
    """What the study computes once for all scorers is what each of them would be given by itself."""
    from kvflash_bench.study import Capture, Columns
    from kvflash_ggml import Llama
    from kvflash_ggml.policy.heads import every_head, newest

    capture = Capture(rows=16)
    llm = Llama(
        str(models["hybrid"]), n_ctx=1536, kvflash=512, kvflash_policy=capture, n_threads=1, n_threads_batch=1,
        n_batch=256, n_ubatch=256, verbose=False,
    )  # fmt: skip
    llm.eval(tokens[:1200].tolist())
    request, keys = capture.request, capture.keys
    assert isinstance(request, ScoreRequest)
    assert keys is not None
    assert request.rows == 16
    columns = Columns(keys, request)
    last = newest(request, 4, keys.shapes)
    assert np.array_equal(columns.score_keys([5, 2], last), keys.score_keys([5, 2], last))
    some = every_head(keys.shapes)[1:4]
    assert np.array_equal(columns.score_keys([5, 2], last, some), keys.score_keys([5, 2], last, some))
    llm.close()


def test_reselection_while_reading_finds_what_a_text_refers_to(models: dict[str, Path], loaded: None) -> None:
    data = bench(
        "reading", models["dense"], "--contexts", "2K", "--residency", "25", "--tasks", "copy", "--trials", 1,
        "-ub", 64,
    )  # fmt: skip
    nats = {(row["policy"], row["reselect"]): row["nats"] for row in data["rows"] if row["label"] == "128 tokens"}
    assert nats["full", False] - NEARLY_ALL.here < nats["qk", True] < nats["qk", False] - 1
    assert nats["qk", False] == nats["lru", False]
    assert abs(nats["qk:exact", False] - nats["full", False]) <= NATS.here
    assert len(data["rows"]) == 10


def test_loss_beside_the_full_cache(models: dict[str, Path], loaded: None) -> None:
    data = bench("loss", models["dense"], "--contexts", "1K", "--pools", "512,2K", "--documents", 2, "--tokens", 40)
    rows = {(row["policy"], row["pool"]): row for row in data["rows"]}
    assert set(rows) == {("full", None), *((name, pool) for name in ("qk:exact", "qk", "lru") for pool in (512, 2048))}
    full = rows.pop(("full", None))
    assert 0 < full["nats"] < 5
    for (_, pool), row in rows.items():
        assert row["more"] == pytest.approx(row["nats"] - full["nats"])
        whole = pool == 2048
        assert (row["more"] == 0) == whole
        assert row["agree"] == 1 or not whole
    assert rows["qk", 512]["page_ins"] > 0


@pytest.mark.parametrize("ranker", ["qk", "drafter"])
def test_previews_answer_from_a_part(ranker: str, models: dict[str, Path], loaded: None) -> None:
    data = bench(
        "recall", models["dense"], "--contexts", "3K", "--pools", "1K", "--policies", f"{ranker}:preview15",
        "--tasks", "multikey4", "--depths", "10,60", "--trials", 2, "--seed", 5, "--drafter", models["small"],
    )  # fmt: skip
    made = [row for row in data["rows"] if row["policy"] != "full"]
    assert sum(row["hits"] for row in made) >= 3
    assert all(192 < row["read"] <= 0.15 * 3200 and row["read_cpu_s"] > 0 for row in made)
    assert sum(row["found"] for row in made) >= 3
    assert sum(row["same"] for row in made) >= 3
    read = {row["policy"]: row["read"] for row in data["rows"]}
    assert read["full"] > 3000


def test_a_preview_of_almost_nothing_finds_nothing(models: dict[str, Path], loaded: None) -> None:
    data = bench(
        "recall", models["dense"], "--contexts", "3K", "--pools", "1K", "--policies", "qk:preview2", "--no-full",
        "--tasks", "multikey4", "--depths", "30", "--trials", 2, "--seed", 5,
    )  # fmt: skip
    assert [(row["read"], row["found"], row["hits"]) for row in data["rows"]] == [(192, 0, 0)]


def test_rulers_tasks_by_every_arm(models: dict[str, Path], loaded: None, tmp_path: Path) -> None:
    kept = tmp_path / "samples.jsonl"
    line = (
        "ruler", models["dense"], "--contexts", "2K", "--pools", "512", "--policies", "qk:exact,lru", "--tasks",
        "niah_multikey_2,qa_1", "--answers", "pool,lossless", "--samples", 1, "--out", kept,
    )  # fmt: skip
    data = bench(*line)
    assert data["bench"] == "ruler"
    samples = {(one["way"], one["task"]): one for one in data["samples"]}
    names = ["full cache", "512 qk:exact", "512 qk:exact, lossless", "512 lru"]
    assert list(dict.fromkeys(way for way, _ in samples)) == [row["way"] for row in data["rows"]] == names
    for task in ("niah_multikey_2", "qa_1"):
        full, pool, lossless, lru = (samples[name, task] for name in names)
        assert all(
            (one["answers"], one["tokens"]) == (full["answers"], full["tokens"]) for one in (pool, lossless, lru)
        )
        assert 1500 < full["tokens"] <= 2048
        assert pool["gold"] == lru["gold"] != []
        assert lru["missing"] == lru["never"] != []
        assert lossless["reply"] == full["reply"]
    assert samples["512 qk:exact", "qa_1"]["missing"] == []
    assert [samples[name, "qa_1"]["score"] for name in names] == [1, 1, 1, 0]
    assert [row["worse"] for row in data["rows"]] == [None, 0, 0, 1]
    before = kept.read_text()
    assert bench(*line)["samples"] == data["samples"]
    assert kept.read_text() == before, "what was finished is not asked again"


def test_longbenchs_own_files(models: dict[str, Path], loaded: None, tmp_path: Path) -> None:
    text = TEXT.read_text(encoding="utf-8")[:9000]
    fact = "The access code for silver harbor is 4820917."
    asked = {"input": "What is the access code for silver harbor?", "answers": ["4820917"], "all_classes": None}
    lines = [asked | {"context": f"{text[:at]}\n{fact}\n{text[at:]}"} for at in (1000, 5000)]
    (tmp_path / "hotpotqa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    code = {"input": "", "context": "def f(x):\n    return x\n" * 400, "answers": ["def f(x):"], "all_classes": None}
    (tmp_path / "lcc.jsonl").write_text(json.dumps(code) + "\n", encoding="utf-8")
    line = [
        "longbench", models["dense"], "--data", tmp_path, "--contexts", "3K", "--pools", "512", "--policies",
        "qk:exact,lru", "--out", tmp_path / "samples", "-t", 1,
    ]  # fmt: skip
    result = CliRunner().invoke(main, [str(word) for word in line], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout.splitlines()[-1])
    rows = {row["way"]: row for row in data["rows"]}
    assert list(rows) == ["full cache", "512 qk:exact", "512 lru"]
    assert all(set(row["tasks"]) == {"hotpotqa", "lcc"} for row in rows.values())
    assert rows["512 qk:exact"]["tasks"]["hotpotqa"] >= rows["full cache"]["tasks"]["hotpotqa"] > 0
    assert rows["512 lru"]["tasks"]["hotpotqa"] == 0
    tokens = {(one["task"], one["index"]): one["tokens"] for one in data["samples"]}
    assert tokens["hotpotqa", 0] <= 3072 - 32
    assert 2900 < tokens["lcc", 0] <= 3072 - 64, "its middle is left out"
