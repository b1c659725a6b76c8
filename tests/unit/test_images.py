"""How much of the host's memory page images get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.placement.sizes import Device
from kvflash_ggml.placement.sizing import image_ceiling, warn_if_too_long

GIB = 1 << 30
MIB = 1 << 20


def host(free: float, total: float = 64 * GIB) -> Device:
    return Device(name="CPU", kind="host", free=int(free), total=int(total))


@pytest.mark.parametrize(
    ("free", "mapped", "want"),
    [
        (10 * GIB, 0, 8 * GIB),
        (10 * GIB, 3 * GIB, 5 * GIB),
        (40 * GIB, 0, 36 * GIB),
        (3 * GIB, 2 * GIB, 256 * MIB),
        (GIB, 0, 256 * MIB),
    ],
)
def test_a_spill_folder_takes_what_passes_what_is_available(free: int, mapped: int, want: int, tmp_path: Path) -> None:
    def found(**config: Any) -> int | None:
        return image_ceiling(KVFlashConfig(**config), host(free), mapped=mapped, least=256 * MIB)

    assert found(spill=tmp_path) == found(spill=tmp_path, host_limit="auto") == want
    assert found() is None
    assert found(spill=tmp_path, host_limit=None) is None
    assert found(spill=tmp_path, host_limit=7) == found(host_limit=7) == 7


def test_a_context_that_may_pass_the_memory_is_told(caplog: pytest.LogCaptureFixture) -> None:
    page = 4 * MIB  # 64 KiB a token
    warn_if_too_long(131_072, page, 8 * GIB, host(GIB, 16 * GIB))
    assert not caplog.records
    warn_if_too_long(131_073, page, 8 * GIB, host(GIB, 16 * GIB))
    (told,) = caplog.messages
    assert "of 131073 tokens take 8,196 MiB and weights on the host 8,192 MiB, it has 16,384" in told
    assert "--kvflash-spill" in told
    assert "at most 131072 (" in told
    warn_if_too_long(64, page, 17 * GIB, host(GIB, 16 * GIB))
    assert "at most" not in caplog.messages[-1]
