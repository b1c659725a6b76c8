"""Worker processes that build training batches ahead of the GPU."""

from __future__ import annotations

import multiprocessing as mp
import os
from typing import Any

from .config import TOKENS
from .synth import Batch, Synth


def data_worker(data_dir: str, corpus_dir: str, *, seed: int, tokens: int, jobs: Any, out: Any) -> None:
    """Build a batch of each length that arrives on ``jobs``, until None arrives."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    synth = Synth.open(data_dir, corpus_dir, seed=seed)
    while (seq := jobs.get()) is not None:
        out.put(synth.batch(seq, tokens))


class Loader:
    """Batches of the sequence lengths asked for, in the order in which the workers finish them."""

    def __init__(self, data_dir: str, corpus_dir: str, *, workers: int, seed: int = 1, tokens: int = TOKENS) -> None:
        ctx = mp.get_context("fork")
        self.jobs, self.out = ctx.Queue(), ctx.Queue(maxsize=2 * workers)
        self.procs = [
            ctx.Process(
                target=data_worker,
                args=(data_dir, corpus_dir),
                kwargs=dict(seed=seed * 1000 + i, tokens=tokens, jobs=self.jobs, out=self.out),
                daemon=True,
            )
            for i in range(workers)
        ]
        for process in self.procs:
            process.start()
        self.pending = 0

    def request(self, seq: int) -> None:
        """Ask for one batch of sequences of ``seq`` tokens."""
        self.jobs.put(seq)
        self.pending += 1

    def get(self) -> Batch:
        """Wait for the next finished batch."""
        self.pending -= 1
        batch: Batch = self.out.get()
        return batch

    def drain(self) -> None:
        """Throw away what is still under way."""
        while self.pending:
            self.get()

    def close(self) -> None:
        """End the workers."""
        for process in self.procs:
            process.terminate()
