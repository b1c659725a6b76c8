"""Which slot holds which token, and which pages move: pure Python and numpy.

A change is a value: `PageTable.reserve` makes a `Plan` with the table as it will be and its `Moves`, somebody else
moves the pages, and `commit` replaces the table as a whole. `residency.py` chooses victims, `shares.py` divides blocks
between texts, `masks.py` writes who sees what.

The room has no engine, no thread and no clock, so every rule is a unit test; `tests/unit/test_page_table_property.py`
drives it beside a plain model.
"""
