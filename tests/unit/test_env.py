"""Environment variables that are no options: a wrong value is an error, whoever reads it."""

from __future__ import annotations

import pytest

from kvflash_ggml import env
from kvflash_ggml.errors import ConfigError


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KERNELS", "LANE", "RPC_TIMEOUT", "ALLOW_CPU", "INSTALL"):
        monkeypatch.delenv(f"KVFLASH_{name}", raising=False)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("KVFLASH_KERNELS", "stok", "stock"),
        ("KVFLASH_KERNELS", "STOCK", "stock"),
        ("KVFLASH_LANE", "remote", "stream or sync"),
        ("KVFLASH_RPC_TIMEOUT", "soon", "from 1 to 86400"),
        ("KVFLASH_RPC_TIMEOUT", "0", "from 1 to 86400"),
        ("KVFLASH_RPC_TIMEOUT", "-5", "from 1 to 86400"),
        ("KVFLASH_RPC_TIMEOUT", "1.5", "from 1 to 86400"),
        ("KVFLASH_RPC_TIMEOUT", "99999999999999999999", "from 1 to 86400"),
        ("KVFLASH_ALLOW_CPU", "please", "1 or 0"),
        ("KVFLASH_INSTALL", "please", "1 or 0"),
    ],
)
def test_a_wrong_value_is_an_error(name: str, value: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as info:
        env.check()
    assert all(part in str(info.value) for part in (name, repr(value), limit))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVFLASH_KERNELS", "stock"),
        ("KVFLASH_KERNELS", ""),
        ("KVFLASH_LANE", "sync"),
        ("KVFLASH_RPC_TIMEOUT", "1"),
        ("KVFLASH_ALLOW_CPU", "0"),
    ],
)
def test_a_right_value_is_taken(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    env.check()


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("on", True), ("0", False), ("", False)])
def test_a_switch_is_on_by_any_of_its_words(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_INSTALL", value)
    monkeypatch.setenv("KVFLASH_ALLOW_CPU", value)
    assert env.install() is on
    assert env.allow_cpu() is on
