"""Does a build compute on this machine? A model of 70 KiB is decoded with it in a child process, on the CPU alone.

Before that, weights packed for its kernels are multiplied. A portable build has a CPU backend for each kind of CPU, and
ggml loads one of them when it runs: here is also told which libraries that leaves to be opened.

Standard library only and nothing of the package: the build runs this file by itself, before there is a package.
`python trial.py LIBRARY...` exits with 0 if it computes or could not be tried, with 1 otherwise; stdout says which.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import os
import random
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

SECONDS = 120
_CHILD = "--child"
_LOG_ERROR = 4
_TOKENS = 40  # more than one tile of rows, so that the kernels for matrices run

_FEATURES = {
    "sse3": "pni", "ssse3": "ssse3", "avx": "avx", "avx_vnni": "avx_vnni", "avx2": "avx2", "f16c": "f16c", "fma": "fma",
    "bmi2": "bmi2", "avx512": "avx512f", "avx512_vbmi": "avx512vbmi", "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16", "amx_int8": "amx_int8",
}  # fmt: skip
"""What libggml-cpu can be compiled for on x86, and what /proc/cpuinfo calls it."""

_LINKED = {"ggml-base": 0, "ggml": 2, "llama": 3}
"""The libraries that are no backends, and their place in the order in which they are opened; backends are at 1."""


# --- what a crash means


def built_for(llama: ctypes.CDLL) -> list[str]:
    """Return the CPU features that libllama's ggml was compiled for and that /proc/cpuinfo can confirm."""
    found = []
    for name in _FEATURES:
        with contextlib.suppress(AttributeError):  # no CPU backend yet: it is loaded later, as it fits the CPU
            if getattr(llama, f"ggml_cpu_has_{name}")():
                found.append(name)
    return found


def cpu() -> dict[str, str]:
    """Read what /proc/cpuinfo says of the first processor, by its names; empty where there is no such file."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:  # only its beginning: it has a paragraph a core
            paragraph = itertools.takewhile(str.strip, file)
            return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in paragraph)}
    except OSError:
        return {}


def missing(features: Iterable[str]) -> list[str]:
    """Return the features that this CPU does not have, in capitals; none where that cannot be known."""
    flags = cpu().get("flags")
    return [] if flags is None else [name.upper() for name in features if _FEATURES[name] not in flags.split()]


def explain(features: Sequence[str]) -> tuple[str, str]:
    """Say why a build for these features may crash here (or nothing), and the variables to build it again with."""
    portable = 'CMAKE_ARGS="$CMAKE_ARGS -DGGML_NATIVE=OFF"'
    if lacking := missing(features):
        return f"it was built for {', '.join(lacking)}, which this CPU does not have", portable
    if "amx_int8" in features:
        return "it uses AMX, which some compilers get wrong", 'CFLAGS="-mno-amx-int8" CXXFLAGS="-mno-amx-int8"'
    return "", portable


def explain_weights(buffer: str) -> tuple[str, str]:
    """Say what has failed if products with weights in an extra buffer type of the CPU have, and what to do about it."""
    amx = "-mno-amx-tile -mno-amx-int8"
    build = f'build it again with CFLAGS="{amx}" CXXFLAGS="{amx}", or ' if buffer == "AMX" else ""
    remedy = f"{build}keep weights as the file has them: --no-repack, or use_extra_bufts=False of Llama"
    return f"weights packed for this CPU, buffer type {buffer}", f"{remedy[0].upper()}{remedy[1:]}"


def signal_name(status: int) -> str:
    """Name the signal behind a child's negative exit status."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


# --- the model


