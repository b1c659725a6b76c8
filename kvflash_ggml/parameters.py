"""What the constructor of `Llama` accepts beside upstream's keywords, and which combinations can work."""

from __future__ import annotations

import inspect
import logging
from typing import Any, Literal

import llama_cpp
from llama_cpp.llama_chat_format import Llava15ChatHandler

from .config import KVFlashConfig
from .errors import ConfigError

logger = logging.getLogger("kvflash_ggml")

# keywords that upstream's server passes although upstream's constructor does nothing with them
STRAY_KEYWORDS = {"rpc_servers", "mul_mat_q"}
UPSTREAM_KEYWORDS = set(inspect.signature(llama_cpp.Llama.__init__).parameters) - {"self", "kwargs"}

KVFlash = KVFlashConfig | int | Literal["auto"] | None


def merge(kvflash: KVFlash, fields: dict[str, Any]) -> KVFlashConfig | None:
    """One configuration from `kvflash=` and the single fields given by keyword; None without a pool."""
    if kvflash is None:
        if fields:
            raise ConfigError(f"kvflash_{next(iter(fields))} needs kvflash: give a pool size or 'auto'")
        return None
    if isinstance(kvflash, KVFlashConfig):
        if fields:
            raise ConfigError(f"give {', '.join(fields)} either in the KVFlashConfig or by keyword, not both")
        return kvflash
    return KVFlashConfig(pool=kvflash, **fields)


def check_features(config: KVFlashConfig, kwargs: dict[str, Any]) -> KVFlashConfig | None:
    """The config, or None where upstream's contract has no cache to bound. Raises for what a pool cannot do."""
    if kwargs.get("vocab_only"):
        return None
    if kwargs.get("embedding"):
        logger.warning("kvflash is off: an embedding context evaluates many short texts and keeps nothing")
        return None
    if kwargs.get("flash_attn", True) is False:
        raise ConfigError("flash_attn=False: a pool needs flash attention, since V is stored transposed without it")
    if isinstance(kwargs.get("chat_handler"), Llava15ChatHandler):
        raise ConfigError("multimodal chat handlers decode behind the pool's back: use kvflash=None with them")
    return config
