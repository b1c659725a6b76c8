"""Decides how large a model's pool is, and how much of the host's memory its page images may take."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..arrays import address
from ..config import Fit, KVFlashConfig
from ..constants import CHUNK, POOL_STEP, SPEED_CAP, round_up
from ..errors import UnsupportedModelError, mebibytes
from . import memory
from .buffers import STAGED_PAGES, index_bytes
from .sizes import HOST, Device

if TYPE_CHECKING:
    from llama_cpp import llama_context_params
    from llama_cpp._internals import LlamaModel

    from ..native.info import DeviceInfo

logger = logging.getLogger("kvflash_ggml")

UNEVEN = 3
"""A device is tight if it has room for less than 3 of 4 slots that all devices together could have."""

MOST_SEQUENCES = 4
"""Most sequences of `parallel="auto"`, as llama-server has. More take blocks that a text alone could use."""

STATE_SHARE = 4
"""The states of more than two sequences take at most this part of the pool's bytes: one in four."""

LEAST_SEQUENCES = 2
"""Sequences that may have states that take more: one that never ends shall not keep all others waiting."""

HALF = 2
"""A pool on the host takes at most half of its memory: page images need the other half."""

NOTABLE = 256 << 20
"""Bytes. A loss of this much is told; with less left a backend cannot grow its own buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A device that holds slots, in bytes. free: without what is kept back, the margin.

    small, large: what a context takes there with the smallest and the largest pool that come into question.
    """

    name: str
    free: int
    margin: int
    small: int
    large: int

    def slots(self, least: int, most: int) -> int:
        """Return how many slots there is room for. The size of a context is linear in them."""
        return least + (self.free - self.small) * (most - least) // max(1, self.large - self.small)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """slots: the pool. n_ctx: the context of each sequence. why: the arithmetic, for the banner. tight: the device that
    has the least room, where one was looked for. uneven: where it has much less than others, what each device has
    without the model. parallel: sequences that share the slots equally. alone:
    why there is one, where more could have been."""

    slots: int
    n_ctx: int
    why: str
    tight: Lane | None = None
    uneven: Mapping[str, int] = field(default_factory=dict)
    parallel: int = 1
    alone: str = ""

    @property
    def bounded(self) -> bool:
        """Whether a text can be longer than its share of the pool."""
        return self.slots < self.n_ctx * self.parallel


def fit(
    config: KVFlashConfig,
    model: LlamaModel,
    params: llama_context_params,
    *,
    query_rows: int = 0,
    indexed: bool = False,
    reserved: int = 0,
    mapped: bool = False,
    before: Mapping[str, int] | None = None,
) -> PoolSize:
    """Return the pool for a model, and the parameters of its context. UnsupportedModelError if it can have none.

    query_rows: captured queries. indexed: the policy has an index. reserved: bytes of the first device that something
    else will take. mapped: weights on the host are pages of their file. before: bytes that were free before the model
    was loaded, by device.
    """
    n_ctx = params.n_ctx or model.n_ctx_train()
    slot_bytes = slot_size(model, params)
    if config.pool != "auto" or config.pool_bytes is not None:
        return resolve(config, n_ctx=n_ctx, slot_bytes=slot_bytes, lanes=())
    least, most = bounds(config, n_ctx)
    if least == most:
        return resolve(config, n_ctx=n_ctx, slot_bytes=slot_bytes, lanes=())
    there = _survey(
        config, address(model.model), params, n_ctx, (least, most), query_rows, indexed, reserved, mapped, before or {}
    )
    size = resolve(config, n_ctx=n_ctx, slot_bytes=slot_bytes, lanes=there.lanes)
    why = size.why + "".join(f", {x / 2**20:,.0f} MiB of {name} went" for name, x in there.lost.items())
    uneven = are_uneven(there.lanes, there.spare, least, most)
    return replace(size, why=why, uneven=there.unloaded if uneven else {})


def are_uneven(lanes: Sequence[Lane], spare: int, least: int, most: int) -> bool:
    """Report whether all devices but the host together would hold a third more slots than the tightest one allows.

    spare: bytes of devices that hold no slots.
    """
    several = [lane for lane in lanes if lane.name != HOST]
    if not several:
        return False
    room, grows = (sum(lane.free - lane.small for lane in several), sum(lane.large - lane.small for lane in several))
    as_one = min(most, least + (room + max(0, spare)) * (most - least) // max(1, grows))
    return min(lane.slots(least, most) for lane in several) * (UNEVEN + 1) < as_one * UNEVEN


@dataclass(slots=True, kw_only=True)
class _Survey:
    """lanes: the devices that hold slots. spare: what others than the host have free. lost: of each device, what went
    elsewhere while the model was loaded. unloaded: what each has without the model. Bytes."""

    lanes: list[Lane] = field(default_factory=list)
    spare: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    unloaded: dict[str, int] = field(default_factory=dict)


def _survey(
    config: KVFlashConfig,
    model: int,
    params: llama_context_params,
    n_ctx: int,
    pools: tuple[int, int],
    query_rows: int,
    indexed: bool,
    reserved: int,
    mapped: bool,
    before: Mapping[str, int],
) -> _Survey:
    from ..native import measure, weights  # here, as below: the arithmetic needs no library

    small, large = (measure.measure(model, params, cells=pool, query_rows=query_rows) for pool in pools)
    devices = memory.of_model(model)
    res = _Survey()
    for i, (device, least, most) in enumerate(zip(devices, small.devices, large.devices, strict=True)):
        ours = least.weights if device.kind != "host" or not mapped else 0
        res.unloaded[device.name] = device.free + ours
        gone = before.get(device.name, 0) - device.free - least.weights
        if gone > NOTABLE:
            res.lost[device.name] = gone
        pages = most.kv - least.kv
        margin, free = memory.margin(device, Fit()), device.free - (reserved if i == 0 else 0)
        if not pages:
            res.spare += max(0, free - margin - most.compute) if memory.usable(device) else 0
            continue
        if device.kind == "host":
            free = (free - (least.weights if mapped else 0) - margin) // HALF
        else:
            free -= margin + STAGED_PAGES * CHUNK * pages // (pools[1] - pools[0])
        sizes = [need.kv + need.compute + need.queries for need in (least, most)]
        res.lanes.append(Lane(name=device.name, free=free, margin=margin, small=sizes[0], large=sizes[1]))
    if indexed and len(res.lanes) == 1:
        (lane,) = res.lanes
        index = config.sequences * index_bytes(small.layers, weights.work(model), n_ctx, config, lane.name)
        res.lanes = [replace(lane, free=lane.free - index)]
    return res


def slot_size(model: LlamaModel, params: llama_context_params) -> int:
    """Return the bytes of one token in the pool. UnsupportedModelError if the model cannot run in one."""
    from ..native import engine as native

    shares = native.probe(
        address(model.model),
        type_k=params.type_k,
        type_v=params.type_v,
        offload=params.offload_kqv,
        arch=model.metadata().get("general.architecture", "unknown"),
    )
    return sum(shares)


def bounds(config: KVFlashConfig, n_ctx: int) -> tuple[int, int]:
    """Return the fewest and the most slots of "auto"."""
    ceiling = round_up(n_ctx, POOL_STEP) * config.sequences
    least = min(config.minimum_pool, ceiling)
    return least, max(least, min(SPEED_CAP, ceiling))


def resolve(config: KVFlashConfig, *, n_ctx: int, slot_bytes: int, lanes: Sequence[Lane]) -> PoolSize:
    """Return the pool for a context of `n_ctx` tokens, at `slot_bytes` a token over all devices.

    "auto" takes what all `lanes` have room for, at most SPEED_CAP tokens, and no more without lanes. A pool is a
    multiple of POOL_STEP, rounded down where bytes count, never above the context and never below the minimum of the
    protections.
    """
    ceiling = round_up(n_ctx, POOL_STEP) * config.sequences
    per_token = f"at {slot_bytes / 1024:.1f} KiB a token"
    tight = None
    if config.pool_bytes is not None:
        slots = config.pool_bytes // slot_bytes // POOL_STEP * POOL_STEP
        why = f"{config.pool_bytes / 2**20:,.0f} MiB asked for, {per_token}"
    elif config.pool == "auto":
        least, most = bounds(config, n_ctx)
        tight = min(lanes, key=lambda lane: lane.slots(least, most), default=None)
        slots, why = most, f"auto{': no more are faster' if most < ceiling else ''}, {per_token}"
        if tight is not None and tight.slots(least, most) < most:
            slots = tight.slots(least, most) // POOL_STEP * POOL_STEP
            room = f"{max(0, tight.free) / 2**20:,.0f} MiB on {tight.name}"
            why = f"auto: {room} beside a margin of {tight.margin / 2**20:,.0f}, {per_token}"
    else:
        slots = round_up(config.pool, POOL_STEP)
        why = f"{config.pool} asked for"
    if slots < config.minimum_pool:
        slots = config.minimum_pool
        why = f"{why}, raised to the minimum of {config.sinks} sink + {config.tail_of()} tail + 2 chunks"
    if slots >= ceiling:
        slots = ceiling
        why = f"{why}, which is the whole context"
    return PoolSize(slots=slots, n_ctx=round_up(n_ctx, POOL_STEP), why=why, tight=tight, parallel=config.sequences)


def sequences_for(
    config: KVFlashConfig, model: LlamaModel, params: llama_context_params, slots: int, *, query_rows: int = 0,
    indexed: bool = False,
) -> tuple[int, str]:  # fmt: skip
    """Return how many sequences `parallel="auto"` means, and why there is only one; else the reason is empty.

    params: of one sequence. slots: the pool, with contexts as long as it
    takes to fill it. query_rows: captured queries of a sequence. indexed: the policy has an index.
    """
    if why := config.serves_one or ("deterministic=True" if config.deterministic else ""):
        return 1, f"{why} serves one"
    from ..native import measure, weights

    at, slot, n_ctx = address(model.model), slot_size(model, params), round_up(params.n_ctx, POOL_STEP)
    devices = memory.of_model(at)

    def measured(count: int) -> tuple[Sequence[int], int]:
        """Return what a context takes beside weights, by device, and the bytes that are not in slots."""
        several, cells = copied(params, n_seq_max=count, kv_unified=True), min(slots, count * n_ctx)
        found = measure.measure(at, several, cells=cells, query_rows=count * query_rows)
        takes = [need.kv + need.compute + need.queries for need in found.devices]
        holding = [i for i, need in enumerate(found.devices) if need.kv]
        if indexed and len(holding) == 1:
            name = devices[holding[0]].name
            takes[holding[0]] += count * index_bytes(found.layers, weights.work(at), n_ctx, config, name)
        return takes, sum(need.kv for need in found.devices) - cells * slot

    alone = measured(1)[1]
    count, why = sequences(config, slots, rows=params.n_ubatch), "the pool has no room for another one"
    while count > 1:
        try:
            takes, states = measured(count)
        except UnsupportedModelError as err:
            count, why = count - 1, str(err)
            continue
        state = (states - alone) // (count - 1)
        much = count > LEAST_SEQUENCES and count * state * STATE_SHARE > slots * slot
        full = [
            device.name
            for device, taken in zip(devices, takes, strict=True)
            if taken + memory.margin(device, Fit()) > device.free
        ]
        if not much and not full:
            return count, ""
        count, why = count - 1, f"{full[0]} has no memory for another one" if full else why
    return 1, why


def sequences(config: KVFlashConfig, slots: int, *, rows: int) -> int:
    """Return how many sequences `parallel="auto"` means at most, with a pool of this many slots.

    Others than the one that is at work keep their least shares: at most half of the pool. rows: most rows of a step.
    """
    least = (config.sinks + config.tail_of() + 2) * CHUNK
    return min(MOST_SEQUENCES, rows, 1 + slots // HALF // least)


def halved(size: PoolSize, times: int, *, minimum: int) -> PoolSize:
    """Return a pool of half as many slots, `times` times: a larger one could not be made."""
    if times == 0:
        return size
    slots = max(min(minimum, size.slots), (size.slots >> times) // POOL_STEP * POOL_STEP)
    return replace(size, slots=slots, why=f"{size.why}, and {size.slots} could not be made")


def warn_if_tight(devices: Sequence[DeviceInfo], n_ubatch: int) -> None:
    """Warn where CUDA would end the process because a backend's own buffers cannot grow."""
    for device in devices:
        if device.asynchronous and device.free_bytes < NOTABLE:
            logger.warning(
                "only %.0f MiB of %s are left: its driver may need more, which ends the process. A smaller step needs "
                "less: n_ubatch=%d (-ub)",
                device.free_bytes / 2**20,
                device.name,
                max(64, n_ubatch // HALF),
            )


# --- page images


def image_limit(config: KVFlashConfig, model: int, size: PoolSize, page_bytes: int, *, mapped: bool) -> int | None:
    """Return the most bytes for page images, None for no limit. Warn where a text could exceed the host's memory then.

    model: address of the llama_model. mapped: its weights on the host are pages of their file.
    """
    from ..native import weights
    from ..native.devices import model_devices

    host, number = memory.host(), len(model_devices(model))
    there = sum(weight.size for weight in weights.of_model(model) if weight.device == number)
    found = image_ceiling(config, host, mapped=there if mapped else 0, least=size.slots // CHUNK * page_bytes)
    if found is None and size.bounded:
        warn_if_too_long(size.n_ctx, page_bytes, there, host)
    return found


def image_ceiling(config: KVFlashConfig, host: Device, *, mapped: int, least: int) -> int | None:
    """Return the most bytes for page images, None for no limit.

    "auto" with a spill folder takes the available memory less a margin and less mapped weights. Mapped weights count as
    available: the system would drop them first, and read them again for each token. mapped: their bytes. least: the
    lowest result.
    """
    if config.host_limit != "auto":
        return config.host_limit
    if config.spill is None:
        return None
    return max(least, host.free - mapped - memory.margin(host, Fit()))


def warn_if_too_long(n_ctx: int, page_bytes: int, weights: int, host: Device) -> None:
    """Warn where the page images of a full context, which have no limit, may exceed the host's memory.

    weights: bytes of weights on the host.
    """
    images = -(-n_ctx // CHUNK) * page_bytes
    if images + weights <= host.total:
        return
    fitting = max(0, host.total - weights) // page_bytes * CHUNK
    shorter = f", or a context of at most {fitting} (n_ctx, -c)" if fitting else ""
    logger.warning(
        "page images of %d tokens take %s MiB and weights on the host %s MiB, it has %s: name a folder for what does "
        "not fit (kvflash_spill, --kvflash-spill)%s",
        n_ctx, mebibytes(images), mebibytes(weights), mebibytes(host.total), shorter,
    )  # fmt: skip


def copied(params: llama_context_params, **changes: Any) -> llama_context_params:
    """Copy parameters, with some fields changed."""
    res = type(params).from_buffer_copy(params)
    for name, value in changes.items():
        setattr(res, name, value)
    return res


def with_steps(model: LlamaModel, params: llama_context_params, *, n_batch: int, n_ubatch: int) -> llama_context_params:
    """Return a context's parameters as upstream will set them once it knows how long the model's context is."""
    n_ctx = params.n_ctx or model.n_ctx_train()
    step = min(n_ctx, n_batch)
    return copied(params, n_ctx=n_ctx, n_batch=step, n_ubatch=min(step, n_ubatch))
