"""Another size for the pool of a `Llama`, with the text that is in it."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
from llama_cpp import _internals as internals

from .. import policy
from ..config import KVFlashConfig
from ..errors import ConfigError, DoesNotFit, KVFlashError
from ..placement import sizing
from ..placement.sizing import PoolSize
from ..policy.base import Scorer
from ..state.session import SessionState
from .generation import GeneratingLlama
from .turns import changing

if TYPE_CHECKING:
    from ..session.pool import Pool


class ResizableLlama(GeneratingLlama):
    """The part of `Llama` that changes the size of the pool."""

    _size: PoolSize | None
    _scorer: Scorer | None
    _drafter: Path | None

    if TYPE_CHECKING:  # of Llama

        def _pool_request(self, size: PoolSize) -> contextlib.AbstractContextManager[None]: ...

        def _open_session(self, size: PoolSize, beside: Pool | None = None) -> None: ...

    @changing
    def resize_pool(self, tokens: int) -> int:
        """Give the pool another size, in tokens; the text and its memory stay. Returns how many slots there are then.

        Page images stay on the host and nothing is read again: what follows is what a session of that pool answers
        that has loaded this text. The new pool is made beside the old one; where there is no room for both, the
        smallest pool takes the old one's place first. A prefix cache keeps what is in its folder.

        Raises DoesNotFit where there is no room for that either, ConfigError for a size that cannot work or a policy
        that is an object, which cannot serve two pools: nothing has changed then, as after any other error. Only where
        others take the memory meanwhile the smallest pool stays, with the text.
        """
        config, old = self._config, self._session
        if config is None or old is None:
            raise KVFlashError("there is no pool that could have another size: make the Llama with kvflash=")
        old.check_open()
        if not isinstance(config.policy, str):
            raise ConfigError(f"policy={config.policy!r} serves one pool: name a policy, or make a new Llama")
        config = replace(config, pool=tokens, pool_bytes=None)
        size = sizing.fit(config, self._model, self.context_params)
        if size.slots == old.pool.n_slots:
            return size.slots
        cache = None if self._prefixes is None else self._prefixes.cache
        self._keep_prefix()
        saved = self._saved(None)
        try:
            try:
                self._exchange(config, size, saved)
            except DoesNotFit as err:
                self._exchange_in_two(config, size, saved, err)
        finally:
            saved.release()
            if cache is not None and self._prefixes is None:
                self.set_cache(cache)
        return size.slots

    def _exchange_in_two(self, config: KVFlashConfig, size: PoolSize, saved: SessionState, why: DoesNotFit) -> None:
        """By way of the smallest pool. Raises `why` where that would not be between the two."""
        assert self._config is not None
        assert self._size is not None
        before = self._config, self._size
        least = replace(size, slots=min(config.minimum_pool, size.n_ctx))
        if least.slots >= min(size.slots, self._size.slots):
            raise why
        old = self._session
        try:
            self._exchange(replace(config, pool=least.slots), least, None)
            self._exchange(config, size, saved)
        except BaseException as err:
            if self._session is old:
                raise (why if isinstance(err, DoesNotFit) else err) from None
            try:
                self._exchange(*before, saved)
            except DoesNotFit:
                self._go_on_from(saved.share())
            raise

    def _exchange(self, config: KVFlashConfig, size: PoolSize, saved: SessionState | None) -> None:
        """Another pool in the place of the session's, which goes on from `saved`; without it the text is unknown.

        Nothing has changed after an error.
        """
        old = self._session
        assert old is not None
        before, closing = dict(vars(self)), self._ctx
        try:
            self._config, self._size = config, size
            if self._drafter is None:
                self._scorer = policy.resolve(config.policy)
            self._ctx = self._make_context(size)
            self._prefixes = None
            self._open_session(size, beside=old.pool)
            assert self._session is not None
            self._session.events.observer = old.events.observer
            self._session.pool.take_images(old.pool)
            if saved is not None:
                self._go_on_from(saved.share())
        except BaseException:
            made, session = self._ctx, self._session
            vars(self).update(before)
            if session is not None and not old.pool.owns_images:
                old.pool.take_images(session.pool)
            if made is not closing:
                made.close()
            raise
        closing.close()

    def _make_context(self, size: PoolSize) -> internals.LlamaContext:
        """A second context on the model. DoesNotFit if llama.cpp cannot make it."""
        assert self._session is not None
        with self._pool_request(size):
            try:
                context = internals.LlamaContext(model=self._model, params=self.context_params, verbose=self.verbose)
            except ValueError as err:
                pool, there = self._session.pool, ctypes.cast(self._ctx.ctx, ctypes.c_void_p).value or 0
                devices = pool.engine.info.devices
                raise sizing.no_room_beside(self._model, there, devices, size, pool.n_slots) from err
        self._stack.enter_context(contextlib.closing(context))
        if self._lora_adapter is not None:
            adapters: Any = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(self._lora_adapter)  # type: ignore[misc]
            scales = (ctypes.c_float * 1)(self.lora_scale)
            llama_cpp.llama_set_adapters_lora(context.ctx, adapters, 1, scales)
        return context
