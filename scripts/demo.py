#!/usr/bin/env python3
"""Ask a small model about a document far larger than its KV cache, and show what stayed on the device."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from residency_map import CHUNKS, draw

from kvflash_bench.tasks import zebra_task
from kvflash_ggml import Llama

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests/models/recall-qwen3-q8_0.gguf"
TEXT = ROOT / "tests/text/stdlib-docs.txt"
POOL, DOCUMENT = 1024, 24_000


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # the map, on a terminal that cannot show it
    # to show the pool at work, and in seconds: exact reading would compute all of the attention
    llm = Llama(str(MODEL), n_ctx=DOCUMENT + 1024, kvflash=POOL, kvflash_reading="pool", verbose=False)
    view = llm.kvflash
    assert view is not None
    print(view.banner(), file=sys.stderr)

    def tokenize(text: str) -> list[int]:
        return list(llm.tokenize(text.encode(), add_bos=False))

    task = zebra_task(TEXT.read_text(encoding="utf-8"), tokenize, n_tokens=DOCUMENT, depth=0.3)
    prompt = tokenize(task.prompt)
    print(f"\nA document of {len(prompt):,} tokens, read through a pool of {view.pool:,}.")
    print(f"At token {task.position:,} it says: {task.needle.sentence}")
    print(f"Question: {task.question.strip()}")

    def progress(done: int, total: int) -> None:
        print(f"\rreading {100 * done // total:3d} %", end="\n" if done == total else "", file=sys.stderr)

    llm.kvflash_progress = progress if sys.stderr.isatty() else None
    trace = view.record()
    began = time.perf_counter()
    answer = llm.create_completion(prompt, max_tokens=10, temperature=0.0)["choices"][0]["text"]
    seconds = time.perf_counter() - began
    right = task.is_correct(answer)
    print(f"Answer: {answer.strip().splitlines()[0] if answer.strip() else ''} ({'right' if right else 'wrong'})")

    print(f"\nRead and answered in {seconds:.1f} s.")
    print(f"On the device: {view.device_bytes / 2**20:.1f} MiB, constant; {view.resident} of {view.chunks} chunks.")
    print(f"On the host:   {view.host_bytes / 2**20:.1f} MiB; {view.page_outs} page-outs, {view.page_ins} page-ins.")
    needle = task.position // 64
    print(f"The chunk of that sentence, {needle}, is {'' if needle in view.resident_chunks else 'not '}resident.")

    print(f"\nWhich chunks were on the device after so many tokens, {CHUNKS} chunks a character: · none, ▁ one, █ all.")
    print(*draw(trace.moments, needle, "^ the sentence"), sep="\n")
    llm.close()
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
