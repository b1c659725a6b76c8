"""The bench of several sequences on a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvflash_bench import main

pytestmark = pytest.mark.usefixtures("known_heads")


def measured(model: Path, *options: str) -> dict[str, Any]:
    line = ["seats", str(model), "-t", "1", "--repeats", "1", *options]
    result = CliRunner().invoke(main, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return document


def test_sequences_decode_together(models: dict[str, Path], loaded: None) -> None:
    shape = ("--batches", "1,3", "--length", "700", "--share", "512", "--steps", "40")
    one, three = measured(models["dense"], "--questions", "decode", *shape)["decode"]
    assert (one["sequences"], three["sequences"]) == (1, 3)
    assert one["gain"] == 1
    assert three["gain"] == three["tps"] / one["tps"] > 0
    assert three["python_us"] > 0
    assert one["stock_tps"] is one["of_stock"] is one["stock_gain"] is None


def test_long_texts_decode_together(models: dict[str, Path], loaded: None) -> None:
    shape = ("--batches", "1,3", "--lengths", "4K", "--share", "512", "--steps", "40")
    rows = measured(models["dense"], "--questions", "long", *shape)["long"]
    assert [(row["length"], row["sequences"]) for row in rows] == [(4096, 1), (4096, 3)]
    for row in rows:
        assert row["page_ins"] > 0
        assert row["of_full"] == row["tps"] / row["full_tps"] > 0
        assert row["full_kv_mib"] > 7 * row["kv_mib"] > 0
        assert row["swap_s"] > 0
        assert row["stock_tps"] is row["of_stock"] is None


def test_a_token_is_drawn_in_two_ways(models: dict[str, Path], loaded: None) -> None:
    rows = measured(models["dense"], "--questions", "draw", "--steps", "12")["draw"]
    assert [row["sampling"] for row in rows] == ["usual", "penalties", "likeliest"]
    for row in rows:
        assert (row["vocabulary"], row["draws"], row["same"]) == (4096, 12, 12)
        assert row["gain"] == row["whole_us"] / row["draw_us"] > 0


def test_a_question_is_answered_as_well_beside_others(models: dict[str, Path], loaded: None) -> None:
    shape = ("--batches", "2", "--lengths", "600,1K", "--share", "512", "--trials", "4", "--rules", "strict,elastic")
    rows = measured(models["dense"], "--questions", "recall", *shape)["recall"]
    assert [(row["sequences"], row["rule"]) for row in rows] == [(1, "strict"), (2, "strict"), (2, "elastic")]
    assert [(row["asked"], row["right"], row["same"], row["right_by_length"]) for row in rows] == [
        (4, 4, 4, [2, 2])
    ] * 3


def test_agents_and_one_client(models: dict[str, Path], loaded: None) -> None:
    shape = ("--batches", "2", "--length", "700", "--share", "512", "--turns", "2", "--prompt", "32", "--answer", "8")
    found = measured(models["dense"], "--questions", "agents,latency", *shape, "--serve", "--kvflash-tau 16")
    (agents,) = found["agents"]
    assert (agents["users"], agents["turns"], agents["lost"]) == (2, 8, 0)
    assert agents["right"] == agents["right_alone"] == 2
    assert 1 <= agents["read_ratio"] < 1.05
    one, two = found["latency"]
    assert (one["parallel"], two["parallel"], one["of_one"]) == (1, 2, 1)
    assert two["of_one"] == two["seconds"] / one["seconds"]
    assert two["cpu_of_one"] is None or two["cpu_of_one"] == two["cpu_s"] / one["cpu_s"]


def test_clients_of_a_server(models: dict[str, Path], loaded: None) -> None:
    (row,) = measured(models["dense"], "--questions", "clients", "--clients", "2", "--answer", "8")["clients"]
    assert (row["arm"], row["finished_alone"], row["finished"], row["equal"]) == ("ours", 2, 2, 2)
    assert row["gain"] > 0
    assert row["of_stock"] is None


def test_agents_are_replayed(models: dict[str, Path], loaded: None, tmp_path: Path) -> None:
    file = tmp_path / "sessions.jsonl"
    shape = ("--kv", "6M", "--users", "1,2", "--gaps", "0", "--answer", "4", "-t", "1")
    lengths = ("--start", "400", "--end", "600", "--known", "85", "--write", str(file))
    line = ["replay", str(models["dense"]), *shape]
    result = CliRunner().invoke(main, [*line, *lengths], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    one, two = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert (one["users"], one["requests"], one["finished"], one["why"]) == (1, 3, 3, [])
    assert (two["users"], two["requests"], two["finished"], two["why"]) == (2, 6, 6, [])
    assert 0.5 < one["read"] < 1.05, "a later turn reads its new tokens"
    again = CliRunner().invoke(main, [*line, "--sessions", str(file)], catch_exceptions=False)
    assert again.exit_code == 0, again.output
    (first, *_), _ = (row["asked"] for row in json.loads(again.stdout.splitlines()[-1])["rows"])
    assert first["prompt"] == one["asked"][0]["prompt"]


def test_a_killed_server_reads_a_turn_only(models: dict[str, Path], loaded: None) -> None:
    pytest.importorskip("kvflash_fleet")
    line = ["agent", str(models["dense"]), "--interfaces", "messages", "--system", "300", "--turns", "3", "-t", "1"]
    more = ["--result", "16", "--answer", "4", "--pool", "512", "--kill-before", "3"]
    result = CliRunner().invoke(main, [*line, *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    first, _, last = json.loads(result.stdout.splitlines()[-1])["interfaces"]["messages"]["turns"]
    assert first["read"] == first["prompt"] > 200
    assert last["prompt"] > first["prompt"]
    assert last["read"] < 100, "the text came from the store"
