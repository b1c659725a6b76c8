"""Whether a free answer is right: whatever its case, punctuation and sentence, but not by naming several things."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"\d+(?:[.,:]\d+)*|[^\W\d_]+")
_DENIED = ("not", "never")


def judge(reply: str, answer: str, anchors: Sequence[str] = ()) -> bool | None:
    """True if the reply names the answer first, False if it names something else of the kind, None if neither yet.

    Something else is one of the anchors, any number if the answer holds one, or the answer itself after a "not".
    """
    words = _words(reply)
    wanted = _words(answer)
    others = [_words(rival) for rival in anchors]
    numeric = any(word[0].isdigit() for word in wanted)
    for at, word in enumerate(words):
        if words[at : at + len(wanted)] == wanted:
            return at == 0 or words[at - 1] not in _DENIED
        if any(words[at : at + len(other)] == other for other in others):
            return False
        if numeric and word[0].isdigit():
            return False
    return None


def finished(reply: str) -> str:
    """The reply without its last word, which may go on."""
    return re.sub(r"\S*\Z", "", reply)


def _words(text: str) -> list[str]:
    return [_singular(word.replace(",", "")) for word in _WORD.findall(text.lower())]


def _singular(word: str) -> str:
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    return word[:-1] if len(word) > 3 and word.endswith("s") else word
