"""The unit tests are for those who have no library: `scripts/test --unit` installs none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ABSENT = ("llama_cpp", "kvflash_ggml.native._kvf", "cffi", "jinja2", "zstandard")


@pytest.mark.slow
def test_unit_tests_import_nothing_that_is_built() -> None:
    code = f"""
import sys, pytest
sys.modules.update(dict.fromkeys({ABSENT!r}))
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests/unit"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
