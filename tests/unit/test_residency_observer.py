"""What viewers are told of the text at hand."""

from __future__ import annotations

from typing import Any

from kvflash_ggml.batching.model import Residency, ResidencyObserver
from kvflash_ggml.trace.events import Change


def test_nothing_is_told_of_a_text_that_is_gone() -> None:
    """Another text, perhaps of another key, comes through length 0."""
    observer = ResidencyObserver(lambda scores: [])
    told: dict[str, Any] = {"scores": None, "generating": False}
    observer.changed(Change(length=128, resident=(0, 1), recalled=(1,), evicted_mass=0.25, **told))
    observer.changed(Change(length=0, resident=(), recalled=(), evicted_mass=None, **told))
    observer.changed(Change(length=64, resident=(0,), recalled=(), evicted_mass=None, **told))
    assert observer.now == Residency(number=3, length=64, resident=(0,))
