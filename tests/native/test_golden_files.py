"""What an earlier version wrote opens, and goes on with the same answer. See tests/golden/README.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import golden_files, golden_names
from support.golden_files import ANSWER, GOLDEN, SNAPSHOTS, answer, tokens_of
from support.serving import serve


@pytest.mark.parametrize("name", sorted(SNAPSHOTS))
def test_a_snapshot_opens_and_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    golden = SNAPSHOTS[name]
    if golden.compress:
        pytest.importorskip("zstandard", reason="its pages are compressed, which needs the package zstandard")
    llm = golden_files.open_model(golden)
    prompt = tokens_of(llm, golden.prompt)
    assert llm.load_snapshot(GOLDEN / f"{name}.kvs") == llm.n_tokens == len(prompt)
    assert llm.input_ids[: llm.n_tokens].tolist() == prompt
    assert (llm.kvflash.chunks > llm.kvflash.resident) == (name == "small"), "and one text is larger than the pool"
    first = int(llm.newest_logits().argmax())
    totals: list[int] = []
    llm.kvflash_progress = lambda done, total: totals.append(total)
    text = llm.detokenize([first]).decode() + answer(llm, [*prompt, first])
    assert text.strip().startswith(ANSWER)
    assert totals == [], "only the first token is read"
    if golden.settings:
        assert llm.kvflash.spec.total.drafted > 0
    assert caplog.text == "", "a drafter that begins anew would say so"
    llm.close()


def test_a_prefix_cache_is_gone_on_from(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "prefixes", tmp_path / "prefixes")
    llm = golden_files.open_prefixes(tmp_path / "prefixes")
    prompt = tokens_of(llm, golden_files.prompt(0, 700))
    totals: list[int] = []
    llm.kvflash_progress = lambda done, total: totals.append(total)
    assert answer(llm, prompt).strip().startswith(ANSWER)
    assert sum(totals) < 64 < len(prompt), "all but the last chunk is known"
    llm.close()


def test_a_servers_conversation_is_gone_on_from(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "sessions", tmp_path / "sessions")
    with serve(golden_files.SERVED, *golden_files.SERVER, "--session-dir", str(tmp_path / "sessions")) as server:
        status, conversations = server.get("/kvflash/conversations")
        assert status == 200
        (known,) = sorted((GOLDEN / "sessions" / "parked").iterdir())
        assert known.name.partition("~")[0] in json.dumps(conversations)
        status, reply = server.post("/v1/completions", golden_files.asked())
        assert status == 200
        usage = reply["usage"]
        assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 64 < usage["prompt_tokens"]
        assert reply["choices"][0]["text"].strip().startswith(ANSWER)


def test_no_public_name_is_lost() -> None:
    wanted = json.loads((GOLDEN / "library_names.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = golden_names.with_the_library() | {"stats": golden_files.stats()}
    assert len(wanted["signatures"]) > 50
    assert golden_names.lost(wanted, found) == []


def test_a_run_tells_the_same_as_json() -> None:
    """A value may be missing in one run and there in another: null is of every kind."""
    wanted = json.loads((GOLDEN / "run.json").read_text(encoding="utf-8"))
    found = golden_names.shape(golden_files.run_json())
    assert len(wanted) > 20
    known = {path: kind for path, kind in wanted.items() if "null" not in (kind, found.get(path))}
    assert set(wanted) - set(found) == set()
    assert golden_names.lost(known, found) == []
