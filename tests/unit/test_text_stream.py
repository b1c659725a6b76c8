"""From tokens to text that is final."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.batching.answer import TextStream
from kvflash_ggml.batching.messages import Logprob


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[str, str | None]:
    stream, out = TextStream(stop), ""
    for piece in pieces:
        out += stream.push(piece)[0]
        if stream.stopped is not None:
            break
    return out + stream.finish()[0], stream.stopped


def test_characters_come_whole() -> None:
    stream = TextStream()
    data = "é€😀".encode()
    assert [stream.push(data[i : i + 1])[0] for i in range(len(data))] == ["", "é", "", "", "€", "", "", "", "😀"]


def test_half_a_character_at_the_end_is_marked() -> None:
    assert run(["€".encode()[:2]]) == ("\ufffd", None)


def test_a_stop_string_across_tokens() -> None:
    assert run([b"one <", b"st", b"op> two"], ("<stop>",)) == ("one ", "<stop>")


def test_the_first_of_several() -> None:
    assert run([b"a END b STOP"], ("STOP", "END")) == ("a ", "END")


def test_what_only_begins_like_a_stop_string_is_text() -> None:
    assert run([b"a <s", b"t", b"art"], ("<stop>",)) == ("a <start", None)
    assert run([b"a <s"], ("<stop>",)) == ("a <s", None)


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 5)))
def test_it_does_not_matter_how_the_bytes_are_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    data, pieces = text.encode("utf-8", "replace"), []
    for cut in [*cuts, len(data) + 1]:
        pieces.append(data[:cut])
        data = data[cut:]
    whole = text.encode("utf-8", "replace").decode()
    # the one that is complete first ends the text
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    out, stopped = run(pieces, tuple(stops))
    if not ends:
        assert (out, stopped) == (whole, None)
        return
    assert stopped is not None
    assert whole.startswith(out + stopped)
    assert all(stop not in out for stop in stops)


def told(token: int) -> Logprob:
    return Logprob(token=token, piece=b"", logprob=0.0)


def test_what_is_told_of_a_token_comes_with_its_text() -> None:
    stream = TextStream(("<stop>",))
    assert stream.push(b"a", told(1)) == ("a", (told(1),))
    assert stream.push(b"<st", told(2)) == ("", ())
    assert stream.push(b"x", told(3)) == ("<stx", (told(2), told(3)))
    assert stream.push(b"b<st", told(4)) == ("b", (told(4),))
    assert stream.push(b"op>", told(5)) == ("", ())
    assert stream.finish() == ("", ())
