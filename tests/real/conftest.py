"""A real model, with the default policy and settings; the tests are skipped where it cannot be had."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import smollm


@pytest.fixture(scope="session")
def smol_path() -> Path:
    """The model's file."""
    try:
        return smollm.fetch()
    except smollm.Unreachable as err:
        pytest.skip(str(err))


@pytest.fixture(scope="module")
def smol(smol_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a Llama; closed after the module."""
    from kvflash_ggml import Llama

    with ExitStack() as stack:

        def make(**changes: Any) -> Any:
            if changes.get("kvflash") is not None:  # a calibration behind an answer would take the next test's cores
                changes = {"kvflash_calibrate": False} | changes
            llm = Llama(str(smol_path), **(smollm.SETTINGS | changes))
            stack.callback(llm.close)
            return llm

        yield make
    gc.collect()


@pytest.fixture(scope="module")
def pooled(smol: Callable[..., Any]) -> Any:
    """One with a small pool."""
    return smol(kvflash=smollm.POOL)
