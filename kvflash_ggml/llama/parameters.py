"""Reads and checks the keywords of `Llama`'s constructor, and the defaults of `install`."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_cache import BaseLlamaCache

from .. import notation, system
from ..config import Fit, KVFlashConfig, PrefixCache, SpecConfig
from ..constants import KV_TYPES, MAX_CONTEXT, MAX_THREADS
from ..errors import ConfigError
from ..gguf import purpose, types
from ..logs import Progress, warn_once
from ..placement import wanted
from ..placement.wanted import DeviceChoice
from .keywords import DeviceKeywords, MediaKeywords, PoolKeywords, RemoteKeywords, WeightKeywords

logger = logging.getLogger("kvflash_ggml")

# keywords that upstream's server passes although upstream's constructor does nothing with them
STRAY_KEYWORDS = {"mul_mat_q"}
UPSTREAM_PARAMETERS = inspect.signature(llama_cpp.Llama.__init__).parameters
POOL_KEYWORDS = tuple(PoolKeywords.__annotations__)
DEVICE_KEYWORDS = tuple(DeviceKeywords.__annotations__)
REMOTE_KEYWORDS = tuple(RemoteKeywords.__annotations__)
WEIGHT_KEYWORDS = tuple(WeightKeywords.__annotations__)
MEDIA_KEYWORDS = tuple(MediaKeywords.__annotations__)

LONG = 1 << 20
"""Tokens of a full cache. llama.cpp takes minutes until it finds no room for a much longer one."""

_PREFIX = "kvflash"
_PATHS = ("scorer", "spill", "calibrate")

_KINDS: dict[Any, tuple[str, tuple[str, ...]]] = {
    Integral: ("a whole number", (
        "n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "n_cpu_moe", "n_gpu_layers", "main_gpu",
        "split_mode", "last_n_tokens_size",
    )),
    (str, os.PathLike): ("the path of a file or folder", ("mmproj", "lora_path", "kvflash_scorer", "kvflash_spill")),
    Iterable: ("a list", ("kvflash_pins", "device", "override_tensor", "rpc", "tensor_split")),
    Mapping: ("a dict", ("kv_overrides",)),
}  # fmt: skip

defaults: dict[str, Any] = {}
"""Keywords for every Llama that is made, where its maker does not give them. Set by `install`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """The keywords of one constructor call, sorted. config: None without a pool. placement: which devices hold what.

    rpc: servers whose devices are used, as they were written; rpc_trust: wherever they are. weights: of
    llama_model_params. fit: None unless asked for. n_batch: what was asked for, where upstream gets a larger one.
    """

    config: KVFlashConfig | None
    cache: PrefixCache | BaseLlamaCache | None
    progress: Progress | None
    placement: DeviceChoice
    rpc: tuple[str, ...]
    rpc_trust: bool
    weights: dict[str, Any]
    fit: Fit | None
    upstream: dict[str, Any]
    n_batch: int | None = None

    @property
    def is_long(self) -> bool:
        """A full cache of more than LONG tokens is asked for."""
        n_ctx = self.upstream.get("n_ctx") or 0
        return self.config is None and n_ctx > LONG and not self.upstream.get("vocab_only")

    def check_files(self, path: Path) -> None:
        """Raise what `purpose.check_model` does for this file and these keywords, and `adapters.check` for a LoRA."""
        vocab_only, overrides = (self.upstream.get(name) for name in ("vocab_only", "kv_overrides"))
        purpose.check_model(path, vocab_only=bool(vocab_only), overrides=overrides)
        if (adapter := self.upstream.get("lora_path")) is not None:
            from . import adapters  # here: few models have one

            adapters.check(adapter, self.upstream.get("lora_scale", 1.0), path)


