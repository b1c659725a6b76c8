"""A plain decode token runs through few files and functions of the package: who reads them has read the decode."""

from __future__ import annotations

import decode_path


def test_a_plain_token_runs_through_few_functions(loaded: None) -> None:
    files, functions = decode_path.counts(decode_path.plain_token())
    assert files <= 14
    assert functions <= 32
