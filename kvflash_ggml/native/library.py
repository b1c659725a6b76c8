"""Finds our libllama, makes llama_cpp use it, and proves that the two fit each other.

Everything is done on the first `load()`, never at import, and every failure says what was tried,
what went wrong and what to type.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import json
import logging
import os
import re
import site
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from kvflash_ggml import env
from kvflash_ggml.errors import LibraryError
from kvflash_ggml.logs import warn_once
from kvflash_ggml.native import trial

logger = logging.getLogger("kvflash_ggml")

_EXTENSION = "kvflash_ggml.native._kvf"
_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
_PREFIX = "" if sys.platform == "win32" else "lib"
_STRUCTS = ("llama_context_params", "llama_model_params", "llama_batch")
_MISSING_OBJECT = re.compile(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")

HOST_BACKENDS = frozenset({"cpu", "blas", "rpc"})
"""Backends of a build that bring no GPU of this machine: RPC has devices only where somebody connects to a server."""

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which OpenMP is told how its threads wait. Whoever sets one of them decides."""

SPINS = 2000
"""Rounds that a thread spins between two steps before it sleeps: 0.03 to 0.1 ms on a Xeon. libgomp's default is
300,000: up to 16 ms there, in which a thread burns the time that the scheduler then denies the thread it waits for.
Within a step our barrier decides (patch `0039`)."""

CUDA_FLAGS = 'CMAKE_ARGS="-DGGML_CUDA=on -DLLAMA_BUILD=OFF"'

_GPU_TYPES = (1, 2)  # ggml_backend_dev_type: GPU, IGPU


def load() -> None:
    """Load the native library and bind llama_cpp to it; does nothing the second time.

    Raises:
        LibraryError: a file is missing or cannot be loaded, llama_cpp has another version or was
            imported first from another libllama, or the parts were not built for each other.
        ConfigError: an environment variable has a wrong value.
    """
    _load()


def announce() -> None:
    """Tell a llama_cpp imported later where our library is, and how its threads wait. `load` reports problems."""
    if "llama_cpp" not in sys.modules:
        with contextlib.suppress(LibraryError):
            _point_llama_cpp_at(library_folder())
            _shorten_spins()


@functools.cache
def _load() -> None:
    env.check()
    # CUDA holds 1,024 kernels that wait, which is less than a prompt's step has: of two GPUs the second would get its
    # part of the step when the first is nearly done, and the first none of the next step meanwhile.
    os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
    _shorten_spins()
    libllama = libllama_path()
    folder = libllama.parent
    if "llama_cpp" in sys.modules:
        _import_llama_cpp(libllama)  # another thread may be importing it still
    _refuse_foreign_library(libllama)
    # Always in this order: a libstdc++ that numpy brings is there before ours, as when the build was tried.
    import numpy  # noqa: F401

    files = [path for path in folder.iterdir() if path.suffix == _SUFFIX]
    for path in trial.to_open(files):
        _open(path)
    _open(folder / f"{_PREFIX}kvf_chat{_SUFFIX}")
    open_device_backends(files)
    _point_llama_cpp_at(folder)
    llama_cpp = _import_llama_cpp(libllama)
    log = logging.getLogger("llama-cpp-python")
    if log.level == logging.NOTSET:  # until a Llama says `verbose` all is printed, and CUDA tells its devices
        log.setLevel(logging.ERROR)
    try:
        trial.load_backends(ctypes.CDLL(str(libllama)), files)
    except OSError as error:
        raise LibraryError(f"{error}. Build it again: {_reinstall()}") from error
    extension = _import(_EXTENSION, libllama)
    _refuse_mismatch(llama_cpp, extension.lib, libllama)


def open_device_backends(files: Iterable[Path]) -> None:
    """Open what ggml loads of a portable build besides the CPU, so that it finds a CUDA runtime installed by pip.

    One that cannot be opened is left out: a wheel with CUDA computes on the CPU where there is no driver.
    """
    for path in trial.device_backends(files):
        try:
            _open(path)
        except LibraryError as error:
            logger.log(logging.WARNING if machine_has_gpu() else logging.DEBUG, "%s", error)


def _shorten_spins() -> None:
    """Have libgomp, which reads its variables when it is loaded, spin for `SPINS` rounds, unless the user decided.

    A libgomp that the process has loaded before waits as it did.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def library_folder() -> Path:
    """Return the folder libllama is loaded from: ``KVFLASH_LIB_PATH`` if set, else the package's own."""
    override = env.lib_path()
    folder = override.expanduser().resolve() if override else _package_root() / "lib"
    if not (folder / f"{_PREFIX}llama{_SUFFIX}").is_file():
        tried = f"KVFLASH_LIB_PATH={override}" if override else str(folder)
        raise LibraryError(
            f"the kvflash_ggml library is missing: no {_PREFIX}llama{_SUFFIX} in {tried}. "
            + (
                "Point KVFLASH_LIB_PATH at the folder of a kvflash_ggml build, or unset it."
                if override
                else f"Build it again: {_reinstall()}"
            )
        )
    return folder


