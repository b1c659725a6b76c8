"""Several threads, or several streams, on one `Llama`."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.harness import MODELS

from kvflash_ggml.errors import KVFlashError

CALLS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from kvflash_ggml import Llama

pool = {"kvflash": 1024, "kvflash_policy": "lru"} if sys.argv[2] == "pool" else {}
llm = Llama(sys.argv[1], n_ctx=1024, n_batch=64, n_threads=1, n_threads_batch=1, verbose=False, **pool)
texts = [" ".join(f"{word} {i}" for i in range(20)) for word in ("one", "two", "three", "four")] * 3

def answer(text):
    return llm.create_completion(text, max_tokens=16, temperature=0.0)["choices"][0]["text"]

expected = {text: answer(text) for text in texts}
with ThreadPoolExecutor(4) as threads:
    answers = list(threads.map(answer, texts))
print(answers == [expected[text] for text in texts], len(set(answers)))
"""


@pytest.mark.parametrize("pool", ["stock", "pool"])
def test_calls_of_several_threads_are_done_in_turns(pool: str) -> None:
    """In a process of its own, which it might take with it."""
    command = [sys.executable, "-c", CALLS, str(MODELS / "recall-qwen3-q8_0.gguf"), pool]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True "), done.stdout


LOADS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from kvflash_ggml import Llama

before = sys.stdout, os.fstat(1), os.fstat(2)
with ThreadPoolExecutor(4) as threads:
    for _ in range(8):
        threads.submit(Llama, sys.argv[1], n_ctx=64, n_threads=1, verbose=False)
assert (sys.stdout, os.fstat(1), os.fstat(2)) == before
print("here")
"""


def test_models_that_are_loaded_at_the_same_time_leave_the_streams() -> None:
    command = [sys.executable, "-c", LOADS, str(MODELS / "recall-qwen3-q8_0.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr


def stream(llm: Any, text: str) -> Any:
    return llm.create_completion(text, max_tokens=8, temperature=0.0, stream=True, logit_bias={llm.token_eos(): -1e9})


@pytest.mark.parametrize("pool", [None, 512])
def test_a_stream_whose_text_is_gone_says_so(pool: int | None, llama: Any) -> None:
    llm = llama(kvflash=pool)
    first, second = stream(llm, "one two three"), stream(llm, "one two three")
    next(first)
    next(second)
    with pytest.raises(KVFlashError, match="another call has used this model"):
        list(first)
    assert len(list(second)) >= 7
    state = llm.save_state()
    for change in (lambda: llm.eval([5]), llm.reset, lambda: llm.load_state(state)):
        third = stream(llm, "four five")
        next(third)
        change()
        with pytest.raises(KVFlashError, match="another call"):
            list(third)


def test_a_stream_may_be_read_by_any_thread(llama: Any) -> None:
    llm = llama(kvflash=512)
    alone = [piece["choices"][0]["text"] for piece in stream(llm, "one two three")]
    pieces = stream(llm, "one two three")
    texts = []
    for _ in alone:
        with ThreadPoolExecutor(1) as thread:  # another thread each time
            texts.append(thread.submit(next, pieces).result()["choices"][0]["text"])
    assert texts == alone


def test_a_stream_that_is_left_keeps_nobody_waiting(llama: Any) -> None:
    llm = llama(kvflash=512)
    left = stream(llm, "one two three")
    next(left)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(llm.create_completion, "four", max_tokens=2).result(timeout=60)
    state = llm.save_state()
    assert state.n_tokens == llm.n_tokens
    left.close()


REFUSED = """
import resource, sys
import numpy as np
from kvflash_ggml import Llama
from kvflash_ggml.policy.qk import QKScorer

class Spy(QKScorer):
    def score(self, request):
        if not hasattr(self, "masses"):
            row, heads = self._whole([0])[0], self._heads
            asks = lambda: self._keys.score_index(self._units, [row] * 4000, heads, request)
            self._keys._threads, self.masses = 64, asks()  # more than there are stacks of threads that have ended
            size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            before = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), before[1]))
            try:
                self.again = asks()
            finally:
                resource.setrlimit(resource.RLIMIT_AS, before)
        return super().score(request)

spy = Spy()
llm = Llama(sys.argv[1], n_ctx=2048, n_threads=1, verbose=False, kvflash=512, kvflash_policy=spy)
llm.eval(list(range(3, 803)))
print(np.array_equal(spy.masses, spy.again), spy.masses.shape[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read as Linux has it")
def test_a_score_needs_no_more_threads_than_there_are() -> None:
    """Where the system began no more, the process ended."""
    command = [sys.executable, "-c", REFUSED, str(MODELS / "recall-qwen3-q8_0.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "True 4000\n"), done.stderr
