"""Several models at once: which have room, which leave for another one, and who waits for that."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies
from support.shelf import Visit, settle, shelved

from kvflash_ggml.cli.serve import serve
from kvflash_ggml.cli.serving import Serving
from kvflash_ggml.config import Fit
from kvflash_ggml.native.sizes import Needs
from kvflash_ggml.placement.sizes import Device
from kvflash_ggml.server.errors import ApiError
from kvflash_router import serving as router_serving
from kvflash_router.engines import ALONE, Engines, LoadError, Plan

A, B, C, D = map(shelved, "abcd")
ROOM = {"CUDA0": 10, "CPU": 100}


def plan(gpu: int, host: int = 1, **more: Any) -> Plan:
    return Plan(needs={"CUDA0": gpu, "CPU": host}, room=ROOM, **more)


@dataclass
class Machine:
    """A fake one. told: what was loaded and unloaded. given: what each model was left. gate: loading waits for it."""

    plans: dict[str, Plan]
    told: list[str] = field(default_factory=list)
    planned: list[tuple[str, Mapping[str, int]]] = field(default_factory=list)
    given: dict[str, Mapping[str, int]] = field(default_factory=dict)
    running: dict[str, Any] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    time: float = 0.0
    took: float = 0.0

    async def plan(self, model: Any, room: Mapping[str, int]) -> Plan:
        self.planned.append((model.name, room))
        await self.gate.wait()
        if model.name not in self.plans:
            raise LoadError("it does not fit")
        return self.plans[model.name]

    async def start(self, model: Any, left: Mapping[str, int]) -> Any:
        machine, name = self, model.name
        self.told.append(f"load {name}")
        self.given[name] = left
        await self.gate.wait()
        self.time += self.took

        class Running:
            port, n_ctx, alive = 1, 4096, True

            async def stop(self) -> None:
                machine.told.append(f"unload {name}")
                self.alive = False

        self.running[name] = Running()
        return self.running[name]


def on(
    test: Callable[[Machine, Engines], Awaitable[None]], plans: Mapping[str, Plan], at_once: int = 0, **more: Any
) -> Machine:
    machine = Machine(dict(plans))

    async def whole() -> None:
        machine.gate.set()
        kept = {"most": 99, "wait_s": 30, "idle_s": 1000, **more}
        engines = Engines(machine.start, plan=machine.plan, at_once=at_once, clock=lambda: machine.time, **kept)
        try:
            await asyncio.wait_for(test(machine, engines), 60)
        finally:
            await engines.close()

    asyncio.run(whole())
    return machine


async def use(machine: Machine, engines: Engines, *models: Any) -> None:
    """One request for each, one after the other, at times of their own."""
    for model in models:
        machine.time += 1
        await Visit(engines, model).end()


def names(engines: Engines) -> str:
    return "".join(one.model.name for one in engines.all_loaded)


def test_as_many_are_loaded_as_have_room() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, A, B, A, C)
        assert machine.told == ["load a", "load b", "unload b", "load c"], "b was used longest ago"
        assert names(engines) == "ac"
        assert machine.given == {"a": ROOM, "b": {"CUDA0": 6, "CPU": 99}, "c": {"CUDA0": 6, "CPU": 99}}
        await use(machine, engines, B)
        assert names(engines) == "b", "a and c have both to leave"

    on(test, {"a": plan(4), "b": plan(5), "c": plan(6)})


def test_no_more_leave_than_have_to() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, A, B, C, D)
        assert machine.told[3:] == ["unload a", "unload b", "load d"]

    on(test, {"a": plan(3), "b": plan(3), "c": plan(3), "d": plan(7)})


def test_every_device_must_have_room() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, A, B)
        assert machine.told == ["load a", "unload a", "load b"]

    on(test, {"a": plan(1, host=60), "b": plan(1, host=60)})


def test_there_is_a_most() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, A, B, C)
        assert names(engines) == "bc"

    on(test, dict.fromkeys("abc", plan(1)), at_once=2)


def test_answers_of_others_go_on_while_a_model_is_loaded() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, A)
        machine.gate.clear()
        other = Visit(engines, B)
        await settle()
        await Visit(engines, A).end()
        machine.gate.set()
        await settle()
        machine.gate.clear()
        third = Visit(engines, C)
        await settle()
        for model in (A, B):
            visit = Visit(engines, model)
            await visit.began.wait()
            await visit.end()
        machine.gate.set()
        await third.end()
        await other.end()
        assert set(names(engines)) == set("abc")

    on(test, dict.fromkeys("abc", plan(3)))


def test_an_answer_that_runs_keeps_its_model_and_others_wait() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, D, B)
        machine.told.clear()
        machine.time += 1
        visit = Visit(engines, A)
        await visit.began.wait()
        waits = Visit(engines, D)
        late = Visit(engines, A)
        beside = Visit(engines, B)
        await settle()
        assert machine.told == ["load a"]
        assert not late.began.is_set(), "another model waits for this one's room"
        assert not beside.began.is_set(), "this one has to leave too"
        await visit.end()
        await waits.began.wait()
        assert machine.told[1:] == ["unload b", "unload a", "load d"]
        await waits.end()
        await late.end()
        await beside.end()

    on(test, {"a": plan(4), "b": plan(4), "d": plan(9)})


def test_a_model_that_stays_lets_all_in() -> None:
    """c needs the room of a alone: requests for b are not behind it."""

    async def test(machine: Machine, engines: Engines) -> None:
        visit = Visit(engines, A)
        await visit.began.wait()
        machine.time += 1
        busy = Visit(engines, B)
        await busy.began.wait()
        waits = Visit(engines, C)
        await settle()
        await Visit(engines, B).end()
        assert not waits.began.is_set()
        await visit.end()
        await waits.began.wait()
        assert machine.told == ["load a", "load b", "unload a", "load c"]
        await busy.end()
        await waits.end()

    on(test, {"a": plan(5), "b": plan(4), "c": plan(6)})


def test_a_model_stays_for_as_long_as_the_change_took() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        machine.took = 10
        await use(machine, engines, A)
        waits = Visit(engines, B)
        await settle()
        await Visit(engines, A).end()
        assert machine.told == ["load a"]
        machine.time += 10
        engines.wake()
        await waits.end()
        assert machine.told == ["load a", "unload a", "load b"]

    on(test, {"a": plan(9), "b": plan(9)})


def test_what_does_not_fit_costs_no_other_its_place() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, A)
        with pytest.raises(ApiError, match="'b' could not be loaded: it does not fit"):
            await Visit(engines, B).end()
        assert names(engines) == "a"
        assert engines.status("b") == {"value": "unloaded", "failed": True}

    assert on(test, {"a": plan(4)}).told == ["load a", "unload a"]


def test_a_model_of_unknown_size_is_loaded_alone() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, A, B, C, A)
        assert machine.told == ["load a", "unload a", "load b", "unload b", "load c", "load a"]
        assert machine.given["b"] == {}

    on(test, {"a": plan(1), "b": ALONE, "c": plan(1)})


def test_memory_is_measured_where_nothing_is_loaded() -> None:
    """A model that is loaded has taken some, and a plan beside it counts on what there was before."""

    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, A, B, A)
        assert machine.planned == [("a", {}), ("b", ROOM)]

    on(test, {"a": plan(1), "b": plan(1)})


def test_a_process_that_has_ended_gives_its_room_back() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, A, B)
        machine.running["a"].alive = False
        assert engines.status("a") == {"value": "unloaded"}
        await use(machine, engines, C)
        assert names(engines) == "bc"
        assert "unload b" not in machine.told

    on(test, {"a": plan(5), "b": plan(5), "c": plan(5)})


def test_each_is_unloaded_when_it_is_idle() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, A)
        machine.time += 60
        await use(machine, engines, B)
        machine.time += 50
        engines.wake()
        await settle()
        assert names(engines) == "b"
        assert engines.unload("b")
        await settle()
        assert names(engines) == ""

    on(test, {"a": plan(1), "b": plan(1)}, idle_s=100)


def test_the_end_unloads_all() -> None:
    async def test(machine: Machine, engines: Engines) -> None:
        await use(machine, engines, A, B)
        machine.gate.clear()
        waits = Visit(engines, C)
        await settle()
        await engines.close()
        with pytest.raises(ApiError, match="shutting down"):
            await waits.end()

    assert sorted(on(test, dict.fromkeys("abc", plan(1))).told) == ["load a", "load b", "unload a", "unload b"]


# --- what a model takes


GIB = 1 << 30


def serving(**devices: Any) -> Any:
    """What a command line asks of a server."""
    options: list[Serving] = []

    class Told(Exception):
        pass

    def told(job: Serving, *_: Any, **__: Any) -> None:
        options.append(job)
        raise Told

    flags = [f"--{name.replace('_', '-')}={value}" for name, value in devices.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvflash_ggml.cli.serve.extension", lambda *_, **__: told)
        patch.setattr("kvflash_ggml.server.run.listen", lambda *_: nullcontext())
        with suppress(Told):
            serve.main(["--models-dir", ".", "--port", "0", *flags], standalone_mode=False)
    return options[0]


@pytest.mark.parametrize(("given", "margin"), [({}, {"CPU": 0}), ({"fit_target": 700}, {"CPU": 0, "CUDA0": 700 << 20})])
def test_a_margin_is_of_each_process_on_a_gpu_and_of_all_on_the_host(
    given: dict[str, Any], margin: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    needs = (
        Needs(device="CUDA0", free=20 * GIB, weights=4 * GIB, margin=GIB),
        Needs(device="CPU", free=60 * GIB, weights=GIB, margin=6 * GIB),
    )
    devices = (
        Device(name="CUDA0", kind="gpu", free=20 * GIB, total=24 * GIB),
        Device(name="CPU", kind="host", free=60 * GIB, total=64 * GIB),
    )

    def without_loading(path: str, keywords: Any, limits: Any) -> Any:
        asked.append(limits)
        return SimpleNamespace(needs=needs), devices

    monkeypatch.setitem(sys.modules, "kvflash_ggml.llama.fitting", SimpleNamespace(without_loading=without_loading))
    monkeypatch.setattr(router_serving, "placed", lambda job, path: {"fit": Fit(), "kvflash": None})
    job = serving(**given)
    found = router_serving.needs_of(job, "m.gguf", {})
    assert found == {
        "needs": {"CUDA0": 5 * GIB, "CPU": GIB},
        "room": {"CUDA0": 20 * GIB, "CPU": 60 * GIB - 6 * GIB},
    }
    router_serving.needs_of(job, "m.gguf", found["room"])
    assert asked[0] is None
    assert (asked[1].free, asked[1].margin["CPU"]) == (found["room"], 0)
    own = router_serving.within(job, "m.gguf", {"CUDA0": 15 * GIB, "CPU": GIB}).opening.devices
    assert own.device_memory == {"CUDA0": 15 * GIB, "CPU": GIB}
    assert own.fit_target == margin


@settings(deadline=None)
@given(strategies.lists(strategies.tuples(strategies.sampled_from("abcd"), strategies.booleans()), max_size=40))
def test_memory_is_never_promised_twice(steps: list[tuple[str, bool]]) -> None:
    """Requests that come and end in any order are all answered, and what is loaded has room together."""
    sizes = {"a": 3, "b": 4, "c": 6, "d": 9}

    async def test(machine: Machine, engines: Engines) -> None:
        visits: list[Visit] = []
        for name, ends in steps:
            machine.time += 1
            visits.append(Visit(engines, shelved(name)))
            await settle()
            assert sum(sizes[one.model.name] for one in engines.all_loaded) <= 10
            if ends:
                begun = [one for one in visits if one.began.is_set()]
                for one in begun[:2]:
                    visits.remove(one)
                    await one.end()
        while visits:
            await settle()
            begun = [one for one in visits if one.began.is_set()]
            assert begun, "somebody is let in"
            for one in begun:
                visits.remove(one)
                with suppress(ApiError):
                    await one.end()

    on(test, {name: plan(size) for name, size in sizes.items()})