def libllama_path() -> Path:
    """Return the path of libllama in `library_folder`."""
    return library_folder() / f"{_PREFIX}llama{_SUFFIX}"


def build_info() -> dict[str, Any]:
    """Return what the installed build is made of: versions, patches, flags, backends, and flavour.

    The flavour is "native" for CPUs like that of the build, "portable" for all, and "fixed" for CPUs with the
    instructions that its flags name.

    Once the library is loaded also `cpu_library`: the file that the CPU backend came from, of a portable build the
    variant that fits this CPU.

    Raises:
        LibraryError: the package was not built (an unbuilt source checkout, for example).
    """
    path = _package_root() / "_build_info.json"
    if not path.is_file():
        from kvflash_ggml import pip_line

        raise LibraryError(f"kvflash_ggml is not built: {path} is missing. Build it: {pip_line.install()}")
    info: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if _load.cache_info().currsize:
        info["cpu_library"] = cpu_library()
    return info


def cpu_library() -> str:
    """Return the name of the file that the CPU backend of the loaded library came from."""
    load()
    extension = importlib.import_module(_EXTENSION)
    return Path(extension.ffi.string(extension.lib.kvf_cpu_library()).decode()).name


def supports_gpu_offload() -> bool:
    """Tell whether the loaded library has a GPU backend with a device to use."""
    return bool(gpu_devices())


def gpu_devices() -> list[str]:
    """Return the GPUs of this machine that the loaded library can use, by ggml's names; none of servers."""
    load()
    ggml = ctypes.CDLL(None)
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for name, result in (("get", ctypes.c_void_p), ("type", ctypes.c_int), ("name", ctypes.c_char_p)):
        function = getattr(ggml, f"ggml_backend_dev_{name}")
        function.restype = result
    devices = [ctypes.c_void_p(ggml.ggml_backend_dev_get(i)) for i in range(ggml.ggml_backend_dev_count())]
    return [
        ggml.ggml_backend_dev_name(dev).decode() for dev in devices if ggml.ggml_backend_dev_type(dev) in _GPU_TYPES
    ]


def machine_has_gpu() -> bool:
    """Report whether the system shows a GPU: a device of NVIDIA, or WSL's. To a build with Vulkan any other too."""
    dev = Path("/dev")
    if (dev / "dxg").exists() or any(dev.glob("nvidia[0-9]*")):
        return True
    if "vulkan" not in build_info()["backends"]:
        return False
    from kvflash_ggml.native import vulkan  # here, as below: few builds have it

    return bool(vulkan.render_nodes())


def ensure_gpu_offload(n_gpu_layers: int, *, installed: bool = False) -> None:
    """Refuse to leave a GPU of this machine idle that the caller asked for; warn where there is none.

    installed: the caller asked llama_cpp.Llama, which runs on the CPU without an error, so this warns too.

    Raises:
        LibraryError: the machine has a GPU that this build cannot use, and ``KVFLASH_ALLOW_CPU`` is not 1.
    """
    if n_gpu_layers == 0 or supports_gpu_offload():
        return
    if not machine_has_gpu():
        warn_once(f"n_gpu_layers={n_gpu_layers}: no GPU was found, so the CPU computes every layer.")
        return
    backends = build_info()["backends"]
    gpu = [b for b in backends if b not in HOST_BACKENDS]
    if "vulkan" in gpu:
        from kvflash_ggml.native import vulkan

        why, cure = f"it has {', '.join(gpu)} but found no device", f"Why: {vulkan.why_none()}"
    elif gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        why = f"it has {', '.join(gpu)} but found no device (CUDA_VISIBLE_DEVICES: {visible})"
        cure = "Check the driver with nvidia-smi"
    else:
        why = f"it was built without a GPU backend (it has: {', '.join(backends)})"
        cure = f"Rebuild it with {_reinstall(CUDA_FLAGS)}"
    text = f"n_gpu_layers={n_gpu_layers}, but {library_folder()} cannot use the GPU of this machine: {why}."
    if installed or env.allow_cpu():
        warn_once(f"{text} The CPU computes every layer. {cure}.")
        return
    raise LibraryError(f"{text} {cure}, or run on the CPU on purpose: n_gpu_layers=0 or KVFLASH_ALLOW_CPU=1.")


def _reinstall(variables: str = "") -> str:
    """Return the command that builds this package again. See `pip_line.reinstall`."""
    from kvflash_ggml import pip_line  # here: an error needs it, and every program would pay for it

    return pip_line.reinstall(variables)


def _package_root() -> Path:
    """Return the folder of ``lib/``: that of the compiled module, which an editable install keeps elsewhere."""
    spec = importlib.util.find_spec(_EXTENSION)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).resolve().parent.parent
    return Path(__file__).resolve().parent.parent


