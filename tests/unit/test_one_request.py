"""docs/one-request.md: its picture is what the script draws and the page table plans, and what it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from xml.etree import ElementTree

import draw_request as drawn
import numpy as np
from support.on_host import OnHost

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.pool.page_table import BlockAllocator, PageTable, PageTableState

PACKAGE = Path(__file__).parents[2] / "kvflash_ggml"
TEXT = (Path(__file__).parents[2] / "docs" / "one-request.md").read_text(encoding="utf-8")


def test_the_picture_is_what_the_script_draws() -> None:
    assert drawn.PICTURE.read_text(encoding="utf-8") == drawn.render(), "run python scripts/draw_request.py"


def test_its_words_are_text() -> None:
    words = [one.text for one in ElementTree.fromstring(drawn.render()).iter("{http://www.w3.org/2000/svg}text")]
    assert {"Device", "Host", f"2 page in {drawn.PAGED_IN}", f"4 page out {drawn.NEWEST}"} <= set(words)


def test_the_page_table_plans_what_it_shows() -> None:
    images = OnHost(range(drawn.NEWEST))
    table = PageTable(BlockAllocator(len(drawn.BLOCKS)), images, sinks=drawn.SINKS, tail=drawn.TAIL)
    blocks = [drawn.BLOCKS.index(c) if c in drawn.BLOCKS else -1 for c in range(drawn.NEWEST + 1)]
    saved = PageTableState(
        blocks=blocks, last_use=[0] * len(blocks), clock=0, settled=True, pins=frozenset(), scores=None
    )
    table.load(drawn.POSITION, saved)
    scores = np.zeros(drawn.NEWEST)
    scores[list(drawn.BLOCKS[:-1])], scores[drawn.EVICTED], scores[drawn.PAGED_IN] = 2, 1, 3
    plan = table.reserve(drawn.POSITION, 1, scores, rebuild=True)
    block = drawn.BLOCKS.index(drawn.EVICTED)
    assert (plan.moves.evict, plan.moves.recall) == ([(drawn.EVICTED, block)], [(drawn.PAGED_IN, block)])
    table.commit(plan)
    assert table.unsaved == range(drawn.NEWEST, drawn.NEWEST + 1)
    assert table.length == (drawn.NEWEST + 1) * CHUNK


def test_each_name_is_in_its_file() -> None:
    """`path` `Name.member`, and further names of that file without a path."""
    path, found = Path(), 0
    for span in re.findall(r"`([^`]+)`", TEXT):
        if (PACKAGE / span).is_file():
            path = PACKAGE / span
        elif re.fullmatch(r"\w+(?:\.\w+)?", span) and path.suffix == ".py" and path.name != "":
            found += span in names(path)
            assert span in names(path) or span in ELSEWHERE, f"{span} is not in {path}"
        elif path.suffix == ".cpp" and span.startswith("kvf_"):
            found += 1
            assert f"{span}(" in path.read_text(encoding="utf-8")
    assert found > 50


ELSEWHERE = {"n_ubatch", "create_completion", "llama_decode", "Llama.generate", "Task.steps", "EventStream", "Finished"}
"""Names that the page uses without their file."""


def names(path: Path) -> set[str]:
    """The classes, functions, methods and constants of a file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found
