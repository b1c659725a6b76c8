"""The residency map that the demo prints."""

from __future__ import annotations

import numpy as np
from residency_map import CHUNKS, draw

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.trace.recorder import Moment


def moment(length: int, *resident: int) -> Moment:
    bits = np.zeros(1 + max(resident), np.bool_)
    bits[list(resident)] = True
    return Moment(length=length, bits=np.packbits(bits), recalled=(), scores=None, evicted_mass=None, generating=False)


def test_a_line_shows_how_many_of_a_characters_chunks_are_resident() -> None:
    whole = 4 * CHUNKS * CHUNK
    line, _ = draw([moment(whole, 0, *range(CHUNKS, CHUNKS + 3), *range(3 * CHUNKS, 4 * CHUNKS))], 0, "", rows=1)
    assert line == f"{whole:7,}  ▁▅·█"


def test_the_text_grows_and_its_last_character_may_be_short() -> None:
    """Full is what holds all there is."""
    first, last, _ = draw([moment(2 * CHUNK, 0, 1), moment((CHUNKS + 1) * CHUNK + 1, 0, CHUNKS)], 0, "", rows=2)
    assert first.split()[1] == "█"
    assert last.split()[1] == "▁▁"


def test_the_mark_is_below_its_chunk() -> None:
    *_, line, mark = draw([moment(20 * CHUNKS * CHUNK, 7 * CHUNKS)], 7 * CHUNKS + 2, "^ here")
    assert line.index("▁") == mark.index("^")
    assert mark.endswith("^ here")


def test_the_last_line_is_the_end_and_the_others_lie_evenly() -> None:
    """The end of a prompt is read again, so lengths do not only grow."""
    moments = [moment(n * CHUNK, 0) for n in (10, 20, 30, 40, 39, 40)]
    lengths = [int(line.split()[0].replace(",", "")) for line in list(draw(moments, 0, "", rows=4))[:-1]]
    assert lengths == [n * CHUNK for n in (10, 20, 30, 40)]
