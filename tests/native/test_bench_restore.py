"""The restore bench on a trained model: what is restored answers as what was not interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvflash_bench import main

pytestmark = pytest.mark.usefixtures("known_heads")


@pytest.mark.parametrize("where", ["--same-process", "--fresh-process"])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_restored_session_answers_the_same(
    kind: str, where: str, models: dict[str, Path], tmp_path: Path, loaded: None
) -> None:
    line = ["restore", models[kind], "--contexts", "2K", "--pool", 768, "--repeats", 1, where, "--folder", tmp_path]
    result = CliRunner().invoke(main, [str(x) for x in (*line, "-t", 1)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["bench"] == "restore"
    (row,) = document["rows"]
    assert row["same_answer"]
    assert row["same_logits"]
    assert row["file_mib"] > 0
    assert list(tmp_path.iterdir()) == []
