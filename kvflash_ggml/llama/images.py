"""How much of the host's memory page images may take, beside the weights that are there."""

from __future__ import annotations

import logging

from ..config import KVFlashConfig
from ..constants import CHUNK
from ..errors import mebibytes
from ..placement import budget
from ..placement.sizes import Device, Fit
from .sizing import PoolSize

logger = logging.getLogger("kvflash_ggml")


def limit(config: KVFlashConfig, model: int, size: PoolSize, page_bytes: int, *, mapped: bool) -> int | None:
    """Bytes for the page images of a pool, None for no ceiling. Says so where a text could pass the host's memory then.

    model: address of the llama_model. mapped: its weights on the host are pages of their file.
    """
    from ..native.devices import model_devices  # here, as below: the arithmetic needs no library
    from ..native.measure import weights
    from ..placement import inventory

    host, number = inventory.host(), len(model_devices(model))
    there = sum(weight.size for weight in weights(model) if weight.device == number)
    found = ceiling(config, host, mapped=there if mapped else 0, least=size.slots // CHUNK * page_bytes)
    if found is None and size.slots < size.n_ctx:
        warn_if_too_long(size.n_ctx, page_bytes, there, host)
    return found


def ceiling(config: KVFlashConfig, host: Device, *, mapped: int, least: int) -> int | None:
    """Bytes for page images, None for no ceiling.

    "auto", with a folder for what passes it: what is available beyond a margin, and beyond weights that are pages of
    their file, which count as available. The system would let go of these first, and read them again for each token.
    mapped: bytes of them. least: what it is at least.
    """
    if config.host_limit != "auto":
        return config.host_limit
    if config.spill is None:
        return None
    return max(least, host.free - mapped - budget.margin(host, Fit()))


def warn_if_too_long(n_ctx: int, page_bytes: int, weights: int, host: Device) -> None:
    """A text that fills the context, and for whose images nobody has named a ceiling, may pass the host's memory.

    weights: bytes of those that the host has.
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
