"""How option values are written."""

from __future__ import annotations

import click
import pytest

from kvflash_ggml.cli.types import Layers, Number, Pin, Pool, Size, TokenLimit
from kvflash_ggml.constants import KV_TYPES


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Pool(), "4096", "4096"),
        (Pool(), "4K", "4k"),
        (Pool(), "2G", "2g"),
        (Pool(), "AUTO", "auto"),
        (Pool(), "off", "off"),
        (Layers(), "0", 0),
        (Layers(), "99", 99),
        (Layers(), "all", -1),
        (Layers(), "-1", -1),
        (Layers(), "auto", "auto"),
        (Number(min=0), "0.8", 0.8),
        (Number(min=0), "inf", float("inf")),
        (Size(), "0", 0),
        (Size(), "1000", 1000),
        (Size(), "512M", 512 << 20),
        (Size(), "1.5g", 3 << 29),
        (Size(), "8 GiB", 8 << 30),
        (Size(), "64KB", 64 << 10),
        (Pin(), "0:512", (0, 512)),
        (TokenLimit(), "-1", -1),
        (TokenLimit(), "20", 20),
    ],
)
def test_values(kind: click.ParamType, text: str, value: object) -> None:
    assert kind.convert(text, None, None) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((Pool(), text) for text in ("", "-1", "0", "1.5", "on")),
        *((Layers(), text) for text in ("", "-2", "most")),
        *((Number(min=0), text) for text in ("", "nan", "-0.1", "warm")),
        *((Size(), text) for text in ("", "G", "-1G", "1X", "1e9")),
        *((Pin(), text) for text in ("", "5", "5:5", "-1:5", "a:b", "1:2:3")),
        *((TokenLimit(), text) for text in ("", "0", "-2", "many")),
    ],
)
def test_mistakes(kind: click.ParamType, text: str) -> None:
    with pytest.raises(click.BadParameter):
        kind.convert(text, None, None)


def test_cache_types_are_ggml_s() -> None:
    assert sorted(KV_TYPES.values()) == [0, 1, 2, 3, 6, 7, 8, 30]
