"""Devices on other machines: two servers compute what they compute without a pool, and pages move to them and back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import device_ladder as ladder
from support.device_ladder import Placed
from support.harness import CHUNK, KV_TYPES, check, go_on, logits_along, read_block, row, same_bits
from support.inside import inside
from support.servers import Server, Wire, running

from kvflash_ggml import remote
from kvflash_ggml.errors import ConfigError, LibraryError, RemoteError
from kvflash_ggml.native import library

LAYERS = {"all": -1, "half": 4}
"""All on the servers, or the first ones on this machine: of six, or of eight of which two have attention."""


@pytest.fixture(scope="module")
def servers(loaded: None) -> Iterator[list[Server]]:
    with running(2) as found:
        yield found


def over(servers: list[Server] | list[Wire], layers: str = "all") -> dict[str, Any]:
    """Settings that share a model out."""
    endpoints = [server.endpoint for server in servers]
    return {"rpc": endpoints, "n_gpu_layers": LAYERS[layers], "tensor_split": [1.0] * len(servers)}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_two_servers_are_exact(
    kind: str, layers: str, servers: list[Server], llama: Any, tokens: Any, tmp_path: Path
) -> None:
    """As without a pool, bit for bit; recalled pages hold their bytes; a saved text goes on bit for bit."""
    where = over(servers, layers)
    whole = llama(kind, kvflash=1024, **where)
    names = [device.name[:3] for device in inside(whole).session.engine.info.devices]
    expected = {"all": ["RPC", "RPC"], "half": ["CPU", "RPC", "RPC"] if kind == "dense" else ["CPU", "RPC"]}
    assert names == expected[layers]
    prompt, rest = tokens[:450], tokens[450:466]
    stock = llama(kind, flash_attn=True, swa_full=False, **where)
    assert same_bits(logits_along(whole, prompt, rest), logits_along(stock, prompt, rest))
    stock.close()
    whole.close()

    small = llama(kind, n_ctx=2048, kvflash=512, **where)
    session = inside(small).session
    sealed = {}
    for start in range(0, 1024, 64):
        small.eval(tokens[start : start + 64].tolist())
        chunk = start // CHUNK
        sealed[chunk] = read_block(session, session.table.chunks[chunk].block)
    assert all(any(page) for page in sealed.values())
    assert 3 not in session.table.resident_chunks
    assert {chunk: session.store.bytes_of(chunk) for chunk in sealed} == sealed
    small.kvflash.pin(3 * CHUNK, 4 * CHUNK)
    small.eval(tokens[1024:1028].tolist())
    assert session.paging.page_ins > 0
    assert read_block(session, session.table.chunks[3].block) == sealed[3]
    check(small)

    small.save_snapshot(tmp_path / "text.kvs")
    expected = go_on(small, 16)
    small.close()
    other = llama(kind, n_ctx=2048, kvflash=512, **where)
    assert other.load_snapshot(tmp_path / "text.kvs") == 1028
    assert go_on(other, 16) == expected


@pytest.mark.parametrize(("kind", "kv"), [("iswa", "f16"), ("dense", "q8_0"), ("iswa", "q8_0")])
def test_rungs_of_two_servers(kind: str, kv: str, servers: list[Server], llama: Any, tokens: Any) -> None:
    """Sliding windows, which stay where they are, and quantised keys and values, whose rows are blocks.

    Upstream's own class knows no `rpc` and would compute here, where a CPU may hold weights in another form.
    """
    placed = Placed(over(servers), ("remote", "remote"))
    ladder.whole_context_is_stock(kind, KV_TYPES[kv], placed, llama, llama, tokens)
    ladder.pages_come_back(kind, KV_TYPES[kv], placed, llama, tokens)


def test_a_window_on_servers_is_restored(servers: list[Server], llama: Any, tokens: Any) -> None:
    ladder.restored_goes_on("iswa", Placed(over(servers), ("remote", "remote")), llama, tokens)


def test_exact_reading_is_exact(servers: list[Server], llama: Any, tokens: Any) -> None:
    """Pages are sent back at once that have just been read: only when they have come. The index is asked, and why."""
    where = over(servers) | {"n_ctx": 2048}
    stock = logits_along(llama(flash_attn=True, swa_full=False, **where), tokens[:1500], tokens[1500:1502])
    llm = llama(kvflash=1024, kvflash_policy="qk", kvflash_reading="exact", kvflash_answer="exact", **where)
    assert same_bits(logits_along(llm, tokens[:1500], tokens[1500:1502]), stock)
    assert inside(llm).session.streamed_steps > 3
    assert llm.kvflash.last.ranked == "index"
    assert "is behind a network" in llm.kvflash.last.ranked_why


def test_messages_that_wait_for_a_reply(servers: list[Server], llama: Any, tokens: Any) -> None:
    """A token costs what it costs without a pool; recalled pages are sent without waiting; eight pages leave as one."""
    wire = Wire(servers[0])
    counted = {}
    for pool in (None, 768):
        llm = llama(n_ctx=2048, kvflash=pool, flash_attn=True, **over([wire]))
        llm.eval(tokens[:400].tolist())
        row(llm)
        before = wire.sent.copy()
        for token in range(8):  # within a chunk
            llm.eval([token])
            row(llm)
        counted[pool] = wire.sent - before
        if pool is not None:
            for start in range(408, 1400, 64):
                llm.eval(tokens[start : start + 64].tolist())
            session = inside(llm).session
            llm.kvflash.pin(2 * CHUNK, 4 * CHUNK)
            session.engine.synchronize()  # pages that leave are read behind the steps
            before, page_ins = wire.sent.copy(), session.paging.page_ins
            llm.eval([5])
            assert session.paging.page_ins - page_ins == 2
            recall = wire.sent - before
            assert recall["get"] == counted[pool]["get"] // 8
            assert recall["set"] > 2 * len(session.engine.layers)
            before = wire.sent.copy()
            page_out_eight(session.engine)
            assert (wire.sent - before)["get"] == 1
        llm.close()
    wire.close()
    assert counted[768]["get"] == counted[None]["get"] > 0
    assert counted[768]["graph"] == counted[None]["graph"]
    assert counted[768]["again"] == counted[None]["again"]


def page_out_eight(engine: Any) -> None:
    page = engine.info.page_bytes
    slab = engine.alloc(8 * page)
    engine.wait(engine.page_out([5, 3, 7, 1, 0, 2, 6, 4], [slab + i * page for i in range(8)]))
    engine.free(slab)


def test_a_busy_server_is_told(servers: list[Server], llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llama(kvflash=512, **over(servers[:1]))
    monkeypatch.setattr(remote, "SECONDS", 0.3)
    with pytest.raises(RemoteError, match="it serves another client"):
        remote.hello(remote.find(servers[0].endpoint))
    llm.eval([1, 2, 3])  # it does not mind
    llm.close()


def test_a_server_that_came_back_with_other_devices_is_refused(
    servers: list[Server], llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml would go on with those that this process has seen there."""
    from kvflash_ggml.native import remote as connections

    assert remote.device_count(remote.find(servers[0].endpoint)) == 1
    llama(kvflash=512, **over(servers[:1])).close()
    assert connections._met[servers[0].endpoint] == 1
    monkeypatch.setitem(connections._met, servers[0].endpoint, 2)
    with pytest.raises(RemoteError, match="has 1 devices, and had 2 when"):
        llama(kvflash=512, **over(servers[:1]))


