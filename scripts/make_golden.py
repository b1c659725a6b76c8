#!/usr/bin/env python3
"""Writes tests/golden anew, or with `names` only the names in it: what other versions of this package must keep."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]

sys.path[:0] = [str(REPO), str(REPO / "tests")]

from support import golden_files, golden_names  # noqa: E402


def write(name: str, value: Any) -> None:
    path = golden_files.GOLDEN / name
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(path.relative_to(REPO))


def main(words: list[str]) -> None:
    if unknown := set(words) - {"names"}:
        sys.exit(f"{min(unknown)!r} is no part of tests/golden: write nothing, or 'names'")
    if not words:
        golden_files.make()
    write("names.json", golden_names.without_a_library())
    write("library_names.json", golden_names.with_the_library() | {"stats": golden_files.stats()})
    write("run.json", golden_names.shape(golden_files.run_json()))


if __name__ == "__main__":
    main(sys.argv[1:])
