"""The options of speculative decoding, by llama.cpp's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from ..config import SPEC_DEFAULT_WINDOW, SPEC_WINDOW, SpecConfig
from ..errors import ConfigError
from .sections import collected, option

F = TypeVar("F", bound=Callable[..., Any])

_spec = option("Speculative decoding")

REMOVED = {
    "--draft": "--spec-draft-n-max",
    "--draft-n": "--spec-draft-n-max",
    "--draft-max": "--spec-draft-n-max",
}
"""Names that llama.cpp has had, and what took their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecOptions:
    """How drafts are made and verified, beside their types."""

    spec_draft_model: Path | None
    spec_draft_n_max: int | None
    spec_fixed: bool
    spec_tree: bool | None
    spec_window: int | None
    spec_draft_ngl: int | None

    def over(self, config: SpecConfig | None) -> SpecConfig | None:
        """What the types of drafts say, and these options. A file without types is one of `auto`.

        ConfigError for options that would change nothing.
        """
        if self.spec_fixed and self.spec_draft_n_max is None:
            raise ConfigError("--spec-fixed verifies --spec-draft-n-max tokens: say how many")
        if self.spec_draft_model is None and config is None:
            given = [name for name, value in asdict(self).items() if value is not None and value is not False]
            asked = [f"--{name.replace('_', '-')}" for name in given]
            if asked:
                raise ConfigError(f"{', '.join(asked)}: nobody drafts: add --kvflash-spec auto, or -md and a file")
            return None
        config = config or SpecConfig()
        if self.spec_draft_model is not None:
            config = replace(config, draft=self.spec_draft_model)
        if self.spec_draft_n_max is not None:
            rows = self.spec_draft_n_max + 1
            config = replace(config, width=rows) if self.spec_fixed else replace(config, max_width=rows)
        if self.spec_tree is not None:
            config = replace(config, tree=self.spec_tree)
        if self.spec_window is not None:
            config = replace(config, window=self.spec_window)
        if self.spec_draft_ngl is not None:
            config = replace(config, n_gpu_layers=self.spec_draft_ngl)
        return config


def _refuse_removed(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value is not None:
        given = next(name for name in param.opts if name in REMOVED)
        raise click.UsageError(f"{given} is called {REMOVED[given]} now")


def _removed(name: str) -> Callable[[F], F]:
    return _spec(name, hidden=True, expose_value=False, allow_from_autoenv=False, callback=_refuse_removed)


spec_options = collected(
    "drafts",
    SpecOptions,
    _spec(
        "-md",
        "--spec-draft-model",
        "--model-draft",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="A drafter: DFlash, EAGLE3, a head for further tokens, or a small model of the same vocabulary.",
    ),
    _spec(
        "--spec-draft-n-max",
        type=click.IntRange(min=1),
        metavar="N",
        help="Draft so many tokens at most.  [default: by what it costs and wins, up to 31; 7 with recurrent state]",
    ),
    _spec(
        "--spec-fixed",
        is_flag=True,
        help="Always verify --spec-draft-n-max tokens, by no clock: the same call takes the same steps.",
    ),
    _spec(
        "--spec-tree/--no-spec-tree",
        default=None,
        help="Let drafters of blocks propose trees, where the model's memory has branches.  [default: no]",
    ),
    _spec(
        "--spec-window",
        type=click.IntRange(min=SPEC_WINDOW),
        metavar="N",
        help=f"Newest tokens that a drafting model sees.  [default: {SPEC_DEFAULT_WINDOW}]",
    ),
    _spec(
        "-ngld",
        "--spec-draft-ngl",
        type=click.IntRange(min=0),
        metavar="N",
        help="0 keeps a drafting model off the GPU, any other number puts all of it there.  [default: as the model]",
    ),
    *map(_removed, REMOVED),
)
