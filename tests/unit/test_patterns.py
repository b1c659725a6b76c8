"""Patterns of strings and numbers, as patterns of JSON text: here read by Python's `re`, which knows the dialect."""

from __future__ import annotations

import json
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.chat import patterns

VALUES = [
    "", "a", "b", "ab", "abc", "xab", "1234", "2024-01-02", "AB-12", "a.b", "axb", "https://x", "ab-", "abx@xyz",
    "zz",
    "xz", '"q"', "\\", '\\"', "AB", "\U0001f600", "\u00e9", "\u00e9\u00e9", "\t\n", "A", "a" * 1500, "ab" * 1000,
    "ab" * 1500, "{}", "aa", "aaa", "]", "}a", "{a}", "a@b.c", "a-b_c/d e", "d", "a\nb", "a b",
]  # fmt: skip


def spelled(pattern: str) -> re.Pattern[str]:
    return re.compile(patterns.quoted(patterns.parsed(pattern)))


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d{4}$", r"^\d{4}-\d{2}-\d{2}$", r"^[A-Z]{2}-\d+$", r"^\w{3}@\w{3}$", r"^a\.b$", r"^https:\/\/x$",
        r"^[\w-]{3}$", "abc", "^a", "b$", "a|b", "^a|b$", "^(a|bc)+$", "(ab){2,3}", "^(?:x|y)?z$", '^"q"$',
        r"^\\$", r'^[\\"]+$', "",
        "^a{2,}$", r"^\x41\u0042$", "^\u00e9+$", "^[\u00e9-\u00fc]$", r"^\t\n$", "^[^a-z]$", "^{}$", "^a{,2}$", "^]$",
        "^}a$", r"^\{a\}$", "^[{}]{2}$", "^a{1500}$", "^[ab]{0,2500}$", "^[ab]{2001,}$", "^a-b_c/d e$", "(^|x)a",
        "a($|b)",
        "^a+?b*?$", "^(?P<name>a)b$", r"^\s*a\sb$", "^a.b$", "^(((a)))b?$", "^$",
    ],
)  # fmt: skip
def test_a_pattern_means_what_it_says(pattern: str) -> None:
    """Of the values that it allows none is lost, and each is JSON."""
    found, plain = spelled(pattern), re.compile(pattern)
    for value in (value for value in VALUES if not value.endswith("\n") or "$" not in pattern):
        assert bool(found.fullmatch(json.dumps(value, ensure_ascii=False))) == bool(plain.search(value)), value


@given(st.text(max_size=6))
def test_characters_beyond_ascii_are_allowed_where_every_validator_allows_them(text: str) -> None:
    written = json.dumps(text, ensure_ascii=False)
    for pattern in (r"^\w+$", r"^\W+$", r"^\S+$", r"^[^\w]+$", r"^[^\s]+$", r"^.+$"):
        if spelled(pattern).fullmatch(written):
            assert re.search(pattern, text), pattern


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)b", "look ahead"), ("a(?!b)", "look ahead"), ("(?<=a)b", "look behind"), ("(?i)a", "'\\(\\?i'"),
        (r"\bx", "two characters"), (r"(a)\1", "repeats a group"), (r"\p{L}", "by a property"),
        (r"\Z", "not supported"), ("a^b", "anchor stands in its middle"), ("(a$)*", "anchor stands"), ("a**",
        "nothing to repeat"),
        ("*a", "nothing to repeat"), ("{2}", "nothing to repeat"), ("a{5,2}", "ends before it begins"),
        ("[z-a]", "ends before it begins"), ("a{1000001}", "more than 1000000 times"), ("(", "group has no end"),
        (")", "closes nothing"), ("[a", "ends too early"), ("\\", "ends too early"), ("[]a]", "class is empty"),
        (r"^[^\s\S]$", "has no character"), ("(" * 41 + ")" * 41, "nested more than 40"),
        ("a" * 513, "512 is the most"), ("^(a{1000000}){1000000}$", "more than 1000000 characters"),
        ("(" * 20 + "a{0,5001}" + "){0,5001}" * 20, "nested too deep"),
        (r"\u12", "too few digits"), (r"\ud800", "names no character"),
    ],
)  # fmt: skip
def test_what_a_grammar_cannot_hold(pattern: str, why: str) -> None:
    with pytest.raises(patterns.Unheld, match=why):
        spelled(pattern)


BOUND = st.none() | st.integers(-1200, 1200)


@given(BOUND, BOUND, st.lists(st.integers(-20_000, 20_000), max_size=30))
def test_integers(low: int | None, high: int | None, values: list[int]) -> None:
    found = patterns.integers(low, high)
    near = [bound + step for bound in (low, high) if bound is not None for step in (-1, 0, 1)]
    for value in (*values, *near):
        allowed = (low is None or low <= value) and (high is None or value <= high)
        assert bool(found and re.fullmatch(found, str(value))) == allowed
    assert not any(found and re.fullmatch(found, text) for text in ("01", "-01", "00", "+1", "1.0", "", "-"))


DECIMAL = st.decimals(-300, 300, places=2, allow_nan=False)


@given(st.none() | DECIMAL, st.none() | DECIMAL, st.booleans(), st.booleans(), st.lists(DECIMAL, max_size=20))
def test_numbers(low: Decimal | None, high: Decimal | None, above: bool, below: bool, values: list[Decimal]) -> None:
    above, below = above and low is not None, below and high is not None
    found = patterns.numbers(low, high, above=above, below=below)
    near = [
        bound + Decimal(step) for bound in (low, high) if bound is not None for step in ("-.01", "0", ".01", ".001")
    ]
    for value in (*values, *near):
        over = low is None or low < value or (low == value and not above)
        allowed = over and (high is None or value < high or (value == high and not below))
        texts = [f"{value:.3f}", f"{value:.6f}"]
        assert [bool(found and re.fullmatch(found, text)) for text in texts if not text.startswith("-0.000")] in (
            [[allowed] * 2, []]
        )
    if low is None or high is None or low < high:
        assert found


def test_numbers_whose_bounds_a_double_does_not_hold() -> None:
    with pytest.raises(patterns.ConfigError, match="15 is the most"):
        patterns.numbers(Decimal("0.1234567890123456"), None, above=False, below=False)


@pytest.mark.parametrize(
    ("name", "values", "others"),
    [
        ("date", ["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01"]),
        ("time", ["23:59:59Z", "00:00:00.25+05:30"], ["24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-01-01T00:00:00Z"], ["2024-01-01 00:00:00Z", "2024-01-01"]),
        ("email", ["a.b@c.de"], ["a@", "@b.c", ".a@b.c"]),
        ("ipv4", ["1.2.3.4", "255.0.0.255"], ["256.1.1.1", "1.2.3"]),
        ("ipv6", ["::1", "1:2:3:4:5:6:7:8", "::", "fe80::1"], ["1:2", ":::"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ("duration", ["P1Y", "PT1H", "P2W", "P1DT2H"], ["P", "1Y"]),
        ("uri", ["https://a.b/c?d=e", "mailto:a@b.c"], ["a b", "//a"]),
        ("hostname", ["a-b.example.com"], ["-a", "a..b"]),
    ],
)
def test_formats(name: str, values: list[str], others: list[str]) -> None:
    found = spelled(patterns.FORMATS[name])
    assert [bool(found.fullmatch(json.dumps(value))) for value in (*values, *others)] == (
        [True] * len(values) + [False] * len(others)
    )
