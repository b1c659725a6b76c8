"""`kvflash-run doctor [MODEL]`: reports what is installed and whether it works. One function a line of the report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click

from .. import env, pip_line
from ..calibration.known import heads_file, read
from ..errors import ConfigError, KVFlashError, LibraryError, mebibytes
from ..native import library, trial, vulkan
from ..snapshot.fingerprint import ModelFile
from .child import PROBE, Child, rebuild, run_child, told
from .report import computes_on, package_version, placement_lines, say
from .sections import HELP, MODEL_FILE
from .terminal import size_text

Status = Literal["ok", "warning", "error"]

_ENVIRONMENT = ("KVFLASH_", "GGML_", "LLAMA_", "CUDA_VISIBLE_DEVICES", "VK_", "LD_LIBRARY_PATH")
_OURS = "LLAMA_CPP_LIB_PATH"  # the package sets it for itself, which is no news
_SECRET = re.compile(r"(KEY|SECRET|PASSWORD|HF_TOKEN)$")
_POOL = 4096
"""Tokens of the pool that a model is described with."""

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("ERROR", "red")}
_WIDTH = 18

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_TEST_MODEL = Path(__file__).parents[2] / "tests/models/recall-qwen3-q8_0.gguf"
_ON_OURS = (
    ", on the library of kvflash_ggml; it has none of its own\n"
    "after pip uninstall kvflash-ggml: pip install --force-reinstall --no-cache-dir llama-cpp-python=="
)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. remedy: what to do; "" for nothing. data: what the JSON document has besides."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@click.command(context_settings=HELP)
@click.argument("model", type=MODEL_FILE, required=False)
@click.option("--measure", is_flag=True, help="Also take a whole step: what does a driver take beyond what is counted?")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="How long the decode may take.",
)
@click.pass_context
def doctor(ctx: click.Context, *, model: str | None, measure: bool, as_json: bool, timeout: float) -> None:
    """Say what is installed and whether it works.

    Versions, library, devices, environment, and a tiny decode with MODEL (or the test model of a
    checkout, or one that is made for it) in a child process; and what of MODEL would go where.
    The exit code is 1 if something is wrong.
    """
    checks = examine(model, timeout=timeout)
    if measure:
        checks.append(a_step(model, timeout=timeout))
    healthy = all(check.status != "error" for check in checks)
    lines = [line for check in checks for line in _lines(check)]
    closing = "everything works" if healthy else "something is wrong: see ERROR above"
    say([*lines, "", closing], _document(checks, healthy), as_json=as_json, indent=2)
    ctx.exit(0 if healthy else 1)


def _lines(check: Check) -> Iterator[str]:
    """Yield one line of the report for people, and what goes below it."""
    mark, colour = _MARKS[check.status]
    first, *rest = check.detail.split("\n")
    yield f"{check.name:{_WIDTH}} {click.style(f'{mark:8}', fg=colour)}{first}"
    for line in rest:
        yield " " * (_WIDTH + 9) + line
    for line in check.remedy.split("\n") if check.remedy else ():
        yield " " * (_WIDTH + 9) + click.style(f"-> {line}", bold=True)


def _document(checks: list[Check], healthy: bool) -> dict[str, Any]:
    return {
        "ok": healthy,
        "checks": {
            check.name: {
                "status": check.status,
                "detail": check.detail,
                **({"remedy": check.remedy} if check.remedy else {}),
                **check.data,
            }
            for check in checks
        },
    }


def examine(model: str | None, *, timeout: float) -> list[Check]:
    """Run all checks, cheap ones first."""
    asked = model
    if model is None and _TEST_MODEL.is_file():
        model = str(_TEST_MODEL)
    child = run_child(model, timeout=timeout)
    return [
        _package(),
        _bindings(),
        _build(),
        _library(child),
        _devices(child),
        *_environment(),
        _weights(child),
        _decode(child, model),
        *_placement(child, asked),
        *([] if child.failure else _heads(asked)),
    ]


def a_step(model: str | None, *, timeout: float) -> Check:
    """Measure what devices lose to a whole step. It is a warning where that is beyond the margin."""
    child = run_child(model, timeout=timeout, module=PROBE, entry="measure")
    found = child.said.get("step")
    if child.failure or found is None:
        return Check("step", "error", child.failure or "the child said nothing")
    devices = found["devices"]
    if not devices:
        nothing = "no device but the host, whose memory others use too: there is nothing to tell"
        return Check("step", "ok", nothing, data={"step": []})
    over = [device["name"] for device in devices if device["beyond"] > device["margin"]]
    remedy = f"keep more free: -fitt, or a smaller step: -ub ({', '.join(over)})" if over else ""
    detail = "\n".join(_taken(device, found["n_ubatch"]) for device in devices)
    return Check("step", "warning" if over else "ok", detail, remedy, {"step": devices})


def _taken(device: Mapping[str, Any], n_ubatch: int) -> str:
    taken, beyond, margin = (mebibytes(device[name]) for name in ("taken", "beyond", "margin"))
    return (
        f"{device['name']}: {taken} MiB with a step of {n_ubatch:,} tokens, {beyond} of them beyond what is counted; "
        f"the margin is {margin}"
    )


def _failed(child: Child, stage: str) -> bool:
    return bool(child.failure) and child.doing == stage


# --- checks


def _heads(model: str | None) -> list[Check]:
    """Check whether the retrieval heads of a model file are known. No check for a file that cannot be read."""
    if model is None:
        return []
    try:
        path = heads_file(ModelFile(model).identity())
    except (OSError, KVFlashError):
        return []
    try:
        count = len(read(path).chosen)
    except ConfigError:
        detail = "not known yet: all heads are asked until a process has found those that retrieve behind its answers"
        return [Check("heads", "ok", f"{detail}\nkvflash-run calibrate {model} finds them now")]
    detail = f"retrieval heads asked: {count}" if count else "none retrieves, so all are asked"
    return [Check("heads", "ok", detail, data={"heads": count})]


def _package() -> Check:
    where = Path(__file__).parents[1]
    python = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    version = package_version()
    return Check("kvflash-ggml", "ok", f"{version} in {where} ({python})", data={"version": version})


def _bindings() -> Check:
    name = "llama-cpp-python"
    try:
        pin = library.build_info().get("llama_cpp_python")
    except LibraryError:
        pin = None
    try:
        found = importlib.metadata.version("llama_cpp_python")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is not None and pin in (None, found):
        own = _has_own_library()
        detail = found if own else f"{found}{_ON_OURS}{found}"
        return Check(name, "ok", detail, data={"version": found, "own_library": own})
    wanted = f"llama-cpp-python=={pin}" if pin else "llama-cpp-python"
    detail = f"{found or 'not installed'}; this build needs exactly {pin or '?'}"
    remedy = f'CMAKE_ARGS="-DLLAMA_BUILD=OFF" pip install --no-cache-dir {wanted}'
    return Check(name, "error", detail, remedy, {"version": found})


def _has_own_library() -> bool:
    """Tell whether llama-cpp-python was built with a libllama of its own."""
    spec = importlib.util.find_spec("llama_cpp")
    return spec is not None and spec.origin is not None and Path(spec.origin).with_name("lib").is_dir()


def _build() -> Check:
    try:
        info = library.build_info()
    except LibraryError as error:
        return Check("build", "error", str(error), pip_line.install())
    patches = info.get("patches", [])
    lines = [
        f"llama.cpp {info.get('llama_cpp_commit')}, ggml {info.get('ggml')}, {computes_on(info)}, {_flavour(info)}",
        f"sdist sha256 {info.get('sdist_sha256')}",
        f"{len(patches)} patches, hash {info.get('patches_hash')}",
    ]
    defines = info.get("cmake_defines", {})
    if defines:
        lines.append(" ".join(f"{key}={value}" for key, value in defines.items()))
    return Check("build", "ok", "\n".join(lines), data={"build": info})


def _library(child: Child) -> Check:
    if child.doing in ("start", "library") and child.failure:
        remedy = rebuild(child) if env.lib_path() is None else "unset KVFLASH_LIB_PATH"
        return Check("library", "error", told(child), remedy=remedy)
    path, cpu = child.said["library"], child.said["cpu"]
    return Check("library", "ok", f"{path}\n{cpu}: {child.said['system']}", data={"path": path, "cpu": cpu})


_BESIDE, _BETWEEN = "pages move beside the compute, as on CUDA", "pages move by plain copies, between two steps"
_UNMEASURED = {
    "ROCm": _BESIDE, "MUSA": _BESIDE, "Vulkan": _BETWEEN, "MTL": _BETWEEN, "Metal": _BETWEEN, "SYCL": _BETWEEN,
    "CANN": _BETWEEN, "OpenCL": _BETWEEN,
}  # fmt: skip
"""By the beginnings of devices' names: how it would work there. Nobody has seen it, or measured how fast it is."""


