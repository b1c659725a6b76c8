"""Models, text and helpers shared by the tests that run the native library."""

from __future__ import annotations

import ctypes
import gc
import shutil
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.archs import missing_sources, write_arch, write_latent
from support.drafter_models import with_head
from support.harness import (
    HEADS,
    MODELS,
    TEXT,
    Bare,
    dequantise,
    write_iswa,
    write_latent_heads,
    write_packed,
    write_twins,
    write_uneven,
)
from support.rounding import GPU_LAYERS, ON_GPU

from kvflash_ggml import KVFlashConfig
from kvflash_ggml.native import library
from kvflash_ggml.runtime.hints import SlowPrompt


@contextmanager
def skips_what_a_gpu_cannot_attend_to() -> Iterator[None]:
    from kvflash_ggml.errors import UnsupportedModelError

    try:
        yield
    except UnsupportedModelError as err:
        if not ON_GPU or "cannot attend" not in str(err):
            raise
        pytest.skip(str(err))


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line about a slow prompt would depend on how slow this machine is. Tests of it bring a clock."""
    monkeypatch.setattr(SlowPrompt.__init__, "__defaults__", (lambda: 0.0,))


@pytest.fixture(scope="session")
def loaded() -> None:
    """llama_cpp can be imported from here on."""
    library.load()


@pytest.fixture
def known_heads(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trained models' retrieval heads are known: to find those of the dense one takes 10 s of CPU."""
    monkeypatch.setenv("KVFLASH_HEADS", str(shutil.copytree(HEADS, tmp_path_factory.mktemp("found") / "heads")))


@pytest.fixture(scope="session")
def models() -> dict[str, Path]:
    """The trained models: dense, hybrid (recurrent state beside attention), small and dense; and drafters."""
    return {
        "dense": MODELS / "recall-qwen3-q8_0.gguf",
        "hybrid": MODELS / "recall-qwen35-q8_0.gguf",
        "small": MODELS / "scorer-qwen3-q8_0.gguf",
        "eagle3": MODELS / "recall-eagle3-q8_0.gguf",  # for the dense one
        "mtp": MODELS / "mtp-recall-qwen35-q8_0.gguf",  # for the hybrid one
    }


