"""The installed library: one file per name, one libllama per process, errors that help."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvflash_ggml.native import library

REPO = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files and /proc")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: one process can load only one libllama."""
    env = {k: v for k, v in os.environ.items() if k != "LLAMA_CPP_LIB_PATH"} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


MAPS = """
import re
text = open("/proc/self/maps").read()
print(sorted(set(re.findall(r"\\S*/lib(?:llama|ggml)[^/\\n]*$", text, re.M))))
"""
LOAD = "from kvflash_ggml.native import library; library.load()\n"


def libraries() -> list[Path]:
    return sorted(library.library_folder().iterdir())


def loaded() -> list[str]:
    """What `library.load` opens of llama.cpp: libmtmd waits for a vision chat handler."""
    return [path.name for path in libraries() if path.name not in {"libkvf_chat.so", "libmtmd.so"}]


def test_one_plain_file_per_library() -> None:
    names = [p.name for p in libraries()]
    parts = ("llama", "mtmd", "kvf_chat", "ggml", "ggml-base", "ggml-cpu")
    assert {f"lib{part}.so" for part in parts} <= set(names)
    assert all(re.fullmatch(r"lib[\w-]+\.so", n) for n in names), names
    assert not any(p.is_symlink() for p in libraries())
    assert names == library.build_info()["libraries"]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_libraries_find_each_other_from_anywhere() -> None:
    from kvflash_ggml.native import _kvf

    for path in [*libraries(), Path(_kvf.__file__)]:
        text = subprocess.run(["readelf", "-d", path], capture_output=True, text=True).stdout
        runpath = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text)
        if path.name.startswith("_kvf"):
            assert runpath == ["$ORIGIN/../lib"]
            assert "[libllama.so]" in text
        else:
            assert re.findall(r"\(SONAME\).*\[(.*)\]", text) == [path.name]
            assert runpath in ([], ["$ORIGIN"]), path


def test_one_libllama_in_the_process() -> None:
    done = run(LOAD + "import llama_cpp; from kvflash_ggml.native import _kvf\n" + MAPS)
    assert done.returncode == 0, done.stderr
    mapped = eval(done.stdout)
    assert sorted(Path(p).name for p in mapped) == loaded()
    assert {Path(p).parent for p in mapped} == {library.library_folder()}


def spins(code: str, **environment: str) -> str | None:
    """How long threads spin, as libgomp has read it; None if it was not loaded."""
    done = run(code, OMP_DISPLAY_ENV="verbose", **dict.fromkeys(library.WAITING, "") | environment)
    assert done.returncode == 0, done.stderr
    found = re.search(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)
    return None if found is None else found[1]


UNSET = f"import os\nfor name in {library.WAITING}:\n    if not os.environ[name]: del os.environ[name]\n"


@pytest.mark.parametrize(
    "code",
    [LOAD, "import kvflash_ggml, llama_cpp\n", "import llama_cpp\n", "from kvflash_ggml import Engine\n"],
    ids=["loaded", "llama_cpp after us", "llama_cpp alone", "Engine"],
)
def test_threads_spin_briefly_before_they_sleep(code: str) -> None:
    assert spins(UNSET + code) == str(library.SPINS)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("OMP_WAIT_POLICY", "passive", "0"), ("GOMP_SPINCOUNT", "77", "77"), ("KMP_BLOCKTIME", "0", "300000")],
)
def test_a_user_says_how_threads_wait(name: str, value: str, expected: str) -> None:
    assert spins(UNSET + LOAD, **{name: value}) == expected


def test_llama_cpp_may_come_first_when_it_uses_our_library() -> None:
    folder = str(library.library_folder())
    done = run("import llama_cpp\n" + LOAD + MAPS, LLAMA_CPP_LIB_PATH=folder)
    assert done.returncode == 0, done.stderr
    assert len(eval(done.stdout)) == len(loaded())


def test_llama_cpp_alone_finds_our_library() -> None:
    done = run("import llama_cpp, sys\n" + MAPS + "print(llama_cpp.Llama.__module__, len(sys.meta_path))")
    assert done.returncode == 0, done.stderr
    mapped, last = done.stdout.splitlines()
    assert {Path(p).parent for p in eval(mapped)} == {library.library_folder()}
    assert last.startswith("llama_cpp.llama ")
    done = run("import llama_cpp\n" + LOAD + MAPS)
    assert done.returncode == 0, done.stderr
    assert len(eval(done.stdout)) == len(loaded())