def tiny_model() -> bytes:
    """Make a GGUF file: one layer of random Q8_0 weights, a vocabulary of bytes. Shapes fit every kernel, AMX too."""
    width, hidden, vocabulary = 64, 128, 288
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [f"<{n}>" for n in range(vocabulary - len(pieces))]
    kinds = [2, 3, 3, *[6] * 256]  # unknown, control, byte
    kinds += [1] * (vocabulary - len(kinds))
    fields = [
        _field("general.architecture", 8, _text("llama")),
        _field("llama.context_length", 4, struct.pack("<I", 1024)),
        _field("llama.embedding_length", 4, struct.pack("<I", width)),
        _field("llama.feed_forward_length", 4, struct.pack("<I", hidden)),
        _field("llama.block_count", 4, struct.pack("<I", 1)),
        _field("llama.attention.head_count", 4, struct.pack("<I", 1)),
        _field("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        _field("tokenizer.ggml.model", 8, _text("llama")),
        _field("tokenizer.ggml.tokens", 9, _array(8, [_text(piece) for piece in pieces])),
        _field("tokenizer.ggml.scores", 9, _array(6, [struct.pack("<f", 0)] * vocabulary)),
        _field("tokenizer.ggml.token_type", 9, _array(5, [struct.pack("<i", kind) for kind in kinds])),
    ]
    shapes = {
        "token_embd": (width, vocabulary), "output_norm": (width,), "blk.0.attn_norm": (width,),
        "blk.0.attn_q": (width, width), "blk.0.attn_k": (width, width), "blk.0.attn_v": (width, width),
        "blk.0.attn_output": (width, width), "blk.0.ffn_norm": (width,), "blk.0.ffn_gate": (width, hidden),
        "blk.0.ffn_up": (width, hidden), "blk.0.ffn_down": (hidden, width),
    }  # fmt: skip
    source, infos, data = random.Random(0), b"", b""
    for name, shape in shapes.items():
        infos += _text(f"{name}.weight") + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos += struct.pack("<IQ", 8 if len(shape) == 2 else 0, len(data))
        if len(shape) == 2:  # Q8_0: blocks of 32, a half-precision scale before each
            blocks = math.prod(shape) // 32
            data += b"".join(struct.pack("<e", 1 / 1024) + source.randbytes(32) for _ in range(blocks))
        else:
            data += struct.pack(f"<{shape[0]}f", *[1.0] * shape[0])
        data += bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(fields)) + b"".join(fields) + infos
    return head + bytes(-len(head) % 32) + data


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _field(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _array(kind: int, values: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


# --- the child


def load_order(files: Iterable[Path]) -> list[Path]:
    """Sort the libraries among the files, each after those that it needs, so that no loader path has to be set."""

    def rank(file: Path) -> int | None:
        name = file.name.removeprefix("lib").partition(".")[0]
        return _LINKED.get(name, 1 if name.startswith("ggml-") else None)

    return sorted((file for file in files if rank(file) is not None), key=lambda file: (rank(file), file.name))


def cpu_variants(files: Iterable[Path]) -> list[Path]:
    """Return the CPU backends of a portable build. ggml loads one of them: together they would overlay each other."""
    return sorted(file for file in files if file.name.removeprefix("lib").startswith("ggml-cpu-"))


def to_open(files: Iterable[Path]) -> list[Path]:
    """Return the libraries of a build in the order to open them. ggml opens the backends of a portable build itself."""
    known = load_order(files)
    if not cpu_variants(known):
        return known
    return [file for file in known if file.name.removeprefix("lib").partition(".")[0] in _LINKED]


def device_backends(files: Iterable[Path]) -> list[Path]:
    """Return the other backends of a portable build, which compute elsewhere than on the CPU; none of another build."""
    known = load_order(files)
    return [file for file in known if file not in cpu_variants(known) and file not in to_open(known)]


_loading = threading.Lock()


def load_backends(ggml: ctypes.CDLL, files: Iterable[Path]) -> None:
    """Have ggml load the backends of a portable build: before llama.cpp would, which looks beside Python's executable.

    It does not happen twice, whichever threads ask: a backend that is loaded again is another one.

    Raises:
        OSError: none was loaded.
    """
    ggml.ggml_backend_reg_count.restype = ctypes.c_size_t
    variants = cpu_variants(files)
    with _loading:
        if not variants or ggml.ggml_backend_reg_count():
            return
        folder = variants[0].parent
        ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
        ggml.ggml_backend_load_all_from_path.restype = None
        log, data = ctypes.c_void_p(), ctypes.c_void_p()
        ggml.ggml_log_get(ctypes.byref(log), ctypes.byref(data))
        ggml.ggml_log_set(_LOG, None)  # which one it was is asked for where it is of interest
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
        ggml.ggml_log_set(log, data)
        if not ggml.ggml_backend_reg_count():
            names = ", ".join(variant.name for variant in variants)
            raise OSError(f"ggml could load none of the CPU backends in {folder} ({names})")


def _child(model: str, libraries: Sequence[str]) -> None:
    # The order in which the package loads: a libstdc++ that numpy brings is there first.
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401
    files = [Path(name) for name in libraries]
    try:
        loaded = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in to_open(files)]
    except OSError as error:
        if "cannot open shared object file" not in str(error):
            raise
        _say(skipped=str(error))  # a driver or a runtime that the machine of the build need not have
        return
    features = built_for(loaded[-1])
    _say(features=features)
    if lacking := missing(features):
        _say(skipped=f"it is for a CPU with {', '.join(lacking)}")
        return
    loaded[-1].llama_log_set(_LOG, None)
    load_backends(loaded[-1], files)
    check_weights(loaded[-1], _say)
    decode(loaded[-1], model)


def check_weights(llama: ctypes.CDLL, say: Callable[..., None]) -> dict[str, int]:
    """Multiply weights in each extra buffer type of the CPU, where they are packed for its kernels, and plain ones.

    say: is told the name of a buffer type before it is used, as `buffer`; None after the last one.
    Returns how many types of weights each of them takes. Raises SystemExit if products differ.
    """
    llama.kvf_selfcheck_name.restype = llama.kvf_last_error.restype = ctypes.c_char_p
    taken: dict[str, int] = {}
    while name := llama.kvf_selfcheck_name(len(taken)):
        say(buffer=name.decode())
        types = ctypes.c_int32()
        if llama.kvf_selfcheck(len(taken), ctypes.byref(types)):
            raise SystemExit(llama.kvf_last_error().decode())
        taken[name.decode()] = types.value
    say(buffer=None)
    return taken


def _errors_only(level: int, text: bytes, _: object) -> None:
    """Write llama.cpp's log, less what would hide the reason of a failure."""
    if level == _LOG_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_errors_only)


