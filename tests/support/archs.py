"""A tiny random model of every architecture, and what each does in a pool. As a script: the child that runs models.

Upstream's `test-llama-archs` has a fixture for almost every architecture. It is compiled here against the library
under test, and each of its models is then run three times on the same tokens: stock, in a pool that holds the whole
context, and in a pool that does not. There it is calibrated too. A model that aborts takes only its child along.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import kvflash_ggml
from kvflash_ggml.convert.describe import describe
from support.harness import read_block, row
from support.inside import inside

from .integrity import check_table

REPO = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("arch_models.cpp")

NO_MODEL = {
    "arwkv7": "purely recurrent",
    "clip": "an image encoder, not a language model",
    "dflash": "a draft that reads its target's memory",
    "eagle3": "a draft that reads its target's memory",
    "gemma4-assistant": "a draft that reads its target's memory",
    "gptj": "known to llama.cpp by name only",
    "graniteswitch": "needs adapters in the file",
    "rwkv7": "purely recurrent",
}
"""Architectures that upstream's fixtures cannot make a model of."""

N_CTX = 1024
POOL = 512
N_BATCH = 256
N_UBATCH = 128
PROMPT = 600
CUT = 300
STEPS = 16
CHUNK = 64
BATCH = 24  # models a child runs
TIMEOUT = 300
ROUNDING = 0.02  # of a logit, in steps of other widths on a GPU; rows of most models are 0.3 apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one model. status: pooled, refused, stock (stock llama.cpp cannot run it either) or failed.

    attention: how many layers have attention, as `convert.describe` reads it in the file.
    """

    file: str
    arch: str
    status: str
    attention: int | None = None
    memory: str = ""
    layers: str = ""
    reason: str = ""

    @property
    def mixture(self) -> bool:
        return self.file.endswith("+moe.gguf")


# --- the parent


def survey(only: Sequence[str] = ()) -> list[Result]:
    """Run every architecture, or those named. One result per model, by architecture."""
    maker = build_maker()
    with tempfile.TemporaryDirectory(prefix="kvflash-archs-") as name:
        folder = Path(name)
        files = make_models(maker, folder, only)
        attention = {file: describe(folder / file).attention for file in files}
        batches = [files[i : i + BATCH] for i in range(0, len(files), BATCH)]
        with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as workers:
            results = [r for done in workers.map(lambda batch: run_batch(folder, batch), batches) for r in done]
    results = [replace(r, attention=attention[r.file]) for r in results]
    return sorted(results, key=lambda r: (r.arch, r.mixture))


@cache
def missing_sources() -> str:
    """Why there are no sources of upstream, which a model of an architecture is made with; empty if there are."""
    sys.path.append(str(REPO / "scripts"))
    from vendoring.build import upstream_llama
    from vendoring.pin import VendorError

    try:
        upstream_llama()
    except VendorError as err:
        return str(err)
    return ""


def build_maker() -> Path:
    """The program that writes the models, compiled once for each combination of sources and library."""
    if why := missing_sources():
        raise RuntimeError(why)
    from vendoring.build import shim_files, upstream_llama
    from vendoring.pin import cache_dir, digest, digest_files, locked

    from kvflash_ggml.native import library

    tree, lib = upstream_llama(), library.library_folder()
    key = digest(SOURCE.read_bytes(), str(tree), str(lib), digest_files(REPO, shim_files()))[:20]
    program = cache_dir() / "tests" / f"arch_models-{key}"
    with locked(program.with_suffix(".lock")):
        if not program.is_file():
            folders = ["tests", "include", "ggml/include", "src", "common", "vendor"]
            command = [
                os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-DNDEBUG", "-w",
                # only saving is used: what else the file needs of upstream's helpers is not linked
                "-ffunction-sections", "-Wl,--gc-sections",
                str(SOURCE), *(f"-I{tree / f}" for f in folders), f"-I{REPO / 'kvflash_ggml' / 'native'}",
                f"-L{lib}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{lib}", f"-Wl,-rpath-link,{lib}",
            ]  # fmt: skip
            temp = program.with_suffix(".new")
            subprocess.run([*command, "-o", str(temp)], check=True)
            temp.rename(program)
    return program


def make_models(maker: Path, folder: Path, only: Sequence[str] = ()) -> list[str]:
    """Write the models; returns their file names. Raises if one is missing without being known to be."""
    env = os.environ | {"GGML_NO_BACKTRACE": "1"}
    done = subprocess.run([maker, folder, *only], env=env, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"{maker.name} failed: {done.stderr[-2000:]}")
    lines = done.stdout.splitlines()
    missing = {line[2:].removesuffix(".gguf") for line in lines if line.startswith("- ")}
    if not missing <= NO_MODEL.keys():
        raise RuntimeError(f"no model of {sorted(missing - NO_MODEL.keys())}: {done.stderr[-2000:]}")
    return [line for line in lines if not line.startswith("- ")]


def write_latent(source: Path, target: Path) -> None:
    """A model whose layers cache one latent key for all heads, and no values (MLA). `source` is not needed."""
    write_arch("deepseek2", target)


def write_arch(arch: str, target: Path) -> None:
    """Upstream's fixture of an architecture."""
    (name,) = make_models(build_maker(), target.parent, [arch])
    target.with_name(name).rename(target)


