"""The vendoring rules, on a small upstream of our own: no network, no compiler."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from vendoring import build, patches, source, stock, toolchain
from vendoring.patches import Patch
from vendoring.pin import Pin, VendorError, digest, load_pin, sha256_file

import vendor

CODE = "".join(f"line {i}\n" for i in range(30))
HEADER = """Why: a test.
Touches: src/a.cpp
Upstream: ours
Remove when: never
Guarding test: tests/unit/test_vendor.py::test_round_trip_is_byte_identical

"""


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("KVFLASH_SDIST", "KVFLASH_LLAMA_SOURCE", "CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)


def _sdist(path: Path, files: dict[str, str]) -> Pin:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"up_stream-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return Pin(
        name="up-stream", version="1.0", size=path.stat().st_size, sha256=sha256_file(path),
        commit="abc", ggml="1.2.3", subpath="vendor/llama.cpp",
        extract=("src", "ggml", "convert_*.py"), bindings=("tests", "LICENSE.md"),
    )  # fmt: skip


@pytest.fixture
def pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pin:
    file = tmp_path / "sdist.tar.gz"
    version = "set(GGML_VERSION_MAJOR 1)\nset(GGML_VERSION_MINOR 2)\nset(GGML_VERSION_PATCH 3)\n"
    pin = _sdist(
        file,
        {
            "vendor/llama.cpp/ggml/CMakeLists.txt": version,
            "vendor/llama.cpp/src/a.cpp": CODE,
            "vendor/llama.cpp/src/b.cpp": CODE,
            "vendor/llama.cpp/convert_x.py": "",
            "vendor/llama.cpp/docs/big.md": "left in the archive",
            "vendor/llama.cpp/src/../../../escape": "must not get out",
            "tests/test_up.py": "",
            "LICENSE.md": "MIT",
            "setup.py": "left in the archive",
        },
    )
    monkeypatch.setenv("KVFLASH_SDIST", str(file))
    return pin


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    base, edited = tmp_path / "base", tmp_path / "edited"
    for root in (base, edited):
        (root / "src").mkdir(parents=True)
        for name in ("a.cpp", "b.cpp"):
            (root / "src" / name).write_text(CODE)
    return base, edited


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that says its version, wherever only what a compiler says is asked for."""
    for variable in ("CC", "CXX"):
        monkeypatch.setenv(variable, sys.executable)


def _patch(folder: Path, name: str, diff: str = "", header: str = HEADER) -> Patch:
    path = folder / name
    path.write_text(header + diff)
    return Patch(path, path.read_text())


def _edit(root: Path, name: str, old: str, new: str) -> None:
    file = root / "src" / name
    file.write_text(file.read_text().replace(old + "\n", new + "\n", 1))


def test_extracts_only_what_the_pin_lists(pin: Pin) -> None:
    tree = source.pristine_tree(pin)
    files = {p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.is_file()}
    assert files == {
        ".complete", "llama.cpp/ggml/CMakeLists.txt", "llama.cpp/src/a.cpp", "llama.cpp/src/b.cpp",
        "llama.cpp/convert_x.py", "llama-cpp-python/tests/test_up.py",
        "llama-cpp-python/LICENSE.md",
    }  # fmt: skip


def test_a_damaged_sdist_is_refused_with_both_hashes(pin: Pin, tmp_path: Path) -> None:
    file = tmp_path / "sdist.tar.gz"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(VendorError) as caught:
        source.pristine_tree(pin)
    assert pin.sha256 in str(caught.value)
    assert sha256_file(file) in str(caught.value)
    assert not list((tmp_path / "cache").rglob("a.cpp"))


def test_a_damaged_cached_copy_is_refused(pin: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFLASH_SDIST")
    cached = tmp_path / "cache" / "kvflash_ggml" / "sdist" / pin.filename
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"not an sdist")
    with pytest.raises(VendorError, match="is not the pinned"):
        source.fetch(pin)