def test_a_llama_cpp_with_a_library_of_its_own_is_left_alone(tmp_path: Path) -> None:
    package = tmp_path / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("import os, sys\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport llama_cpp, os\n"
        "print('kvflash_ggml' in sys.modules, os.environ.get('LLAMA_CPP_LIB_PATH'))"
    )
    done = run(code)
    assert done.stdout == "False None\n", done.stderr


def test_a_process_without_llama_cpp_pays_nothing() -> None:
    done = run("import sys; print([m for m in sys.modules if m.startswith(('kvflash_ggml', 'llama_cpp'))])")
    assert done.stdout == "[]\n", done.stderr


def test_a_foreign_libllama_is_refused(tmp_path: Path) -> None:
    for path in libraries():
        shutil.copy2(path, tmp_path)
    done = run("import llama_cpp\n" + LOAD, LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert "LibraryError" in done.stderr
    assert f"already loaded from {tmp_path}" in done.stderr
    assert str(library.library_folder()) in done.stderr
    assert "Import kvflash_ggml before llama_cpp" in done.stderr


def test_lib_path_override_wins(tmp_path: Path) -> None:
    for path in libraries():
        shutil.copy2(path, tmp_path)
    done = run(LOAD + MAPS, KVFLASH_LIB_PATH=str(tmp_path), LLAMA_CPP_LIB_PATH=str(tmp_path / "other"))
    assert done.returncode == 0, done.stderr
    assert {Path(p).parent for p in eval(done.stdout)} == {tmp_path}


def test_a_missing_library_says_what_was_tried(tmp_path: Path) -> None:
    done = run(LOAD, KVFLASH_LIB_PATH=str(tmp_path))
    assert f"no libllama.so in KVFLASH_LIB_PATH={tmp_path}" in done.stderr
    assert "unset it" in done.stderr


def test_a_broken_library_says_so(tmp_path: Path) -> None:
    for path in libraries():
        (tmp_path / path.name).write_bytes(b"not ELF")
    done = run(LOAD, KVFLASH_LIB_PATH=str(tmp_path))
    assert "LibraryError" in done.stderr
    assert f"{tmp_path}/libggml-base.so could not be loaded" in done.stderr


def test_another_llama_cpp_version_is_refused() -> None:
    pin = library.build_info()["llama_cpp_python"]
    done = run(
        f"import os; os.environ['LLAMA_CPP_LIB_PATH'] = {str(library.library_folder())!r}\n"
        "import llama_cpp; llama_cpp.__version__ = '0.0.1'\n" + LOAD
    )
    assert "llama-cpp-python 0.0.1 is installed" in done.stderr
    assert f"needs exactly {pin}" in done.stderr
    assert f'CMAKE_ARGS="-DLLAMA_BUILD=OFF" pip install --no-cache-dir llama-cpp-python=={pin}' in (done.stderr)


def test_what_an_uninstall_left_is_no_llama_cpp() -> None:
    done = run(
        "import importlib.metadata as m, sys, types\n"
        "def version(name): raise m.PackageNotFoundError(name)\n"
        "m.version, sys.modules['llama_cpp'] = version, types.ModuleType('llama_cpp')\n" + LOAD
    )
    assert "LibraryError: llama-cpp-python is not installed" in done.stderr


def test_another_thread_may_be_importing_llama_cpp() -> None:
    done = run(
        "import sys, threading, time\nimport kvflash_ggml\n"
        "threading.Thread(target=__import__, args=('llama_cpp',)).start()\n"
        "while 'llama_cpp' not in sys.modules: time.sleep(0)\n"
        "print(kvflash_ggml.Llama.__name__)\n"
    )
    assert (done.stdout, done.returncode) == ("Llama\n", 0), done.stderr


def test_every_public_name_is_listed() -> None:
    """Shells complete names of `dir`, where names that are imported when they are used do not stand by themselves."""
    done = run("import kvflash_ggml as k, sys\nassert {*k.__all__} <= {*dir(k)}\nassert 'llama_cpp' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("_kvf.lib.kvf_abi = lambda: 99", "has native interface 99"),
        ("_kvf.lib.kvf_chat_abi = lambda: 99", "has native interface 99"),
        ("_kvf.lib.kvf_sizeof = lambda which: 1", "llama_context_params has 1 bytes"),
    ],
)
def test_parts_of_different_builds_are_refused(breakage: str, message: str) -> None:
    code = (
        "import types\nfrom kvflash_ggml.native import library\nlibrary.load()\n"
        "import llama_cpp\nfrom kvflash_ggml.native import _kvf as real\n"
        "lib = types.SimpleNamespace(kvf_abi=real.lib.kvf_abi, KVF_ABI=real.lib.KVF_ABI,"
        " kvf_chat_abi=real.lib.kvf_chat_abi, KVF_CHAT_ABI=real.lib.KVF_CHAT_ABI,"
        " kvf_sizeof=real.lib.kvf_sizeof)\n_kvf = types.SimpleNamespace(lib=lib)\n"
        f"{breakage}\nlibrary._refuse_mismatch(llama_cpp, lib, library.library_folder())\n"
    )
    done = run(code)
    assert "LibraryError" in done.stderr
    assert message in done.stderr