def _refuse_other_version(found: str | None) -> None:
    pin = build_info()["llama_cpp_python"]
    if found != pin:
        have = f"llama-cpp-python {found} is installed" if found else "llama-cpp-python is not installed"
        raise LibraryError(
            f"{have}, but this build of kvflash_ggml needs exactly {pin}. Install it with:\n"
            f'  CMAKE_ARGS="-DLLAMA_BUILD=OFF" pip install --no-cache-dir llama-cpp-python=={pin}'
        )


def _refuse_foreign_library(libllama: Path) -> None:
    module = sys.modules.get("llama_cpp.llama_cpp")
    if module is None:
        return
    loaded = Path(module._lib._name)
    if not (loaded.exists() and loaded.samefile(libllama)):
        raise LibraryError(
            f"llama_cpp is already loaded from {loaded}, but kvflash_ggml needs {libllama}. "
            "Import kvflash_ggml before llama_cpp (one process can hold only one libllama)."
        )


def _open(path: Path) -> None:
    """Load one library; a CUDA runtime installed by pip is found without any loader path."""
    for _ in range(8):  # each turn supplies one missing dependency
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            missing = _MISSING_OBJECT.search(str(error))
            if missing is None or not _open_from_wheels(missing.group(1)):
                raise LibraryError(_explain(path, error)) from error
        else:
            return
    raise LibraryError(f"{path} could not be loaded: its dependencies never settled")


def _open_from_wheels(name: str) -> bool:
    for packages in [*site.getsitepackages(), site.getusersitepackages()]:
        for found in Path(packages).glob(f"nvidia/**/lib/{name}"):
            try:
                ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                nested = _MISSING_OBJECT.search(str(error))
                if nested is None or nested.group(1) == name or not _open_from_wheels(nested.group(1)):
                    continue
                ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
            return True
    return False


def _explain(path: Path, error: OSError) -> str:
    text = f"{path} could not be loaded: {error}."
    missing = _MISSING_OBJECT.search(str(error))
    name = missing.group(1) if missing else ""
    if name.startswith("libcuda.so"):
        return f"{text} {name} comes with the NVIDIA driver, and there is none here: install it, or use a CPU build."
    if name.startswith("libvulkan.so"):
        from kvflash_ggml.native import vulkan

        return f"{text} {vulkan.LOADER}."
    if name.startswith(("libcudart", "libcublas")):
        return (
            f"{text} {name} belongs to the CUDA toolkit (the driver alone is not enough): install "
            "it or NVIDIA's runtime and cuBLAS wheels, or add its folder to LD_LIBRARY_PATH."
        )
    return f"{text} Build it again for this machine: {_reinstall()}"


def _point_llama_cpp_at(folder: Path) -> None:
    for name in ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"):  # libllama, and libmtmd of the vision chat handlers
        theirs = os.environ.get(name)
        if theirs and Path(theirs).expanduser().resolve() != folder:
            logger.warning("%s=%s is replaced by %s for this process", name, theirs, folder)
        os.environ[name] = str(folder)


def _import_llama_cpp(libllama: Path) -> ModuleType:
    """Import llama_cpp, which our library is loaded for. Another version may fail to import for that alone."""
    try:
        module = _import("llama_cpp", libllama)
        found = module.__version__  # what an uninstall left in its folder imports too, and has none
    except (LibraryError, AttributeError):
        import importlib.metadata  # only here: it brings the email package, which takes 15 ms

        try:
            found = importlib.metadata.version("llama_cpp_python")
        except importlib.metadata.PackageNotFoundError:
            found = None
        _refuse_other_version(found)
        raise
    _refuse_other_version(found)
    return module


def _import(name: str, libllama: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        if isinstance(error, LibraryError):
            raise
        raise LibraryError(f"{name} cannot be used with {libllama}: {error}. Build it again: {_reinstall()}") from error


def _refuse_mismatch(llama_cpp: ModuleType, lib: Any, libllama: Path) -> None:
    """Compare struct sizes, because llama_cpp passes these structs by value."""
    chat = libllama.with_name(f"{_PREFIX}kvf_chat{_SUFFIX}")
    for path, has, needs in ((libllama, lib.kvf_abi(), lib.KVF_ABI), (chat, lib.kvf_chat_abi(), lib.KVF_CHAT_ABI)):
        if has != needs:
            raise LibraryError(
                f"{path} has native interface {has}, this package needs {needs}. "
                f"Unset KVFLASH_LIB_PATH, or build again: {_reinstall()}"
            )
    for which, name in enumerate(_STRUCTS):
        ours, theirs = int(lib.kvf_sizeof(which)), ctypes.sizeof(getattr(llama_cpp, name))
        if ours != theirs:
            raise LibraryError(
                f"{name} has {ours} bytes in {libllama} but {theirs} in llama_cpp "
                f"{llama_cpp.__version__}: they are not of one release. Build again: {_reinstall()}"
            )
