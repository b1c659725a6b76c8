"""What holds for every test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_known_heads(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's retrieval heads nor those that another test has found, in child processes either."""
    monkeypatch.setenv("KVFLASH_HEADS", str(tmp_path_factory.mktemp("heads")))
