"""A drafter with another tokenizer: it gets the target's text as bytes, and its tokens' scores map back by position.

Each target token decodes alone, so that the bytes of a chunk are known; special tokens and rows of media are no text. A
drafter token belongs to the chunk that holds its middle byte.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Callable, Sequence

import numpy as np

from ..arrays import Floats, Int32s, Int64s, common_prefix
from ..constants import CHUNK
from ..state.session import DrafterState, TokenAlignment
from .base import Keys, ScoreRequest
from .drafter import MIN_TOKENS, ReadingModel, Window
from .heads import split

logger = logging.getLogger("kvflash_ggml")


SETTLE = 256
"""Bytes at the end of the text that are encoded again when it grows: more text can merge tokens there."""


class TextReader:
    """Follows the target's text with a drafter of another tokenizer.

    decode: returns the bytes of a target token alone. encode: returns drafter tokens of valid UTF-8. spell: returns the
    bytes of a drafter token alone. opening: drafter tokens before any text; they stand for no byte.
    """

    def __init__(
        self,
        drafter: ReadingModel,
        *,
        decode: Callable[[int], bytes],
        encode: Callable[[bytes], Sequence[int]],
        spell: Callable[[int], bytes],
        opening: Sequence[int] = (),
    ) -> None:
        self._drafter = drafter
        self._decode = decode
        self._encode = encode
        self._spell = spell
        self._prefix = tuple(opening)
        self._opening = len(opening)
        self.window = Window(drafter)
        self._begin()

    def _begin(self) -> None:
        self._tokens: Int32s = np.empty(0, np.int32)
        self._ends: list[int] = []  # byte offset after each target token
        self.text = bytearray()
        self.drafted = list(self._prefix)  # the text in the drafter's tokens
        self.drafted_ends = [0] * self._opening
        self._settled = self._opening  # drafter tokens that more text does not change

    def read(self, tokens: Int32s) -> tuple[int, Floats] | None:
        self._take(tokens)
        self._draft()
        if len(self.drafted) < MIN_TOKENS:
            return None
        self.window.follow(np.array(self.drafted, np.int32))
        return 0, self._map(len(tokens) // CHUNK)

    def reset(self) -> None:
        self._begin()
        self.window.reset()

    def state(self) -> DrafterState:
        return self.window.state(
            TokenAlignment(
                ends=np.array(self._ends, np.int64),
                drafted_ends=np.array(self.drafted_ends, np.int64),
                settled=self._settled,
            )
        )

    def load(self, saved: DrafterState, tokens: Int32s) -> None:
        alignment, text = saved.alignment, bytearray()
        if alignment is None or len(alignment.ends) > len(tokens) or len(alignment.drafted_ends) != len(saved.text):
            logger.warning("the drafter reads the text again: it was saved with another tokenizer")
            return
        tokens = tokens[: len(alignment.ends)]
        ends = []
        for token in tokens.tolist():
            text += self._spelled(token)
            ends.append(len(text))
        final = self._opening <= alignment.settled <= len(saved.text)
        if not final or ends != alignment.ends.tolist() or not self.window.load(saved):
            return
        self._tokens, self._ends, self.text = tokens, ends, text
        self.drafted, self.drafted_ends = saved.text.tolist(), alignment.drafted_ends.tolist()
        self._settled = alignment.settled

    def close(self) -> None:
        self._drafter.close()

    def _take(self, tokens: Int32s) -> None:
        """Bring the bytes up to date."""
        same = common_prefix(self._tokens, tokens)
        del self._ends[same:]
        del self.text[self._ends[-1] if self._ends else 0 :]
        for token in tokens[same:].tolist():
            self.text += self._spelled(token)
            self._ends.append(len(self.text))
        self._tokens = tokens.copy()
        retained = len(self.drafted_ends)
        while retained > self._opening and self.drafted_ends[retained - 1] > len(self.text):
            retained -= 1
        self._settled = min(self._settled, retained)

    def _spelled(self, token: int) -> bytes:
        return self._decode(token) if token >= 0 else b""  # llama.cpp ends the process for the number of a media row

    def _draft(self) -> None:
        """Encode the text that is not settled yet."""
        while self._settled > self._opening and not starts_character(self.text, self._settled_bytes):
            self._settled -= 1
        at, end = self._settled_bytes, complete_characters(self.text)
        segment = same_length_utf8(bytes(self.text[at:end]))
        new = list(self._encode(segment)) if segment else []
        ends = at + spelled_ends(segment, [self._spell(token) for token in new])
        self.drafted[self._settled :] = new
        self.drafted_ends[self._settled :] = ends.tolist()
        while self._settled < len(self.drafted) and self.drafted_ends[self._settled] <= end - SETTLE:
            self._settled += 1
        self._settle_at_word()

    def _settle_at_word(self) -> None:
        """Go back a little to a token that begins with white space, where encoders split, if there is one."""
        count = self._settled
        while count > self._opening and self.drafted_ends[count - 1] > self._settled_bytes - SETTLE:
            at = self.drafted_ends[count - 1]
            if self.text[at : at + 1].isspace() and not self.text[at - 1 : at].isspace():
                self._settled = count
                return
            count -= 1

    @property
    def _settled_bytes(self) -> int:
        return self.drafted_ends[self._settled - 1] if self._settled else 0

    def _map(self, n_chunks: int) -> Floats:
        scores = self._drafter.score_tokens()
        base, skip = self.window.base, max(self.window.first, self._opening)
        scores = scores[max(0, skip - base) :]
        first = max(base, skip)
        ends = np.array(self.drafted_ends[first : first + len(scores)], np.int64)
        starts = np.array(([0, *self.drafted_ends])[first : first + len(scores)], np.int64)
        chunk_ends = np.array(self._ends[CHUNK - 1 : n_chunks * CHUNK : CHUNK], np.int64)
        return chunk_scores(chunk_ends, starts, ends, scores)


def chunk_scores(chunk_ends: Int64s, starts: Int64s, ends: Int64s, scores: Floats) -> Floats:
    """Return the best score of the tokens whose middle lies in each chunk, NaN where there are none; [n_chunks].

    chunk_ends: byte offset after each chunk, ascending. starts, ends, scores: of the drafter's tokens, in text order.
    """
    of = np.searchsorted(2 * chunk_ends, starts + ends, side="right")
    best = np.full(len(chunk_ends) + 1, -np.inf, np.float32)
    np.maximum.at(best, of, scores)
    best[np.isneginf(best)] = np.nan
    return best[:-1]


def spelled_ends(text: bytes, pieces: Sequence[bytes]) -> Int64s:
    """Return the byte offset in `text` after each piece, [len(pieces)]. The encoder may have put a space before the
    text.
    """
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    if lengths.sum() > len(text) and pieces[0][:1] == b" ":
        lengths[0] -= 1
    ends = np.minimum(np.cumsum(lengths), len(text))
    if pieces:
        ends[-1] = len(text)
    return ends


def starts_character(text: bytes | bytearray, at: int) -> bool:
    return at >= len(text) or text[at] & 0xC0 != 0x80


def complete_characters(text: bytes | bytearray) -> int:
    """Return the length without an unfinished character at the end."""
    for back in range(1, min(3, len(text)) + 1):
        lead = text[-back]
        if lead & 0xC0 != 0x80:
            wants = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
            return len(text) - back if wants > back else len(text)
    return len(text)


def same_length_utf8(text: bytes) -> bytes:
    """Return valid UTF-8 of the same length, with a question mark for each byte that is not part of a character."""
    return text.decode("utf-8", "kvflash_question_marks").encode()


def _question_marks(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "?" * (error.end - error.start), error.end


codecs.register_error("kvflash_question_marks", _question_marks)


def token_scores(keys: Keys, request: ScoreRequest) -> Floats:
    """Return the log of the largest share of attention that each token of the chunks gets, [n_chunks * CHUNK]."""
    mass = keys.score_keys(range(request.n_chunks), request)
    most = mass.max(axis=1, keepdims=True)
    total = most[:, 0] + np.log(np.exp(mass - most).sum(axis=1))
    scores = np.full(request.n_chunks * CHUNK, -np.inf, np.float32)
    layers = list(zip(split(request, keys.shapes), keys.shapes, strict=True))
    for chunk in range(request.n_chunks):
        part, at = scores[chunk * CHUNK : (chunk + 1) * CHUNK], 0
        for (queries, shape), rows in zip(layers, keys.read(chunk), strict=True):
            grouped = queries.reshape(request.rows, shape.n_head_kv, shape.group, shape.head)
            dots = np.einsum("rhgd,thd->hgrt", grouped, rows, optimize=True).reshape(-1, CHUNK)
            columns = slice(at, at + len(dots))
            np.maximum(part, (dots * shape.scale - total[columns, None]).max(axis=0), out=part)
            at += len(dots)
    return scores
