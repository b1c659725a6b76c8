"""After `close`, or while another thread closes the model, every call says that it is closed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvflash_ggml.errors import KVFlashError

ARGUMENTS: dict[str, Any] = {
    "tokens": [1, 2], "text": b"one", "input": "one", "prompt": "one two", "suffix": "two",
    "bytes": b"a", "lo": 0, "hi": 64,
    "messages": [{"role": "user", "content": "one"}], "seed": 1, "cache": None, "path": "no-such-file",
    "draft_model": None, "wanted": True,
    "observer": None, "progress": lambda *_: None, "sequence": [1], "a": [1], "b": [1],
    "parked": None, "scores": np.zeros(4, np.float32), "give_way": bool,
}  # fmt: skip
"""What is given for a parameter of that name."""

NEEDS_MORE = {"from_pretrained", "create_chat_completion_openai_v1"}
"""Makes another model; needs another package."""


def public(one: object) -> list[str]:
    return [name for name in dir(type(one)) if not name.startswith("_")]


def asked(one: Any, name: str, given: dict[str, Any]) -> object:
    """The value of a property, or what a method returns, read to its end."""
    found = getattr(one, name)
    if not inspect.ismethod(found):
        return found
    parameters = inspect.signature(found).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    result = found(**{p.name: given[p.name] for p in needed})
    return list(result) if inspect.isgenerator(result) else result


@pytest.mark.parametrize("pool", [None, 512])
def test_whatever_is_asked(pool: int | None, llama: Any, tokens: Any) -> None:
    llm = llama(kvflash=pool)
    llm.eval(tokens.tolist()[:700])
    given = {**ARGUMENTS, "state": llm.save_state()}
    stats = llm.kvflash
    if pool is not None:
        given |= {"parked": llm.park()}
    llm.close()
    wrong = {}
    for one in (llm, stats):
        for name in sorted(set(public(one)) - NEEDS_MORE):
            try:
                asked(one, name, given)
            except KVFlashError:
                pass
            except Exception as err:
                wrong[f"{type(one).__name__}.{name}"] = repr(err)
    assert not wrong, "\n".join(f"{name}: {err}" for name, err in wrong.items())


def completion(llm: Any, tokens: list[int], folder: Path) -> None:
    llm.create_completion("one two", max_tokens=4)


def stream(llm: Any, tokens: list[int], folder: Path) -> None:
    list(llm.create_completion("one two", max_tokens=4, stream=True))


def generate(llm: Any, tokens: list[int], folder: Path) -> None:
    written = llm.generate(tokens[:70])
    for _ in range(4):
        next(written)


def evaluate(llm: Any, tokens: list[int], folder: Path) -> None:
    llm.reset()
    llm.eval(tokens[:200])
    llm.sample()


def save(llm: Any, tokens: list[int], folder: Path) -> None:
    llm.eval(tokens[:70])
    llm.save_snapshot(folder / "waited")
    llm.save_snapshot(folder / "later", wait=False)
    llm.load_snapshot(folder / "waited")
    llm.reset()


def park(llm: Any, tokens: list[int], folder: Path) -> None:
    llm.eval(tokens[:70])
    parked = llm.park()
    try:
        llm.reset()
        llm.resume(parked)
        llm.reset()
    finally:
        parked.release()


WORKS = [completion, stream, generate, evaluate, save, park]


@pytest.mark.parametrize(
    ("work", "pool"), [(work, pool) for work in WORKS for pool in (None, 512) if pool or work in WORKS[:4]]
)
def test_while_it_is_used(
    work: Callable[[Any, list[int], Path], None], pool: int | None, llama: Any, tokens: Any, tmp_path: Path
) -> None:
    llm, begun = llama(kvflash=pool), threading.Event()

    def close() -> None:
        begun.wait()
        llm.close()

    def over_and_over() -> None:
        while True:
            work(llm, tokens.tolist(), tmp_path)
            begun.set()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(KVFlashError, match="this model is closed"):
        over_and_over()
    closing.join()
