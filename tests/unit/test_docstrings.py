"""A function's docstring begins with what the function does: an imperative verb. Properties read like fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvflash_ggml"

LEAST = 0.9
"""Share of a room's docstrings."""

VERBS = """
accept add allocate allow anchor announce answer append ask await begin bind bound bring build calibrate call cancel
chat check choose clear close combine commit compare complete compress compute connect continue convert copy count
create cut deal decode delay delete describe divide do draft draw drop empty encode end erase estimate evaluate
evict exchange expect fetch fill find follow forget free give go guard guess have hear hide hold import join keep
lease leave let list load lock log look make mean measure merge move multiply name note open override parse place
plan predict prefill prepare print put queue raise rank read recall receive record refuse reject release remove
render repeat replace report reserve restore retain return rewrite roll run save say score seal see send serve set
settle share show shrink skip sort split start step stop store swap take tell tokenize track translate truncate try
turn undo unload unpin update use verify wait warn withdraw wrap write yield zero
"""
"""Base forms that docstrings of the package begin with. A verb that is missing here is one word to add."""


def begins_with_verb(docstring: str) -> bool:
    """Tell whether a docstring begins with one of VERBS. Before "of" it is a noun: the score of a chunk."""
    first, second = [*docstring.split(), "", ""][:2]
    return first.istitle() and first.strip(",:").lower() in VERBS.split() and second != "of"


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file's functions and methods, less those of properties."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and not any("property" in ast.unparse(one) for one in node.decorator_list):
                yield text


def rooms() -> dict[str, list[Path]]:
    """Return the files of each room; the single files are the room "ground"."""
    found = {path.parent.name: sorted(path.parent.rglob("*.py")) for path in PACKAGE.glob("*/__init__.py")}
    return {**found, "ground": sorted(PACKAGE.glob("*.py"))}


@pytest.mark.parametrize("room", sorted(rooms()))
def test_docstrings_say_what_a_function_does(room: str) -> None:
    found = [text for path in rooms()[room] for text in docstrings(path)]
    wrong = [text.partition("\n")[0] for text in found if not begins_with_verb(text)]
    assert len(wrong) <= (1 - LEAST) * len(found), wrong


@pytest.mark.parametrize("text", ["Return it.", "Render, with care.", "Wait for the end.", "Score\nchunks."])
def test_an_imperative_is_a_verb(text: str) -> None:
    assert begins_with_verb(text)


@pytest.mark.parametrize(
    "text", ["The score.", "Returns it.", "Whether it ends.", "Score of a chunk.", "score: a number.", "Is it?", ""]
)
def test_a_noun_a_question_and_another_form_are_none(text: str) -> None:
    assert not begins_with_verb(text)
