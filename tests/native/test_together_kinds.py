"""Several texts on one pool of models that keep more than pooled attention: sliding windows and recurrent state."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from support.beside import PROMPT, Make, alike, all_finite, answers, check, decode, logits_of, make, spoil, spread
from support.harness import Bare, Logits, same_bits
from support.rounding import ON_GPU

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import NotFinite
from kvflash_ggml.sequence import prefill, restore, together
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.step import LAST

KINDS = ["iswa", "hybrid"]


@pytest.mark.parametrize("kind", ["dense", *KINDS])
def test_what_neighbours_say_changes_no_bit(kind: str, bare: Make, tokens: Any) -> None:
    """The same shapes, the same sequence, other texts beside mine."""
    clock = {"tau": 64} if ON_GPU else {}  # scores so late that nothing is computed again, in steps of another shape
    found = []
    for beside in (0, 3000):
        run = make(bare, 3, kind=kind, **clock)
        prompts = [tokens[beside : beside + PROMPT], tokens[1500 : 1500 + PROMPT], tokens[beside + 100 :][:1000]]
        script = np.stack([tokens[beside + 5000 :][:40], tokens[6000:6040], tokens[beside + 7000 :][:40]], 1)
        rows = answers(run, prompts, 40, script)
        text = run.sessions[1]
        assert text.paging.page_ins > 0
        found.append(([row[1] for row in rows], [chunk.block for chunk in text.table.chunks]))
    assert found[0][1] == found[1][1]
    assert all(same_bits(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_alone_or_among_others_is_a_matter_of_rounding(kind: str, bare: Make, tokens: Any) -> None:
    """Also where only some of them go on, so that states change their places.

    Chunks of random weights score nearly the same, so rounding may choose others: such a text is compared no further.
    """
    among = make(bare, 4, kind=kind)
    prompts = [tokens[1000 * i :][: PROMPT - 100 * i] for i in range(4)]
    lone, parted = [], set()
    for i, prompt in enumerate(prompts):
        lone.append(make(bare, 1, kind=kind))
        if resident_along(lone[i].session, prompt) != resident_along(among.sessions[i], prompt):
            parted.add(i)
    at = 5000
    for running in ([0, 1, 2, 3], [0, 2], [3], [1, 3], [3, 1, 0], [2, 0, 1, 3]):
        for _ in range(6):
            script = tokens[at : at + len(running)].tolist()
            at += len(running)
            rows = decode(among, [among.sessions[i] for i in running], script)
            for i, token, row in zip(running, script, rows, strict=True):
                (its,) = decode(lone[i], [lone[i].session], [token])
                if among.sessions[i].table.resident_chunks != lone[i].session.table.resident_chunks:
                    parted.add(i)
                assert i in parted or alike(its, row)
    assert len(parted) < 4
    assert among.sessions[0].paging.page_ins > 0


def resident_along(text: Any, prompt: Any) -> list[list[int]]:
    """Read a prompt. The chunks that were resident behind each step."""
    found = []
    for _ in prefill.computed(prefill.pieces(text, prompt), partial(prefill.compute, text)):
        found.append(sorted(text.table.resident_chunks))
    return found


@pytest.mark.parametrize("kind", ["dense", *KINDS])
def test_a_text_that_was_swapped_out_goes_on_bit_for_bit(kind: str, bare: Make, tokens: Any) -> None:
    """Another text has its place meanwhile. llama.cpp chooses cells of a shared window: there it is up to rounding."""
    found = []
    for swapped in (False, True):
        run = make(bare, 3, kind=kind)
        for i, text in enumerate(run.sessions):
            extend(text, tokens[1000 * i :][: PROMPT - 200 * i])
        rows = [decode(run, run.sessions, tokens[4000 + 3 * at :][:3]) for at in range(10)]
        if swapped:
            text = run.sessions[1]
            saved = restore.state(text)
            try:
                text.reset()
                extend(text, tokens[8000:8700])
                restore.load(text, saved)
            finally:
                saved.release()
            check(run)
        rows += [decode(run, run.sessions, tokens[5000 + 3 * at :][:3]) for at in range(10)]
        found.append([x for row in rows for x in row])
    same = alike if kind == "iswa" else same_bits
    assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["dense", *KINDS])
def test_a_text_goes_on_as_another_sequence(kind: str, bare: Make, tokens: Any) -> None:
    """Swapped out and in again: the same chunks are resident. Also from a context of one sequence, and into one."""
    run, alone = make(bare, 3, kind=kind), make(bare, 1, kind=kind)
    one, _, other = run.sessions
    extend(one, tokens[:PROMPT])
    extend(other, tokens[2000:2600])
    saved = restore.state(one)
    try:
        restore.load(other, saved)
        state = one.engine.get_state(seq=0)
        extend(alone.session, tokens[:PROMPT])
        its = alone.session.engine.get_state(seq=0)
        alone.session.engine.set_state(state, PROMPT, seq=0)
        one.engine.set_state(its, PROMPT, seq=0)
    finally:
        saved.release()
    for token in tokens[PROMPT : PROMPT + 16]:
        mine, moved = decode(run, [one, other], [token, token])
        (lone,) = decode(alone, [alone.session], [token])
        assert alike(mine, moved)
        assert alike(mine, lone)
    assert one.table.resident_chunks == other.table.resident_chunks


@pytest.mark.parametrize("planes", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_several_texts_go_back_each_by_itself(kind: str, planes: int, bare: Make, tokens: Any) -> None:
    """Some keep their rows while others go on: the state of a text is its own, wherever it lies."""
    planes *= kind == "hybrid"
    clock = {"tau": 64}  # drafts and plain steps are scored behind other tokens, which may page in other chunks
    run, plain = make(bare, 3, kind=kind, planes=planes, **clock), make(bare, 3, kind=kind, **clock)
    for one in (run, plain):
        for i, text in enumerate(one.sessions):
            extend(text, tokens[1000 * i :][:700])
    at = [1000 * i + 700 for i in range(3)]
    for turn in range(6):
        steps = []
        for i, text in enumerate(run.sessions):
            rows = np.concatenate([tokens[at[i] : at[i] + 2], tokens[9000 + turn : 9002 + turn]])
            steps.append((text, text.prepare_drafts(rows.astype(np.int32), None)))
        assert together.compute(steps) == [None] * 3
        kept = [1 + (turn + i) % 2 for i in range(3)]
        for i, text in enumerate(run.sessions):
            for row in range(kept[i]):
                text.keep(row)
            at[i] += kept[i]
        for i in (0, 2) if turn % 2 else (2,):  # the others settle behind a step of these
            (row,) = decode_one(run, i, tokens[at[i]])
            its = read_to(plain, i, tokens[1000 * i + 700 : at[i] + 1])
            assert alike(its, row)
            at[i] += 1
    for i, text in enumerate(run.sessions):
        text.settle()
        assert text.length == at[i] - 1000 * i or kind == "hybrid"
        extend(text, tokens[1000 * i + text.length : at[i] + 1])
        assert alike(read_to(plain, i, tokens[1000 * i + 700 : at[i] + 1]), logits_of(run, text))
    check(run)


def decode_one(run: Bare, i: int, token: int) -> list[Logits]:
    text = run.sessions[i]
    text.settle()
    return decode(run, [text], [token])


def read_to(plain: Bare, i: int, answer: Any) -> Logits:
    """The logits of a text that goes on with these tokens after its prompt, one at a time."""
    text = plain.sessions[i]
    rows: list[Logits] = []
    for token in answer[text.length - 700 :]:
        rows = decode(plain, [text], [token])
    return rows[0]


@pytest.mark.parametrize("spreads", [False, True])
@pytest.mark.parametrize("kind", ["dense", *KINDS, "latent heads", "of qwen3moe"])
def test_numbers_that_are_none_reach_nobody_else(kind: str, spreads: bool, bare: Make, tokens: Any) -> None:
    """A block of one text is spoiled: its neighbours go on as without that, in K and V too, and so does the text that
    follows it.

    spreads: as on a GPU, all texts of the step are spoiled. Recurrent state is read again from a checkpoint then.
    """
    found, pages = [], []
    spreads |= ON_GPU
    for spoiled in (False, True):
        run = make(bare, 3, kind=kind)
        ids = tokens % run.n_vocab
        engine, victim, others = run.session.engine, run.sessions[1], run.sessions[::2]
        if spreads:
            spread(engine)
        texts = [np.concatenate([ids[1000 * i :][:400], ids[4000 + i :][:1]]) for i in range(3)]
        for text, its in zip(run.sessions, texts, strict=True):
            extend(text, its[:400])
        rows = [decode(run, run.sessions, ids[4000:4003])]
        if spoiled:
            spoil(engine, victim.table.chunks[0].block)
        for at in range(1 if spreads else 3):
            steps = []
            for i, text in enumerate(run.sessions):
                text.begin(1)
                texts[i] = np.concatenate([texts[i], ids[5000 + 3 * at + i :][:1]])
                steps.append((text, text.prepare_answer(texts[i][-1:], LAST)))
            errors = together.compute(steps)
            assert isinstance(errors[1], NotFinite) == spoiled
            assert kind == "hybrid" or victim.length == (401 if spoiled else 402 + at)
            for text, its, error in zip(others, texts[::2], errors[::2], strict=True):
                if error is not None:
                    assert (kind, spreads) == ("hybrid", True), "it could have been computed again alone"
                    extend(text, its[text.length :])
                assert text.length == 402 + at
            check(run)
        victim.reset()
        assert all_finite(engine)
        rows += [decode(run, others, ids[6000 + 2 * at :][:2]) for at in range(3)]
        pages.append([pages_of(text) for text in others])
        extend(victim, ids[7000:7400])
        rows += [decode(run, run.sessions, ids[8000 + 3 * at :][:3]) for at in range(6)]
        found.append([x for row in rows for x in row])
    exact = not (spreads or kind == "iswa")
    same = same_bits if exact else alike
    assert all(same(a, b) for a, b in zip(*found, strict=True))
    assert pages[0] == pages[1] or not exact


def pages_of(text: Any) -> bytes:
    """K and V of the text's rows in the pool."""
    engine, size = text.engine, text.engine.info.page_bytes
    image = engine.alloc(size)
    data = b""
    for c, chunk in enumerate(text.table.chunks):
        if chunk.block >= 0:
            engine.wait(engine.page_out([chunk.block], [image]))
            engine.blank(engine.view(image, size), min(CHUNK, text.length - c * CHUNK))
            data += bytes(engine.view(image, size))
    engine.free(image)
    return data
