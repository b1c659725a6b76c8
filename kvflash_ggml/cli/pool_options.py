"""The options of the pool, all named `--kvflash...`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from .. import notation
from ..config import SPEC_TYPES, KVFlashConfig, SpecConfig
from ..policy import names
from ..prefix_cache.cache import PrefixCache
from .sections import collected, option
from .types import Calibrate, Ceiling, Drafts, Pin, Policy, Pool, Size

_pool = option("KVFlash")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What is asked of the pool."""

    kvflash: str
    kvflash_policy: str
    kvflash_drafter: Path | None
    kvflash_tau: int | None
    kvflash_calibrate: bool | str
    kvflash_deterministic: bool
    kvflash_reading: Literal["auto", "exact", "pool"]
    kvflash_stage: int | None
    kvflash_answer: Literal["pool", "exact", "lossless"]
    kvflash_repair: int | None
    kvflash_spec: str | None
    kvflash_pin: tuple[tuple[int, int], ...]
    kvflash_host_limit: int | Literal["auto"]
    kvflash_spill: Path | None
    kvflash_cache: Path | None
    kvflash_cache_size: int
    kvflash_report: Path | None

    def config(self) -> KVFlashConfig | None:
        """The pool's settings, or None when it is off."""
        asked = notation.pool(self.kvflash)
        if asked is None:
            return None
        calibrate = self.kvflash_calibrate
        return KVFlashConfig(
            **asked,
            policy=self.kvflash_policy,
            drafter=self.kvflash_drafter,
            tau=self.kvflash_tau,
            calibrate=calibrate if isinstance(calibrate, bool) else Path(calibrate),
            deterministic=self.kvflash_deterministic,
            reading=self.kvflash_reading,
            stage=self.kvflash_stage,
            answer=self.kvflash_answer,
            repair=self.kvflash_repair,
            spec=None if self.kvflash_spec is None else SpecConfig.read(self.kvflash_spec),
            pins=self.kvflash_pin,
            host_limit=self.kvflash_host_limit,
            spill=self.kvflash_spill,
        )

    def cache(self) -> PrefixCache | None:
        """Where texts that were read are kept for later runs, or None."""
        if self.kvflash == "off" or self.kvflash_cache is None:
            return None
        return PrefixCache(folder=self.kvflash_cache, disk_bytes=self.kvflash_cache_size)


pool_options = collected(
    "pool",
    PoolOptions,
    _pool(
        "--kvflash",
        type=Pool(),
        default="off",
        show_default=True,
        envvar="KVFLASH_POOL",
        metavar="TOKENS|SIZE|auto|off",
        help="Keep the KV cache in a pool of so many tokens (4096, 4K) or bytes (512M, 2G); what does not fit is"
        " paged to host memory. 'auto' sizes the pool from free device memory.",
    ),
    _pool(
        "--kvflash-policy",
        type=Policy(),
        default="qk",
        show_default=True,
        envvar="KVFLASH_POLICY",
        metavar="NAME",
        help=f"Who stays resident: {', '.join(names())}, or a policy of another installed package.",
    ),
    _pool(
        "--kvflash-drafter",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="KVFLASH_DRAFTER",
        metavar="FILE",
        help="Small GGUF model for the policy 'drafter'.  [default: one with 'scorer', 'drafter' or 'draft' in its name"
        " beside the model, or in a folder 'drafter' or 'draft' there]",
    ),
    _pool(
        "--kvflash-tau",
        type=click.IntRange(min=1),
        envvar="KVFLASH_TAU",
        metavar="N",
        help="Tokens between two reselections while generating.  [default: adapts to what scoring costs]",
    ),
    _pool(
        "--kvflash-calibrate",
        type=Calibrate(),
        default="on",
        show_default=True,
        envvar="KVFLASH_CALIBRATE",
        metavar="on|off|FILE",
        help="Find the heads of the model that retrieve, once, after the first answer; or take them from a file of"
        " 'kvflash-run calibrate'; 'off' asks all heads.",
    ),
    _pool(
        "--kvflash-deterministic",
        is_flag=True,
        envvar="KVFLASH_DETERMINISTIC",
        help="The same text brings the same chunks: each prompt is read from its beginning.",
    ),
    _pool(
        "--kvflash-reading",
        type=click.Choice(["auto", "exact", "pool"]),
        default="auto",
        show_default=True,
        envvar="KVFLASH_READING",
        help="What the prompt's tokens see of the text before them: 'exact' all of it, as without a pool; 'pool' what"
        " is resident; 'auto' all of it if there is memory for that.",
    ),
    _pool(
        "--kvflash-stage",
        type=Size(),
        envvar="KVFLASH_STAGE",
        metavar="TOKENS",
        help="So many tokens can be seen by exact reading; of a longer text the best chunks.  [default: all, or what a"
        " third of the free device memory holds]",
    ),
    _pool(
        "--kvflash-answer",
        type=click.Choice(["pool", "exact", "lossless"]),
        default="pool",
        show_default=True,
        envvar="KVFLASH_ANSWER",
        help="What the answer's tokens see: what is resident; or all of the text, at the speed of the bus; 'lossless'"
        " all of it too, where what is resident drafts several tokens and one pass over the text verifies them; who"
        " drafts otherwise (--kvflash-spec, -md) drafts for the pool then.",
    ),
    _pool(
        "--kvflash-repair",
        type=click.IntRange(min=1),
        envvar="KVFLASH_REPAIR",
        metavar="N",
        help="After every N tokens of an answer, evaluate these again with the whole text in view, and count what would"
        " have been different.  [default: never]",
    ),
    _pool(
        "--kvflash-spec",
        "--spec-type",
        type=Drafts(),
        envvar="KVFLASH_SPEC",
        metavar="auto|none|NAMES",
        help=f"Speculative decoding: who drafts what one step verifies, of {', '.join(SPEC_TYPES)}, with commas;"
        " NAME=FILE names a drafter's file. 'auto': the text, and a drafter in the model's file or beside it."
        "  [default: none]",
    ),
    _pool(
        "--kvflash-pin",
        type=Pin(),
        multiple=True,
        envvar="KVFLASH_PIN",
        metavar="LO:HI",
        help="Tokens that are never paged out; may be repeated.",
    ),
    _pool(
        "--kvflash-host-limit",
        type=Ceiling(),
        default="auto",
        envvar="KVFLASH_HOST_LIMIT",
        metavar="SIZE|auto",
        help="Ceiling on host memory for paged-out tokens, as 8G or 512M; auto is what is available with a spill "
        "folder, and no ceiling without one.  [default: auto]",
    ),
    _pool(
        "--kvflash-spill",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="KVFLASH_SPILL",
        metavar="DIR",
        help="Folder for what passes that ceiling.",
    ),
    _pool(
        "--kvflash-cache",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="KVFLASH_CACHE",
        metavar="DIR",
        help="Folder where texts that were read are kept, so that later runs need not read them again.",
    ),
    _pool(
        "--kvflash-cache-size",
        type=Size(),
        default="16G",
        show_default=True,
        envvar="KVFLASH_CACHE_SIZE",
        metavar="SIZE",
        help="What that folder may take, for all models together.",
    ),
    _pool(
        "--kvflash-report",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="KVFLASH_REPORT",
        metavar="FILE",
        help="Write an HTML page that shows which chunks were resident when.",
    ),
)