def test_a_wrong_value_of_a_variable_is_told_before_anything_is_loaded() -> None:
    done = run(LOAD, KVFLASH_KERNELS="stok")
    assert "ConfigError: KVFLASH_KERNELS='stok'" in done.stderr
    assert run(LOAD, KVFLASH_KERNELS="stock").returncode == 0


def test_a_gpu_that_the_build_cannot_use_is_told() -> None:
    if library.supports_gpu_offload():
        pytest.skip("this build has a GPU")
    code = LOAD + "library.machine_has_gpu = lambda: {}\nlibrary.ensure_gpu_offload({})"
    refused, allowed = run(code.format(True, -1)), run(code.format(True, -1), KVFLASH_ALLOW_CPU="1")
    assert "n_gpu_layers=-1" in refused.stderr
    assert "KVFLASH_ALLOW_CPU=1" in refused.stderr
    assert allowed.returncode == 0, allowed.stderr
    assert run(code.format(True, 0)).returncode == 0
    assert run(code.format(False, 99)).returncode == 0


def test_a_longer_launch_queue_is_asked_of_cuda_unless_the_environment_says_otherwise() -> None:
    library.load()
    assert os.environ["CUDA_SCALE_LAUNCH_QUEUES"] == "4x"
    code = LOAD + "import os; print(os.environ['CUDA_SCALE_LAUNCH_QUEUES'])"
    assert run(code, CUDA_SCALE_LAUNCH_QUEUES="1x").stdout == "1x\n"


def test_llama_cpps_log_is_silent_until_a_model_is_verbose() -> None:
    """CUDA tells its devices when they are counted, which is before a model says whether it is verbose."""
    code = LOAD + "from llama_cpp import _logger; tell = _logger.llama_log_callback; tell(1, b'found', None)"
    assert run(code).stderr == ""
    assert run(code + "; _logger.set_verbose(True); tell(1, b'told', None)").stderr == "told"
    asked = "import logging; logging.getLogger('llama-cpp-python').setLevel(logging.INFO); "
    assert run(asked + code).stderr == "found"


def test_loading_twice_is_free() -> None:
    library.load()
    library.load()


def test_build_info_names_the_build() -> None:
    info = library.build_info()
    assert info["llama_cpp_commit"]
    assert "cpu" in info["backends"]
    assert len(info["sdist_sha256"]) == 64


@pytest.mark.slow
def test_the_wheel_carries_code_licences_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("pip", reason="pip makes the wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    flags = [f"-D{k}={v}" for k, v in library.build_info()["cmake_defines"].items()]
    done = subprocess.run(
        [*pip, "--wheel-dir", str(tmp_path), str(REPO)],
        env=os.environ | {"CMAKE_ARGS": shlex.join(flags)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp310-abi3-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    built = [n for n in names if re.search(r"\.so", n)]
    assert sorted(Path(n).name for n in built) == sorted([*library.build_info()["libraries"], "_kvf.abi3.so"])
    assert {"kvflash_ggml/py.typed", "kvflash_ggml.pth", "_kvflash_ggml_startup.py"} <= set(names)
    licenses = {n.partition("/licenses/")[2] for n in names if "/licenses/" in n}
    assert licenses == {
        "LICENSE", "upstream/LICENSE.llama.cpp", "upstream/AUTHORS.llama.cpp", "upstream/LICENSE.xxHash",
        "upstream/LICENSE.llama-cpp-python.md", "upstream/LICENSE.json", "upstream/NOTICE",
    }  # fmt: skip
    code = [n for n in names if "/licenses/" not in n]
    assert not [n for n in code if n.endswith((".cpp", ".h", ".patch", ".gguf"))]