def _unmeasured(names: Iterable[str]) -> list[str]:
    """Say what is known of devices on which this was never run."""
    kinds = {kind for name in names for kind in _UNMEASURED if name.startswith(kind)}
    return [
        f"{kind}: never measured. A pool should work, and {_UNMEASURED[kind]}; try one with -v, and compare its answers"
        " with --kvflash off"
        for kind in sorted(kinds)
    ]


def _devices(child: Child) -> Check:
    if _failed(child, "devices"):
        return Check("devices", "error", child.failure, remedy="nvidia-smi")
    found = child.said.get("devices")
    if found is None:
        return Check("devices", "warning", "not looked at")
    lines = [
        f"{d['name']}: {d['description']}, {d['free'] / 2**30:.1f} of {d['total'] / 2**30:.1f} GiB free" for d in found
    ]
    unmeasured = _unmeasured(d["name"] for d in found)
    lines += unmeasured
    status: Status = "warning" if unmeasured else "ok"
    remedy = ""
    if "vulkan" in _info().get("backends", ()):
        lines.append(f"Vulkan drivers: {', '.join(vulkan.drivers()) or 'none'}")
    if "vulkan" in _info().get("backends", ()) and not child.said["gpu"]:
        status, remedy = "warning", vulkan.why_none()
    elif not child.said["gpu"] and _NVIDIA_DRIVER.exists():
        status = "warning"
        lines.append(f"no GPU is used, though there is a driver: {_driver()}")
        remedy = pip_line.reinstall(library.CUDA_FLAGS) if computes_on(_info()) == "CPU" else "nvidia-smi"
    elif child.said["gpu"] and _NVIDIA_DRIVER.exists():
        lines.append(_driver())
    return Check("devices", status, "\n".join(lines), remedy, {"devices": found, "gpu": child.said["gpu"]})


