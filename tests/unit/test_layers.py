"""Imports run one way, from the top floor to the ground. Those for types count as well."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.inside import PRIVATE

PACKAGE = Path(__file__).parents[2] / "kvflash_ggml"
BENCH = Path(__file__).parents[2] / "benchmarks" / "kvflash_bench"
ROUTER = Path(__file__).parents[2] / "router" / "kvflash_router"
FLEET = Path(__file__).parents[2] / "fleet" / "kvflash_fleet"
TESTS = Path(__file__).parents[1]

FLOORS = [
    {"__main__"},
    {"cli"},
    {"server"},
    {"__init__"},
    {"batching"},
    {"llama"},
    {"runtime"},
    {"speculation"},
    {"convert"},
    {"calibration", "store", "drafter"},
    {"snapshot"},
    {"sequence"},
    {"placement"},
    {"config"},
    {"policy"},
    {"chat", "state"},
    {"native", "pool", "trace"},
    {"host", "gguf", "media"},
    {
        "arrays",
        "constants",
        "env",
        "errors",
        "extensions",
        "files",
        "logs",
        "notation",
        "pip_line",
        "remote",
        "sampling",
        "settings",
        "system",
        "threads",
    },
]
"""From the top down. A room imports itself and the floors below; on the ground the files are in no order."""

ORDER = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module by its name in the package, "" for the package itself."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: dict[str, Path], root: str = "kvflash_ggml") -> Iterator[str]:
    """The modules of the package `root` that a module names in its imports."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.startswith(root))
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            parts = package.split(".") if package else []
            base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
        elif node.module is not None and node.module.partition(".")[0] == root:
            base = node.module.partition(".")[2]
        else:
            continue
        for alias in node.names:
            below = f"{base}.{alias.name}".lstrip(".")
            yield below if below in known else base


def room(name: str) -> str:
    return name.partition(".")[0] or "__init__"


def arrows_of(package: Path) -> dict[str, set[str]]:
    """The modules of a package by their names, each with those that it imports."""
    known = modules(package)
    return {
        name: {target for target in imported(name, path, known, package.name) if target != name}
        for name, path in known.items()
    }


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    return arrows_of(PACKAGE)


def test_every_room_has_a_floor(arrows: dict[str, set[str]]) -> None:
    assert {room(name) for name in arrows} == set(ORDER)


def test_imports_run_down(arrows: dict[str, set[str]]) -> None:
    up = [
        f"{name} -> {target}"
        for name, targets in arrows.items()
        for target in targets
        if room(name) != room(target) and ORDER[room(target)] <= ORDER[room(name)]
    ]
    ground = FLOORS[-1]
    assert [arrow for arrow in up if not {room(x) for x in arrow.split(" -> ")} <= ground] == []


@pytest.mark.parametrize("beside", [BENCH, ROUTER, FLEET], ids=lambda path: path.name)
def test_the_package_needs_nothing_beside_it(beside: Path) -> None:
    assert any(beside.rglob("*.py"))
    assert [name for name, path in modules().items() if beside.name in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("package", [PACKAGE, BENCH, ROUTER, FLEET], ids=lambda path: path.name)
def test_there_are_no_circles(package: Path) -> None:
    left = arrows_of(package)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    assert sorted(left) == [], "these import each other, or one that does"


def test_there_is_one_class_of_a_name() -> None:
    classes = Counter(
        node.name if not node.name.startswith("_") else f"{room(module)} {node.name}"
        for module, path in modules().items()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_locks_are_entered_by_with() -> None:
    """An interrupt of the main thread between an `acquire` and what gives the lock back would keep it."""
    not_by_main = ["llama/call_lock.py: self.lock.acquire"]  # `CallLock._leave`, which asks first which thread it is
    called = [
        f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in ("acquire", "Condition", "Semaphore", "BoundedSemaphore")
        and ast.unparse(node.value) != "asyncio"  # a task is interrupted where it awaits
    ]
    assert called == not_by_main


@pytest.mark.parametrize(
    ("root", "knowing"), [(TESTS, TESTS / "support"), (BENCH, BENCH / "inside.py")], ids=["tests", "bench"]
)
def test_private_parts_of_a_model_are_reached_in_one_file(root: Path, knowing: Path) -> None:
    reaches = {
        f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}"
        for path in root.rglob("*.py")
        if not path.is_relative_to(knowing)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr in PRIVATE and ast.unparse(node.value) != "self")
        or (isinstance(node, ast.Constant) and node.value in PRIVATE)
    }
    assert reaches == set()
