"""llama_cpp's ctypes declarations against the header our library is built from.

Compared by kind, width and sign, and structs by size: a difference is memory corruption later.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vendoring.build import upstream_llama

import kvflash_ggml.native.library as library

# Upstream binds neither; nothing in Python attaches thread pools.
UNBOUND = {"llama_attach_threadpool", "llama_detach_threadpool"}
# Training only, and passed only to llama_opt_init, which we never call.
SHORT_STRUCTS = {"llama_opt_params"}

POINTER = "pointer"
SCALARS = {
    "void": "void", "bool": "bool", "char": "i1", "float": "f4", "double": "f8", "int": "i4",
    "int8_t": "i1", "uint8_t": "u1", "int16_t": "i2", "uint16_t": "u2", "int32_t": "i4",
    "uint32_t": "u4", "int64_t": "i8", "uint64_t": "u8", "size_t": "u8",
}  # fmt: skip


@pytest.fixture(scope="module")
def bindings() -> Any:
    library.load()
    import llama_cpp.llama_cpp

    return llama_cpp.llama_cpp


@pytest.fixture(scope="module")
def headers() -> dict[str, str]:
    root = upstream_llama()
    files = (root / "include" / "llama.h", *sorted((root / "ggml" / "include").glob("*.h")))
    return {f.name: _without_comments(f.read_text(encoding="utf-8")) for f in files}


def _without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", " ", text)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", " ", text, flags=re.MULTILINE)


def _typedefs(headers: dict[str, str]) -> dict[str, str]:
    """Kind of every typedef: a scalar, or a pointer (to data, a struct, a function)."""
    kinds = dict(SCALARS)
    text = " ".join(headers.values())
    for name in re.findall(r"typedef\s[^;{}]*?\(\s*\*\s*(\w+)\s*\)\s*\([^;]*;", text):
        kinds[name] = POINTER
    for target, name in re.findall(r"typedef\s+([\w\s*]+?)\s*\b(\w+)\s*;", text):
        if "*" in target:
            kinds[name] = POINTER
        elif target in kinds:
            kinds[name] = kinds[target]
    return kinds


def _kind(declaration: str, kinds: dict[str, str], *, named: bool) -> str:
    words = re.sub(r"\bconst\b", " ", declaration)
    if "*" in words or "[" in words:
        return POINTER
    parts = words.split()
    if parts[0] == "enum":
        return "i4"
    if parts[0] == "struct":
        parts = parts[1:]
    elif parts[0] not in kinds and named and len(parts) == 1:
        raise AssertionError(f"cannot read parameter {declaration!r}")
    return kinds.get(parts[0], f"struct {parts[0]}")


def _declared(headers: dict[str, str]) -> dict[str, tuple[str, list[str]]]:
    kinds = _typedefs(headers)
    found = {}
    pattern = r"LLAMA_API\s+([^();]*?[\s*])(\w+)\s*\(((?:[^()]|\([^()]*\))*)\)\s*[;,]"
    for result, name, inside in re.findall(pattern, headers["llama.h"]):
        parameters = [p.strip() for p in inside.split(",")]
        arguments = [_kind(p, kinds, named=True) for p in parameters if p not in {"", "void"}]
        found[name] = (_kind(result, kinds, named=False), arguments)
    return found


def _bound_kind(ctype: Any) -> str:
    if ctype is None:
        return "void"
    if issubclass(ctype, ctypes.Structure):
        return f"struct {ctype.__name__}"
    if issubclass(ctype, (ctypes.c_void_p, ctypes.c_char_p, ctypes._Pointer, ctypes._CFuncPtr)):
        return POINTER
    if issubclass(ctype, ctypes.Array) or hasattr(ctype, "contents"):
        return POINTER
    code: str = ctype._type_
    if code == "?":
        return "bool"
    if code in "fd":
        return f"f{ctypes.sizeof(ctype)}"
    return f"{'i' if code in 'bhilqc' else 'u'}{ctypes.sizeof(ctype)}"


def test_every_function_is_bound_as_declared(bindings: Any, headers: dict[str, str]) -> None:
    declared = _declared(headers)
    assert len(declared) > 200, "the header parser lost its footing"
    wrong = []
    for name, (result, arguments) in declared.items():
        function = bindings._lib.__dict__.get(name)
        if function is None:
            if name not in UNBOUND:
                wrong.append(f"{name}: not bound")
            continue
        bound = _bound_kind(function.restype), [_bound_kind(a) for a in function.argtypes or ()]
        if bound != (result, arguments):
            wrong.append(f"{name}: header {(result, arguments)}, ctypes {bound}")
    assert not wrong, "\n".join(wrong)
    assert not UNBOUND & bindings._lib.__dict__.keys(), "upstream binds these now: drop the exception"


def test_every_struct_has_the_same_size(bindings: Any, headers: dict[str, str], tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    structs = dict(_structs(bindings, headers["llama.h"]))
    lines = "".join(f'printf("{n} %zu\\n", sizeof(struct {n}));' for n in structs)
    source = tmp_path / "sizes.c"
    source.write_text(f'#include <stdio.h>\n#include "llama.h"\nint main(void){{{lines}return 0;}}\n')
    root = upstream_llama()
    includes = [f"-I{root / 'include'}", f"-I{root / 'ggml' / 'include'}"]
    subprocess.run([compiler, *includes, str(source), "-o", str(tmp_path / "sizes")], check=True)
    output = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout
    sizes = {name: int(size) for name, size in (line.split() for line in output.splitlines())}
    wrong = {n: (sizes[n], ctypes.sizeof(s)) for n, s in structs.items() if sizes[n] != ctypes.sizeof(s)}
    assert set(wrong) == SHORT_STRUCTS, f"(C, ctypes) sizes differ: {wrong}"


def _structs(bindings: Any, header: str) -> Iterator[tuple[str, Any]]:
    for name, value in vars(bindings).items():
        is_struct = isinstance(value, type) and issubclass(value, ctypes.Structure)
        if is_struct and re.search(rf"\bstruct\s+{name}\s*\{{", header):
            yield name, value


def test_shim_was_compiled_against_the_same_structs(bindings: Any) -> None:
    from kvflash_ggml.native import _kvf

    names = ("llama_context_params", "llama_model_params", "llama_batch")
    for which, name in enumerate(names):
        assert _kvf.lib.kvf_sizeof(which) == ctypes.sizeof(getattr(bindings, name)), name


def test_the_package_asks_for_no_more_scores_than_the_engine_takes() -> None:
    from kvflash_ggml.native import _kvf
    from kvflash_ggml.sequence.device_index import INDEX_ROWS, INDEX_SCORES

    assert (_kvf.lib.KVF_INDEX_SCORES, _kvf.lib.KVF_INDEX_ROWS) == (INDEX_SCORES, INDEX_ROWS)