def _environment() -> list[Check]:
    found = {
        name: "(set)" if _SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_ENVIRONMENT) and not (name == _OURS and value == _folder())
    }
    wheels = sorted(
        f"{name} {d.version}"
        for d in importlib.metadata.distributions()
        if (name := (d.metadata["Name"] or "").lower()).startswith("nvidia-")
    )
    detail = "\n".join(f"{k}={v}" for k, v in found.items()) or "nothing set"
    checks = [Check("environment", "ok", detail, data={"variables": found})]
    if wheels:
        checks.append(Check("CUDA wheels", "ok", "\n".join(wheels), data={"wheels": wheels}))
    return checks


def _weights(child: Child) -> Check:
    """Check that products of weights packed for this CPU are those of plain ones."""
    name = "packed weights"
    if _failed(child, "weights"):
        buffer = child.said.get("buffer")
        why, remedy = trial.explain_weights(buffer) if buffer else ("", "")
        return Check(name, "error", f"{why}: {child.failure}".removeprefix(": "), remedy=remedy)
    found = child.said.get("weights")
    if found is None:
        return Check(name, "warning", "not looked at")
    lines = [f"{buffer}: {types} types, as exact as plain ones" for buffer, types in found.items()]
    return Check(name, "ok", "\n".join(lines) or "none here", data={"buffers": found})


def _decode(child: Child, model: str | None) -> Check:
    name = model or "a tiny model of random weights"
    if _failed(child, "decode"):
        remedy = _decode_remedy(child, model or "MODEL.gguf")
        return Check("decode", "error", f"{name}: {told(child)}", remedy=remedy)
    result = child.said.get("decode")
    if result is None:
        return Check("decode", "error", "not tried: see above")
    lines = [name, *_about(child), f"{result['prompt']} + {len(result['tokens'])} tokens, {result['seconds']} s"]
    status: Status = "ok"
    remedy = ""
    if result["refused"]:
        status = "warning"
        lines.append(f"works without a pool only: {result['refused']}")
    elif result["paged"] and not (result["page_outs"] and result["page_ins"]):
        status = "error"
        remedy = f"kvflash-run {model or 'MODEL.gguf'} --kvflash off    (paging does not work here)"
    if result["paged"]:
        lines.append(f"pages: {result['page_outs']} out, {result['page_ins']} in")
    data = {"about": child.said.get("about"), "decode": result}
    return Check("decode", status, "\n".join(lines), remedy, data)


def _about(child: Child) -> list[str]:
    """Say what the child has found out, for people; nothing if it came to nothing."""
    about = child.said.get("about")
    if about is None:
        return []
    length, size = about["n_ctx_train"], about["token_bytes"]
    template = "a chat template" if about["chat_template"] else "no chat template, so no chat"
    found = [f"{about['architecture']}, trained for {length:,} tokens, {template}"]
    if about["refused"] is None:
        pool = min(_POOL, length)
        found.append(
            f"can be pooled: a full f16 cache takes {size_text(length * size)}, a pool of {pool:,} tokens "
            f"{size_text(pool * size)} and up to {size_text(length * size)} on the host"
        )
    return found


def _placement(child: Child, model: str | None) -> list[Check]:
    """Check what would go where, of a model that was asked for."""
    if model is None or child.doing != "placement":
        return []
    if child.failure:
        return [Check("placement", "error", told(child), remedy=f"kvflash-run {model} --dry-run")]
    found = child.said["placement"]
    status: Status = "ok" if found["fits"] else "warning"
    return [Check("placement", status, "\n".join(placement_lines(model, found)), data=found)]


def _decode_remedy(child: Child, model: str) -> str:
    if child.said.get("gpu"):
        return f"kvflash-run {model} -v -ngl 0 -n 4 -p Hello    (does it work on the CPU?)"
    return rebuild(child) if child.crashed else f"kvflash-run {model} -v -n 4 -p Hello    (says more)"


def _flavour(info: dict[str, Any]) -> str:
    if info.get("flavour") == "portable":
        return f"for any CPU: {', '.join(info['cpu_variants'])}"
    return "for CPUs like that of the build" if info.get("flavour") == "native" else "for CPUs with what its flags say"


def _info() -> dict[str, Any]:
    try:
        return library.build_info()
    except LibraryError:
        return {}


def _folder() -> str:
    try:
        return str(library.library_folder())
    except LibraryError:
        return ""


def _driver() -> str:
    try:
        return _NVIDIA_DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "version unknown"
