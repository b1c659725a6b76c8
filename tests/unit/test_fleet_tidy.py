"""`kvflash-run store`: what a shared store has, whether it is sound, and what of it may go."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvflash_fleet import shared as shared_module
from kvflash_fleet.objects import FolderObjects
from kvflash_fleet.shared import Draft, Head, SharedTexts
from kvflash_fleet.tidy import GRACE_S
from kvflash_ggml.cli.main import main
from kvflash_ggml.store.texts import new_id

MODEL = "0123456789abcdef" * 2
TEXT = np.arange(600, dtype=np.int32) % 90 + 33


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "BLOCK", 256)


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.texts = SharedTexts(FolderObjects(folder / "store" / MODEL), made="CPU")

    def publish(self, tokens: np.ndarray, base: Head | None = None) -> Head:
        (self.folder / "out").write_bytes(tokens.tobytes())
        id = new_id() if base is None else base.id
        draft = Draft(id=id, salt="", prompt=3, places=None, tokens=tokens, base=base)
        return self.texts.publish(draft, self.folder / "out")

    def run(self, *line: str) -> Result:
        return CliRunner().invoke(main, ["store", *line, str(self.folder / "store")], catch_exceptions=False)

    def files(self, pattern: str) -> list[Path]:
        return sorted((self.folder / "store" / MODEL).rglob(pattern))

    def age(self, seconds: float, *paths: Path) -> None:
        for path in paths or self.files("*"):
            os.utime(path, (time.time() - seconds,) * 2)

    def whole(self, head: Head) -> bool:
        self.texts.fetch(head, self.folder / "in")
        return (self.folder / "in").read_bytes() == head.tokens.tobytes()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_ls(store: Store) -> None:
    base = store.publish(TEXT)
    store.publish(np.append(TEXT, np.int32(1)), base)
    other = store.publish(TEXT[:100])
    told = {one["id"]: one for one in json.loads(store.run("ls", "--json").stdout)}
    assert told[base.id]["tokens"] == 601
    assert (told[other.id]["tokens"], told[other.id]["bytes"], told[other.id]["made"]) == (100, 400, "CPU")
    said = store.run("ls").stdout
    assert f"{MODEL}, 2 conversations" in said
    assert f"{base.id} 601 tokens" in said


def test_verify(store: Store) -> None:
    head = store.publish(TEXT)
    assert store.run("verify").exit_code == 0
    damaged, gone = (store.files(f"blocks/{hash}")[0] for hash in head.blocks[:2])
    damaged.write_bytes(bytes(256))
    gone.unlink()
    store.publish(TEXT[:100])
    (broken,) = [path for path in store.files("heads/*/c-*~00000001") if head.id not in path.name]
    broken.write_bytes(b"half")
    result = store.run("verify")
    assert result.exit_code == 1
    for said in (f"blocks/{damaged.name} is damaged", "lacks 1 of its blocks", f"{broken.name} is damaged"):
        assert said in result.output


def test_prune_keeps_what_is_used(store: Store) -> None:
    base = store.publish(TEXT)
    head = store.publish(np.append(TEXT[:300], np.int32(1)), base)
    other = store.publish(TEXT)
    (store.folder / "store" / "README").write_text("not ours")
    (store.folder / "store" / MODEL / "blocks" / "README").write_text("not ours")
    before = store.files("*")
    assert store.run("prune").stdout == ""
    store.age(2 * GRACE_S)
    store.run("prune", "--dry-run")
    assert store.files("*") == before
    store.run("prune")
    assert store.whole(head)
    assert store.whole(other)
    assert (store.folder / "store" / MODEL / "blocks" / "README").exists()
    assert store.run("verify").exit_code == 0


def test_prune_by_age(store: Store) -> None:
    old = store.publish(TEXT)
    store.age(3 * 86400)
    new = store.publish(TEXT[:300])
    store.run("prune", "--older-than", "2")
    assert store.texts.latest(new.begin) == {new.id: 1}
    assert store.whole(new)
    assert len(store.files("blocks/*")) == len(new.blocks), "blocks of both were written lately, and stay with one"
    again = store.publish(np.append(TEXT, np.int32(1)), old)  # whoever has it writes all of it again
    assert store.whole(again)


def test_prune_by_bytes(store: Store) -> None:
    heads = [store.publish(TEXT + np.int32(n)) for n in range(4)]
    for n, head in enumerate(heads):
        store.age(2 * GRACE_S + 100 - n, *store.files(f"{head.id}*"), *(store.files(b)[0] for b in set(head.blocks)))
    whole = sum(path.stat().st_size for path in store.files("*") if path.is_file())
    store.run("prune", "--larger-than", str(int(whole * 0.6)))
    left = [head for head in heads if store.texts.latest(head.begin)]
    assert left == heads[2:]
    assert all(store.whole(head) for head in left)
    assert sum(path.stat().st_size for path in store.files("*") if path.is_file()) <= whole * 0.6


def test_prune_removes_remains(store: Store) -> None:
    """Of a server that was killed: a replaced head, marks of it, unfinished files, what it tried, a damaged head."""
    base = store.publish(TEXT)
    (place,) = store.files(f"{base.id}~00000001")
    (marks,) = store.files(f"{base.id}~00000001~*")
    kept = place.read_bytes()
    head = store.publish(np.append(TEXT, np.int32(1)), base)
    place.write_bytes(kept)
    marks.touch()
    root, probe = store.folder / "store" / MODEL, "probe-0123456789abcdef"
    left = [root / "blocks" / ".x.0123.part", root / probe, root / f".{probe}.01234567.part"]
    for path in left:
        path.touch()
    store.run("prune")
    assert all(path.exists() for path in (place, marks, *left))
    store.age(2 * GRACE_S)
    store.run("prune")
    assert not any(path.exists() for path in (place, marks, *left))
    assert store.whole(head)
    damaged = store.files(f"{head.id}~00000002")[0]
    damaged.write_bytes(b"half")
    assert "damaged" in store.run("prune").stdout
    assert store.texts.latest(head.begin) == {}


def test_a_store_that_cannot_be_read() -> None:
    result = CliRunner().invoke(main, ["store", "ls", "nothing://here"])
    assert result.exit_code != 0
    assert "nothing://here" in result.output
