"""The bench of acceptance on the trained models: in a pool that pages, and in one that need not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.harness import TEXT
from support.inside import inside

from kvflash_bench import main
from kvflash_ggml.arrays import common_prefix

pytestmark = pytest.mark.usefixtures("known_heads")

OPTIONS = {"n_batch": 256, "n_ubatch": 256, "n_threads": 1, "n_threads_batch": 1, "heads": None}


def rows(model: Path, *args: Any) -> list[dict[str, Any]]:
    words = ("acceptance", model, *args, "--trials", 1, "--depths", 20, "--text", TEXT, "-ub", 256, "-t", 1)
    result = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])["rows"]
    return found


@pytest.mark.parametrize(("kind", "head"), [("dense", "eagle3"), ("hybrid", "mtp")])
def test_an_answer_goes_on_as_it_is_forced_to(kind: str, head: str, models: dict[str, Path], loaded: None) -> None:
    """Forced to say what it would have said, the full cache accepts of each draft what comes."""
    from kvflash_bench import accepting

    model, name = str(models[kind]), f"draft-{head}={models[head]}"
    plan = accepting.Plan(
        types=(name,), tasks=("single",), contexts=(600,), drafts=3, tokens=20, trials=1, depths=(0.5,), window=256
    )  # fmt: skip
    (text,) = accepting._texts(model, plan, 600, TEXT.read_text(), OPTIONS)
    with accepting._opened(model, plan, 600, name, OPTIONS) as llm:
        assert inside(llm).speculator.drafters[0].wants.newest == 256 + 1
        walk = accepting._walk(llm, text, plan)
        assert llm.input_ids[: llm.n_tokens].tolist() == [*text.prompt, *text.goes_on]
    comes = [*text.goes_on[1:], walk.chosen[-1]]
    assert walk.chosen == comes
    whole = walk.drafts[: len(comes) - plan.drafts]
    accepted = [common_prefix(draft.tokens, comes[at:]) for at, draft in enumerate(whole) if draft is not None]
    assert 0 < sum(accepted) <= walk.tally.accepted <= sum(accepted) + plan.drafts**2
    assert walk.tally.steps == len(comes)


def test_a_pool_that_holds_the_text_accepts_what_the_full_cache_does(models: dict[str, Path], loaded: None) -> None:
    name = f"draft-eagle3={models['eagle3']}"
    found = rows(
        models["dense"], "--types", name, "--contexts", 600, "--pools", 1536, "--tokens", 12, "--crossed"
    )  # fmt: skip
    assert [row["task"] for row in found] == ["text", "single"]
    for row in found:
        assert row["places"] == 12
        assert row["share"] == row["full"] > 0
        assert (row["agree"], row["points"], row["target"], row["drafts"], row["page_ins"]) == (1, 0, 0, 0, 0)


def test_pages_come_back_in_a_pool(models: dict[str, Path], loaded: None) -> None:
    (row,) = rows(
        models["dense"], "--types", "ngram", "--contexts", "2K", "--pools", 512, "--tokens", 12, "--tasks", "single"
    )  # fmt: skip
    assert row["policy"] == "qk:exact"
    assert row["read_page_ins"] + row["page_ins"] > 0
    assert row["share"] > 0
    assert row["target"] is row["drafts"] is None


def test_what_the_pool_does_not_know_it_does_not_accept(models: dict[str, Path], loaded: None) -> None:
    """The text drafts the number that is asked for, wherever it is; the pool has forgotten it."""
    (row,) = rows(
        models["dense"], "--types", "ngram", "--contexts", "2K", "--pools", 512, "--tokens", 12, "--tasks", "single",
        "--policies", "lru", "--crossed",
    )  # fmt: skip
    assert row["points"] < -20
    assert row["agree"] < 0.8
    assert row["drafts"] == 0, "what the text drafts does not depend on what is in the pool"
    assert row["target"] == row["points"]


def test_who_drafts_nothing_is_named(models: dict[str, Path], loaded: None) -> None:
    words = ["acceptance", str(models["dense"]), "--types", "ngram,none", "--text", str(TEXT)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "'none' drafts nothing" in result.output