def test_an_aborted_extraction_leaves_nothing(pin: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def abort(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(source, "_extract", abort)
    with pytest.raises(KeyboardInterrupt):
        source.pristine_tree(pin)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_dir() and pin.sha256[:12] in p.name]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KVFLASH_SDIST", str(tmp_path / "sdist.tar.gz"))
    assert (source.pristine_tree(pin) / ".complete").is_file()


def test_a_pin_that_extracts_more_has_a_tree_of_its_own(pin: Pin) -> None:
    less = source.pristine_tree(dataclasses.replace(pin, extract=("ggml",)))
    more = source.pristine_tree(pin)
    assert [(tree / "llama.cpp/src/a.cpp").is_file() for tree in (less, more)] == [False, True]


def test_the_pinned_ggml_version_is_checked(pin: Pin, tmp_path: Path) -> None:
    with pytest.raises(VendorError, match=r"says ggml 9\.9\.9, the sdist carries 1\.2\.3"):
        source.pristine_tree(dataclasses.replace(pin, ggml="9.9.9"))


def test_developer_tree_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dev" / "src").mkdir(parents=True)
    (tmp_path / "dev" / "src" / "llama.cpp").touch()
    monkeypatch.setenv("KVFLASH_LLAMA_SOURCE", str(tmp_path / "dev"))
    assert source.patched_tree() == (tmp_path / "dev").resolve()
    assert "NOT APPLIED" in capsys.readouterr().err


@pytest.mark.usefixtures("compilers")
def test_a_developer_tree_is_built_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> Path:
        raise AssertionError("fetched the sdist")

    monkeypatch.setattr(source, "fetch", no_network)
    licences = ("LICENSE", "AUTHORS", "licenses/LICENSE-jsonhpp", "vendor/hash/xxhash/xxhash.c")
    for name in (*licences, "src/llama.cpp", "ggml/CMakeLists.txt"):
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    monkeypatch.setenv("KVFLASH_LLAMA_SOURCE", str(tmp_path / "dev"))
    plan = build.plan(toolchain.Toolchain())
    (plan.ggml / "lib").mkdir(parents=True)  # as if compiled before: what follows is all that a build still does
    plan.out.mkdir(parents=True)
    build.build(plan)
    build.assemble(plan, tmp_path / "stage")
    licenses = tmp_path / "stage" / "licenses"
    names = {"LICENSE.llama.cpp", "LICENSE.json", "LICENSE.xxHash", "AUTHORS.llama.cpp", "NOTICE"}
    assert {file.name for file in licenses.iterdir()} == names
    assert "developer tree" in (licenses / "NOTICE").read_text()


@pytest.mark.usefixtures("compilers")
def test_programs_of_upstream_are_built_once_and_unpatched(
    pin: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def ran(command: list[str]) -> None:
        lines.append(" ".join(command))
        if "-S" in command:
            assert (Path(command[command.index("-S") + 1]) / "src/a.cpp").read_text() == CODE

    def made(chain: toolchain.Toolchain, work: Path, name: str) -> None:
        (work / "bin").mkdir(parents=True, exist_ok=True)
        (work / "bin" / name).write_text(name)

    monkeypatch.setattr(stock, "load_pin", lambda: pin)
    monkeypatch.setattr(stock, "run", ran)
    monkeypatch.setattr(stock, "make", made)
    folder = stock.build_stock(toolchain.Toolchain())
    assert {file.name for file in folder.iterdir()} == set(stock.PROGRAMS)
    assert stock.build_stock(toolchain.Toolchain()) == folder
    (line,) = lines
    assert "-DLLAMA_USE_PREBUILT_UI=OFF" in line
    assert stock.build_stock(toolchain.Toolchain({"GGML_CUDA": "OFF"})) != folder


def test_round_trip_is_byte_identical(trees: tuple[Path, Path], tmp_path: Path) -> None:
    base, edited = trees
    series = [_patch(tmp_path, "0001-one.patch"), _patch(tmp_path, "0002-two.patch")]
    _edit(edited, "a.cpp", "line 4", "line four")
    assert patches.refresh(base, edited, series, "0001-one.patch") == ["0001-one.patch"]
    series = [Patch(p.path, p.path.read_text()) for p in series]
    _edit(edited, "b.cpp", "line 9", "line nine\nline nine and a half")
    assert patches.refresh(base, edited, series, "0002-two.patch") == ["0002-two.patch"]
    series = [Patch(p.path, p.path.read_text()) for p in series]
    assert [p.files for p in series] == [("src/a.cpp",), ("src/b.cpp",)]
    assert [p.changed for p in series] == [2, 3]
    assert patches.refresh(base, edited, series) == []
    assert patches.problems(base, series) == []
    patches.apply_series(series, base)
    assert [(base / "src" / n).read_text() for n in ("a.cpp", "b.cpp")] == [
        (edited / "src" / n).read_text() for n in ("a.cpp", "b.cpp")
    ]


def test_two_patches_may_touch_one_file(trees: tuple[Path, Path], tmp_path: Path) -> None:
    base, edited = trees
    series = [_patch(tmp_path, "0001-one.patch"), _patch(tmp_path, "0002-two.patch")]
    _edit(edited, "a.cpp", "line 2", "line two")
    patches.refresh(base, edited, series, "0001-one.patch")
    first = Patch(series[0].path, series[0].path.read_text())
    second = _patch(tmp_path, "0002-two.patch", first.diff.replace("line two", "line zwei"))
    second = _patch(tmp_path, "0002-two.patch", second.diff.replace("-line 2\n", "-line two\n"))
    _edit(edited, "a.cpp", "line two", "line deux")
    assert patches.refresh(base, edited, [first, second]) == ["0002-two.patch"]
    assert first.path.read_text() == first.text
    assert "+line deux" in second.path.read_text()


def test_fuzz_is_refused(trees: tuple[Path, Path], tmp_path: Path) -> None:
    base, edited = trees
    patch = _patch(tmp_path, "0001-one.patch")
    _edit(edited, "a.cpp", "line 10", "line ten")
    patches.refresh(base, edited, [patch], patch.name)
    patch = Patch(patch.path, patch.path.read_text())
    _edit(base, "a.cpp", "line 8", "line eight, moved on")
    with pytest.raises(VendorError, match="does not apply at zero fuzz"):
        patches.apply_patch(patch, base)


def test_patch_is_the_fallback_without_git(
    trees: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, edited = trees
    patch = _patch(tmp_path, "0001-one.patch")
    _edit(edited, "a.cpp", "line 10", "line ten")
    patches.refresh(base, edited, [patch], patch.name)
    patch = Patch(patch.path, patch.path.read_text())
    which = patches.shutil.which
    if which("patch") is None:
        pytest.skip("no patch(1) here")
    monkeypatch.setattr(patches.shutil, "which", lambda name: None if name == "git" else which(name))
    patches.apply_patch(patch, base)
    assert (base / "src" / "a.cpp").read_text() == (edited / "src" / "a.cpp").read_text()
    (base / "src" / "a.cpp").write_text(CODE.replace("line 8\n", "line eight\n"))
    with pytest.raises(VendorError, match="zero fuzz"):
        patches.apply_patch(patch, base)


def test_a_patch_starts_as_a_header(trees: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = trees
    patches.apply_patch(_patch(tmp_path, "0001-one.patch"), base)
    assert (base / "src" / "a.cpp").read_text() == CODE


def test_refreshing_from_no_folder_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vendor.main(["refresh", str(tmp_path / "nowhere")]) == 1
    assert f"no such folder: {tmp_path}/nowhere" in capsys.readouterr().err


def test_new_files_need_an_owner(trees: tuple[Path, Path], tmp_path: Path) -> None:
    base, edited = trees
    (edited / "src" / "new.cpp").write_text("new\n")
    with pytest.raises(VendorError, match=r"src/new\.cpp.*--into"):
        patches.refresh(base, edited, [_patch(tmp_path, "0001-one.patch")])


def test_rules_are_reported(trees: tuple[Path, Path], tmp_path: Path) -> None:
    base, edited = trees
    (edited / "src" / "a.cpp").write_text("".join(f"other {i}\n" for i in range(31)))
    patch = _patch(tmp_path, "0001-one.patch", header="Why: x\nGuarding test: tests/nowhere.py::t\n")
    patches.refresh(base, edited, [patch], patch.name)
    found = "\n".join(patches.problems(base, [Patch(patch.path, patch.path.read_text())]))
    assert "no 'Touches:'" in found
    assert "no 'Remove when:'" in found
    assert "61 changed lines (limit 60)" in found
    assert "tests/nowhere.py does not exist" in found


def test_series_lists_exactly_the_patches(tmp_path: Path) -> None:
    assert patches.read_series(tmp_path) == []
    _patch(tmp_path, "0001-one.patch")
    (tmp_path / "series").write_text("# order matters\n0001-one.patch\n")
    assert [p.name for p in patches.read_series(tmp_path)] == ["0001-one.patch"]
    _patch(tmp_path, "0002-forgotten.patch")
    with pytest.raises(VendorError, match=r"0002-forgotten\.patch"):
        patches.read_series(tmp_path)


def test_a_better_header_rebuilds_nothing(tmp_path: Path) -> None:
    one = _patch(tmp_path, "0001-one.patch", "diff --git a/x b/x\n")
    two = _patch(tmp_path, "0001-one.patch", "diff --git a/x b/x\n", header="Why: better\n\n")
    assert patches.series_hash([one]) == patches.series_hash([two])
    assert patches.series_hash([one]) != patches.series_hash([])


@pytest.mark.usefixtures("compilers")
def test_cmake_args_reach_the_build_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = toolchain.Toolchain(defines=toolchain.user_defines())
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_NATIVE=off -D GGML_LTO:BOOL=on -DLLAMA_BUILD=OFF")
    flagged = toolchain.Toolchain(defines=toolchain.user_defines(["GGML_LTO=off"]))
    assert flagged.defines == {"GGML_NATIVE": "off", "GGML_LTO": "off"}
    assert "-DGGML_NATIVE=off" in flagged.arguments()
    assert digest(*plain.identity()) != digest(*flagged.identity())
    assert not flagged.flag("GGML_NATIVE", default=True)
    before = digest(*flagged.identity())
    monkeypatch.setenv("CXXFLAGS", "-O1")
    assert digest(*flagged.identity()) != before


@pytest.mark.usefixtures("compilers")
def test_a_portable_build_has_its_own_key_and_none_of_its_flags_may_say_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = toolchain.portable_defines({"GGML_NATIVE": "0", "GGML_LTO": "on"})
    portable, native = toolchain.Toolchain(defines=given), toolchain.Toolchain(defines={"GGML_LTO": "on"})
    assert (portable.flavour, native.flavour) == ("portable", "native")
    assert toolchain.Toolchain(defines={"GGML_NATIVE": "OFF"}).flavour == "fixed"
    assert digest(*portable.identity()) != digest(*native.identity())
    assert "-DCMAKE_INSTALL_BINDIR=lib" in portable.arguments()
    assert "-DCMAKE_INSTALL_BINDIR=lib" not in native.arguments()
    monkeypatch.setattr(toolchain, "_cpu_features", lambda: "another CPU")
    assert portable.identity() == toolchain.Toolchain(defines=given).identity()
    with pytest.raises(VendorError, match="a portable build has GGML_BACKEND_DL=ON, but GGML_BACKEND_DL=off was given"):
        toolchain.portable_defines({"GGML_BACKEND_DL": "off"})


def test_the_variants_of_a_portable_build_are_one_backend(pin: Pin, tmp_path: Path) -> None:
    source_tree = tmp_path / "source"
    (source_tree / "ggml").mkdir(parents=True)
    (source_tree / "ggml" / "CMakeLists.txt").touch()
    unused: Any = dict.fromkeys(("ggml", "work", "out"), tmp_path)
    chain = toolchain.Toolchain(defines=toolchain.portable_defines({}))
    plan = build.Plan(pin=pin, toolchain=chain, source=source_tree, series=(), developer=False, **unused)
    lib = tmp_path / "lib"
    lib.mkdir()
    for name in ("base", "cpu-x64", "cuda", "cpu-armv8.2_1"):
        (lib / f"libggml-{name}.so").touch()
    info = build.build_info(plan, lib)
    assert info["backends"] == ["cuda", "cpu"]
    assert info["cpu_variants"] == ["armv8.2_1", "x64"]
    assert info["flavour"] == "portable"


def test_the_real_pin_reads() -> None:
    pin = load_pin()
    assert pin.filename == f"llama_cpp_python-{pin.version}.tar.gz"
    assert len(pin.sha256) == 64
    assert os.sep not in pin.root


def test_only_changed_files_get_a_new_time(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    (a / "src").mkdir(parents=True)
    for name in ("same.cpp", "edited.cpp", "gone.cpp"):
        (a / "src" / name).write_text(name)
    (a / "README").write_text("not listed")
    assert build._sync(a, b, ["src"]) == 3
    for file in (b / "src").iterdir():
        os.utime(file, (1, 1))
    (a / "src" / "edited.cpp").write_text("edited")
    (a / "src" / "gone.cpp").unlink()
    assert build._sync(a, b, ["src"]) == 2
    assert {f.name: f.stat().st_mtime > 1 for f in (b / "src").iterdir()} == {
        "same.cpp": False,
        "edited.cpp": True,
    }
    assert not (b / "README").exists()


@pytest.mark.usefixtures("compilers")
def test_a_patch_rebuilds_ggml_only_if_it_touches_it(pin: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_pin", lambda: pin)
    monkeypatch.setattr(build, "patched_tree", source.pristine_tree)

    def keys(*names: str) -> tuple[str, str]:
        series = [_patch(tmp_path, f"{i:04}.patch", f"diff --git a/{n} b/{n}\n") for i, n in enumerate(names)]
        monkeypatch.setattr(build, "read_series", lambda: series)
        plan = build.plan(toolchain.Toolchain())
        return plan.ggml.name, plan.out.name

    ggml, llama = keys()
    assert keys("src/a.cpp")[0] == ggml
    assert keys("src/a.cpp")[1] != llama
    assert keys("ggml/src/ggml.c")[0] != ggml
