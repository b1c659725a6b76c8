"""Fits a model to the devices before it is loaded: decides what the keywords leave open."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp

from .. import policy, remote
from ..config import Fit, KVFlashConfig
from ..constants import CHUNK, KV_TYPES, POOL_STEP, SPEED_CAP, round_up
from ..drafter import model as drafter
from ..errors import ConfigError, DeviceLimit, DoesNotFit, KVFlashError, NotMade, mebibytes
from ..native import devices, library, measure
from ..native import remote as servers
from ..placement import memory
from ..placement.buffers import index_bytes
from ..placement.devices import holders, slices
from ..placement.predict import ALL_LAYERS, imagine, predict
from ..placement.sizes import Device, ModelSizes, Placement, PlacementRequest
from ..placement.sizing import PoolSize
from ..placement.table import summary
from ..placement.wanted import LAYER, NONE
from ..policy.base import Exact, Indexed
from ..remote import Endpoint
from . import embedding, parameters, vision
from .drafting import device_bytes, likely, loads_head, search
from .parameters import LONG, ModelRequest

logger = logging.getLogger("kvflash_ggml")

N_CTX, N_BATCH, N_UBATCH = 512, 512, 512
"""llama-cpp-python's."""

_REPLACED = (
    (bool, llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL, "val_bool"),
    (int, llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT, "val_i64"),
    (float, llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT, "val_f64"),
    (str, llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR, "val_str"),
)
"""Types of values that take the place of a field, and how llama.cpp is told each."""

NOT_MADE = "llama.cpp could not make it all the same: something else may have taken memory meanwhile."


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a model needs beside its weights and cache. query_rows: captured queries. indexed: the policy has an index.
    exact: the policy that wants exact scores. reserved: bytes of the first device. planes: recurrent states to roll
    back to. head: load an MTP head."""

    query_rows: int = 0
    indexed: bool = False
    exact: Exact | None = None
    reserved: int = 0
    planes: int = 0
    head: bool = False


def fit(
    path: str, asked: ModelRequest, beside: Beside, endpoints: Sequence[Endpoint] = ()
) -> tuple[ModelRequest, Placement]:
    """Return the keywords with everything decided, and the placement. DoesNotFit, or what `predict` raises."""
    placement, _ = predicted(path, asked, beside, endpoints)
    logger.info("fit: %s; %s", placement.why, summary(placement))
    upstream = {
        **asked.upstream,
        "n_gpu_layers": placement.n_gpu_layers,
        "n_ubatch": placement.n_ubatch,
        "n_batch": max(placement.n_ubatch, asked.upstream.get("n_batch", N_BATCH)),
        "type_k": KV_TYPES[placement.type_k],
        "type_v": KV_TYPES[placement.type_v],
        "use_mmap": placement.use_mmap,
    }
    if placement.tensor_split is not None:
        upstream["tensor_split"] = list(placement.tensor_split)
    config = asked.config
    if config is not None:
        stage = staged(config, placement.n_ctx) or config.stage
        config = replace(config, pool=placement.pool, pool_bytes=None, stage=stage)
    where = replace(asked.placement, override_tensor=placement.overrides, n_cpu_moe=0)
    return replace(asked, upstream=upstream, config=config, placement=where), placement


def check_full_cache(path: str, asked: ModelRequest) -> None:
    """Raise ConfigError for a long full cache that takes more than the memory of this machine's devices together."""
    if not asked.is_long or asked.rpc:
        return
    n_ctx, flash = asked.upstream["n_ctx"], bool(asked.upstream.get("flash_attn", False))
    try:
        with measure.sketch(path, _model_params(asked)) as model:
            settings = [_context_params(asked.upstream, n, N_BATCH, 0, flash=flash) for n in (LONG >> 9, LONG >> 8)]
            found = [measure.measure(model, one, cells=0).devices for one in settings]
    except KVFlashError:  # the load says what is wrong with it
        return
    small, large = (sum(need.kv for need in needs) for needs in found)
    needed = small + (large - small) * (n_ctx - (LONG >> 9)) // (LONG >> 9)
    there = sum(device.total for device in memory.devices())
    if needed > there:
        raise ConfigError(
            f"n_ctx={n_ctx} (-c): a full cache takes {mebibytes(needed)} MiB, and all devices have {mebibytes(there)}: "
            'give a shorter context, or a pool (kvflash="auto", --kvflash auto)'
        )