def decode(llama: ctypes.CDLL, model: str, *, off: Sequence[int] = ()) -> None:
    """Decode a few tokens with libllama alone, on the CPU. Raises SystemExit with what is wrong with the result.

    off: offsets of flags in llama_model_params to be cleared.
    """
    llama.kvf_sizeof.restype = ctypes.c_int64
    context_params, model_params, batch = (_opaque(llama.kvf_sizeof(which)) for which in range(3))
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("llama_model_default_params", model_params, []),
        ("llama_context_default_params", context_params, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, model_params]),
        ("llama_init_from_model", pointer, [pointer, context_params]),
        ("llama_batch_get_one", batch, [pointer, ctypes.c_int32]),
        ("llama_decode", ctypes.c_int32, [pointer, batch]),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, ctypes.c_int32]),
    ):
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    llama.llama_log_set(_LOG, None)
    llama.llama_backend_init()
    settings = llama.llama_model_default_params()
    no_devices = (ctypes.c_void_p * 1)()
    # The first member is the list of devices to use; an empty one means the CPU.
    ctypes.cast(ctypes.byref(settings), ctypes.POINTER(pointer))[0] = ctypes.addressof(no_devices)
    for offset in off:
        ctypes.c_bool.from_buffer(settings, offset).value = False
    loaded = llama.llama_model_load_from_file(model.encode(), settings)
    if not loaded:
        raise SystemExit("the model could not be loaded")
    context = llama.llama_init_from_model(loaded, llama.llama_context_default_params())
    if not context:
        raise SystemExit("no context could be made")
    tokens = (ctypes.c_int32 * _TOKENS)(*range(3, 3 + _TOKENS))
    if status := llama.llama_decode(context, llama.llama_batch_get_one(tokens, _TOKENS)):
        raise SystemExit(f"llama_decode returned {status}")
    logits = llama.llama_get_logits_ith(context, -1)[:288]
    if not all(map(math.isfinite, logits)) or len(set(logits)) < 2:
        raise SystemExit(f"the logits are {logits[:4]}, ...")


def _opaque(size: int) -> type[ctypes.Structure]:
    """Make the type of a structure of `size` bytes, to be passed by value as it came."""
    return type("Opaque", (ctypes.Structure,), {"_fields_": [("words", ctypes.c_uint64 * (size // 8))]})


def _say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


# --- the parent


def attempt(libraries: Iterable[Path]) -> tuple[bool, str]:
    """Decode with these libraries: is there no reason against the build, and what to say about it."""
    import subprocess  # here: the package imports this file, and only a build is tried
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny.gguf"
        model.write_bytes(tiny_model())
        command = [sys.executable, __file__, _CHILD, str(model), *map(str, load_order(libraries))]
        try:
            done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return False, f"no answer within {SECONDS} s"
    said: dict[str, object] = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith("{"):
            said.update(json.loads(line))
    if done.returncode == 0:
        return True, f"not tried: {said['skipped']}" if "skipped" in said else "a model was decoded"
    tail = "\n".join(done.stderr.decode(errors="replace").rstrip().splitlines()[-5:])
    crash = f"it crashes with {signal_name(done.returncode)}" if done.returncode < 0 else ""
    if isinstance(buffer := said.get("buffer"), str):
        why, remedy = explain_weights(buffer)
        return False, "\n".join(filter(None, [tail, f"{crash or 'it is wrong'}: {why}", remedy]))
    if not crash:
        return False, tail or f"exit code {done.returncode}"
    features = said.get("features", [])
    assert isinstance(features, list)
    why, remedy = explain(features)
    crash += f": {why}" if why else ""
    return False, "\n".join(filter(None, [tail, crash, f"Build it again with {remedy}"]))


if __name__ == "__main__":
    if sys.argv[1] == _CHILD:
        _child(sys.argv[2], sys.argv[3:])
    else:
        fine, text = attempt([Path(name) for name in sys.argv[1:]])
        print(text)
        sys.exit(0 if fine else 1)