def run_batch(folder: Path, files: Sequence[str]) -> Iterator[Result]:
    """Run models in one child; if it dies, the rest in another one, where the model it died with is the first."""
    left = list(files)
    while left:
        results, phase, why = _child(folder, left)
        yield from results
        left = left[len(results) :]
        if results or not left:
            continue
        file = left.pop(0)
        if phase == "stock":
            again, _, _ = _child(folder, ["--no-stock", file])
            refused = [r for r in again if r.status == "refused"]
            yield from refused or [Result(file=file, arch=_arch(file), status="stock", reason=why)]
        else:
            yield Result(file=file, arch=_arch(file), status="failed", reason=f"the process died: {why}")
    for file in files:
        (folder / file).unlink(missing_ok=True)


def _child(folder: Path, arguments: Sequence[str]) -> tuple[list[Result], str, str]:
    """(results, what was going on at the end, why it ended)"""
    env = os.environ | {"GGML_NO_BACKTRACE": "1"}
    package = Path(kvflash_ggml.__file__).parents[1]  # the one under test: of the checkout, or installed
    paths = [str(package), str(REPO / "tests"), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "support.archs", str(folder), *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True, timeout=TIMEOUT)
            out, why = done.stdout, f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as error:
            out, why = (error.stdout or b"").decode(), f"no end after {TIMEOUT} s"
        log.seek(0)
        tail = log.read()[-3000:]
    asserts = re.findall(r"([\w.-]+):\d+: (GGML_ASSERT.*)", tail)
    why = " ".join(asserts[-1]) if asserts else f"{why}: {tail}"
    lines = out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    phase = next((line for line in reversed(lines) if not line.startswith("{")), "")
    return [Result(**row) for row in rows], phase, why


def _arch(file: str) -> str:
    """The maker adds "+moe" for a mixture of experts: a dash may belong to the name."""
    return file.removesuffix(".gguf").removesuffix("+moe")


# --- the child


def run_model(path: Path, enter: Callable[[str], None], *, with_stock: bool) -> Result:
    """Stock, whole pool, small pool. Raises nothing: what goes wrong is the result. enter: told what comes next."""
    from kvflash_ggml.errors import UnsupportedModelError

    about = {"file": path.name, "arch": _arch(path.name)}
    stock, reason = None, ""
    if with_stock:
        enter("stock")
        try:
            stock = _stock(path)
        except Exception as error:
            reason = _line(error)
    enter("pool")
    try:
        whole = _Run(path, pool=N_CTX)
    except UnsupportedModelError as error:
        return _refused(about, str(error))
    except Exception as error:
        if stock is None:
            return Result(**about, status="stock", reason=reason)
        return Result(**about, status="failed", reason=f"opening: {_line(error)}")
    if stock is None:
        whole.close()
        return Result(**about, status="stock", reason=reason)
    about |= {"memory": whole.memory, "layers": whole.layers}
    try:
        assert stock.text.std(axis=1).min() > 0, "stock: logits are constant or not finite, so they prove nothing"
        _same(whole.logits(), stock.text, "whole pool")
        if whole.memory.startswith("plain"):
            _same(whole.after_cut(), stock.cut, "whole pool, cut")
        whole.close()
        _check_last(_Run(path, pool=N_CTX, last=True), stock.text)
        small = _Run(path, pool=POOL)
        _check_small_pool(small, stock.text)
        _check_calibration(small)
        small.close()
        exact = _Run(path, pool=POOL, exact=True)
        _same(exact.logits(), stock.text, "exact reading")
        assert exact.llm.kvflash.streamed_steps > STEPS, "exact reading: nothing was streamed"
        exact.close()
    except Exception as error:
        return Result(**about, status="failed", reason=_line(error))
    return Result(**about, status="pooled")


