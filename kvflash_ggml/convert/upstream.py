"""Runs llama.cpp's own converter from the pinned source. A child process does, because the converter needs torch."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from .. import env, pip_line
from ..errors import ConversionError, LibraryError, brief
from ..gguf import reader, verify
from ..gguf.reader import GGUF
from ..native import library
from . import checkpoint, safetensors, writer

TYPES = ("auto", "f32", "f16", "bf16", "q8_0")
"""Types that a whole model can be written as. auto is the 16-bit type that loses least."""

NEEDED = ("torch", "transformers", "sentencepiece", "google.protobuf")
"""Modules that the converter imports for one model or another."""

_SCRIPT = "convert_hf_to_gguf.py"
_PARTS = (_SCRIPT, "conversion", "gguf-py")
_LLAMA = "llama.cpp"
_PIN = Path(__file__).parents[2] / "vendor/pin.toml"  # in a checkout that is not built
_TAIL = 12


def convert_model(folder: Path, out: Path, *, kind: str, arguments: Sequence[str] = (), shown: bool = False) -> None:
    """Write the Hugging Face model in `folder` to `out`, as a whole or not at all.

    kind: one of TYPES. arguments: more arguments for llama.cpp's converter. shown: True sends the converter's output to
    stderr; False shows only the end of it, if it fails. Raises LibraryError for a missing package or source,
    ConversionError if the folder is no checkpoint or the converter fails.
    """
    writer.check_output(out, folder)
    _check_folder(folder, "the folder of a Hugging Face checkpoint", "Give the folder that was fetched.")
    _refuse_without_packages()
    with converter() as script, tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as parts:
        # whole paths, so that no name is taken for an option
        made = (Path(parts) / out.name).resolve()
        given = [str(folder.resolve()), "--outfile", str(made), "--outtype", kind, *arguments]
        _run([sys.executable, str(script), *given], folder.name, shown=shown)
        files = sorted(Path(parts).iterdir())  # of some kinds the name gets a prefix
        if len(files) != 1:
            raise ConversionError(
                folder.name, "what llama.cpp's converter wrote", found=f"{len(files)} files", wanted="one",
                remedy="Leave out arguments that split it.",
            )  # fmt: skip
        reader.read(files[0], called=out.name)
        _publish(files[0], out)


def convert_draft(
    folder: Path, out: Path, *, model: Path, target_folder: Path, kind: str, rope_differs: bool, shown: bool = False
) -> str:
    """Write a drafter of any kind that llama.cpp converts to `out`. Return a description for the user.

    model: the target's GGUF file. target_folder: the target's Hugging Face folder, which llama.cpp's converter reads.
    kind, shown: as for `convert_model`. Raises ConversionError if a check before or after the conversion fails.
    """
    writer.check_output(out, model, folder, target_folder)
    _check_folder(folder, "the checkpoint's own", "Fetch the whole checkpoint.")
    _check_folder(target_folder, "the target's Hugging Face folder", "Its config.json and its tokenizer are enough.")
    checkpoint.check_others(folder)
    if not _pickled(folder):
        safetensors.read_folder(folder)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as parts:
        made = Path(parts) / out.name
        convert_model(
            folder, made, kind=kind, arguments=["--target-model-dir", str(target_folder.resolve())], shown=shown
        )
        bound = made.with_name(f"bound-{out.name}")
        words = writer.bind(made, bound, model=model, rope_differs=rope_differs, called=out.name)
        words += _layers(folder, reader.read(bound, called=out.name))
        _publish(bound, out)
    return words


def _pickled(folder: Path) -> bool:
    """Report whether the folder has torch's own files only, which llama.cpp's converter reads."""
    return not any(folder.glob("*.safetensors*")) and any(folder.glob("*.bin"))


def _layers(folder: Path, made: GGUF) -> str:
    """Return a note if llama.cpp's converter took EAGLE3's usual target layers; "" otherwise.

    ConversionError if the configuration names others, where that converter does not look.
    """
    wanted, found = checkpoint.eagle3_layers(folder), made.own("target_layers")
    if made.architecture != verify.EAGLE3 or found == wanted:
        return ""
    if wanted is None:
        return "; config.json names no target layers: these are EAGLE3's usual ones"
    raise ConversionError(
        made.name, "target layers", found=found, wanted=f"{brief(wanted)}, which config.json names",
        remedy="Move eagle_aux_hidden_state_layer_ids to the top level of config.json.",
    )  # fmt: skip


def _check_folder(folder: Path, wanted: str, remedy: str) -> None:
    if not (folder / "config.json").is_file():
        raise ConversionError(str(folder), "config.json", found="not there", wanted=wanted, remedy=remedy)


def _refuse_without_packages() -> None:
    missing = [name for name in NEEDED if not _installed(name)]
    if missing:
        raise LibraryError(
            f"llama.cpp's converter needs {', '.join(missing)}, and {sys.prefix} does not have it: "
            f"{pip_line.install('convert')}"
        )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def _run(command: list[str], name: str, *, shown: bool) -> None:
    settings = {key: value for key, value in os.environ.items() if key != "NO_LOCAL_GGUF"}
    settings["PYTHONDONTWRITEBYTECODE"] = "1"  # the source lies in a cache that is as it was unpacked
    with tempfile.TemporaryFile() as said:
        place = None if shown else said
        done = subprocess.run(command, env=settings, stdin=subprocess.DEVNULL, stdout=place, stderr=place, check=False)
        if done.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").rstrip().splitlines()
            raise ConversionError(
                name, "the exit code of llama.cpp's converter", found=done.returncode, wanted="0",
                remedy="It says why above." if shown else "\n".join(["It said:", *lines[-_TAIL:]]),
            )  # fmt: skip


def _publish(made: Path, out: Path) -> None:
    with made.open("rb") as file:
        os.fsync(file.fileno())
    made.replace(out)


# --- the source


class Pin(NamedTuple):
    """The sdist that the package is built from."""

    version: str
    sha256: str


@contextlib.contextmanager
def converter() -> Iterator[Path]:
    """Yield the converter's script: from KVFLASH_LLAMA_SOURCE, the build's cache, or the pinned sdist."""
    if (given := env.llama_source()) is not None:
        yield _script(given.expanduser())
        return
    pin = pinned()
    tree = env.cache_dir() / "src" / pin.sha256[:12]
    if (tree / ".complete").is_file() and (tree / _LLAMA / _SCRIPT).is_file():
        yield _script(tree / _LLAMA)
        return
    sdist = _sdist(pin)
    with tempfile.TemporaryDirectory() as name:
        _unpack(sdist, Path(name))
        yield _script(Path(name))


def pinned() -> Pin:
    """Return the pin of the built library, or else of the checkout. LibraryError if there is neither."""
    try:
        info = library.build_info()
        return Pin(str(info["llama_cpp_python"]), str(info["sdist_sha256"]))
    except LibraryError:
        text = _PIN.read_text(encoding="utf-8") if _PIN.is_file() else ""
        found = [re.search(rf'^{key} = "(.+)"', text, re.MULTILINE) for key in ("version", "sha256")]
        if not all(found):
            raise
        return Pin(*(match[1] for match in found if match))


def _script(tree: Path) -> Path:
    if not (tree / _SCRIPT).is_file():
        raise LibraryError(f"{tree} is no llama.cpp source: it has no {_SCRIPT}")
    return tree / _SCRIPT


def _sdist(pin: Pin) -> Path:
    given = env.sdist()
    path = given.expanduser() if given else env.cache_dir() / "sdist" / f"llama_cpp_python-{pin.version}.tar.gz"
    if path.is_file() and _hash(path) == pin.sha256:
        return path
    raise LibraryError(
        f"llama.cpp's converter is in the source of llama-cpp-python {pin.version}, and {path} is not it: fetch it "
        f"with 'pip download --no-deps --no-binary llama-cpp-python llama-cpp-python=={pin.version}', and set "
        "KVFLASH_SDIST to the file"
    )


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def _unpack(sdist: Path, folder: Path) -> None:
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            inner = PurePosixPath(member.name).parts[3:]  # llama_cpp_python-VERSION/vendor/llama.cpp/...
            if not member.isfile() or not inner or inner[0] not in _PARTS or ".." in inner:
                continue
            content = archive.extractfile(member)
            assert content is not None
            place = folder.joinpath(*inner)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content.read())
