"""`install`: our class in place of `llama_cpp.Llama`, for programs that know nothing of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llama_cpp

from .. import config
from ..config import PrefixCache
from . import parameters
from .llama import Llama

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import Keywords


def install(**defaults: Unpack[Keywords]) -> None:
    """Make `llama_cpp.Llama` this class, for programs whose import cannot be changed.

    defaults: keywords of the constructor for every Llama made from now on, where its maker does not give them. A maker
    that gives the keyword `kvflash` gets none of the defaults that begin with kvflash. Defaults that are not given here
    come from the variables of the pool's options: KVFLASH_POOL, KVFLASH_POLICY, KVFLASH_CACHE, ...

    A later call replaces the defaults. Names that a program imported from llama_cpp before stay what they were.
    TypeError for an unknown keyword, ConfigError for a value that cannot work.
    """
    requested = parameters.over(dict(defaults), _environment())
    parameters.read(requested, {})
    parameters.defaults.clear()
    parameters.defaults.update(requested)
    llama_cpp.Llama = Llama  # type: ignore[assignment,misc]


def _environment() -> dict[str, Any]:
    """Read the keywords that the variables ask for."""
    keywords = config.from_environment()
    size = keywords.pop("kvflash_cache_size", None)
    if "kvflash_cache" in keywords and size is not None:
        keywords["kvflash_cache"] = PrefixCache(folder=keywords["kvflash_cache"], disk_bytes=size)
    return keywords
