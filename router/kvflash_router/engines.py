"""Several models: decides which is loaded next, which leave for it, and when one is unloaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvflash_ggml.server.errors import ApiError, shutting_down

from .model_folder import FolderModel

logger = logging.getLogger("kvflash_ggml")

T = TypeVar("T")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a model takes of each device's memory, and what they have for models, in bytes.

    alone: what it takes is not known, so it is loaded where no other model is.
    """

    needs: Mapping[str, int]
    room: Mapping[str, int]
    alone: bool = False


ALONE = Plan(needs={}, room={}, alone=True)


@dataclass(slots=True, eq=False, kw_only=True)
class Loaded:
    """A model that is loaded. answers: how many run. until: it gives way to no other model before this time.

    plan: what it takes. used: when it last ended an answer. leaves: it is unloaded once no answer runs.
    """

    model: FolderModel
    engine: ModelServer
    plan: Plan
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
    """Loads models, as many as there is room for, and lets the others take turns.

    A model that has no room waits until those that were used longest ago have ended their answers and are unloaded. A
    model that was loaded stays for as long as the change took, so that at most half of the time goes into changes.
    While it stays, its requests come first. Then the model comes whose request has waited longest.

    start: loads a model, LoadError if that fails; left: memory that others leave it, by device. plan: says what a model
    takes; None where no two are loaded at once. at_once: most that are loaded, 0 for no limit. most: requests that may
    wait. idle_s: seconds without an answer, after which a model is unloaded; None for never. Everything runs on one
    loop.
    """

    def __init__(
        self,
        start: Callable[[FolderModel, Mapping[str, int]], Coroutine[Any, Any, ModelServer]],
        *,
        most: int,
        wait_s: float,
        idle_s: float | None,
        plan: Callable[[FolderModel, Mapping[str, int]], Coroutine[Any, Any, Plan]] | None = None,
        at_once: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._plan = plan
        self._at_once = at_once
        self._most = most
        self._wait_s = wait_s
        self._idle_s = idle_s
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._changed = asyncio.Event()
        self._loaded: dict[str, Loaded] = {}
        self._plans: dict[FolderModel, Plan] = {}
        self._room: Mapping[str, int] = {}
        self._failed: dict[str, _Failed] = {}
        self._change: asyncio.Future[None] | None = None
        self._starting: asyncio.Future[Any] | None = None
        self._closing = False
        self._driver = asyncio.ensure_future(self._drive())
        self.loading: str | None = None
        self.last: str | None = None

    @property
    def all_loaded(self) -> list[Loaded]:
        """The models that are loaded now, the one used last at the end. One whose process has ended is none."""
        alive = [one for one in self._loaded.values() if one.engine.alive]
        return sorted(alive, key=lambda one: (one.answers > 0, one.used))

    def find(self, name: str) -> Loaded | None:
        """Return a model if it is loaded, and its process has not ended."""
        one = self._loaded.get(name)
        return one if one is not None and one.engine.alive else None

    def status(self, name: str) -> dict[str, object]:
        """Return the status as llama-server: "value" is loaded, loading or unloaded; "failed" if it cannot load."""
        if name == self.loading:
            return {"value": "loading"}
        if self.find(name) is not None:
            return {"value": "loaded"}
        return {"value": "unloaded", **({"failed": True} if name in self._failed else {})}

    def left(self, loaded: Loaded) -> float | None:
        """Return the seconds until a model is unloaded without a request; None while it answers, or if it stays."""
        left = float("inf") if loaded.answers else self._idle_left(loaded)
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
        loaded = self.find(name)
        if loaded is None:
            return False
        loaded.leaves = True
        self.wake()
        return True

    def wake(self) -> None:
        """Let the driver look again at what there is to do."""
        self._changed.set()

    async def close(self) -> None:
        """Refuse all waiting and further requests, let running answers end, and unload the models."""
        self._closing = True
        for one in self._waiting:
            if not one.granted.done():
                one.granted.set_exception(shutting_down())
        self._waiting.clear()
        if self._starting is not None:
            self._starting.cancel()
        self.wake()
        await self._driver

    # --- one task decides; a change at a time is made beside it

    async def _drive(self) -> None:
        while not self._closing:
            self._changed.clear()
            self._admit()
            if self._change is None and (work := self._next()) is not None:
                self._change = asyncio.ensure_future(work)
                self._change.add_done_callback(self._made)
            else:
                with suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._pause())
        if (change := self._change) is not None:
            await asyncio.wait([change])
        await self._unload([*self._loaded.values()])

    def _made(self, change: asyncio.Future[None]) -> None:
        self._change = None
        self.wake()
        change.result()

    def _admit(self) -> None:
        """Let in requests for loaded models, until one that has its turn needs their room and stands before them."""
        self._loaded = {name: one for name, one in self._loaded.items() if one.engine.alive}
        leaving: Sequence[Loaded] = ()
        turns = True
        for one in [*self._waiting]:
            loaded = self._loaded.get(one.model.name)
            if loaded is None:
                if turns and (plan := self._plan_of(one.model)) is not None:
                    leaving = self._in_the_way(plan)
                    leaving = leaving if all(self._clock() >= other.until for other in leaving) else ()
                turns = False  # those behind it have none yet
            elif loaded not in leaving:
                self._waiting.remove(one)
                loaded.answers += 1
                one.granted.set_result(loaded)

    def _next(self) -> Coroutine[Any, Any, None] | None:
        """Return the change to make now: to plan, load or unload. None if a model still has its turn."""
        first = next((one.model for one in self._waiting if one.model.name not in self._loaded), None)
        if first is not None:
            plan = self._plan_of(first)
            if plan is None:
                return self._make_plan(first)
            leaving = self._in_the_way(plan)
            if not any(one.answers or self._clock() < one.until for one in leaving):
                return self._load(first, plan, leaving)
        waited = {one.model.name for one in self._waiting}
        idle = [
            one
            for name, one in self._loaded.items()
            if not one.answers and name not in waited and self._idle_left(one) <= 0
        ]
        return self._unload(idle) if idle else None

    def _plan_of(self, model: FolderModel) -> Plan | None:
        """Return the plan of a model; None if it has to be made. What there is is known once nothing is loaded."""
        measured = self._room or not self._loaded
        return self._plans.get(model) if self._plan is not None and measured else ALONE

    def _in_the_way(self, plan: Plan) -> list[Loaded]:
        """Return the loaded models that must leave for another one: those used longest ago, idle ones first."""
        stays = self.all_loaded
        leaving = []
        while stays and not self._has_room(plan, stays):
            leaving.append(stays.pop(0))
        return leaving

    def _has_room(self, plan: Plan, beside: Sequence[Loaded]) -> bool:
        if plan.alone or any(one.plan.alone for one in beside) or len(beside) == self._at_once:
            return False
        left = self._left(beside)
        return all(size <= left.get(device, 0) for device, size in plan.needs.items())

    def _left(self, beside: Sequence[Loaded]) -> dict[str, int]:
        """Return the memory that these models leave of each device."""
        taken: Counter[str] = Counter()
        for one in beside:
            taken.update(one.plan.needs)
        return {device: size - taken[device] for device, size in self._room.items()}

    def _idle_left(self, loaded: Loaded) -> float:
        idle_s = float("inf") if self._idle_s is None else self._idle_s
        return -1.0 if loaded.leaves else loaded.used + idle_s - self._clock()

    def _pause(self) -> float | None:
        """Return the seconds until there may be something to do without a change; None for no limit."""
        resting = [one for one in self._loaded.values() if not one.answers]
        times = [self._idle_left(one) for one in resting]
        times += [one.until - self._clock() for one in resting if self._waiting]
        left = min((time for time in times if time > 0), default=float("inf"))
        return None if self._change is not None or left == float("inf") else max(left, 0.001)

    async def _make_plan(self, model: FolderModel) -> None:
        assert self._plan is not None
        plan = await self._begun(model, self._plan(model, self._room if self._loaded else {}))
        if plan is not None:
            self._plans[model] = plan
            self._room = self._room if self._loaded else plan.room

    async def _begun(self, model: FolderModel, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what comes of a model's process. None if that failed, which its requests are told, or at the end."""
        self._starting = starting = asyncio.ensure_future(work)
        try:
            return await starting
        except asyncio.CancelledError:
            if not self._closing:
                raise
        except (LoadError, OSError) as err:
            self._fail(_Failed(model, str(err), self._clock()))
        except Exception as err:  # whatever it is, others have their turn
            logger.exception("%a could not be loaded", model.name)
            self._fail(_Failed(model, str(err) or type(err).__name__, self._clock()))
        finally:
            self._starting = None
        return None

    async def _load(self, model: FolderModel, plan: Plan, leaving: Sequence[Loaded]) -> None:
        began, self.loading = self._clock(), model.name
        try:
            await self._unload(leaving)
            if self._closing:
                return
            left = {} if plan.alone else self._left([*self._loaded.values()])
            engine = await self._begun(model, self._start(model, left))
        finally:
            self.loading = None
        if engine is not None:
            now = self._clock()
            self._failed.pop(model.name, None)
            until = now + (now - began)
            self._loaded[model.name] = Loaded(model=model, engine=engine, plan=plan, until=until, used=now)
            self.last = model.name

    def _fail(self, failed: _Failed) -> None:
        logger.error("%a could not be loaded: %s", failed.model.name, failed.why)
        self._failed[failed.model.name] = failed
        for one in [one for one in self._waiting if one.model.name == failed.model.name]:
            self._waiting.remove(one)
            one.granted.set_exception(_refusal(failed, FAILED_S))

    async def _unload(self, leaving: Sequence[Loaded]) -> None:
        for one in leaving:
            self._loaded.pop(one.model.name, None)
        for one, end in zip(
            leaving, await asyncio.gather(*(one.engine.stop() for one in leaving), return_exceptions=True), strict=True
        ):
            if isinstance(end, Exception):
                logger.error("%a could not be unloaded", one.model.name, exc_info=end)


def _refusal(failed: _Failed, left: float) -> ApiError:
    message = f"the model {failed.model.name[:80]!r} could not be loaded: {failed.why}"
    return ApiError(503, message, code="model_failed", retry_after_s=left)
