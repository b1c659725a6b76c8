"""What can be asked of speculative decoding, and what is said where that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_llama import Stage, staged

from kvflash_ggml.cli.report import spec_counters
from kvflash_ggml.config import SPEC_WINDOW, SpecConfig
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.speculation.draft import DraftStats


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    yield from staged(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "d.gguf"
    path.touch()
    return str(path)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"types": ("ngram", "mtp")}, "'mtp'"),
        ({"types": ("ngram", "ngram")}, "ngram, ngram"),
        ({"width": 1}, "2, not 1"),
        ({"max_width": True}, "2, not True"),
        ({"window": SPEC_WINDOW - 1}, f"{SPEC_WINDOW}, not {SPEC_WINDOW - 1}"),
        ({"tree": "no"}, "'no'"),
        ({"n_gpu_layers": "all"}, "'all'"),
    ],
    ids=lambda x: repr(x),
)
def test_refused_by_name_and_value(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields)).rstrip("s")) as caught:
        SpecConfig(**fields)
    assert told in str(caught.value)


def test_a_file_can_be_named_by_a_string() -> None:
    assert SpecConfig(draft="a.gguf") == SpecConfig(draft=Path("a.gguf"))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["auto", "none", "ngram,eagle3=a=b.gguf", "draft-mtp", "ngram-mod,mtp,ngram-simple"])
def test_read(text: str) -> None:
    want = {
        "ngram-mod,mtp,ngram-simple": SpecConfig(types=("ngram", "draft-mtp")),
        "auto": SpecConfig(),
        "none": None,
        "ngram,eagle3=a=b.gguf": SpecConfig(types=("ngram", "draft-eagle3"), draft=Path("a=b.gguf")),
        "draft-mtp": SpecConfig(types=("draft-mtp",)),
    }
    assert SpecConfig.read(text) == want[text]


def test_the_command_line(cli: Stage, file: str) -> None:
    pool = ("m.gguf", "hi", "--kvflash", "1024")
    cli(*pool, "--kvflash-spec", "ngram", "--spec-draft-n-max", "4", "--spec-fixed", "--spec-window", "512")
    assert cli.settings["kvflash"].spec == SpecConfig(types=("ngram",), width=5, window=512)
    cli(*pool, "-md", file, "--spec-draft-n-max", "4", "--spec-tree", "-ngld", "0")
    assert cli.settings["kvflash"].spec == SpecConfig(draft=Path(file), max_width=5, tree=True, n_gpu_layers=0)
    cli(*pool)
    assert cli.settings["kvflash"].spec is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--kvflash", "1024", "--spec-window", "512"), "--spec-window: nobody drafts"),
        (("--kvflash", "1024", "--no-spec-tree", "-ngld", "0"), "--spec-draft-ngl: nobody drafts"),
        (("--kvflash", "1024", "--kvflash-spec", "auto", "--spec-fixed"), "say how many"),
        (("-md", "FILE"), "add --kvflash"),
        (("--kvflash", "1024", "--kvflash-spec", "auto", "--spec-window", "64"), "range x>=256"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_options_that_would_change_nothing_are_refused(
    options: tuple[str, ...], told: str, cli: Stage, file: str
) -> None:
    result = cli("m.gguf", "hi", *(file if word == "FILE" else word for word in options))
    assert result.exit_code != 0
    assert told in " ".join(result.stderr.split())


def test_the_json_document_says_why_nothing_was_verified() -> None:
    spec = SimpleNamespace(
        types=("ngram",), off=None, idle="it costs more", speedup=None, excess=0.1, last=DraftStats(), on_pool=None
    )
    told = spec_counters(spec)
    assert told is not None
    assert (told["idle"], told["off"], told["steps"], told["rate"]) == ("it costs more", None, 0, None)
