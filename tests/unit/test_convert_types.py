"""Numbers on their way from one type to another, and how accepted tokens are counted."""

from __future__ import annotations

import numpy as np
import pytest

from kvflash_ggml.convert.quantize import chosen
from kvflash_ggml.gguf import encoding, types
from kvflash_ggml.gguf.reader import Tensor
from kvflash_ggml.speculation import acceptance
from kvflash_ggml.speculation.acceptance import Continued
from kvflash_ggml.speculation.draft import Draft, chain


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [(0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81), (0x3F807FFF, 0x3F80), (0xBF818000, 0xBF82)],
    ids=["tie down", "tie up", "above", "below", "negative"],
)
def test_bf16_is_the_nearest_and_ties_go_to_the_even_one(bits: int, rounded: int) -> None:
    values = np.array([[bits]], np.uint32).view(np.float32)
    made = encoding.encode(values, types.BY_NAME["bf16"])
    assert made.view(np.uint16).item() == rounded


def test_q2_0_is_known() -> None:
    assert types.nbytes(types.BY_ID[42], (128, 3)) == types.nbytes(types.BY_NAME["q2_0"], (128, 3)) == 3 * 2 * 18


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_plain_types_come_back(kind: str) -> None:
    values = np.array([[0.5, -3.0, 0.0, 96.0]], np.float32)
    assert (
        encoding.decode(encoding.encode(values, types.BY_NAME[kind]), types.BY_NAME[kind]).tolist() == values.tolist()
    )


def test_a_mixture_keeps_values_and_ffn_down_larger() -> None:
    names = ("attn_q", "attn_v", "ffn_down", "ffn_up", "attn_norm")
    kinds = {}
    for name in names:
        tensor = Tensor(f"blk.3.{name}.weight", types.BY_NAME["bf16"], (256, 4) if name != "attn_norm" else (256,), 0)
        kinds[name] = chosen(tensor, "q4_k_m").name
    assert kinds == {"attn_q": "q4_k", "attn_v": "q6_k", "ffn_down": "q6_k", "ffn_up": "q4_k", "attn_norm": "bf16"}


class Guessing:
    """A drafter that knows the text, and is wrong after so many tokens. Checks that it is told of each token once."""

    size = 5

    def __init__(self, text: list[int], right: int) -> None:
        self._text = text
        self._right = right
        self.read = 0
        self.asked: list[int] = []

    def observe(self, start: int, tokens: np.ndarray, rows: np.ndarray) -> None:
        assert start == self.read
        assert tokens.tolist() == rows[:, 0].tolist() == self._text[start : start + len(tokens)]
        self.read += len(tokens)

    def propose(self, root: int, most: int) -> Draft:
        assert self._text[self.read] == root
        self.asked.append(self.read)
        rest = [*self._text[self.read + 1 : self.read + 1 + most], *[0] * most][:most]
        return chain([token if i < self._right else -1 for i, token in enumerate(rest)], "guess")


@pytest.mark.parametrize("right", [0, 2, 5])
def test_accepted_tokens_are_counted_a_step(right: int) -> None:
    text = list(range(100, 140))
    known = Continued(tokens=text, prompt=10, features=np.array(text, np.float32)[:, None])
    draft = Guessing(text, right)
    found = acceptance.answer(draft, [known], draft.size)  # type: ignore[arg-type]
    assert (found["accepted"], found["block"]) == (right, 5)
    assert draft.asked == list(range(10, 39, right + 1))


def test_a_block_that_the_text_ends_in_is_no_rejection() -> None:
    text = [1, 2, 3]
    known = Continued(tokens=text, prompt=1, features=np.array(text, np.float32)[:, None])
    assert acceptance.answer(Guessing(text, 5), [known], 5)["steps"] == 0  # type: ignore[arg-type]
