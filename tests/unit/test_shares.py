"""How the blocks of a pool are dealt to texts with requests and idle ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.pool.shares import Claim, dealt, sizes

HOME = 8


def claims(*asked: tuple[int, int, int | None]) -> list[Claim]:
    """Of texts that hold so many blocks at home, keep so many of them, and want so many."""
    found = []
    for i, (held, kept, wants) in enumerate(asked):
        home = range(HOME * i, HOME * (i + 1))
        found.append(Claim(home=home, held=home[:held], kept=kept, wants=wants))
    return found


def of(*asked: tuple[int, int, int | None]) -> list[int]:
    return sizes(claims(*asked), HOME * len(asked))


def test_texts_with_requests_have_equal_shares_of_all_that_idle_ones_do_not_keep() -> None:
    assert of((8, 3, 99), (8, 3, None), (8, 3, None), (8, 3, None)) == [23, 3, 3, 3]
    assert of((8, 3, 99), (8, 3, 99), (8, 3, None), (0, 0, None)) == [14, 14, 4, 0]  # what cannot be halved
    assert of((8, 3, 99), (8, 3, 99), (8, 3, 99), (8, 3, 99)) == [8] * 4


def test_nobody_has_more_than_it_wants_and_idle_texts_keep_the_rest() -> None:
    assert of((2, 2, 3), (8, 3, None), (8, 3, None)) == [8, 8, 8]
    assert of((8, 3, 11), (8, 3, None), (8, 3, None), (8, 3, None)) == [11, 8, 8, 5]
    assert of((8, 3, 9), (8, 3, 99), (8, 3, None)) == [9, 12, 3]


def test_without_requests_all_stays() -> None:
    assert of((8, 3, None), (8, 3, None)) == [8, 8]


def test_blocks_that_cannot_leave_are_the_last_to_be_given() -> None:
    """The host is full: who asks has what is left, and nobody is in more blocks than there are."""
    full = [Claim(home=range(8), held=range(14), kept=14, wants=99), Claim(home=range(8, 16), wants=99)]
    assert sizes(full, 16) == [14, 2]


@given(
    texts=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.none() | st.integers(0, 60)), min_size=1, max_size=6
    ),
    places=st.randoms(use_true_random=False),
)
def test_any_deal(texts: list[tuple[int, int, int | None]], places: object) -> None:
    """Each block is of one text at most, each text keeps what it holds, and no request has less than at home."""
    total = HOME * len(texts)
    free = list(range(total))
    places.shuffle(free)  # type: ignore[attr-defined]
    asked = []
    for i, (held, kept, wants) in enumerate(texts):
        mine, free = free[:held], free[held:]
        asked.append(
            Claim(home=range(HOME * i, HOME * (i + 1)), held=mine, kept=min(kept, len(mine), HOME), wants=wants)
        )
    found = sizes(asked, total)
    assert sum(found) <= total
    for claim, size in zip(asked, found, strict=True):
        assert size >= claim.kept
        if claim.wants is None:
            assert size <= len(claim.held)
        else:
            assert HOME <= size <= max(HOME, claim.wants)
    running = [(size, claim.wants) for size, claim in zip(found, asked, strict=True) if claim.wants is not None]
    short = [size for size, wants in running if size < wants]
    if short:
        assert max(size for size, _ in running) <= max(min(short) + 1, HOME), "a share that is less than another's"
    shrunk = [
        Claim(home=one.home, held=one.held[:size], kept=one.kept, wants=one.wants)  # type: ignore[index]
        for one, size in zip(asked, found, strict=True)
    ]
    blocks = dealt(shrunk, found, total)
    assert [len(mine) for mine in blocks] == found
    assert len({block for mine in blocks for block in mine}) == sum(found)
    for claim, mine in zip(shrunk, blocks, strict=True):
        assert set(claim.held) <= set(mine)
        away = [block not in claim.home for block in mine]
        assert away == sorted(away), "blocks at home are handed out first"