def _refused(about: dict[str, Any], text: str) -> Result:
    """The text must name the architecture and give a reason; only the reason goes into the table."""
    head, _, reason = text.partition(" cannot run in a pool: ")
    reason = reason.removesuffix(" Use kvflash=None.").rstrip(".")
    if repr(about["arch"]) not in head or len(reason) < 10:
        return Result(**about, status="failed", reason=f"unhelpful refusal: {text}")
    return Result(**about, status="refused", reason=reason)


class _Logits(NamedTuple):
    text: Any  # of every token, [PROMPT + STEPS, n_vocab]
    cut: Any  # of the tokens read after a cut at CUT, [STEPS, n_vocab]


def _stock(path: Path) -> _Logits:
    run = _Run(path, pool=None)
    try:
        text = run.logits()
        # a recurrent memory cannot be cut, and a window that was left behind is lost without notice
        plain = not (run.llm._is_recurrent or run.llm._is_hybrid)
        return _Logits(text, run.after_cut() if plain else None)
    finally:
        run.close()


class _Run:
    """One model on one context, fed the same tokens as every other run of it."""

    def __init__(self, path: Path, *, pool: int | None, exact: bool = False, last: bool = False) -> None:
        import numpy as np

        from kvflash_ggml import KVFlashConfig, Llama

        seen = {"reading": "exact", "answer": "exact"} if exact else {"reading": "pool"}
        # with four of the eight chunks the newest, one of those that were read at first has to go
        config = None if pool is None else KVFlashConfig(pool=pool, tail=4, **seen)
        self.llm = Llama(
            str(path), n_ctx=N_CTX, n_batch=N_BATCH, n_ubatch=N_UBATCH, n_threads=1, n_threads_batch=1,
            n_gpu_layers=0, flash_attn=True, swa_full=False, logits_all=not last, verbose=True, kvflash=config,
        )  # fmt: skip
        rng = np.random.default_rng(7)
        self.tokens = rng.integers(0, min(128, self.llm.n_vocab()), PROMPT + STEPS).tolist()
        if self.llm.kvflash is not None:
            engine = inside(self.llm).session.engine
            info = engine.info
            kinds = ["hybrid" if info.recurrent else "", "sliding window" if info.n_swa else ""]
            self.memory = " + ".join(filter(None, kinds)) or "plain"
            latent = any(not layer.has_v for layer in engine.layers)
            self.memory += ", latent (MLA)" if latent else ""
            self.memory += ", ALiBi" if info.alibi else ""
            metadata = self.llm._model.metadata()
            total = metadata.get(f"{metadata['general.architecture']}.block_count", "?")
            self.layers = f"{info.n_layers} of {total}"

    def logits(self) -> Any:
        """Logits of every token, shape [PROMPT + STEPS, n_vocab]."""
        self.llm.eval(self.tokens[:PROMPT])
        for token in self.tokens[PROMPT:]:
            self.llm.eval([token])
        return self.llm.scores[: len(self.tokens)].copy()

    def after_cut(self) -> Any:
        """Go back to the first CUT tokens and read others. Logits of these, shape [STEPS, n_vocab]."""
        self.llm.n_tokens = CUT
        self.llm.eval(self.tokens[:STEPS])
        return self.llm.scores[CUT : CUT + STEPS].copy()

    def close(self) -> None:
        self.llm.close()


def _check_last(run: _Run, stock: Any) -> None:
    """Where logits of a prompt's last token are wanted alone, they are those of that token, and of no other one."""
    import numpy as np

    run.llm.eval(run.tokens[:PROMPT])
    apart = np.abs(stock[:PROMPT] - row(run.llm)).max(axis=1)
    run.close()
    nearest = int(apart.argmin())
    assert apart[-1] <= apart[nearest] + ROUNDING, f"last logits: {apart[-1]:.3g} away, those of {nearest} are nearer"


