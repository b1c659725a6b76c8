"""A setting that cannot work is refused where it is made, by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import click
import numpy as np
import pytest

from kvflash_ggml import cli
from kvflash_ggml.config import INDEX_WORK, POOL_SETTINGS, Fit, KVFlashConfig, PrefixCache, SpecConfig, keyword
from kvflash_ggml.constants import round_up
from kvflash_ggml.errors import ConfigError, KVFlashError
from kvflash_ggml.llama.keywords import PoolKeywords
from kvflash_ggml.settings import settings

WRONG = [
    ("pool", 0),
    ("pool", -256),
    ("pool", 1.5),
    ("pool_bytes", 0),
    ("pool_bytes", 1.5),
    ("pool_bytes", True),
    ("pool", "512"),
    ("pool", "Auto"),
    ("pool", None),
    ("pool", True),
    ("tau", 0),
    ("tau", -1),
    ("tau", 64.0),
    ("tau", "64"),
    ("sinks", -1),
    ("sinks", True),
    ("sinks", 1.0),
    ("tail", 0),
    ("checkpoints", -1),
    ("checkpoints", 0.5),
    ("pins", ((5, 5),)),
    ("pins", ((5, 4),)),
    ("pins", ((-1, 4),)),
    ("pins", ((1, 2, 3),)),
    ("pins", ((1,),)),
    ("pins", ((1.0, 2),)),
    ("pins", (("a", "b"),)),
    ("pins", (("a", "b"),)),
    ("index", -1),
    ("index", 1.5),
    ("index", "256M"),
    ("host_limit", -1),
    ("host_limit", 1e9),
    ("host_limit", "1G"),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda x: repr(x))
def test_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        KVFlashConfig(**{name: value})
    assert isinstance(caught.value, KVFlashError)
    assert isinstance(caught.value, ValueError)
    text = str(caught.value)
    assert name.removesuffix("s") in text
    assert repr(value[0] if name == "pins" else value) in text


@pytest.mark.parametrize("fields", [{"free": 8 << 30}, {"margin": True}, {"margin": {"CUDA0": -1}}, {"prefer": "x"}])
def test_what_fitting_is_asked_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"fit: {next(iter(fields))}"):
        Fit(**fields)


def test_a_cache_takes_whole_numbers_of_numpy() -> None:
    assert PrefixCache(least=np.int64(5)).least == 5  # type: ignore[arg-type]
    for value in (-1, 1.5, True):
        with pytest.raises(ConfigError, match=f"least must be a whole number of at least 0, not {value}"):
            PrefixCache(least=value)  # type: ignore[arg-type]


def test_a_pin_that_is_no_pair() -> None:
    with pytest.raises(ConfigError, match="pin"):
        KVFlashConfig(pins=(5,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pool": "auto"},
        {"pool": 1},
        {"tau": 1},
        {"sinks": 0},
        {"tail": 1},
        {"checkpoints": 0},
        {"pins": ((0, 1), (100, 200))},
        {"host_limit": 0},
        {"host_limit": None},
        {"host_limit": "auto"},
    ],
)
def test_accepted(fields: dict[str, Any]) -> None:
    config = KVFlashConfig(**fields)
    for name, value in fields.items():
        assert getattr(config, name) == value


def test_is_frozen_and_by_keyword() -> None:
    with pytest.raises(FrozenInstanceError):
        KVFlashConfig().pool = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        KVFlashConfig(512)  # type: ignore[misc]
    with pytest.raises(TypeError):
        KVFlashConfig(pools=512)  # type: ignore[call-arg]


def test_a_setting_is_a_keyword_and_a_variable_and_an_option_of_every_verb() -> None:
    assert {keyword(name) for name in POOL_SETTINGS} - {"kvflash_cache_size"} == {*PoolKeywords.__annotations__} - {
        "kvflash_progress"
    }
    wanted = {(one.long_flag(name), one.variable_of(name)) for name, one in POOL_SETTINGS.items()}
    assert ("--kvflash-pin", "KVFLASH_PIN") in wanted
    for verb in ("run", "serve", "exec"):
        options = [param for param in cli.main.commands[verb].params if isinstance(param, click.Option)]
        assert wanted <= {(flag, str(option.envvar)) for option in options for flag in option.opts}


def test_what_a_setting_means_is_in_the_docstring() -> None:
    told = " ".join(str(KVFlashConfig.__doc__).split())
    assert all(f"{name}: {' '.join(one.help.split())}" in told for name, one in settings(KVFlashConfig).items())


@pytest.mark.parametrize(("value", "step", "want"), [(0, 256, 0), (1, 256, 256), (256, 256, 256), (257, 256, 512)])
def test_round_up(value: int, step: int, want: int) -> None:
    assert round_up(value, step) == want


@pytest.mark.parametrize("fields", [{"spec": SpecConfig()}, {"answer": "lossless"}, {"answer": "auto"}])
def test_what_a_clock_decides_does_not_repeat(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give a width"):
        KVFlashConfig(deterministic=True, **fields)
    KVFlashConfig(deterministic=True, **(fields | {"spec": SpecConfig(width=4)}))


@pytest.mark.parametrize("parallel", [2, 3, 4, 8, 32])
def test_rows_by_fours_keep_their_bits(parallel: int) -> None:
    assert KVFlashConfig(parallel=parallel, deterministic_batch=True).same_bits


@pytest.mark.parametrize("parallel", [5, 6, 30])
def test_rows_that_are_left_over_from_fours_are_refused(parallel: int) -> None:
    with pytest.raises(ConfigError, match=f"parallel is {parallel}, .*: give 4 or fewer, or a multiple of 4"):
        KVFlashConfig(parallel=parallel, deterministic_batch=True)


def test_shares_are_elastic_unless_bits_are_promised() -> None:
    assert KVFlashConfig(parallel=2).is_elastic
    assert not KVFlashConfig().is_elastic
    assert not KVFlashConfig(parallel=2, pool_share="strict").is_elastic
    for promise in ({"deterministic": True}, {"deterministic_batch": True}):
        assert not KVFlashConfig(parallel=2, **promise).is_elastic  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="others change what is resident"):
            KVFlashConfig(parallel=2, pool_share="elastic", **promise)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not 'fair'"):
        KVFlashConfig(pool_share="fair")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "small", "large"), [({}, 256 << 20, 0), ({"index": 0}, 0, 0), ({"index": 5, "parallel": 2}, 5, 5)]
)
def test_models_that_the_host_keeps_up_with_have_no_index_on_a_gpu(
    fields: dict[str, Any], small: int, large: int
) -> None:
    config = KVFlashConfig(**fields)
    assert (config.index_limit(INDEX_WORK), config.index_limit(INDEX_WORK + 1)) == (small, large)
