"""How option values are written."""

from __future__ import annotations

import click
import pytest

from kvflash_ggml import notation
from kvflash_ggml.cli.options import read_layers
from kvflash_ggml.cli.sections import Number, Place, Written
from kvflash_ggml.config import POOL_SETTINGS
from kvflash_ggml.constants import KV_TYPES

POOL = Written(POOL_SETTINGS["kvflash"].kind)
LAYERS = Written(read_layers)
LIMIT = Written(notation.limit)
PIN = Written(notation.pin)
SIZE = Written(notation.size)
WORD = Written(notation.word)
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
        *((LIMIT, text) for text in ("", "0", "-2", "many")),
    ],
)
def test_mistakes(kind: click.ParamType, text: str) -> None:
    with pytest.raises(click.BadParameter):
        kind.convert(text, None, None)


def test_cache_types_are_ggml_s() -> None:
    assert sorted(KV_TYPES.values()) == [0, 1, 2, 3, 6, 7, 8, 30]
