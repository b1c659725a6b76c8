"""Retrieval heads of a running model: found behind the first answer, kept, and used from the next request on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.drafter_models import with_context, with_other_tokens
from support.harness import HEADS, heads_of, wait_for_scorer
from support.inside import inside
from support.interrupter import signalled
from support.rounding import GPU_LAYERS

from kvflash_ggml.calibration import finder, run
from kvflash_ggml.calibration.known import Calibration, ModelId, heads_file, load, of_llama, save
from kvflash_ggml.calibration.run import Stopped, calibrate
from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.errors import CalibrationError, ConfigError, DecodeError, KVFlashError
from kvflash_ggml.placement import memory
from kvflash_ggml.placement.sizes import Device
from kvflash_ggml.sequence import sidecar
from kvflash_ggml.snapshot.fingerprint import ModelFile

MODEL_ID = ModelId("x", "a model")
SETTINGS = {"n_ctx": 4096, "kvflash": 512, "kvflash_policy": "qk", "kvflash_tau": 16}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test finds what another has left, or what the user has."""
    monkeypatch.setenv("KVFLASH_HEADS", str(tmp_path))
    return tmp_path


@pytest.fixture
def pooled(llama: Callable[..., Any]) -> Callable[..., Any]:
    def make(kind: str = "dense", **changes: Any) -> Any:
        return llama(kind, **(SETTINGS | {"kvflash_calibrate": True} | changes))

    return make


@pytest.fixture(scope="module")
def dense(models: dict[str, Path]) -> Calibration:
    """Of the dense model, without a pool."""
    from kvflash_ggml import Llama

    with closing(Llama(str(models["dense"]), n_gpu_layers=GPU_LAYERS, n_threads_batch=1, verbose=False)) as llm:
        return calibrate(llm._model, model_id=of_llama(llm), settings=llm.context_params)


