"""Property tests are short unless asked."""

from __future__ import annotations

import sys

from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "kvflash",
    derandomize=True,
    deadline=None,
    max_examples=40,
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
if "--hypothesis-profile" not in " ".join(sys.argv):
    settings.load_profile("kvflash")