def test_nobody_gets_devices_unasked(servers: list[Server], llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in use is no GPU of this machine, neither for another model nor for the rule against silent CPU runs."""
    monkeypatch.delenv("KVFLASH_ALLOW_CPU", raising=False)
    monkeypatch.setattr(library, "machine_has_gpu", lambda: True)
    llm = llama(kvflash=512, **over(servers[:1]))
    assert "rpc" in library.build_info()["backends"]
    if not library.gpu_devices():
        with pytest.raises(LibraryError, match="it was built without a GPU backend"):
            llama(kvflash=512, n_gpu_layers=-1)
    local = llama(kvflash=512, n_gpu_layers=0)
    assert not any(device.name.startswith("RPC") for device in inside(local).session.engine.info.devices)
    llm.close()


def test_devices_of_servers_have_names(servers: list[Server], llama: Any) -> None:
    """The other way round, and one of two."""
    where = over(servers)
    names = [device.name for device in inside(llama(kvflash=512, **where)).session.engine.info.devices]
    for use in (names[::-1], names[1:]):
        llm = llama(kvflash=512, device=use, **(where | {"tensor_split": None}))
        assert [device.name for device in inside(llm).session.engine.info.devices] == use
        llm.eval([1, 2, 3])
        llm.close()
    with pytest.raises(ConfigError, match="device='RPC99' cannot hold layers: there are RPC"):
        llama(kvflash=512, device=["RPC99"], **where)


def test_options_of_a_server_are_kept(servers: list[Server], llama: Any) -> None:
    """For who makes the same model again in another process."""
    llm = llama(kvflash=512, rpc_servers=servers[0].endpoint, n_gpu_layers=-1, tensor_split=[1.0])
    assert [device.name[:3] for device in inside(llm).session.engine.info.devices] == ["RPC"]
    assert llm.__getstate__()["rpc"] == [servers[0].endpoint]
    llm.close()


def test_a_model_is_fitted_to_a_server(servers: list[Server], llama: Any) -> None:
    llm = llama(kvflash=512, fit=True, **over(servers[:1]))
    assert [device.name[:3] for device in inside(llm).session.engine.info.devices] == ["RPC"]
    llm.eval([1, 2, 3])


def test_a_device_that_has_to_be_waited_for_is_named(
    servers: list[Server], llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "pages wait" not in llama(kvflash=512, **over(servers)).kvflash.banner()
    monkeypatch.setenv("KVFLASH_LANE", "sync")
    told = llama(kvflash=512, **over(servers)).kvflash.banner()
    assert re.search(r"MiB on RPC\d+ \(4 layers, pages wait for its compute\) and RPC", told), told
