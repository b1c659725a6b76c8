"""docs/api.md is what scripts/api_page.py writes."""

from __future__ import annotations

import api_page


def test_the_page_is_current() -> None:
    found = api_page.PAGE.read_text(encoding="utf-8")
    assert found == api_page.render(), "run python scripts/api_page.py"


def test_a_member_has_its_signature_and_its_first_paragraph() -> None:
    rows = api_page.render().splitlines()
    assert "| `reset()` | Forget the text. Settings and pins stay. |" in rows
    assert any(row.startswith("| `KVFLASH_POOL` | `--kvflash` |") and "serve" in row for row in rows)
