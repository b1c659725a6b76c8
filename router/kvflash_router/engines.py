"""Several models, one loaded at a time: decides which model is loaded next, and when one is unloaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from kvflash_ggml.server.errors import ApiError, shutting_down

from .model_folder import FolderModel

logger = logging.getLogger("kvflash_ggml")

FAILED_S = 60.0
"""Seconds until a model that could not be loaded is tried again: each try unloads another one."""


class LoadError(Exception):
    """A model could not be loaded; the message says why."""


class ModelServer(Protocol):
    """A loaded model that answers HTTP at a port of loopback. n_ctx: tokens of its context."""

    port: int
    n_ctx: int

    @property
    def alive(self) -> bool: ...

    async def stop(self) -> None:
        """Let its answers end, store its conversations, and unload it. Returns when its memory is free."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Loaded:
    """A model that is loaded. answers: how many run. until: it gives way to no other model before this time.

    used: when it last ended an answer. leaves: it is unloaded once no answer runs.
    """

    model: FolderModel
    engine: ModelServer
    until: float
    used: float
    answers: int = 0
    leaves: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    model: FolderModel
    granted: asyncio.Future[Loaded]


@dataclass(slots=True, frozen=True)
class _Failed:
    model: FolderModel
    why: str
    when: float


class Engines:
    """Lets models take turns. Answers of the loaded model run to their end before another is loaded.

    A model that was loaded stays for as long as the change took, so that at most half of the time goes into changes.
    While it stays, its requests come first. Then the model comes whose request has waited longest.

    start: loads a model, LoadError if that fails. most: requests that may wait. idle_s: seconds without an answer,
    after which a model is unloaded; None for never. Everything runs on one loop.
    """

    def __init__(
        self,
        start: Callable[[FolderModel], Awaitable[ModelServer]],
        *,
        most: int,
        wait_s: float,
        idle_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._most = most
        self._wait_s = wait_s
        self._idle_s = idle_s
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._changed = asyncio.Event()
        self._loaded: Loaded | None = None
        self._starting: asyncio.Future[ModelServer] | None = None
        self._failed: dict[str, _Failed] = {}
        self._closing = False
        self._driver = asyncio.ensure_future(self._drive())
        self.loading: str | None = None
        self.last: str | None = None

    @property
    def loaded(self) -> Loaded | None:
        """The model that is loaded now; None if none is, or its process has ended."""
        return self._loaded if self._loaded is not None and self._loaded.engine.alive else None

    def status(self, name: str) -> dict[str, object]:
        """Return the status as llama-server: "value" is loaded, loading or unloaded; "failed" if it cannot load."""
        if name == self.loading:
            return {"value": "loading"}
        if self.loaded is not None and self.loaded.model.name == name:
            return {"value": "loaded"}
        return {"value": "unloaded", **({"failed": True} if name in self._failed else {})}

    @property
    def left(self) -> float | None:
        """Seconds until the loaded model is unloaded without a request; None while it answers, or if it stays."""
        loaded = self.loaded
        left = float("inf") if loaded is None or loaded.answers else self._idle_left(loaded)
        return None if left == float("inf") else left

    @asynccontextmanager
    async def turn(self, model: FolderModel) -> AsyncIterator[Loaded]:
        """Wait until a model is loaded, and keep it loaded. ApiError if it cannot be, or not in time."""
        self._check(model)
        one = _Waiting(model, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self.wake()
        try:
            await asyncio.wait([one.granted], timeout=self._wait_s)
            if not one.granted.done():
                message = f"the request waited {self._wait_s:g} s for its model: try again later, or --queue-timeout"
                raise ApiError(503, message, code="queue_timeout", retry_after_s=5)
            yield one.granted.result()
        finally:
            if one in self._waiting:
                self._waiting.remove(one)
            elif one.granted.done() and one.granted.exception() is None:
                loaded = one.granted.result()
                loaded.answers -= 1
                loaded.used = self._clock()
            self.wake()

    def _check(self, model: FolderModel) -> None:
        if self._closing:
            raise shutting_down()
        failed = self._failed.get(model.name)
        if failed is not None and failed.model == model and (left := failed.when + FAILED_S - self._clock()) > 0:
            raise _refusal(failed, left)
        if len(self._waiting) >= self._most:
            message = f"{len(self._waiting)} requests wait for their model, and {self._most} is the most: --max-queue"
            raise ApiError(429, message, code="queue_full", retry_after_s=5)

    def unload(self, name: str) -> bool:
        """Unload a model as soon as no answer of it runs; False if it is not loaded."""
        if self.loaded is None or self.loaded.model.name != name:
            return False
        self.loaded.leaves = True
        self.wake()
        return True

    def wake(self) -> None:
        """Let the driver look again at what there is to do."""
        self._changed.set()

    async def close(self) -> None:
        """Refuse all waiting and further requests, let running answers end, and unload the model."""
        self._closing = True
        for one in self._waiting:
            if not one.granted.done():
                one.granted.set_exception(shutting_down())
        self._waiting.clear()
        if self._starting is not None:
            self._starting.cancel()
        self.wake()
        await self._driver

    # --- one task loads and unloads

    async def _drive(self) -> None:
        while not self._closing:
            self._changed.clear()
            self._admit()
            wanted = self._next()
            if wanted is not None:
                await self._load(wanted)
            elif self._is_idle():
                await self._unload()
            else:
                with suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._pause())
        await self._unload()

    def _admit(self) -> None:
        """Let in requests for the loaded model, until one for another that has its turn stands before them."""
        self._loaded = loaded = self.loaded
        if loaded is None:
            return
        stays = self._clock() < loaded.until
        for one in [*self._waiting]:
            if one.model.name == loaded.model.name:
                self._waiting.remove(one)
                loaded.answers += 1
                one.granted.set_result(loaded)
            elif not stays:
                return

    def _next(self) -> FolderModel | None:
        """Return the model to load now; None if another one still has its turn, or no request waits."""
        loaded = self._loaded
        if not self._waiting or (loaded is not None and (loaded.answers or self._clock() < loaded.until)):
            return None
        return self._waiting[0].model

    def _is_idle(self) -> bool:
        loaded = self._loaded
        return loaded is not None and not loaded.answers and not self._waiting and self._idle_left(loaded) <= 0

    def _idle_left(self, loaded: Loaded) -> float:
        idle_s = float("inf") if self._idle_s is None else self._idle_s
        return -1.0 if loaded.leaves else loaded.used + idle_s - self._clock()

    def _pause(self) -> float | None:
        """Return the seconds until there may be something to do without a change; None for no limit."""
        loaded = self._loaded
        if loaded is None or loaded.answers:
            return None
        left = loaded.until - self._clock() if self._waiting else self._idle_left(loaded)
        return None if left == float("inf") else max(left, 0.001)

    async def _load(self, model: FolderModel) -> None:
        began, self.loading = self._clock(), model.name
        try:
            await self._unload()
            if self._closing:
                return
            self._starting = asyncio.ensure_future(self._start(model))
            engine = await self._starting
        except (LoadError, OSError) as err:
            self._fail(_Failed(model, str(err), self._clock()))
        except asyncio.CancelledError:
            if not self._closing:
                raise
        except Exception as err:  # whatever it is, others have their turn
            logger.exception("%a could not be loaded", model.name)
            self._fail(_Failed(model, str(err) or type(err).__name__, self._clock()))
        else:
            now = self._clock()
            self._failed.pop(model.name, None)
            self._loaded = Loaded(model=model, engine=engine, until=now + (now - began), used=now)
            self.last = model.name
        finally:
            self.loading = self._starting = None

    def _fail(self, failed: _Failed) -> None:
        logger.error("%a could not be loaded: %s", failed.model.name, failed.why)
        self._failed[failed.model.name] = failed
        for one in [one for one in self._waiting if one.model.name == failed.model.name]:
            self._waiting.remove(one)
            one.granted.set_exception(_refusal(failed, FAILED_S))

    async def _unload(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            try:
                await loaded.engine.stop()
            except Exception:
                logger.exception("%a could not be unloaded", loaded.model.name)


def _refusal(failed: _Failed, left: float) -> ApiError:
    message = f"the model {failed.model.name[:80]!r} could not be loaded: {failed.why}"
    return ApiError(503, message, code="model_failed", retry_after_s=left)