def check_limits(path: str, asked: ModelRequest) -> None:
    """Raise DeviceLimit where K or V of a layer would be a larger tensor than a GPU of this machine computes on."""
    config, settings = asked.config, asked.upstream
    gpus = [device.name for device in devices.devices() if device.kind in ("gpu", "integrated")]
    bounds = {name: most for name in gpus if (most := devices.largest_tensor(name)) is not None}
    if config is None or not bounds:
        return
    try:
        with measure.sketch(path, _model_params(asked)) as model:
            params = _context_params(settings, POOL_STEP, CHUNK, 0, flash=True)
            layers = measure.measure(model, params, cells=POOL_STEP).layers
    except KVFlashError:  # the load says what is wrong with it
        return
    names = [_type(settings.get(name), left_open=False) or "f16" for name in ("type_k", "type_v")]
    pooled = [layer for layer in layers if not layer.window]
    row = max(max(layer.rows(*names)) for layer in pooled)
    slots = config.pool if isinstance(config.pool, int) else SPEED_CAP
    if config.pool_bytes is not None:
        slots = config.pool_bytes // sum(layer.slot(*names) for layer in pooled)
    slots = round_up(min(slots, settings.get("n_ctx") or slots), POOL_STEP)
    device, limit = min(bounds.items(), key=lambda item: item[1])
    if slots * row > limit:
        most = limit // row // POOL_STEP * POOL_STEP
        raise DeviceLimit(
            device, f"K or V of one layer in a pool of {slots:,} tokens", needed=slots * row, limit=limit,
            remedy=f"take a pool of at most {most} tokens (kvflash, --kvflash), or smaller K and V (type_k, -ctk)",
        )  # fmt: skip


def staged(config: KVFlashConfig | None, n_ctx: int) -> int:
    """Return the tokens of layer buffers to make room for: those that a setting asks for, or needs."""
    if config is None or config.reading == "pool":
        return 0
    return min(config.stage or n_ctx, n_ctx) if config.sees_all or config.stage else 0


def without_loading(
    path: str, keywords: dict[str, Any], limits: Fit | None = None
) -> tuple[Placement, tuple[Device, ...]]:
    """Tell where a `Llama` with these keywords would go, and the devices. Raises what making it would, and DoesNotFit.

    If `fit` names a device that this machine lacks, only the devices that it names count. The placement is an estimate.
    limits: the memory to count on, whatever `fit` says of that, and without `fit` too.
    """
    asked = parameters.read(keywords, parameters.defaults)
    if asked.fit is not None and limits is not None:
        asked = replace(asked, fit=replace(asked.fit, free=limits.free, margin=limits.margin))
    asked.check_files(Path(path))
    check_full_cache(path, asked)
    endpoints = remote.find_all(asked.rpc, trust=asked.rpc_trust)
    free = {} if asked.fit is None else asked.fit.free
    if not endpoints and {*free} - {device.name for device in memory.devices()}:
        return predicted(path, asked, beside(path, asked), machine=memory.imagined(free))
    if not endpoints:
        library.ensure_gpu_offload(asked.upstream.get("n_gpu_layers", 0))
        check_limits(path, asked)
    others = beside(path, asked)
    if asked.config is not None and asked.config.scorer is not None:
        drafter.check(asked.config.scorer)
    with servers.connected(endpoints):
        return predicted(path, asked, others, endpoints, limits=limits)


def beside(path: str, asked: ModelRequest) -> Beside:
    """Return what the keywords need beside the model and its context, before either exists."""
    config, images = asked.config, vision.reserve_bytes(asked.upstream.get("chat_handler"))
    if config is None:
        return Beside(reserved=images)
    small = drafter.of_policy(path, config)
    scorer = policy.resolve(config.policy) if small is None else None
    found, drafts = search(Path(path), config), likely(config, asked.upstream.get("draft_model"))
    embeds = 0
    if config.embedding:
        with measure.sketch(path, _model_params(asked)) as model:
            embeds = embedding.reserve_bytes(model, llama_cpp.llama_context_default_params(), config)
    rows = 0 if scorer is None else scorer.query_rows
    return Beside(
        query_rows=rows + (drafts.queries if rows else 0),
        indexed=isinstance(scorer, Indexed),
        exact=scorer if isinstance(scorer, Exact) else None,
        reserved=(0 if small is None else drafter.reserve_bytes(small)) + embeds + device_bytes(found) + images,
        planes=drafts.planes,
        head=loads_head(found),
    )


