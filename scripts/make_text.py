"""Assemble the filler texts of ``tests/text``: docstrings of the standard library, and licences.

  python3.12 scripts/make_text.py [--out tests/text] [--licences DIR]

The same Python release and the same licence files give the same bytes. ``DIR`` holds one licence
text per file, as Debian's ``common-licenses`` does.
"""

from __future__ import annotations

import argparse
import ast
import platform
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
MIN_DOCSTRING = 350  # characters of prose; shorter ones are labels, not text
SKIP_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "tkinter", "turtledemo"}
LICENCES = (  # the newest of each family: older ones repeat it nearly word for word
    "Apache-2.0",
    "Artistic",
    "BSD",
    "CC0-1.0",
    "GFDL-1.3",
    "GPL-3",
    "LGPL-3",
    "MPL-2.0",
)
RULE = "=" * 80

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | Definition


def is_private(name: str) -> bool:
    """Whether ``name`` is neither public nor special."""
    return name.startswith("_") and not name.endswith("__")


def modules(stdlib: Path) -> Iterator[tuple[str, str]]:
    """(name, source) of the modules that stand under Python's own licence, in order of name.

    A module that names a copyright may have terms of its own and is left out.
    """
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if SKIP_FOLDERS & set(parts) or any(map(is_private, parts)):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        if source.isascii() and "copyright" not in source.lower():
            yield ".".join(p for p in parts if p != "__init__"), source


def docstrings(name: str, node: Documented) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of a module and everything public in it, in source order."""
    if text := ast.get_docstring(node):
        yield name, text
    for child in node.body:
        if isinstance(child, Definition) and not is_private(child.name):
            yield from docstrings(f"{name}.{child.name}", child)


def prose(text: str) -> str:
    """The paragraphs of ``text`` without interpreter examples and without tables."""
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    return "\n\n".join(p for p in paragraphs if ">>>" not in p and "---" not in p and "===" not in p).rstrip()


def stdlib_docs(stdlib: Path) -> str:
    """One section per docstring that is long enough; no text comes twice."""
    sections = [f"Docstrings of the standard library of Python {platform.python_version()}"]
    seen = set()
    for module, source in modules(stdlib):
        for name, text in docstrings(module, ast.parse(source)):
            body = prose(text)
            if len(body) >= MIN_DOCSTRING and body not in seen:
                seen.add(body)
                sections.append(f"{name}\n\n{body}")
    return "\n\n\n".join(sections) + "\n"


def licences(folder: Path, python_licence: Path) -> str:
    """The licence texts verbatim, each once, between rules that name them."""
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in LICENCES}
    texts["Python"] = python_licence.read_text(encoding="utf-8")
    return "\n".join(f"{RULE}\n{name}\n{RULE}\n\n{text}" for name, text in texts.items())


def main() -> None:
    """Write both files and print their sizes."""
    ap = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    ap.add_argument("--out", type=Path, default=REPO / "tests" / "text")
    ap.add_argument("--licences", type=Path, default=Path("/usr/share/common-licenses"))
    args = ap.parse_args()
    stdlib = Path(sysconfig.get_path("stdlib"))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("stdlib-docs.txt", stdlib_docs(stdlib)),
        ("licences.txt", licences(args.licences, stdlib / "LICENSE.txt")),
    ):
        (args.out / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
