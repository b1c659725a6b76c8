"""The table of `kvflash-bench streaming`."""

from __future__ import annotations

import importlib
from typing import Any

streaming = importlib.import_module("kvflash_bench.streaming")  # the package has a command of that name


def test_every_cell_of_the_table_is_one_value() -> None:
    full: dict[str, Any] = {"arm": "full", "depth": 64, "step_ms": {1: 2.0, 8: 3.0}, "copy_ms": 0.0, "turn_ms": {}}
    exact = full | {"arm": "exact", "copy_ms": 0.5, "turn_ms": {"exact": 5.0, "exact, first token": 6.0}}
    header, rows = streaming.table([full, exact])
    assert header[-5:] == ["step of 1 ms", "step of 8 ms", "copy ms", "turn ms: exact", "turn ms: exact, first token"]
    assert [row[-5:] for row in rows] == [[2.0, 3.0, 0.0, None, None], [2.0, 3.0, 0.5, 5.0, 6.0]]
    assert rows[0][header.index("decode t/s")] is None
    assert not [cell for row in rows for cell in row if isinstance(cell, dict)]