@pytest.fixture(scope="session")
def model(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of a model by kind.

    "iswa", "narrow" (its heads are), "uneven", "latent" and "latent heads" (one head, several; random weights), "f32"
    (the dense one, dequantised), "packed" (Q4_K), "twins" (two tokens are always as likely) and "headed" (the hybrid
    one with its MTP head) are made when asked for; "of NAME" is a tiny one of that architecture.
    """
    made = dict(models)

    def find(kind: str) -> Path:
        if kind not in made:
            if (kind == "latent" or kind.startswith("of ")) and (why := missing_sources()):
                pytest.skip(why)
            path = tmp_path_factory.mktemp("models") / f"{kind}.gguf"
            makers: dict[str, Callable[[Path, Path], None]] = {
                "iswa": write_iswa,
                "narrow": partial(write_iswa, head=32),
                "uneven": write_uneven,
                "latent": write_latent,
                "latent heads": write_latent_heads,
                "f32": dequantise,
                "packed": write_packed,
                "twins": write_twins,
                "headed": lambda _, path: with_head(models["hybrid"], models["mtp"], path),
            }
            if kind.startswith("of "):
                write_arch(kind.removeprefix("of "), path)
            else:
                makers[kind](models["dense"], path)
            made[kind] = path
        return made[kind]

    return find


@pytest.fixture(scope="session")
def tokens(models: dict[str, Path]) -> npt.NDArray[np.int32]:
    """About 40,000 tokens of real text. All models of the tests share one tokenizer."""
    from kvflash_ggml import Llama

    llm = Llama(str(models["dense"]), vocab_only=True, verbose=False)
    data = TEXT.read_bytes()[:150_000].decode("utf-8", "ignore").encode()
    ids = np.array(llm.tokenize(data), np.int32)
    llm.close()
    assert len(ids) > 33_000
    return ids


@pytest.fixture
def llama(model: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """Makes our Llama; closed after the test."""
    from kvflash_ggml import Llama

    yield from _maker(Llama, model)


@pytest.fixture(params=["at once", "beside"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chunks are scored: as this machine does it, or on a thread, for later tokens, as beside a GPU."""
    from kvflash_ggml.native.info import EngineInfo

    if request.param == "beside":
        monkeypatch.setattr(EngineInfo, "asynchronous", True)


@pytest.fixture
def stock(loaded: None, model: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """Makes upstream's own Llama on the same library; closed after the test."""
    from llama_cpp.llama import Llama

    yield from _maker(Llama, model)


def _maker(cls: Any, model: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    with ExitStack() as stack:

        def make(kind: str = "dense", **kwargs: Any) -> Any:
            # one thread: the models are so small that threads cost more than they give
            threads = {"n_threads": 1, "n_threads_batch": 1, "n_gpu_layers": GPU_LAYERS}
            split = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 256}
            # what leaves the pool is foreseeable only without scores
            if isinstance(kwargs.get("kvflash"), int):
                kwargs = {"kvflash_policy": "lru", "kvflash_calibrate": False, "kvflash_reading": "pool"} | kwargs
            with skips_what_a_gpu_cannot_attend_to():
                llm = cls(str(model(kind)), **({"seed": 7, "verbose": False} | threads | split | kwargs))
            stack.callback(llm.close)
            return llm

        yield make
    gc.collect()


@pytest.fixture
def bare(loaded: None, model: Callable[[str], Path]) -> Iterator[Callable[..., Bare]]:
    """Makes a Sequence on a context of its own: KV type, flash attention and placement are free."""
    import llama_cpp
    from llama_cpp import _internals as internals

    from kvflash_ggml.native import engine as native
    from kvflash_ggml.policy import resolve
    from kvflash_ggml.sequence.pool import Pool
    from kvflash_ggml.sequence.reading import Reading
    from kvflash_ggml.sequence.sequence import Sequence

    with ExitStack() as stack:

        def make(
            kind: str = "dense",
            *,
            pool: int,
            n_ctx: int = 1024,
            n_ubatch: int = 256,
            type_kv: int = 1,
            flash: bool = True,
            query_rows: int = 0,
            n_seq_max: int = 1,
            block_order: abc.Sequence[int] | None = None,
            stages: int = 0,
            answers_exactly: bool = False,
            n_batch: int | None = None,
            fixed_rows: bool = False,
            planes: int = 0,
            nodes: list[int] | None = None,
            policy: str | None = None,
            **config: Any,
        ) -> Bare:
            """A text of each of `n_seq_max` sequences; `session` is the first.

            n_batch: the longest step, n_ubatch if not given. nodes: takes the address of each node computed.
            """
            longest = n_batch or n_ubatch
            params = llama_cpp.llama_model_default_params()
            params.n_gpu_layers = GPU_LAYERS
            params.load_mtp = kind == "headed"
            loaded = internals.LlamaModel(path_model=str(model(kind)), params=params, verbose=False)
            stack.callback(loaded.close)
            cparams = llama_cpp.llama_context_default_params()
            cparams.n_ctx = n_ctx
            cparams.n_batch, cparams.n_ubatch = longest, n_ubatch
            cparams.n_rs_seq = planes
            if nodes is not None:
                cparams.cb_eval = _counter(nodes)
            cparams.n_seq_max = n_seq_max
            cparams.kv_unified = n_seq_max > 1
            cparams.n_threads = cparams.n_threads_batch = 1
            cparams.type_k = cparams.type_v = type_kv
            cparams.swa_full = False
            cparams.flash_attn_type = (
                llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
            with native.pool_request(pool, query_rows):
                ctx = internals.LlamaContext(model=loaded, params=cparams, verbose=False)
            with skips_what_a_gpu_cannot_attend_to():
                engine = native.PagedEngine(ctypes.cast(ctx.ctx, ctypes.c_void_p).value or 0, longest)
            shared = Pool(engine, n_ubatch=longest, block_order=block_order, fixed_rows=fixed_rows)
            if stages:
                shared.make_stages(stages)
            sessions = [
                Sequence(
                    shared,
                    KVFlashConfig(pool=pool, **config),
                    seq=seq,
                    n_ctx=ctx.n_ctx(),
                    n_batch=longest,
                    scorer=None if policy is None else resolve(policy),
                    reading=Reading(exact=stages > 0, answers_exactly=answers_exactly),
                )
                for seq in range(n_seq_max)
            ]
            for session in sessions:
                stack.callback(session.close)
            return Bare(sessions[0], loaded.n_vocab(), ctx, sessions)

        yield make
    gc.collect()


def _counter(nodes: list[int]) -> Any:
    """A callback of the scheduler that looks at nothing."""
    import llama_cpp

    def asked(tensor: int, _ask: bool, _data: Any) -> bool:
        nodes.append(tensor)
        return False

    return llama_cpp.ggml_backend_sched_eval_callback(asked)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each run of the image encoder."""
    from llama_cpp import mtmd_cpp

    runs: list[int] = []
    stock = mtmd_cpp.mtmd_encode_chunk
    monkeypatch.setattr(mtmd_cpp, "mtmd_encode_chunk", lambda *args: runs.append(1) or stock(*args))
    return runs


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many answers each step computed that was for several."""
    from kvflash_ggml.sequence import together

    found: list[int] = []
    compute = together.compute

    def counted(prepared: Any, **more: bool) -> list[Exception | None]:
        found.append(len(prepared))
        return compute(prepared, **more)

    monkeypatch.setattr(together, "compute", counted)
    return found
