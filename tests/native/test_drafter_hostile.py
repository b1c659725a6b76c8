"""A drafter's part of a snapshot is as untrustworthy as the rest: refused, or the drafter reads the text again."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import MODELS, go_on, wait_for_scorer
from support.inside import inside

from kvflash_ggml.errors import SnapshotError
from kvflash_ggml.snapshot.container import TABLE, BytesSource, Container, Writer

POOLED = {"n_ctx": 2048, "n_ubatch": 128, "kvflash": 512, "kvflash_policy": "drafter", "kvflash_tau": 4}
Change = Callable[[dict[str, Any], dict[str, bytes]], object]


def fact(**values: Any) -> Change:
    return lambda facts, sections: facts["drafter"].update(values)


def section(name: str, data: Callable[[bytes], bytes]) -> Change:
    return lambda facts, sections: sections.update({f"drafter {name}": data(sections[f"drafter {name}"])})


def filled(kind: str, value: float) -> Callable[[bytes], bytes]:
    return lambda data: np.full(len(data) // 4, value, kind).tobytes()


REREAD: dict[str, Change] = {
    "base beyond the text": fact(base=10**9),
    "base within a chunk": fact(base=5),
    "shorter than its tokens": fact(length=1),
    "negative count": fact(queries_from=-1),
    "another drafter": fact(source="x"),
    "half the text": section("text", lambda data: data[: len(data) // 8 * 4]),
    "no text": section("text", lambda data: b""),
    "tokens that do not exist": section("tokens", filled("<i4", 2**31 - 1)),
    "negative tokens": section("tokens", filled("<i4", -5)),
    "a chunk less": section("ledger", lambda data: data[:-24]),
    "a state of nothing": section("state", lambda data: b"x" * 100),
}
REFUSED: dict[str, Change] = {
    "no drafter": lambda facts, sections: facts.update(drafter=3),
    "a bridge without sections": fact(bridge=3),
    "a negative base": fact(base=-64),
    "no source": fact(source=None),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, loaded: None, tokens: Any) -> bytes:
    from kvflash_ggml import Llama

    path = tmp_path_factory.mktemp("drafter") / "session.kvs"
    model = MODELS / "recall-qwen3-q8_0.gguf"
    drafter = MODELS / "scorer-qwen3-q8_0.gguf"
    llm = Llama(str(model), verbose=False, n_threads=1, kvflash_scorer=drafter, **POOLED)
    llm.eval(tokens[:1500].tolist())
    llm.save_snapshot(path)
    llm.close()
    return path.read_bytes()


def changed(data: bytes, change: Change) -> bytes:
    """The file after a change, with checksums that are right."""
    container = Container(BytesSource(data))
    sections = {part.name: bytes(part.read()) for part in container.sections}
    facts = copy.deepcopy(container.facts)
    tables = [name for name in sections if name.endswith("pages")]
    images: dict[str, list[bytes]] = {name: [] for name in tables}
    for name in tables:
        size = int(np.frombuffer(sections.pop(name), TABLE)["size"][0])
        for page in container.pages(name, size):
            image = bytearray(size)
            page.read_into(memoryview(image))
            images[name].append(bytes(image))
    change(facts, sections)
    stream = io.BytesIO()
    writer = Writer(stream)
    for name, content in sections.items():
        writer.section(name, content)
    for name, content_of in images.items():
        writer.pages(name, content_of)
    writer.close(container.kind, facts)
    return stream.getvalue()


def restored(llama: Any, saved: bytes, change: Change, path: Path) -> Any:
    path.write_bytes(changed(saved, change))
    llm = llama("dense", **POOLED, kvflash_scorer=MODELS / "scorer-qwen3-q8_0.gguf")
    llm.load_snapshot(path)
    return llm


def test_without_a_change_nothing_is_read_again(llama: Any, saved: bytes, tmp_path: Path, caplog: Any) -> None:
    llm = restored(llama, saved, lambda facts, sections: None, tmp_path / "x")
    go_on(llm, 8)
    wait_for_scorer(inside(llm).session)
    assert inside(llm).drafter_reader.window.pushed < 100
    assert not caplog.text


@pytest.mark.parametrize("what", REREAD)
def test_the_drafter_reads_again(what: str, llama: Any, saved: bytes, tmp_path: Path, caplog: Any) -> None:
    llm = restored(llama, saved, REREAD[what], tmp_path / "x")
    go_on(llm, 24)
    wait_for_scorer(inside(llm).session)
    assert inside(llm).drafter_reader.window.pushed > 1400
    assert "the drafter reads the text again" in caplog.text


@pytest.mark.parametrize("what", REFUSED)
def test_the_file_is_refused(what: str, llama: Any, saved: bytes, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError):
        restored(llama, saved, REFUSED[what], tmp_path / "x")
