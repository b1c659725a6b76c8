"""How deep property tests search: a little with `scripts/test --unit`, more in the whole suite, and longest when asked.
Sessions on a fake engine take little memory."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from kvflash_ggml.host import slabs

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
for name, examples in (("kvflash-quick", 12), ("kvflash", 40)):
    settings.register_profile(
        name,
        derandomize=True,
        deadline=None,
        max_examples=examples,
        stateful_step_count=30,
        suppress_health_check=_SLOW,
    )
settings.register_profile(
    "kvflash-long",
    deadline=None,
    max_examples=1500,
    stateful_step_count=60,
    suppress_health_check=_SLOW,
)


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("kvflash")


@pytest.fixture(autouse=True, scope="session")
def moderate_slabs() -> Iterator[None]:
    """A fake engine fills its memory: that of a real first slab takes longer than most tests."""
    with mock.patch.object(slabs, "SLAB_BYTES", 1 << 20):
        yield
