"""Distributions beside the package: entry points lead to what they give, and where they are missing that is said."""

from __future__ import annotations

import importlib.metadata
import re
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvflash_ggml.cli import main
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.extensions import GROUP, extension

REPO = Path(__file__).parents[2]
MISSING = "kvflash-run store needs kvflash-fleet, which is not installed: pip install ./fleet in the checkout"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed beside the package."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())


@pytest.mark.parametrize("folder", ["router", "fleet"])
def test_entry_points_lead_to_what_is_there(folder: str) -> None:
    text = (REPO / folder / "pyproject.toml").read_text(encoding="utf-8")
    points = re.findall(r'(?m)^([\w-]+) = "(\w[\w.]+):(\w+)"$', text.partition(f'entry-points."{GROUP}"]\n')[2])
    assert points
    for name, module, value in points:
        assert extension(name, asked="", folder=folder) is getattr(import_module(module), value)


def test_a_missing_one_is_named(alone: None) -> None:
    with pytest.raises(ConfigError, match=re.escape("--x needs kvflash-y, which is not installed: pip install ./y")):
        extension("x", asked="--x", folder="y")


def test_a_missing_verb_is_listed_and_says_what_to_install(alone: None) -> None:
    result = CliRunner().invoke(main, ["store", "prune", "texts", "--dry-run"])
    assert (result.exit_code, MISSING in " ".join(result.stderr.split())) == (1, True), result.output
    assert re.search(
        r"(?m)^  store +kvflash-run store needs kvflash-fleet", CliRunner().invoke(main, ["--help"]).output
    )
    assert MISSING in " ".join(CliRunner().invoke(main, ["store", "--help"]).output.split())
