"""Policies of other distributions are found by their names."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvflash_ggml import policy
from kvflash_ggml.cli import main
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.policy.base import REGISTRY

BENCH = Path(__file__).parents[2] / "benchmarks" / "pyproject.toml"
MODULE = """
from kvflash_ggml.policy.base import register
from kvflash_ggml.policy.qk import QKScorer

@register("elsewhere")
class Elsewhere(QKScorer):
    pass
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution with a policy, installed."""
    (tmp_path / "a_policy.py").write_text(MODULE)
    info = tmp_path / "a_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvflash_ggml.policies]\nelsewhere = a_policy\nbroken = no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "a_policy", raising=False)
    monkeypatch.delitem(REGISTRY, "elsewhere", raising=False)
    return tmp_path


def test_a_policy_of_another_distribution(elsewhere: Path) -> None:
    assert "elsewhere" not in policy.names(), "nothing is imported before somebody asks for it"
    assert type(policy.resolve("elsewhere")).__name__ == "Elsewhere"
    assert "elsewhere" in policy.names()


def test_the_command_line_takes_it(elsewhere: Path) -> None:
    model = elsewhere / "no.gguf"
    result = CliRunner().invoke(main, ["run", str(model), "hi", "--kvflash", "1K", "--kvflash-policy", "elsewhere"])
    assert "policy" not in result.output
    result = CliRunner().invoke(main, ["run", str(model), "hi", "--kvflash", "1K", "--kvflash-policy", "nowhere"])
    assert "there is no policy 'nowhere': use one of lru, " in " ".join(result.output.split())


def test_an_unknown_policy_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no policy 'nowhere': use one of lru, .*qk.* or install the package"):
        policy.resolve("nowhere")


def test_those_of_the_benchmarks_are_registered_by_the_modules_that_are_named() -> None:
    text = (
        BENCH.read_text(encoding="utf-8").partition('entry-points."kvflash_ggml.policies"]\n')[2].partition("\n\n")[0]
    )
    points = dict(re.findall(r"^(\S+) = \"(\S+)\"$", text, re.MULTILINE))
    assert sorted(points) == ["meanstd", "oracle", "qk-mean", "quest"]
    for name, module in points.items():
        import_module(module)
        assert name in REGISTRY


def test_the_package_alone_has_its_own() -> None:
    code = "from kvflash_ggml import policy; print(policy.names())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(eval(done.stdout)) == ["drafter", "lru", "qk"]
