"""The drop-in class is a front: who is given one, who reaches into it, and how large a class may become."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "kvflash_ggml"

FRONTS = ("llama/", "cli/")
"""Rooms that are fronts on a `Llama`, as users' programs are."""

GIVEN = {
    "batching/encoder.py", "batching/engine.py", "batching/llama.py", "calibration/known.py", "calibration/finder.py",
    "runtime/model.py",
    "server/prompts.py", "server/run.py", "snapshot/fingerprint.py",
}  # fmt: skip
"""Files beside them that are given a `Llama`, to make something of it."""

REACHES = 12
"""Places that reach into a `Llama`, all in all."""

UNTYPED = 5
"""Parameters `llm` or `model` of any type: what a user may set, and pointers of llama.cpp's."""

METHODS = 46
"""Of a class, at most. `native.engine.PagedEngine` has one for each call of the seam."""


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def is_model(node: ast.expr) -> bool:
    """Whether an expression is a `Llama`, by its name."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ("llm", "_llm")


def test_few_are_given_the_drop_in_class() -> None:
    given = {
        file
        for file, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(one.arg == "llm" for one in (*node.args.args, *node.args.kwonlyargs))
    }
    assert {file for file in given if not file.startswith(FRONTS)} == GIVEN


def test_only_its_own_room_sets_its_private_fields() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_model(node.value)
        and node.attr.startswith("_") and not file.startswith("llama/")
    ]  # fmt: skip
    assert found == []


def test_few_places_reach_into_it() -> None:
    found = [
        f"{file}:{node.lineno} {node.attr}"
        for file, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_model(node.value) and node.attr.startswith("_")
    ]
    assert len(found) <= REACHES, found
    assert {place.partition(":")[0] for place in found if not place.startswith("llama/")} <= {"runtime/model.py"}


def test_parameters_that_are_models_have_types() -> None:
    found = [
        f"{file}:{node.lineno} {one.arg}"
        for file, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for one in (*node.args.args, *node.args.kwonlyargs)
        if one.arg in ("llm", "model") and one.annotation is not None and ast.unparse(one.annotation) == "Any"
    ]
    assert len(found) <= UNTYPED, found


def test_no_class_has_too_many_methods() -> None:
    sizes = {
        f"{file} {node.name}": sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
        for file, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and (file, node.name) != ("native/engine.py", "PagedEngine")
    }
    assert {name: size for name, size in sizes.items() if size > METHODS} == {}
