"""A server that ends: an error with a name, a process that lives, and a text that goes on elsewhere."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.harness import CHUNK, go_on, row
from support.inside import inside
from support.servers import COMPUTE, Wire, running

from kvflash_ggml.errors import DeviceLost, RemoteError, SnapshotError

SETTINGS = {"n_ctx": 2048, "kvflash": 512, "n_batch": 64, "n_ubatch": 64}
ALL_OF_IT = SETTINGS | {"n_gpu_layers": -1, "tensor_split": [1.0]}
"""On one server, whatever GPU is here."""


@pytest.fixture
def wires(loaded: None) -> Iterator[Any]:
    """Starts servers, and gives a wire to each. A server is its wire's `server`."""
    with ExitStack() as stack:

        def start(count: int) -> list[Wire]:
            found = [Wire(server) for server in stack.enter_context(running(count))]
            for wire in found:
                stack.callback(wire.close)
            return found

        yield start


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing waits for the garbage collector, which comes when it likes."""
    gc.disable()
    yield
    gc.enable()


def lost(llm: Any, tokens: Any) -> DeviceLost:
    """What evaluating raises; then every other call does too."""
    with pytest.raises(DeviceLost) as caught:
        llm.eval(tokens.tolist())
    for again in (lambda: llm.eval([1]), lambda: llm.save_state(), lambda: next(llm.generate([1, 2, 3]))):
        with pytest.raises(DeviceLost) as later:
            again()
        assert later.value.kept == caught.value.kept
    return caught.value


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_killed_server_is_an_error_and_the_text_goes_on_elsewhere(
    kind: str, wires: Any, llama: Any, tokens: Any, tmp_path: Path
) -> None:
    """One of two servers goes: when nothing happens, within a prompt, and while a token is generated."""
    one, two = wires(2)
    where = {"rpc": [one.endpoint, two.endpoint], "n_gpu_layers": -1, "tensor_split": [1.0, 1.0]}
    path = tmp_path / "left.kvs"

    def load() -> Any:
        return llama(kind, **SETTINGS, **where)

    healthy = load()
    healthy.eval(tokens[:1000].tolist())
    kept = 960 if kind == "dense" else inside(healthy).session.checkpoints.nearest(960)
    assert kept > 512, "the text does not pass the pool"
    pages = [inside(healthy).session.store.bytes_of(chunk) for chunk in range(kept // CHUNK)]
    healthy.close()

    for when in ("prompt", "token", "idle"):
        llm = load()
        if when == "prompt":
            llm.eval(tokens[:704].tolist())
            two.cut = COMPUTE, 3
            error = lost(llm, tokens[704:1000])
            assert 512 <= error.kept <= 960
        else:
            llm.eval(tokens[:1000].tolist())
            if when == "token":
                two.cut = ["get"], 0
            else:
                assert two.server.kill() != 0
            error = lost(llm, tokens[1000:1001])
            assert error.kept == kept
        two.cut = None
        assert error.device == two.endpoint
        llm.save_snapshot(path, salvage=True)
        llm.close()

        local = llama(kind, n_gpu_layers=0, **SETTINGS)
        assert local.load_snapshot(path) == error.kept
        store = inside(local).session.store
        assert [store.bytes_of(c) for c in range(error.kept // CHUNK)] == pages[: error.kept // CHUNK]
        local.eval(tokens[error.kept : 1000].tolist())
        afresh = llama(kind, n_gpu_layers=0, **SETTINGS)
        afresh.eval(tokens[:1000].tolist())
        assert row(local).argmax() == row(afresh).argmax()
        go_on(local, 4)
        local.close()
        afresh.close()

    with pytest.raises(RemoteError, match=r"nobody answers|no RPC server"):
        load()


def test_what_was_not_read_in_time_is_not_kept(wires: Any, llama: Any, tokens: Any, tmp_path: Path) -> None:
    """The connection ends while pages are read: those that came as zeros are no part of what is left."""
    (wire,) = wires(1)
    llm = llama(rpc=wire.endpoint, **ALL_OF_IT)
    llm.eval(tokens[:640].tolist())
    session = inside(llm).session
    zeros = bytes(session.engine.info.page_bytes)
    wire.at_least = len(zeros)  # pages alone: whether the logits of a step come before or after its page is not said
    wire.cut = ["get"], 1
    error = lost(llm, tokens[640:896])
    assert error.kept < 896
    assert any(session.store.bytes_of(c)[-64:] == zeros[-64:] for c in session.store), "nothing came as zeros"
    llm.save_snapshot(tmp_path / "left.kvs", salvage=True)
    local = llama(n_gpu_layers=0, **SETTINGS)
    assert local.load_snapshot(tmp_path / "left.kvs") == error.kept
    for chunk in range(error.kept // CHUNK):
        page = inside(local).session.store.bytes_of(chunk)
        for layer in inside(local).session.engine.layers:
            assert any(page[layer.v_offset : layer.v_offset + layer.v_row])


def test_a_connection_that_ends_while_a_text_is_saved(wires: Any, llama: Any, tokens: Any, tmp_path: Path) -> None:
    """No file is left, and what is on this machine can be saved after it."""
    (wire,) = wires(1)
    llm = llama("hybrid", rpc=wire.endpoint, **ALL_OF_IT)
    llm.eval(tokens[:1000].tolist())
    inside(llm).session.engine.synchronize()
    wire.cut = ["get"], 0  # recurrent state, and the chunk that is not sealed
    path = tmp_path / "left.kvs"
    with pytest.raises(DeviceLost) as caught:
        llm.save_snapshot(path)
    assert not path.exists()
    llm.save_snapshot(path, salvage=True)
    llm.close()
    local = llama("hybrid", n_gpu_layers=0, **SETTINGS)
    assert local.load_snapshot(path) == caught.value.kept > 512
    local.eval(tokens[local.n_tokens : 1000].tolist())


@pytest.mark.parametrize(("message", "count"), [("other", 1), ("other", 4), ("memory", 1), ("set", 0), ("set", 20)])
@pytest.mark.usefixtures("uncollected")
def test_a_connection_that_ends_while_a_model_is_loaded(message: str, count: int, wires: Any, llama: Any) -> None:
    """An error with a name, and the next attempt has another connection, at once."""
    (wire,) = wires(1)
    wire.cut = [message], count
    with pytest.raises((RemoteError, DeviceLost)):
        llama(rpc=wire.endpoint, **ALL_OF_IT)
    wire.cut = None
    llm = llama(rpc=wire.endpoint, **ALL_OF_IT)
    llm.eval([1, 2, 3])


def test_a_stopped_server_is_lost_when_its_time_is_up(
    wires: Any, llama: Any, tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFLASH_RPC_TIMEOUT", "1")
    (wire,) = wires(1)
    llm = llama(rpc=wire.server.endpoint, **ALL_OF_IT)
    with pytest.raises(SnapshotError, match="nothing of the text is on this machine"):
        llm.save_snapshot(tmp_path / "left.kvs", salvage=True)
    llm.eval(tokens[:640].tolist())
    wire.server.signal(signal.SIGSTOP)
    start = time.monotonic()
    assert lost(llm, tokens[640:641]).kept >= 576
    assert time.monotonic() - start < 60, "it would have waited for ever"
    wire.server.signal(signal.SIGCONT)
    llm.close()
    again = llama(rpc=wire.server.endpoint, **ALL_OF_IT)  # what is lost is the connection
    again.eval(tokens[:64].tolist())
