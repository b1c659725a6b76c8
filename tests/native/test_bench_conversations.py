"""The bench of conversations on a trained model: answers of lone runs, and an end by time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvflash_bench import main

KNOWN = pytest.mark.usefixtures("known_heads")


def measured(model: Path, *options: str) -> dict[str, Any]:
    line = ["conversations", str(model), "--count", "4", "--length", "600", "--turns", "2", "--answer", "4"]
    line += ["--pool", "512", "--park-memory", "1M", "-t", "1", *options]
    result = CliRunner().invoke(main, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return document


@KNOWN
@pytest.mark.parametrize("beside", ["0", "2"])
def test_answers_are_those_of_lone_runs(beside: str, models: dict[str, Path], loaded: None) -> None:
    found = measured(models["dense"], "--beside", beside)
    assert found["compared"] == found["equal"] == found["begun"] == 4
    assert found["answers_compared"] == found["answers_equal"] == found["requests"] == 8
    assert found["stored"] > 0
    assert found["lost"] == found["dropped"] == found["failed"] == found["lone_failed"] == 0
    assert 0 < found["rss_mib_first"] <= found["rss_mib_most"]


@KNOWN
def test_images_that_are_spilled(models: dict[str, Path], loaded: None) -> None:
    found = measured(models["dense"], "--park-memory", "64M", "--host-limit", "2M")
    assert found["equal"] == 4
    assert found["stored"] == 0
    assert 0 < found["heap_mib"] <= 2 < found["spilled_mib"]


@KNOWN
def test_what_was_done_until_then_is_reported(models: dict[str, Path], loaded: None) -> None:
    found = measured(models["dense"], "--seconds", "0")
    assert found["conversations"] == 4
    assert found["requests"] == found["begun"] == found["compared"] == 0


@KNOWN
@pytest.mark.slow
def test_servers_that_share_a_store(models: dict[str, Path], loaded: None) -> None:
    """Turns go to any of three servers, of which some are killed and some told to end: no answer is another one, but
    for those whose text a server had not written, and another one has read again.
    """
    found = measured(  # texts so long that they are announced: whoever looks for one waits until it is written
        models["dense"], "--count", "5", "--length", "1200", "--servers", "3", "--kill-every", "6", "--end-every", "4"
    )  # fmt: skip
    assert found["requests"] == 10
    assert found["answers_compared"] == found["answers_equal"] == 10 - found["reread"]
    assert found["reread"] < 5
    assert (found["killed"], found["ended"]) == (1, 2)
    assert found["store_takeovers"] > 0