def _check_small_pool(run: _Run, stock: Any) -> None:
    """Exact while all is resident; then pages move and come back bit for bit, and a saved state continues as it was."""
    import numpy as np

    llm = run.llm
    session = inside(llm).session
    before = N_BATCH
    llm.eval(run.tokens[:before])
    assert session.paging.page_outs == before // CHUNK, f"{session.paging.page_outs} pages saved after {before} tokens"
    session.engine.synchronize()
    pages = [read_block(session, session.table.chunks[c].block) for c in range(before // CHUNK)]
    llm.eval(run.tokens[before:PROMPT])
    for token in run.tokens[PROMPT:]:
        llm.eval([token])
    check_table(session.table)

    logits = llm.scores[: len(run.tokens)]
    _same(logits[:before], stock[:before], "small pool, before anything is evicted")
    assert np.isfinite(logits).all(), "small pool: a logit is not finite"
    resident = llm.kvflash.resident_chunks
    gone = [c for c in range(before // CHUNK) if c not in resident]
    assert gone, f"nothing was evicted, resident are {resident}"
    for c in gone:
        assert session.store.bytes_of(c) == pages[c], f"chunk {c} changed on its way to the host"
    state = llm.save_state()
    text = llm.n_tokens
    found = []
    for _ in range(2):
        llm.eval(run.tokens[:STEPS])
        found.append(llm.scores[text : text + STEPS].copy())
        llm.load_state(state)
    _same(found[1], found[0], "restored state")
    back = gone[0]
    llm.kvflash.pin(back * CHUNK, back * CHUNK + CHUNK)
    llm.eval([run.tokens[0]])
    check_table(session.table)
    assert back in llm.kvflash.resident_chunks, f"chunk {back} was not recalled"
    session.engine.synchronize()
    assert read_block(session, session.table.chunks[back].block) == pages[back], f"chunk {back} came back different"

    assert np.isfinite(run.after_cut()).all(), "cut: a logit is not finite"
    check_table(session.table)


def _check_calibration(run: _Run) -> None:
    """Every question about one document instead of two is asked, and every head is measured."""
    from kvflash_ggml.calibration import choice, measure
    from kvflash_ggml.calibration.known import ModelId
    from kvflash_ggml.calibration.run import calibrate

    measure.DOCUMENTS = 1
    heads = {(layer.il, head) for layer in inside(run.llm).session.engine.layers for head in range(layer.n_head)}
    found = calibrate(run.llm._model, model_id=ModelId("", ""), settings=run.llm.context_params)
    assert found.questions == 24, f"calibration: {found.questions} questions"
    measured = {(x.layer, x.head) for x in found.heads}
    assert measured <= heads, f"calibration: heads that the model does not pool: {measured - heads}"
    assert len(found.heads) == len(measured) == min(len(heads), choice.LISTED), f"calibration: {len(found.heads)} heads"
    shares = [share for x in found.heads for share in (x.found, x.control, x.first)]
    assert all(0 <= share <= 1 for share in shares), "calibration: a share of attention is none"


def _same(found: Any, wanted: Any, what: str) -> None:
    import numpy as np

    if found.tobytes() == wanted.tobytes():
        return
    rows = np.flatnonzero((found.view(np.uint32) != wanted.view(np.uint32)).any(axis=1))
    gap = float(np.nanmax(np.abs(found[rows] - wanted[rows])))
    nan = int(np.isnan(found[rows]).any(axis=1).sum())
    raise AssertionError(
        f"{what}: {len(rows)} of {len(found)} tokens differ from stock, first {rows[0]}, by up to {gap:.3g}, {nan} NaN"
    )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main(folder: str, *arguments: str) -> None:
    out = os.dup(1)  # upstream redirects the descriptor itself at times

    def tell(line: str) -> None:
        os.write(out, f"{line}\n".encode())

    for file in [a for a in arguments if not a.startswith("--")]:
        result = run_model(Path(folder, file), tell, with_stock="--no-stock" not in arguments)
        tell(json.dumps(asdict(result)))


if __name__ == "__main__":
    main(*sys.argv[1:])
