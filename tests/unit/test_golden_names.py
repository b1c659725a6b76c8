"""Every name that a user can type or import is still there. tests/golden/README.md says how the list is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import golden_names

GOLDEN = Path(__file__).parents[1] / "golden"
WANTED: dict[str, Any] = json.loads((GOLDEN / "names.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return golden_names.without_a_library()


@pytest.mark.parametrize("kind", sorted(WANTED))
def test_no_name_is_lost(kind: str, found: dict[str, Any]) -> None:
    assert len(WANTED[kind]) > 2
    assert golden_names.lost(WANTED[kind], found[kind], f"/{kind}") == []


def test_a_lost_option_is_found(found: dict[str, Any]) -> None:
    verb = found["options"]["kvflash-run"]["doctor"]
    less = {"options": {"kvflash-run": {"doctor": [name for name in verb if name != "--json"]}}}
    assert "/options/kvflash-run/doctor/--json" in golden_names.lost({"options": WANTED["options"]}, less)
    assert "/options/kvflash-convert" in golden_names.lost({"options": WANTED["options"]}, less)


@pytest.mark.parametrize(
    ("before", "after", "fits"),
    [
        ("a b=", "a b=", True),
        ("a b=", "a b= c=", True),
        ("a b=", "a b= * c=", True),
        ("a * k=", "a * j= k=", True),
        ("a * k=", "a k=", True),
        ("a * k=", "a **more", True),
        ("a b", "a b=", True),
        ("a b=", "a", False),
        ("a b=", "a c=", False),
        ("a b=", "a c= b=", False),
        ("a b=", "a * b=", False),
        ("a b=", "a b", False),
        ("a", "a b", False),
        ("a", "a * b", False),
        ("a * k=", "a", False),
        ("a **more", "a", False),
        ("a *more", "a", False),
    ],
)
def test_signatures_may_only_take_more(before: str, after: str, fits: bool) -> None:
    wanted, found = {"signatures": {"f": before.split()}}, {"signatures": {"f": after.split()}}
    assert (golden_names.lost(wanted, found) == []) == fits


def test_the_golden_files_stay_small() -> None:
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 2 << 20
