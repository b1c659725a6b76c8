"""The remembering tokenizer says what the wrapped one says, and asks it for little."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.llama.tokenizer import SHORT, IncrementalTokenizer

BOS = 1
SPECIAL = 2
N_VOCAB = 8
PIECES = {
    BOS: b"",
    SPECIAL: b"",
    3: b" a",
    4: b"b",
    5: b" ",
    6: "é".encode()[:1],
    7: "é".encode()[1:],
}


class Plain:
    """As upstream's: pieces one after another, and no leading space after a leading BOS."""

    def __init__(self) -> None:
        self.asked = 0
        self.name = "plain"

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        self.asked += len(tokens)
        text = b"".join(b"<s>" if special and t == SPECIAL else PIECES[t] for t in tokens)
        return text[1:] if tokens and tokens[0] == BOS and text[:1] == b" " else text


def make() -> tuple[IncrementalTokenizer, Plain]:
    plain = Plain()
    return IncrementalTokenizer(plain, lambda: BOS, n_vocab=N_VOCAB), plain


def agree(tokenizer: IncrementalTokenizer, tokens: list[int], special: bool = False) -> None:
    want = Plain().detokenize(list(tokens), special=special)
    assert tokenizer.detokenize(tokens, prev_tokens=[3, 4], special=special) == want


def test_a_growing_completion_is_asked_for_once() -> None:
    tokenizer, plain = make()
    tokens: list[int] = []
    for n in range(2000):
        tokens.append(3 + n % 5)
        agree(tokenizer, tokens)
        agree(tokenizer, tokens)
    assert plain.asked <= 2000 + 2 * SHORT * (SHORT + 1)


def test_the_list_may_be_reused_by_the_caller() -> None:
    tokenizer, _ = make()
    tokens = [3, 4, 5]
    agree(tokenizer, tokens)
    tokens[0] = 4
    agree(tokenizer, tokens)
    tokens.append(6)
    agree(tokenizer, tokens)


@pytest.mark.parametrize(
    "lists",
    [
        [[3, 4], [3, 4, 5], [3]],  # shrinks
        [[3, 4], [3, 5, 4], [3, 5, 4, 4]],  # changes
        [[3, 4], [5, 4, 4]],  # same last known token, other text before it
        [[], [3], [], [3, 4]],
        [[BOS, 3], [BOS, 3, 5, 3]],
        [[BOS], [BOS, 3], [BOS, 3, 3]],
        [[3, BOS], [3, BOS, 5], [3, BOS, 5, 3]],
        [[6], [6, 7], [6, 7, 6]],  # bytes of one character
    ],
)
def test_other_lists(lists: list[list[int]]) -> None:
    tokenizer, _ = make()
    for tokens in lists:
        agree(tokenizer, tokens)


def test_special_tokens_are_not_mixed_with_plain_ones() -> None:
    tokenizer, _ = make()
    for special in (False, True, True, False):
        agree(tokenizer, [3, SPECIAL], special)
        agree(tokenizer, [3, SPECIAL, SPECIAL, 4], special)


def test_bos_inside_the_text() -> None:
    tokenizer, _ = make()
    agree(tokenizer, [3, 4])
    agree(tokenizer, [3, 4, BOS, 5, 3])


def test_streaming_asks_for_little() -> None:
    """Upstream's streaming asks for the whole completion and for its last token, in turn."""
    tokenizer, plain = make()
    tokens: list[int] = []
    for n in range(1000):
        tokens.append(3 + n % 5)
        agree(tokenizer, tokens)
        agree(tokenizer, tokens[-1:])
    assert plain.asked < 20_000


def test_everything_else_is_the_wrapped_one() -> None:
    tokenizer, _ = make()
    assert tokenizer.name == "plain"
    with pytest.raises(AttributeError):
        tokenizer.nothing  # noqa: B018


token: Any = st.sampled_from([SPECIAL, 3, 4, 5, 6, 7])


@given(st.data())
def test_random_lists(data: st.DataObject) -> None:
    tokenizer, _ = make()
    tokens: list[int] = []
    for _ in range(12):
        match data.draw(st.sampled_from(["grow", "grow", "shrink", "change", "new", "bos"])):
            case "grow":
                tokens = tokens + data.draw(st.lists(token, max_size=4))
            case "shrink":
                tokens = tokens[: data.draw(st.integers(0, len(tokens)))]
            case "change" if tokens:
                at = data.draw(st.integers(0, len(tokens) - 1))
                tokens = [*tokens[:at], data.draw(token), *tokens[at + 1 :]]
            case "new":
                tokens = data.draw(st.lists(token, max_size=6))
            case _:
                tokens = [BOS, *(t for t in tokens if t != BOS)]
        agree(tokenizer, tokens, data.draw(st.booleans()))
