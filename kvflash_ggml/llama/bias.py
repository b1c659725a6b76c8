"""Logit bias beside a logits processor: upstream loses both when given both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import llama_cpp


def with_bias(processor: llama_cpp.LogitsProcessorList | None, bias: dict[int, float]) -> llama_cpp.LogitsProcessorList:
    """The processors, and one that adds the bias of each token."""
    import llama_cpp

    added = {int(token): float(value) for token, value in bias.items()}
    return llama_cpp.LogitsProcessorList([*(processor or ()), _bias_processor(added)])


def _bias_processor(bias: dict[int, float]) -> Any:
    def add_bias(input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        biased: npt.NDArray[np.single] = scores.copy()
        for token, value in bias.items():
            biased[token] += value
        return biased

    return add_bias
