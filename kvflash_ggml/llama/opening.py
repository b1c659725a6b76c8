"""Decides how a `Llama` is opened: what is loaded, what its context needs, and how large its pool is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import llama_cpp

from .. import policy
from ..arrays import address
from ..config import KVFlashConfig
from ..constants import POOL_STEP, SPEED_CAP, round_up
from ..errors import ConfigError
from ..native import library
from ..placement import memory, sizing
from ..placement.sizing import PoolSize, with_steps
from ..placement.wanted import DeviceChoice
from ..policy.base import DRAFTER, Indexed, Scorer
from ..runtime.saving import Saver
from .drafting import DraftRoom, device_bytes, loads_head, room, search
from .parameters import UPSTREAM_PARAMETERS, ModelRequest

if TYPE_CHECKING:
    from llama_cpp._internals import LlamaModel

    from ..native.devices import ModelArrays
    from ..placement.sizes import Placement
    from ..remote import Endpoint
    from ..speculation.find import Found
    from .pooled import PooledTexts

logger = logging.getLogger("kvflash_ggml")


class Opening:
    """How one `Llama` is opened, from its keywords to its pool.

    `Llama` calls `load` and `size_pool` in the midst of upstream's constructor, and `open_pool` behind it.

    request: the keywords, as `fit` has settled them. endpoints: the servers whose devices are used. placement: what
    `fit` has chosen; None where it was not asked for. config: of the pool, None without one; `size_pool` puts a number
    in place of "auto" sequences. logits_all: the logits of all tokens are kept. free: bytes of each device by name,
    before the weights were loaded.

    room, size: what drafts need, and the pool, once it is sized. halvings: how often an "auto" pool was too large.
    """

    def __init__(self, path: str, request: ModelRequest, *, installed: bool) -> None:
        """Find what is asked for, and fit it to the devices, before anything is loaded.

        installed: programs find our class as `llama_cpp.Llama`.
        """
        self.path = path
        config = request.config
        self._scorer: Scorer | None = None
        self._drafter: Path | None = None
        self._found: tuple[Found, ...] = ()
        if config is not None:
            if config.policy == DRAFTER or config.scorer is not None:
                from ..drafter import model as drafter  # here, as below: few pools ask a small model

                self._drafter = drafter.of_policy(path, config)
                if config.scorer is not None:
                    drafter.check(config.scorer)
            if self._drafter is None:
                self._scorer = policy.resolve(config.policy)
            self._found = search(Path(path), config)
        self.endpoints: Sequence[Endpoint] = ()
        if request.rpc:
            from .. import remote  # here, as below: few use the devices of servers

            self.endpoints = remote.find_all(request.rpc, trust=request.rpc_trust)
        else:
            library.ensure_gpu_offload(request.upstream.get("n_gpu_layers", 0), installed=installed)
        self.placement: Placement | None = None
        if request.fit is not None or request.is_long:
            from . import fitting  # here, as below: it imports all that plans a placement

            fitting.check_full_cache(path, request)
        if request.fit is not None:
            with self.connected():
                request, self.placement = fitting.fit(path, request, fitting.beside(path, request), self.endpoints)
        if request.config is not None and request.upstream.get("n_gpu_layers", 0) != 0 and not self.endpoints:
            from . import fitting

            fitting.check_limits(path, request)
        self.request, self.config, settings = request, request.config, request.upstream
        self._draft_model, self._projector = settings.get("draft_model"), settings.get("chat_handler")
        self.logits_all: bool = settings.pop("logits_all", False)
        if self.config is None:
            self.logits_all = self.logits_all or self._draft_model is not None
        self._steps = {name: settings.get(name, UPSTREAM_PARAMETERS[name].default) for name in ("n_batch", "n_ubatch")}
        self._arrays: ModelArrays | None = None
        self.free: dict[str, int] = {}
        self.room = DraftRoom()
        self.size: PoolSize | None = None
        self.halvings = 0

    def connected(self) -> AbstractContextManager[None]:
        """Return a context manager in which the devices of the servers can be used."""
        if not self.endpoints:
            return nullcontext()
        from ..native import remote

        return remote.connected(self.endpoints)

    def place(self) -> None:
        """Decide which devices hold what. The servers are connected."""
        request = self.request
        if request.placement != DeviceChoice() or self.endpoints:
            from ..placement import devices  # here: most leave it to llama.cpp

            self._arrays = devices.place(self.path, request.placement, request.upstream, self.endpoints)

    # --- in the midst of upstream's constructor

    def load(self, params: llama_cpp.llama_model_params) -> None:
        """Complete the parameters that the weights are loaded with next."""
        fields = {"load_mtp": loads_head(self._found)} | self.request.weights
        if self._arrays is not None:
            fields |= {"devices": self._arrays.devices, "tensor_buft_overrides": self._arrays.overrides}
        for name, value in fields.items():
            setattr(params, name, value)
        if self.config is not None and params.n_gpu_layers != 0:
            self.free = {device.name: device.free for device in memory.devices()}

    def size_pool(self, llm: llama_cpp.Llama, model: LlamaModel) -> AbstractContextManager[None]:
        """Load the projector, size the pool, and complete the parameters of the context that is made next.

        model: the weights, just loaded. Returns a context manager in which the context is to be made.
        """
        if self._projector is not None:
            from . import vision  # here, as below: few models see or hear

            vision.open_projector(llm, self._projector, self.free)
        if self.config is None:
            return nullcontext()
        from ..native.engine import pool_request  # here: a Llama without a pool needs no engine

        params, mapped = llm.context_params, is_mapped(llm)
        self.room = room(model, params, self.config, self._draft_model, **self._steps)
        params.n_rs_seq = self.room.planes
        self.config, alone = self._with_sequences(self.config, model, params, mapped=mapped)
        self.size = replace(self._sized(self.config, model, params, mapped=mapped), alone=alone)
        return pool_request(self.size.slots, self._query_rows(params) if self.size.bounded else 0)

    def _query_rows(self, params: llama_cpp.llama_context_params) -> int:
        """Count the queries of all sequences that are captured, if a text can be longer than its share of the pool."""
        rows = self._scorer.query_rows if self._scorer is not None else 0
        return (rows + (self.room.queries if rows else 0)) * int(params.n_seq_max)

    def _sized(
        self, config: KVFlashConfig, model: LlamaModel, params: llama_cpp.llama_context_params, *, mapped: bool
    ) -> PoolSize:
        others = device_bytes(self._found) + self.room.kept_bytes
        if config.embedding:
            from . import embedding

            others += embedding.reserve_bytes(address(model.model), params, config)
        if self._drafter is not None:
            from ..drafter import model as drafter

            others += drafter.reserve_bytes(self._drafter)
        if self._projector is not None:
            from . import vision

            others += vision.reserve_bytes(self._projector)
        size = sizing.fit(
            config,
            model,
            with_steps(model, params, **self._steps),
            query_rows=self._query_rows(params),
            indexed=isinstance(self._scorer, Indexed),
            reserved=others,
            mapped=mapped,
            before=self.free,
        )
        if self.placement is not None:
            return replace(size, why=self.placement.why)
        if size.uneven:
            from . import fitting

            size = replace(size, why=size.why + fitting.other_split(self.path, self.request, self.endpoints, size))
        return sizing.halved(size, self.halvings, minimum=config.minimum_pool)

    def _with_sequences(
        self, config: KVFlashConfig, model: LlamaModel, params: llama_cpp.llama_context_params, *, mapped: bool
    ) -> tuple[KVFlashConfig, str]:
        """Set the sequences of the context to be made. Return the config with a number in place of "auto", and why that
        is one sequence; empty if it is not.
        """
        alone = ""
        if config.parallel == "auto":
            single = replace(config, parallel=1, deterministic_batch=False)
            size = self._sized(single, model, params, mapped=mapped)
            slots = size.slots
            if not size.bounded and config.pool_bytes is None:  # several contexts may fill more
                slots = SPEED_CAP if config.pool == "auto" else round_up(config.pool, POOL_STEP)
            made, rows = with_steps(model, params, **self._steps), self._query_rows(params)
            count, alone = (
                sizing.sequences_for(
                    config, model, made, slots, query_rows=rows, indexed=isinstance(self._scorer, Indexed)
                )
                if self._draft_model is None
                else (1, "draft_model serves one")
            )
            config = replace(config, parallel=count, deterministic_batch=config.deterministic_batch and count > 1)
        if config.sequences > 1:
            allow_several(params, config.sequences, **self._steps)
        return config, alone

    # --- behind it

    def open_pool(self, llm: llama_cpp.Llama, saver: Saver) -> PooledTexts:
        """Open the pool of the context. saver: of the text at hand."""
        from .pooled import PooledTexts  # here: a Llama without a pool needs nothing of one

        config, size, scorer, model = self.config, self.size, self._scorer, saver.text.model
        assert config is not None
        assert size is not None
        if self._drafter is not None:
            from ..drafter import model as drafter

            idle = size.slots - 2 * model.n_ubatch
            scorer = drafter.make_scorer(
                self._drafter, model.weights, llm.model_params, llm.context_params, n_ctx=model.n_ctx, idle=idle
            )
        return PooledTexts(
            llm, saver, config, size, scorer=scorer, found=self._found, rows=self.room.rows, mapped=is_mapped(llm)
        )


def allow_several(params: llama_cpp.llama_context_params, sequences: int, *, n_batch: int, n_ubatch: int) -> None:
    """Set the number of sequences of a context to be made. ConfigError if a step has fewer rows."""
    rows = min(n_batch, n_ubatch or n_batch)
    if rows < sequences:
        raise ConfigError(
            f"n_ubatch = {rows} rows of a step for {sequences} sequences: give at least {sequences}, or fewer sequences"
        )
    params.n_seq_max, params.kv_unified = sequences, True


def is_mapped(llm: llama_cpp.Llama) -> bool:
    """Return whether weights on the host are pages of their file."""
    return bool(llm.model_params.load_mode == llama_cpp.LLAMA_LOAD_MODE_MMAP)
