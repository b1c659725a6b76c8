"""The options of the pool and of its drafts: settings of `config.py`, and a few that only a command line has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from .. import notation
from ..config import KVFlashConfig, PoolSettings, SpecConfig
from ..errors import ConfigError
from ..settings import in_section, setting, settings
from ..store.prefixes import PrefixCache
from .sections import collected, option

F = TypeVar("F", bound=Callable[..., Any])

_spec = in_section("Speculative decoding")

REMOVED = {
    "--draft": "--spec-draft-n-max",
    "--draft-n": "--spec-draft-n-max",
    "--draft-max": "--spec-draft-n-max",
}
"""Names that llama.cpp has had, and what took their place."""


@dataclass(frozen=True, kw_only=True)
class PoolOptions(PoolSettings):
    """What is asked of the pool. fields: of `KVFlashConfig`, by name."""

    report: Path | None = setting(
        Path, "--kvflash-report", metavar="FILE", section="KVFlash",
        help="Write an HTML page that shows which chunks were resident when.",
    )  # fmt: skip
    fields: dict[str, Any]

    def config(self) -> KVFlashConfig | None:
        """The pool's settings, or None when it is off."""
        asked = notation.pool(self.kvflash)
        if asked is None:
            return None
        spec = self.fields["spec"]
        drafts = None if spec is None else SpecConfig.read(spec)
        return KVFlashConfig(**asked, **self.fields | {"spec": drafts})

    def prefix_cache(self) -> PrefixCache | None:
        """Where texts that were read are kept for later runs, or None."""
        if self.kvflash == "off" or self.cache is None:
            return None
        return PrefixCache(folder=self.cache, disk_bytes=self.cache_size)


pool_options = collected("pool", PoolOptions, also=KVFlashConfig)


@dataclass(frozen=True, kw_only=True)
class SpecOptions:
    """How drafts are made and verified, beside their types. fields: of `SpecConfig`, by name."""

    draft_n_max: int | None = _spec(
        int, "--spec-draft-n-max", least=1,
        help="Draft so many tokens at most.  [default: by what it costs and wins, up to 31; 7 with recurrent state]",
    )  # fmt: skip
    fixed: bool = _spec(
        bool, "--spec-fixed", default=False,
        help="Always verify --spec-draft-n-max tokens, by no clock: the same call takes the same steps.",
    )  # fmt: skip
    fields: dict[str, Any]

    def over(self, config: SpecConfig | None) -> SpecConfig | None:
        """What the types of drafts say, and these options. A file without types is one of `auto`.

        ConfigError for options that would change nothing.
        """
        if self.fixed and self.draft_n_max is None:
            raise ConfigError("--spec-fixed verifies --spec-draft-n-max tokens: say how many")
        usual = SpecConfig()
        asked = {name: value for name, value in self.fields.items() if value != getattr(usual, name)}
        if config is None and "draft" not in asked:
            known = settings(SpecConfig)
            names = [known[name].long_flag(name) for name, value in asked.items() if value is not False]
            names += ["--spec-draft-n-max"] * (self.draft_n_max is not None)
            if names:
                raise ConfigError(f"{', '.join(names)}: nobody drafts: add --kvflash-spec auto, or -md and a file")
            return None
        if self.draft_n_max is not None:
            asked["width" if self.fixed else "max_width"] = self.draft_n_max + 1
        return replace(config or usual, **asked)


def _refuse_removed(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value is not None:
        given = next(name for name in param.opts if name in REMOVED)
        raise click.UsageError(f"{given} is called {REMOVED[given]} now")


def spec_options(function: F) -> F:
    """A decorator that adds the options of drafts, and passes them as `drafts`."""
    for name in REMOVED:
        function = option("Speculative decoding")(
            name, hidden=True, expose_value=False, allow_from_autoenv=False, callback=_refuse_removed
        )(function)
    return collected("drafts", SpecOptions, also=SpecConfig)(function)
