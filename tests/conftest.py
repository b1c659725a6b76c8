"""What holds for every test."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

pytest.register_assert_rewrite("support")  # what helpers of tests assert says its values too

BESIDE = [str(Path(__file__).parents[1] / folder) for folder in ("benchmarks", "router", "fleet")]

# child processes find the distributions beside the package too, where they are not installed
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*BESIDE, os.environ.get("PYTHONPATH")]))


def pytest_collection_finish() -> None:
    """What was collected is kept to the end. The native tests look for garbage after each, and would go through all
    tests of the suite: 0.2 s each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def heads_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that are not there yet, one after the other: pytest would look at all it has made for each."""
    base = tmp_path_factory.mktemp("heads")
    return (base / str(number) for number in count())


@pytest.fixture(autouse=True)
def no_known_heads(heads_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's retrieval heads nor those that another test has found, in child processes either."""
    monkeypatch.setenv("KVFLASH_HEADS", str(next(heads_folders)))


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """The command line turns the log to the terminal for good; other tests of the same process read it."""
    logger = logging.getLogger("kvflash_ggml")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Figures that tests leave with `record_property`, in whatever process they ran."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value} ({report.nodeid})")
