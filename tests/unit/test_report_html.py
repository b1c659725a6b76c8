"""The residency map as a file: whole, self-contained, and safe whatever the model is called."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.trace import recorder as trace_html
from kvflash_ggml.trace.events import Change
from kvflash_ggml.trace.recorder import Summary, Trace, levels, page

HOSTILE = """</title><script>alert("x")</script><img src=x onerror='y'> & ${data} $title"""
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """Collects elements and their text; refuses what is not nested well."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0])


def trace(moments: int = 3, chunks: int = 5) -> Trace:
    one = Trace()
    for i in range(moments):
        one.changed(
            Change(
                length=(i + 1) * CHUNK * chunks // moments,
                resident=(0, i % chunks),
                recalled=(i % chunks,) if i else (),
                scores=np.linspace(-8, -1, chunks, dtype=np.float32) if i % 2 else None,
                evicted_mass=0.3 if i % 2 else None,
                generating=i == moments - 1,
            )
        )
    return one


def test_it_is_well_formed_and_says_what_ran() -> None:
    summary = Summary(facts=[("pool", "1,024 tokens"), ("banner", "kvflash: pool 1024")])
    reader = Reader(page(trace().moments, summary, title="model.gguf"))
    assert reader.texts["h1"] == ["model.gguf"]
    assert reader.texts["title"] == ["Residency map: model.gguf"]
    assert reader.texts["th"] == ["pool", "banner"]
    assert reader.texts["td"] == ["1,024 tokens", "kvflash: pool 1024"]
    assert len([tag for tag, _ in reader.tags if tag == "canvas"]) == 1


def test_its_data_are_the_moments() -> None:
    one = trace()
    data = Reader(page(one.moments, Summary(), title="m")).data
    assert (data["chunk"], data["chunks"]) == (CHUNK, 5)
    assert [moment["length"] for moment in data["moments"]] == [moment.length for moment in one.moments]
    assert [moment["in"] for moment in data["moments"]] == [[], [1], [2]]
    assert [moment["mass"] for moment in data["moments"]] == [None, 0.3, None]
    assert [moment["answer"] for moment in data["moments"]] == [False, False, True]
    assert [moment["scores"] is not None for moment in data["moments"]] == [False, True, False]
    for written, moment in zip(data["moments"], one.moments, strict=True):
        bits = np.unpackbits(np.frombuffer(base64.b64decode(written["resident"]), np.uint8))
        assert tuple(np.flatnonzero(bits)) == moment.resident


def test_hostile_strings_are_text() -> None:
    summary = Summary(facts=[(HOSTILE, HOSTILE)])
    text = page(trace().moments, summary, title=HOSTILE)
    reader = Reader(text)
    assert reader.texts["h1"] == reader.texts["th"] == reader.texts["td"] == [HOSTILE]
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in reader.tags]
    assert "alert" not in "".join(reader.texts["script"])


def test_json_cannot_end_its_element() -> None:
    assert "<" not in trace_html._json({"x": "</script><!--"})
    assert json.loads(trace_html._json("</script>&")) == "</script>&"


def test_nothing_is_fetched() -> None:
    text = page(trace().moments, Summary(facts=[("a", "b")]), title="m")
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text
    for tag, attributes in Reader(text).tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert not {"src", "href", "srcset", "action"} & set(attributes)


def test_light_and_dark_know_the_same_colours() -> None:
    text = page([], Summary(), title="m")
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    names = {line.split(":")[0].strip() for line in light.replace(";", "\n").splitlines() if "--" in line.split(":")[0]}
    assert len(names) > 8
    for name in names:
        assert f"{name}:" in dark


def test_an_empty_trace_is_a_page_too() -> None:
    assert Reader(page([], Summary(), title="")).data["moments"] == []


def test_levels_run_from_the_lowest_to_the_highest_exact_score() -> None:
    scores = np.array([-10_005.0, -8.0, -4.5, -1.0, np.nan, -np.inf], np.float32)
    assert levels(scores, -8.0, -1.0).tolist() == [0, 1, 128, 255, 0, 0]
    assert levels(np.array([3.0], np.float32), 3.0, 3.0).tolist() == [1]
    assert levels(np.array([np.nan], np.float32), 0.0, 1.0).tolist() == [0]


def test_too_many_scores_are_shown_at_every_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_html, "MAX_CELLS", 25)
    data = Reader(page(trace(20).moments, Summary(), title="m")).data
    shown = [i for i, moment in enumerate(data["moments"]) if moment["scores"] is not None]
    assert shown == [3, 7, 11, 15, 19]


def test_a_long_run_stays_a_small_file(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    trace(500, 1000).write_html(path, title="m")
    assert path.stat().st_size < 1 << 20
    assert Reader(path.read_text()).data["chunks"] == 1000
