"""The golden files: how they are made, and what they must answer. See tests/golden/README.md."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvflash_ggml.config import SpecConfig

from .harness import MODELS, TESTS, TEXT
from .rounding import GPU_LAYERS

GOLDEN = TESTS / "golden"
ANSWER = "4820917"
FACT = f"The access code for silver harbor is {ANSWER}."
QUESTION = "Question: What is the access code for silver harbor?\nAnswer:"

SETTINGS: dict[str, Any] = {
    "n_ctx": 1024, "n_batch": 256, "n_ubatch": 256, "n_threads": 1, "n_threads_batch": 1, "seed": 1, "verbose": False,
    "type_k": 2, "type_v": 2, "kvflash": 512, "kvflash_tau": 8, "kvflash_calibrate": False,
}  # fmt: skip
"""Of every model here. The cache has four bits a value, so that page images are small."""

SERVER = (
    "-c", "1024", "-b", "256", "-ub", "256", "-ctk", "q4_0", "-ctv", "q4_0", "--kvflash", "512", "--kvflash-tau", "8",
    "--kvflash-calibrate", "off", "-q",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One snapshot. before, after: characters of other text around the fact. settings: beside SETTINGS."""

    model: str
    before: int
    after: int
    settings: dict[str, Any]
    compress: bool = False

    @property
    def prompt(self) -> str:
        return prompt(self.before, self.after)


SNAPSHOTS = {
    # a text of more chunks than the pool has, so that page images lie on the host
    "small": Golden(model="scorer-qwen3-q8_0.gguf", before=700, after=1150, settings={}, compress=True),
    # what a drafting model knew is in the file; with a fixed width no clock decides whether it drafts
    "dense": Golden(
        model="recall-qwen3-q8_0.gguf",
        before=0,
        after=100,
        settings={
            "kvflash_spec": SpecConfig(types=("draft-eagle3",), draft=MODELS / "recall-eagle3-q8_0.gguf", width=4)
        },
    ),
    # recurrent state beside the pages
    "hybrid": Golden(model="recall-qwen35-q8_0.gguf", before=0, after=300, settings={}),
}

SERVED = MODELS / "scorer-qwen3-q8_0.gguf"


def prompt(before: int, after: int) -> str:
    """A text with the fact in it, and the question at its end."""
    other = TEXT.read_text(encoding="utf-8")
    return f"{other[:before]}\n{FACT}\n{other[before : before + after]}\n{QUESTION}"


def open_model(golden: Golden, **settings: Any) -> Any:
    from kvflash_ggml import Llama

    return Llama(str(MODELS / golden.model), n_gpu_layers=GPU_LAYERS, **{**SETTINGS, **golden.settings, **settings})


def tokens_of(llm: Any, text: str) -> list[int]:
    return list(llm.tokenize(text.encode(), add_bos=False))


def answer(llm: Any, tokens: list[int], count: int = 16) -> str:
    """A greedy answer. The models repeat the code with a wide margin, so every machine computes the same digits."""
    return str(llm.detokenize(list(islice(llm.generate(tokens, temp=0.0), count))).decode(errors="replace"))


def open_prefixes(folder: Path) -> Any:
    """The model of the golden prefix cache, with its texts in that folder only."""
    from kvflash_ggml import PrefixCache

    cache = PrefixCache(folder=folder, memory_bytes=0, least=64)
    return open_model(Golden(model=SERVED.name, before=0, after=0, settings={"kvflash_cache": cache}))


def run_json() -> Any:
    """What `kvflash-run --json` prints for a short prompt."""
    line = [
        *(sys.executable, "-m", "kvflash_ggml", str(SERVED), *SERVER, "-t", "1", "--json", "--temp", "0", "-n", "8"),
        *("-ngl", str(GPU_LAYERS), "-p", f"{FACT}\n{QUESTION}"),
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVFLASH_")}
    kept |= {name: os.environ[name] for name in ("KVFLASH_LIB_PATH", "KVFLASH_HEADS") if name in os.environ}
    done = subprocess.run(line, capture_output=True, text=True, env=kept, cwd=Path(__file__).parent, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- making


def make(folder: Path = GOLDEN) -> None:
    """Write all files anew."""
    for name, golden in SNAPSHOTS.items():
        llm = open_model(golden)
        llm.eval(tokens_of(llm, golden.prompt))
        llm.save_snapshot(folder / f"{name}.kvs", compress=golden.compress)
        llm.close()
    for name in ("prefixes", "sessions"):
        shutil.rmtree(folder / name, ignore_errors=True)
    llm = open_prefixes(folder / "prefixes")
    answer(llm, tokens_of(llm, prompt(0, 700)), 4)
    llm.close()
    make_sessions(folder / "sessions")


def make_sessions(folder: Path) -> None:
    """The folder of a server that has answered one question and ended."""
    from .serving import serve

    with serve(SERVED, *SERVER, "--session-dir", str(folder)) as server:
        status, _ = server.post("/v1/completions", asked())
        assert status == 200
        assert server.stop(signal.SIGTERM) == 0


def asked() -> dict[str, Any]:
    """The request whose conversation is in the golden session folder."""
    return {"prompt": prompt(0, 700), "max_tokens": 12, "temperature": 0}


def stats() -> dict[str, list[str]]:
    """Public attributes of `llm.kvflash` and of what it holds."""
    from .golden_names import public

    llm = open_model(SNAPSHOTS["dense"])
    try:
        return {
            "kvflash": public(llm.kvflash), "last": public(llm.kvflash.last), "spec": public(llm.kvflash.spec),
            "device": public(llm.kvflash.devices[0]),
        }  # fmt: skip
    finally:
        llm.close()
