"""What a preview reads of a prompt: the passages that share words with its end, or that a small model looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvflash_ggml.arrays import Int32s, Int64s
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.drafter import model as drafters
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.llama.llama import Llama
from kvflash_ggml.llama.preview import FIRST, LAST, STRIDE, best, passages
from kvflash_ggml.policy.drafter import TargetReader
from kvflash_ggml.runtime.model import weights_of

Pick = Callable[[Sequence[int]], Int64s]
"""From a prompt to the positions that are read, in order."""


@contextmanager
def pick_of(llm: Llama, share: float | None, drafter: Path | None) -> Iterator[Pick | None]:
    """How an arm chooses what it reads; None where it reads all. share: 0 to 1. drafter: ranks in the place of words.

    The least that a preview of the package reads is left out, so that shares of short documents can be measured.
    """
    if share is None:
        yield None
    elif drafter is None:
        yield lambda prompt: passages(np.asarray(prompt, np.int32), int(share * len(prompt)))
    else:
        settings = {"beside": weights_of(llm), "n_ctx": llm.n_ctx(), "settings": llm.context_params}
        offload, repack = llm.model_params.n_gpu_layers != 0, llm.model_params.use_extra_bufts
        with closing(drafters.load(drafter, offload=offload, repack=repack, **settings)) as reader:
            yield lambda prompt: looked_at(reader, np.asarray(prompt, np.int32), int(share * len(prompt)))


def looked_at(reader: TargetReader, ids: Int32s, most: int) -> Int64s:
    """The positions of the passages that the end of a prompt looks at in a small model, `most` of them at most.

    The small model reads what is new since the prompt before: of a document's first question all of it.
    """
    found = reader.read(ids)
    if found is None:
        raise ConfigError(f"a prompt of {len(ids)} tokens is too short for a small model: use a longer document")
    first, scores = found
    chunks = np.full(-(-len(ids) // CHUNK) + 1, -np.inf)
    chunks[first : first + len(scores)] = np.where(np.isfinite(scores), scores, -np.inf)
    starts = np.arange(FIRST, max(FIRST, len(ids) - LAST), STRIDE)
    return best(len(ids), most, starts, _of_passages(chunks, starts))


def _of_passages(chunks: npt.NDArray[np.float64], starts: Int64s) -> npt.NDArray[np.float64]:
    """Scores above 0 of passages by the logs of those of chunks: a passage between two has the mean of their shares."""
    shares = np.exp(chunks)
    return (shares[starts // CHUNK] + shares[(starts + CHUNK - 1) // CHUNK]) / 2