def does_not_fit(path: str, asked: ModelRequest, endpoints: Sequence[Endpoint], size: PoolSize) -> DoesNotFit:
    """Return the error for a context that could not be made even with so small an "auto" pool, with remedies.

    The model is not loaded any more. endpoints: as `predicted`.
    """
    assert asked.config is not None
    assert size.tight is not None
    asked = replace(asked, config=replace(asked.config, pool=size.slots, pool_bytes=None))
    others, limits = beside(path, asked), Fit()
    try:
        placement, _ = predicted(path, asked, others, endpoints)
        need = next(need for need in placement.needs if need.device == size.tight.name)
        # it should have fitted: what would need less is all that can be told
        limits = Fit(free={need.device: need.total - 1}, margin={need.device: need.margin})
        predicted(path, asked, others, endpoints, limits=limits)
    except DoesNotFit as err:
        if not limits.free:
            return err
        helps = [replace(remedy, enough=False) for remedy in err.remedies]
        return DoesNotFit(
            need.device, needed=need.total, free=need.free, needs=need.itemised, remedies=helps, why=NOT_MADE
        )
    return DoesNotFit(need.device, needed=need.total, free=need.free, needs=need.itemised, why=NOT_MADE)


def why_not(path: str, asked: ModelRequest, endpoints: Sequence[Endpoint] = ()) -> DoesNotFit | NotMade | None:
    """Return why a model could not be made: the file, the settings, or the memory. None if that is not known.

    The model is not loaded any more. endpoints: as `predicted`.
    """
    try:
        predicted(path, asked, beside(path, asked), endpoints)
    except (DoesNotFit, NotMade) as err:
        return err
    except KVFlashError:  # it cannot be placed beforehand
        return None
    return None


def other_split(path: str, asked: ModelRequest, endpoints: Sequence[Endpoint], size: PoolSize) -> str:
    """Return, for the banner of an uneven "auto" pool, the split of the layers that gives more slots; "" if none does.

    endpoints: as `predicted`.
    """
    try:
        limits = Fit(free=size.uneven)
        placement, _ = predicted(path, asked, beside(path, asked), endpoints, limits=limits, split_open=True)
    except (ConfigError, DoesNotFit):  # what cannot be planned was loaded all the same
        return ""
    if placement.tensor_split is None or placement.pool <= size.slots:
        return ""
    return f"; tensor_split (-ts) {','.join(f'{share:g}' for share in placement.tensor_split)} gives {placement.pool}"


