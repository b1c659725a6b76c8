"""How option values are written."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from kvflash_ggml import notation
from kvflash_ggml.cli import main
from kvflash_ggml.cli.options import read_layers
from kvflash_ggml.cli.sections import Number, Place, Tokens, Written
from kvflash_ggml.config import POOL_SETTINGS
from kvflash_ggml.constants import KV_TYPES

POOL = Written(POOL_SETTINGS["kvflash"].kind)
LAYERS = Written(read_layers)
LIMIT = Written(notation.limit)
PIN = Written(notation.pin)
SIZE = Written(notation.size)
WORD = Written(notation.word)
TOKENS = Tokens(-1, 1 << 20)
KEY = Written(notation.key)
ORIGIN = Written(notation.origin)
FILE = Place()


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (POOL, "4096", "4096"),
        (POOL, "4K", "4k"),
        (POOL, "2G", "2g"),
        (POOL, "AUTO", "auto"),
        (POOL, "off", "off"),
        (LAYERS, "0", 0),
        (LAYERS, "99", 99),
        (LAYERS, "all", -1),
        (LAYERS, "-1", -1),
        (LAYERS, "auto", "auto"),
        (Number(min=0), "0.8", 0.8),
        (Number(min=0), "inf", float("inf")),
        (SIZE, "0", 0),
        (SIZE, "1000", 1000),
        (SIZE, "512M", 512 << 20),
        (SIZE, "1.5g", 3 << 29),
        (SIZE, "8 GiB", 8 << 30),
        (SIZE, "64KB", 64 << 10),
        (PIN, "0:512", (0, 512)),
        (WORD, "CUDA0", "CUDA0"),
        (KEY, "sk-0_A~", "sk-0_A~"),
        (ORIGIN, "https://Chat.example.org:8443", "https://chat.example.org:8443"),
        (ORIGIN, "*", "*"),
        (ORIGIN, "vscode-webview://a1b2", "vscode-webview://a1b2"),
        (LIMIT, "-1", -1),
        (LIMIT, "20", 20),
        (LIMIT, "4k", 4096),
        (PIN, "0:4K", (0, 4096)),
        (TOKENS, "16K", 16384),
        (TOKENS, "0.5M", 1 << 19),
        (TOKENS, " 1 M ", 1 << 20),
        (TOKENS, "-1", -1),
        (TOKENS, "7", 7),
    ],
)
def test_values(kind: click.ParamType, text: str, value: object) -> None:
    assert kind.convert(text, None, None) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((POOL, text) for text in ("", "-1", "0", "1.5", "on")),
        *((LAYERS, text) for text in ("", "-2", "most")),
        *((Number(min=0), text) for text in ("", "nan", "-0.1", "warm")),
        *((SIZE, text) for text in ("", "G", "-1G", "1X", "1e9")),
        *((PIN, text) for text in ("", "5", "5:5", "-1:5", "a:b", "1:2:3")),
        *((WORD, text) for text in ("", " ")),
        *((KEY, text) for text in ("", " ", "a b", "clé", "a\n")),
        *((ORIGIN, text) for text in ("", "chat.example.org", "https://a.example/", "https://a,https://b", "https://")),
        *((FILE, text) for text in ("",)),
        *((LIMIT, text) for text in ("", "0", "-2", "many", "0K")),
        *((TOKENS, text) for text in ("", "K", "-2", "2M", "1G", "16KB", "1.5", "1e3", "0x10", "1K1", "1.5.5K")),
    ],
)
def test_mistakes(kind: click.ParamType, text: str) -> None:
    with pytest.raises(click.BadParameter):
        kind.convert(text, None, None)


def test_cache_types_are_ggml_s() -> None:
    assert sorted(KV_TYPES.values()) == [0, 1, 2, 3, 6, 7, 8, 30]


@pytest.mark.parametrize("verb", ["run", "serve"])
def test_every_number_of_tokens_may_have_a_letter(verb: str) -> None:
    """Whatever number the help counts in tokens is read as a size of the pool is."""
    options = [param for param in main.commands[verb].params if isinstance(param, click.Option)]
    counts = [one for one in options if re.search(r"\b[Tt]oken", one.help or "") and one.metavar in ("N", "TOKENS")]
    assert {"--ctx-size", "--kvflash-tau", "--kvflash-stage", "--min-tokens"} <= {one.opts[-1] for one in counts}
    read = {one.opts[-1]: one.type.convert("4K", one, None) for one in counts}
    assert read == dict.fromkeys(read, 4096)


def test_numbers_of_tokens_have_their_bounds() -> None:
    result = CliRunner().invoke(main, ["run", "m.gguf", "-c", "1M", "-b", "0K"])
    assert result.exit_code == 2
    assert "'-b' / '--batch-size': 0 is not in the range" in result.output