def answer(llm: Any, tokens: npt.NDArray[np.int32], count: int = 8) -> list[int]:
    stream = llm.generate(tokens.tolist(), temp=0.0)
    made = [int(next(stream)) for _ in range(count)]
    stream.close()
    return made


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_heads_are_found_behind_the_first_answer_and_kept(
    kind: str, pooled: Callable[..., Any], dense: Calibration, tokens: npt.NDArray[np.int32]
) -> None:
    llm = pooled(kind)
    assert llm.kvflash.retrieval_heads is None
    answer(llm, tokens[:400])
    assert not llm.kvflash.calibrated(lambda done, total: None), "a text that fits needs none"
    answer(llm, tokens[:2000])
    seen: list[tuple[int, int]] = []
    assert llm.kvflash.calibrated(lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    before = inside(llm).session.scoring.scorer.index_bytes
    answer(llm, tokens[:2000])
    heads = llm.kvflash.retrieval_heads
    assert heads is None or len(heads) <= 8
    path = heads_file(ModelFile(llm.model_path).identity())
    layers = [layer.il for layer in inside(llm).session.engine.layers]
    known = load(path, model_id=of_llama(llm), layers=layers, shapes=inside(llm).finder._shapes)
    assert known.questions == 48
    if kind == "dense":
        assert known == dense, "the same heads again, behind an answer and in a pool"
    assert tuple(known.chosen) == (heads or ())
    if heads is not None:
        assert inside(llm).session.scoring.scorer.index_bytes < before
        assert f"{len(heads)} retrieval head" in llm.kvflash.banner()
    again = pooled(kind)
    assert again.kvflash.retrieval_heads == heads
    answer(again, tokens[:2000])
    assert inside(again).finder._thread is None, "they are known"


def test_the_tests_files_are_of_these_models(models: dict[str, Path], dense: Calibration) -> None:
    """Tests that need no heads of their own take them from there."""
    assert heads_of(models["dense"]).chosen == dense.chosen
    assert all(
        heads_of(models[kind]).model == ModelFile(models[kind]).identity() for kind in ("dense", "hybrid", "small")
    )


def test_a_file_is_taken_instead(
    pooled: Callable[..., Any], dense: Calibration, tokens: npt.NDArray[np.int32], tmp_path: Path
) -> None:
    layer = 1
    heads = [{"layer": layer, "head": 0, "found": 1.0, "control": 0.0, "first": 1.0, "chosen": True}]
    save(dense, tmp_path / "mine.json")
    facts = json.loads((tmp_path / "mine.json").read_text()) | {"heads": heads}
    (tmp_path / "mine.json").write_text(json.dumps(facts))
    mine = pooled(kvflash_calibrate=tmp_path / "mine.json")
    assert mine.kvflash.retrieval_heads == ((layer, 0),)
    answer(mine, tokens[:2000])
    assert mine.kvflash.page_ins > 0
    assert inside(mine).session.scoring.scorer.units.tolist() == [[1, 0]]
    with pytest.raises(ConfigError, match="cannot be read"):
        pooled(kvflash_calibrate=tmp_path / "none.json")


def test_a_file_of_another_model_is_refused(pooled: Callable[..., Any], models: dict[str, Path]) -> None:
    small = HEADS / f"{ModelFile(models['small']).identity()}.json"
    with pytest.raises(
        ConfigError, match=r"made for qwen3 scorer-qwen3, 3 layers .* this model is qwen3 recall-qwen3, 6"
    ):
        pooled(kvflash_calibrate=small)


def test_a_file_of_another_quantisation_is_taken_with_a_warning(
    pooled: Callable[..., Any], dense: Calibration, tmp_path: Path, caplog: Any
) -> None:
    save(dense, tmp_path / "q8.json")
    assert pooled(kvflash_calibrate=tmp_path / "q8.json").kvflash.retrieval_heads == tuple(dense.chosen)
    assert "another file" not in caplog.text
    assert pooled("f32", kvflash_calibrate=tmp_path / "q8.json").kvflash.retrieval_heads == tuple(dense.chosen)
    assert caplog.text.count("another file of this model") == 1


def test_positions_are_encoded_as_in_the_session(pooled: Callable[..., Any]) -> None:
    """And what was found with other settings is kept by itself."""
    usual, other = pooled("small"), pooled("small", rope_freq_base=500.0)
    ids = [of_llama(llm) for llm in (usual, other)]
    assert ids[0].identity == ModelFile(usual.model_path).identity()
    assert ids[0].identity != ids[1].identity
    assert ids[0].title == ids[1].title
    assert of_llama(pooled("small", kv_overrides={"general.name": "x"})).identity != ids[0].identity
    heads = [calibrate(llm._model, model_id=MODEL_ID, settings=llm.context_params).heads for llm in (usual, other)]
    assert heads[0] != heads[1]


def test_a_model_that_is_closed_meanwhile_stops_it(
    pooled: Callable[..., Any], tokens: npt.NDArray[np.int32], cache: Path
) -> None:
    llm = pooled()
    answer(llm, tokens[:2000])
    assert inside(llm).finder.is_finding
    thread = inside(llm).finder._thread
    llm.close()
    assert not thread.is_alive()
    assert not list(cache.rglob("*.json"))


@pytest.mark.parametrize("interrupted", ["the wait", "the end", "both"])
def test_an_interrupted_wait_does_not_free_the_model_under_the_thread(
    interrupted: str, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until Python 3.13 an interrupted `Thread.join` says of a thread that runs that it has ended."""
    from kvflash_ggml import Llama

    ended, computing = [], Event()

    def calibrate(of: Any, *, stop: Event, **_: Any) -> Any:
        computing.set()
        stop.wait(30)
        time.sleep(0.5)  # the step that is being computed
        ended.append(of.model is not None)
        raise Stopped

    monkeypatch.setattr(run, "calibrate", calibrate)
    llm = Llama(str(models["dense"]), n_ctx=1024, kvflash=512, verbose=False)
    inside(llm).finder.start()
    assert computing.wait(30)
    if interrupted != "the end":
        assert signalled(lambda: llm.kvflash.calibrated(lambda done, total: None), lambda: None, 0.2)
    if interrupted == "the wait":
        llm.close()
    else:
        signalled(llm.close, lambda: None, 0.2)
    assert ended == [True]


def test_it_can_be_stopped(pooled: Callable[..., Any]) -> None:
    llm = pooled()
    stop = Event()
    stop.set()
    with pytest.raises(Stopped):
        calibrate(llm._model, model_id=MODEL_ID, settings=llm.context_params, stop=stop)


def test_a_failure_is_said_once_and_all_heads_count(
    pooled: Callable[..., Any], tokens: npt.NDArray[np.int32], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise CalibrationError("no room for it")

    monkeypatch.setattr(run, "calibrate", fail)
    llm = pooled()
    for _ in range(3):
        answer(llm, tokens[:2000])
        llm.kvflash.calibrated(lambda done, total: None)
    assert llm.kvflash.retrieval_heads is None
    assert sum("no room for it" in record.message for record in caplog.records) == 1


def test_a_model_without_a_tokenizer_keeps_all_heads(pooled: Callable[..., Any], caplog: Any) -> None:
    llm = pooled("uneven")
    answer(llm, np.arange(5, 1500, dtype=np.int32))
    llm.kvflash.calibrated(lambda done, total: None)
    assert llm.kvflash.retrieval_heads is None
    assert sum("has no vocabulary" in record.message for record in caplog.records) == 1


def full_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of two, the second."""
    sizes = {"CUDA0": 8 << 30, "CUDA1": 100 << 20}
    devices = [Device(name=name, kind="gpu", free=free, total=8 << 30) for name, free in sizes.items()]
    host = memory.host()
    monkeypatch.setattr(run.memory, "of_model", lambda address: (*devices, host))
    monkeypatch.setattr(sidecar.Sidecar, "slot_shares", lambda model, settings: (1, 1, 0))
    return "MiB of CUDA1, and 100 MiB of it are free"


def no_context(monkeypatch: pytest.MonkeyPatch) -> str:
    def fail(**settings: Any) -> None:
        raise ValueError("Failed to create llama_context")

    monkeypatch.setattr(sidecar.internals, "LlamaContext", fail)
    return "Failed to create llama_context"


def no_step(monkeypatch: pytest.MonkeyPatch) -> str:
    reads = []
    read = sidecar.Sidecar.read

    def fail(self: Any, *args: Any, **keywords: Any) -> None:
        reads.append(self)
        if len(reads) == 4:
            raise DecodeError("llama_decode returned -3")
        read(self, *args, **keywords)

    monkeypatch.setattr(sidecar.Sidecar, "read", fail)
    return "llama_decode returned -3"


@pytest.mark.parametrize("inject", [full_gpu, no_context, no_step])
def test_without_memory_for_it_all_heads_count(
    inject: Callable[[pytest.MonkeyPatch], str],
    pooled: Callable[..., Any],
    tokens: npt.NDArray[np.int32],
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    llm = pooled("small")
    with monkeypatch.context() as injected:
        reason = inject(injected)
        first = answer(llm, tokens[:2000])
        llm.kvflash.calibrated(lambda done, total: None)
    assert answer(llm, tokens[:2000]) == first
    told = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert [reason in record.message and "all heads count" in record.message for record in told] == [True]
    assert told[0].exc_info is None
    assert llm.kvflash.retrieval_heads is None
    llm.kvflash.calibrate()
    assert llm.kvflash.retrieval_heads is not None, "it is tried again when it is asked for"


def test_it_waits_for_requests_and_takes_as_long_as_it_takes(
    pooled: Callable[..., Any], tokens: npt.NDArray[np.int32], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A stream that is not over holds it back; it goes on behind it, and the banner says how far it is."""
    monkeypatch.setattr(finder, "BUSY", 1e6)
    steps: list[int] = []
    real = run.calibrate

    def noted(*args: Any, progress: Any, **keywords: Any) -> Any:
        def step(done: int, total: int) -> None:
            progress(done, total)
            steps.append(done)

        return real(*args, progress=step, **keywords)

    monkeypatch.setattr(run, "calibrate", noted)
    llm = pooled("small")
    assert "all heads until those that retrieve are found" in llm.kvflash.banner()
    with inside(llm).finder.behind():
        inside(llm).finder.start()
        inside(llm).finder._thread.join(2)
        assert steps == []
        assert "are being found" in llm.kvflash.banner()
    assert llm.kvflash.calibrated(lambda done, total: None)
    assert steps
    answer(llm, tokens[:1000])
    assert llm.kvflash.retrieval_heads


def test_a_command_does_not_wait_for_what_takes_long(
    pooled: Callable[..., Any], tokens: npt.NDArray[np.int32], caplog: Any
) -> None:
    llm = pooled("small")
    answer(llm, tokens[:1000])
    llm.kvflash.calibrated(lambda done, total: None, most=1e-6)
    assert inside(llm).finder.is_finding
    assert "'kvflash-run calibrate' finds them" in caplog.text
    assert llm.kvflash.calibrated(lambda done, total: None)


@pytest.fixture(params=["qk", "drafter", "drafter with another tokenizer"])
def policy(request: Any, models: dict[str, Path], loaded: None, tmp_path: Path) -> dict[str, Any]:
    """The drafters have a window that is shorter than the text."""
    if request.param == "qk":
        return {"kvflash_calibrate": False}
    path = with_context(models["small"], tmp_path / "small.gguf", 1024)
    if request.param != "drafter":
        path = with_other_tokens(path, tmp_path / "other.gguf")
    return {"kvflash_policy": "drafter", "kvflash_scorer": path}


def test_the_same_text_brings_the_same_chunks(
    policy: dict[str, Any], pooled: Callable[..., Any], tokens: npt.NDArray[np.int32]
) -> None:
    """Whatever was read before. Without it, what was resident decides among equals."""
    seen = []
    for history in ([], [(0, 900)], [(500, 2600), (0, 2000), (0, 2400)]):
        llm = pooled(kvflash_deterministic=True, kvflash_tau=None, **policy)
        for lo, hi in history:
            answer(llm, tokens[lo:hi], 3)
        stream = llm.generate(tokens[:2000].tolist(), temp=0.0)
        first = next(stream)
        seen.append((first, llm.kvflash.resident_chunks, llm.newest_logits().tobytes()))
        stream.close()
        assert llm.kvflash.page_ins > 0
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("promise", [{"deterministic": True}, {"deterministic_batch": True, "parallel": 2}])
def test_heads_that_are_found_meanwhile_change_no_promised_bit(
    promise: dict[str, Any], pooled: Callable[..., Any], dense: Calibration, tokens: npt.NDArray[np.int32]
) -> None:
    """When they are found depends on the clock."""
    config = KVFlashConfig(pool=1536, policy="qk", **promise)
    llm = pooled(kvflash=config, kvflash_policy=None, kvflash_tau=None, kvflash_calibrate=None)
    units = inside(llm).session.scoring.scorer.units.tolist()
    inside(llm).finder._found = dense
    answer(llm, tokens[:1600], 2)
    assert inside(llm).session.scoring.scorer.units.tolist() == units
    inside(llm).finder.settle(inside(llm).session)
    wait_for_scorer(inside(llm).session)
    assert inside(llm).session.scoring.scorer.units.tolist() != units


def test_a_prefix_cache_contradicts_it(pooled: Callable[..., Any], tmp_path: Path) -> None:
    from kvflash_ggml import PrefixCache

    with pytest.raises(ConfigError, match="kvflash_cache"):
        pooled(kvflash_deterministic=True, kvflash_cache=tmp_path)
    with pytest.raises(KVFlashError, match="PrefixCache"):
        pooled(kvflash_deterministic=True).set_cache(PrefixCache())


def test_a_model_that_is_collected_on_the_thread_that_calibrates_it(models: Any, monkeypatch: Any) -> None:
    """A garbage collector runs on any thread: what that thread computes with is freed when it ends."""
    from kvflash_ggml import Llama

    seen = []

    def calibrate(of: Any, *, stop: Any, **_: Any) -> Any:
        llm = made.pop()
        llm.close()  # as its __del__ does
        seen.append((stop.is_set(), of.model is not None))
        raise Stopped

    monkeypatch.setattr(run, "calibrate", calibrate)
    made = [Llama(str(models["dense"]), n_ctx=1024, kvflash=512, verbose=False)]
    model, found = made[0]._model, inside(made[0]).finder
    found.start()
    found._thread.join(30)
    assert seen == [(True, True)]
    assert model.model is None