def predicted(
    path: str,
    asked: ModelRequest,
    beside: Beside,
    endpoints: Sequence[Endpoint] = (),
    *,
    limits: Fit | None = None,
    split_open: bool = False,
    machine: tuple[Device, ...] = (),
) -> tuple[Placement, tuple[Device, ...]]:
    """Return where a model would go with these keywords. Without `fit` nothing is open but an "auto" pool.

    endpoints: of the servers that are asked for, connected. limits: what to count on, where `fit` is not asked for.
    split_open: the split of the layers is open, whatever the keywords say. machine: devices to imagine in the place of
    this machine's.
    """
    if not Path(path).exists():
        raise ConfigError(f"Model path does not exist: {path}")
    settings, open_ = asked.upstream, asked.fit is not None
    if settings.get("split_mode", LAYER) not in (NONE, LAYER):
        raise ConfigError("fit places whole layers: leave out split_mode, or use split_mode=1 (layer) or 0 (none)")
    layers = settings.get("n_gpu_layers", None if open_ else 0)
    model = _model_params(asked)
    model.n_gpu_layers = ALL_LAYERS if layers is None or layers < 0 else layers
    for name in ("split_mode", "main_gpu"):
        if name in settings:
            setattr(model, name, settings[name])
    model.load_mtp = beside.head
    for name, value in asked.weights.items():
        setattr(model, name, value)
    n_ctx = settings.get("n_ctx", N_CTX)
    n_batch = min(n_ctx or N_BATCH, settings.get("n_batch", N_BATCH))
    steps_open = open_ and "n_batch" not in settings and "n_ubatch" not in settings
    n_ubatch = None if steps_open else min(n_batch, settings.get("n_ubatch", N_UBATCH))
    flash = bool(settings.get("flash_attn", False))
    types = [_type(settings.get(name), left_open=open_ and flash) for name in ("type_k", "type_v")]

    def request(sizes: ModelSizes, devices: tuple[Device, ...]) -> PlacementRequest:
        shares = _shares(settings.get("tensor_split")) or (None if open_ else by_memory(sizes, devices, layers or 0))
        tokens, heads = n_ctx or sizes.n_ctx_train, sum(layer.heads for layer in sizes.layers)
        return PlacementRequest(
            n_ctx=tokens,
            pool=_slots(asked.config, sizes, types),
            minimum_pool=POOL_STEP if asked.config is None else asked.config.minimum_pool,
            n_ubatch=n_ubatch,
            type_k=types[0],
            type_v=types[1],
            n_gpu_layers=layers,
            tensor_split=None if split_open else shares,
            overrides=asked.placement.override_tensor,
            n_cpu_moe=asked.placement.n_cpu_moe or (None if open_ else 0),
            use_mmap=settings.get("use_mmap", None if open_ else True),
            offload_kqv=settings.get("offload_kqv", True),
            query_rows=beside.query_rows,
            stage=staged(asked.config, tokens) if open_ else 0,
            masses=0 if beside.exact is None else beside.exact.most_masses(tokens // CHUNK, heads),
            index={} if asked.config is None or not beside.indexed else _index(asked.config, sizes, devices, tokens),
            fit=asked.fit or limits or Fit(),
        )

    context = _context_params(settings, n_ctx, n_batch, beside.planes, flash=flash)
    overrides = asked.placement.override_tensor
    if machine:
        placement = imagine(path, model, context, request, machine, overrides=overrides, reserved=beside.reserved)
        return placement, memory.counted(machine, asked.fit or Fit())
    return predict(
        path,
        model,
        context,
        request,
        device=holders(asked.placement, endpoints),
        overrides=overrides,
        reserved=beside.reserved,
    )


def _model_params(asked: ModelRequest) -> Any:
    """Return upstream's parameters of a model with the values that `asked` replaces. A load reads these from it."""
    params, replaced = llama_cpp.llama_model_default_params(), asked.upstream.get("kv_overrides") or {}
    fields = (llama_cpp.llama_model_kv_override * (len(replaced) + 1))()  # the last one ends them
    for field, (name, value) in zip(fields, replaced.items(), strict=False):
        tag, attribute = next((tag, attribute) for kind, tag, attribute in _REPLACED if isinstance(value, kind))
        field.key, field.tag = name.encode(), tag
        setattr(field.value, attribute, value.encode() if isinstance(value, str) else value)
    params.kv_overrides = fields
    return params


def _context_params(settings: dict[str, Any], n_ctx: int, n_batch: int, planes: int, *, flash: bool) -> Any:
    """Return context parameters as upstream's constructor makes them, as far as they concern memory."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, min(n_batch, N_UBATCH)
    params.n_rs_seq = planes
    params.flash_attn_type = (
        llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.embeddings = settings.get("embedding", False)
    for name in ("offload_kqv", "op_offload", "swa_full", "type_k", "type_v"):
        if settings.get(name) is not None:
            setattr(params, name, settings[name])
    return params


def _type(number: int | None, *, left_open: bool) -> str | None:
    if number is None:
        return None if left_open else "f16"
    names = {value: name for name, value in KV_TYPES.items()}
    if number not in names:
        raise ConfigError(f"fit knows no K or V of type {number}: it is one of {', '.join(KV_TYPES)}")
    return names[number]


def _shares(split: list[float] | None) -> tuple[float, ...] | None:
    return None if split is None else tuple(split)


def by_memory(sizes: ModelSizes, devices: tuple[Device, ...], layers: int) -> tuple[float, ...] | None:
    """Return the layers of each device as llama.cpp shares them out: by free memory. None with one device.

    layers: n_gpu_layers.
    """
    *several, host = devices
    if len(several) < 2 or layers == 0:
        return None
    shares = [device.free if device.total else host.total for device in several]
    return tuple(float(len(part)) for part in slices(len(sizes.layers), layers, shares))


def _index(config: KVFlashConfig, sizes: ModelSizes, devices: tuple[Device, ...], tokens: int) -> Mapping[str, int]:
    """Return what the policy's index takes at most, by device: of a single one, since it must hold all layers."""
    if len(devices) > 2:  # with the host
        return {}
    name = devices[0].name
    return {name: config.sequences * index_bytes(sizes.layers, sizes.work, tokens, config, name)}


def _slots(config: KVFlashConfig | None, sizes: ModelSizes, types: list[str | None]) -> Any:
    """Return the slots of the pool: a number, "auto", or None for a full cache."""
    if config is None:
        return None
    if config.pool_bytes is None:
        return config.pool
    slot = sum(layer.slot(types[0] or "f16", types[1] or "f16") for layer in sizes.layers if not layer.window)
    return config.pool_bytes // max(1, slot) // POOL_STEP * POOL_STEP