def read(keywords: dict[str, Any], below: dict[str, Any]) -> ModelRequest:
    """Read what is asked for. below: defaults. TypeError for an unknown keyword, ConfigError for what cannot work."""
    given = over(keywords, below)
    check_names(given)
    check_kinds(given)
    rpc, trust = _servers(given)
    weights = {name: given.pop(name) for name in WEIGHT_KEYWORDS if name in given}
    upstream = {
        name: value for name, value in given.items() if not name.startswith(_PREFIX) and name not in REMOTE_KEYWORDS
    }
    _open_projector(upstream)
    fit = read_fit(upstream.pop("fit", None))
    if rpc and fit is None:
        upstream.setdefault("n_gpu_layers", -1)
    fields = {
        name.removeprefix(f"{_PREFIX}_"): value
        for name, value in given.items()
        if name.startswith(_PREFIX) and value is not None
    }
    _name_draft_file(fields, upstream)
    kvflash, store, progress = (fields.pop(name, None) for name in (_PREFIX, "cache", "progress"))
    config = merge(kvflash, fields)
    if config is not None:
        config = _check_features(config, upstream, by_default=_PREFIX not in keywords)
    check_numbers(upstream)  # with the flash attention that a pool sets
    # upstream counts the cores of the machine, where a container or an affinity may allow fewer
    upstream["n_threads"] = upstream.get("n_threads") or max(1, system.cores() // 2)
    upstream["n_threads_batch"] = upstream.get("n_threads_batch") or system.cores()
    if config is not None:
        upstream.setdefault("n_ctx", 0)
        upstream.setdefault("swa_full", False)
    if config is not None and isinstance(config.calibrate, Path):
        from ..calibration import known  # here: it imports how heads are kept

        known.read(config.calibrate)  # before a model is loaded, which takes minutes
    if config is not None and config.deterministic and store is not None:
        raise ConfigError("kvflash_deterministic reads each prompt from its beginning: leave out kvflash_cache")
    if isinstance(store, (str, Path)):
        store = PrefixCache(folder=Path(store))
    if not isinstance(store, PrefixCache | BaseLlamaCache | None):
        raise ConfigError(f"kvflash_cache={store!r}: a PrefixCache, or the folder of one")
    if progress is not None and not callable(progress):
        raise ConfigError(f"kvflash_progress={progress!r}: what is called as (done, total)")
    placement = wanted.read(upstream, config)
    return ModelRequest(
        config=config, cache=store, progress=progress, placement=placement, rpc=rpc, rpc_trust=trust, weights=weights,
        fit=fit, upstream=upstream, n_batch=_make_steps_whole(config, upstream),
    )  # fmt: skip


def check_kinds(keywords: dict[str, Any]) -> None:
    """Raise ConfigError for a value of a kind that nothing later could name."""
    for kind, (what, names) in _KINDS.items():
        for name in names:
            if (value := keywords.get(name)) is not None and not isinstance(value, kind):
                raise ConfigError(f"{name}={value!r}: {what}")


def check_numbers(upstream: dict[str, Any]) -> None:
    """Raise ConfigError for numbers that upstream would change silently, or that end the process in llama.cpp."""
    for name, least in (("n_ctx", 0), ("n_batch", 1), ("n_ubatch", 0)):
        if (value := upstream.get(name)) is not None and not least <= value <= MAX_CONTEXT:
            raise ConfigError(f"{name}={value}: a number of tokens from {least} to {MAX_CONTEXT}")
    for name in ("n_threads", "n_threads_batch"):
        if (value := upstream.get(name)) is not None and value > MAX_THREADS:
            raise ConfigError(f"{name}={value}: at most {MAX_THREADS} threads, and no more than there are cores")
    for name in ("type_k", "type_v"):
        if (value := upstream.get(name)) is None:
            continue
        if (kind := types.BY_ID.get(value)) is None:
            raise ConfigError(f"{name}={value} is no type of ggml: 1 is f16, 8 is q8_0")
        computes = kind.block > 1 or kind.name in KV_TYPES
        if not computes or (kind.block > 64 and not upstream.get("flash_attn")):  # which checks that heads fit
            raise ConfigError(f"{name}={value} ({kind.name}) is no type of a cache here: 1 is f16, 8 is q8_0")


def _make_steps_whole(config: KVFlashConfig | None, upstream: dict[str, Any]) -> int | None:
    """Raise n_batch to n_ubatch where prompts may be streamed; return the old value, None if it stays.

    A streamed step moves the whole text over the bus, and LangChain's default is n_batch=8.
    """
    if config is None or config.reading == "pool":
        return None
    asked, step = (upstream.get(name, UPSTREAM_PARAMETERS[name].default) for name in ("n_batch", "n_ubatch"))
    if asked >= step:
        return None
    upstream["n_batch"] = step
    return int(asked)


def _open_projector(upstream: dict[str, Any]) -> None:
    """Put a chat handler in the place of `mmproj=`. ConfigError if the file is no projector, or another handler is
    given.
    """
    given = upstream.pop("mmproj", None)
    if given is None:
        return
    for name in ("chat_handler", "chat_format"):
        if upstream.get(name) is not None:
            raise ConfigError(f"mmproj={str(given)!r} and {name} both say how chats are made: leave one of the two out")
    from .vision import Projector  # here: few models see or hear

    upstream["chat_handler"] = Projector(Path(given))


def read_fit(asked: object) -> Fit | None:
    """Read `fit=` of the constructor. ConfigError for another value."""
    if asked is None or asked is False:
        return None
    if asked is True:
        return Fit()
    if not isinstance(asked, Fit):
        raise ConfigError(f"fit is True, False or a Fit, not {asked!r}")
    return asked


def over(keywords: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    """Return keywords over the defaults `below`. With `kvflash` among them, no default about the pool counts."""
    if "kvflash" in keywords:
        below = {name: value for name, value in below.items() if not name.startswith(_PREFIX)}
    return {**below, **keywords}


def check_names(keywords: dict[str, Any]) -> None:
    """Raise TypeError for an unknown keyword that begins with kvflash. Warn of others, which upstream ignores."""
    ours = {*POOL_KEYWORDS, *DEVICE_KEYWORDS, *REMOTE_KEYWORDS, *WEIGHT_KEYWORDS, *MEDIA_KEYWORDS}
    unknown = set(keywords) - {*UPSTREAM_PARAMETERS, *STRAY_KEYWORDS} - ours
    for name in sorted(unknown):
        if name.startswith(_PREFIX):
            import difflib  # here: it compiles regular expressions

            known = {word.removeprefix(_PREFIX): word for word in POOL_KEYWORDS}
            close = difflib.get_close_matches(name.removeprefix(_PREFIX), known, n=1)
            hint = f": is it {known[close[0]]}?" if close else f"; there are {', '.join(POOL_KEYWORDS)}"
            raise TypeError(f"Llama() has no keyword {name}{hint}")
    if unknown:
        warn_once(f"ignored, as llama_cpp.Llama does, for it has no such keywords: {', '.join(sorted(unknown))}")


def _servers(given: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the servers, and whether they are trusted wherever they are. ConfigError if they are named twice."""
    named = [name for name in ("rpc", "rpc_servers") if given.get(name)]
    if len(named) > 1:
        raise ConfigError("rpc and rpc_servers name the same thing: give one of them")
    servers = given[named[0]] if named else ()
    words = servers.split(",") if isinstance(servers, str) else servers
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{named[0]}={servers!r}: a list of 'HOST:PORT', or 'HOST:PORT,HOST:PORT'")
    return tuple(word.strip() for word in words), bool(given.get("rpc_trust"))


def _name_draft_file(fields: dict[str, Any], upstream: dict[str, Any]) -> None:
    """Move a file that `draft_model=` names to the settings of drafts. ConfigError if that contradicts others."""
    model = upstream.get("draft_model")
    if not isinstance(model, (str, Path)):
        return
    kvflash = fields.get(_PREFIX)
    if kvflash is None or kvflash == "off":
        raise ConfigError(f"draft_model={str(model)!r}: a file drafts for a pool: give kvflash a pool size or 'auto'")
    if "spec" in fields:
        raise ConfigError(
            f"draft_model={str(model)!r} and kvflash_spec: name the file in kvflash_spec=SpecConfig(draft=...)"
        )
    if isinstance(kvflash, KVFlashConfig):
        raise ConfigError(
            f"draft_model={str(model)!r} and a KVFlashConfig: name the file there, as spec=SpecConfig(draft=...)"
        )
    del upstream["draft_model"]
    fields["spec"] = SpecConfig(draft=Path(model))


def merge(kvflash: KVFlashConfig | int | str | None, fields: dict[str, Any]) -> KVFlashConfig | None:
    """Return the configuration of `kvflash=` and of single fields given by keyword; None without a pool."""
    asked = _asked(kvflash)
    if asked is None:
        if fields:
            raise ConfigError(f"kvflash_{next(iter(fields))} needs kvflash: give a pool size or 'auto'")
        return None
    if isinstance(asked, KVFlashConfig):
        if fields:
            raise ConfigError(f"give {', '.join(fields)} either in the KVFlashConfig or by keyword, not both")
        return asked
    for name in _PATHS:
        if isinstance(fields.get(name), str):
            fields[name] = Path(fields[name])
    if "pins" in fields:
        fields["pins"] = tuple(fields["pins"])
    if isinstance(fields.get("spec"), str):
        fields["spec"] = SpecConfig.read(fields["spec"])
    return KVFlashConfig(**asked, **fields)


def _asked(kvflash: KVFlashConfig | int | str | None) -> KVFlashConfig | dict[str, Any] | None:
    """Return a configuration, the fields of one, or None without a pool."""
    if not isinstance(kvflash, str):
        return kvflash if kvflash is None or isinstance(kvflash, KVFlashConfig) else {"pool": kvflash}
    try:
        return notation.pool(kvflash)
    except ValueError as err:
        raise ConfigError(f"the pool {err}") from err


def _check_features(config: KVFlashConfig, upstream: dict[str, Any], *, by_default: bool) -> KVFlashConfig | None:
    """Return the config, or None where there is no cache to bound. ConfigError for what a pool cannot do.

    by_default: the pool comes from `install`, so the program that gives the other keywords knows nothing of it.
    """
    if upstream.get("vocab_only"):
        return None
    if upstream.get("embedding"):
        logger.warning("kvflash is off: an embedding context evaluates many short texts and keeps nothing")
        return None
    if upstream.get("flash_attn", True) is False:
        if not by_default:
            raise ConfigError("flash_attn=False: a pool needs flash attention, since V is stored transposed without it")
        warn_once("flash_attn=False of the program is raised to True: a pool needs flash attention")
    upstream["flash_attn"] = True
    if upstream.get("attention_type") == llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL:
        raise ConfigError("attention_type=1 (non-causal): in a pool tokens see those before them: use kvflash=None")
    return config


def signature() -> inspect.Signature:
    """Return the constructor's signature, upstream's parameters and ours, for `help()` and editors."""
    names = inspect.signature(llama_cpp.Llama.__init__).parameters
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation.__forward_arg__)
        for keywords in (PoolKeywords, DeviceKeywords, RemoteKeywords, MediaKeywords)
        for name, annotation in keywords.__annotations__.items()
    ]
    ours += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=True, annotation=annotation.__forward_arg__)
        for name, annotation in WeightKeywords.__annotations__.items()
    ]
    *upstream, rest = names.values()
    return inspect.Signature([*upstream, *ours, rest])
