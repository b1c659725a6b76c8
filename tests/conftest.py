"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def heads_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that are not there yet, one after the other: pytest would look at all it has made for each."""
    base = tmp_path_factory.mktemp("heads")
    return (base / str(number) for number in count())


@pytest.fixture(autouse=True)
def no_known_heads(heads_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's retrieval heads nor those that another test has found, in child processes either."""
    monkeypatch.setenv("KVFLASH_HEADS", str(next(heads_folders)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Figures that tests leave with `record_property`, in whatever process they ran."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value} ({report.nodeid})")
