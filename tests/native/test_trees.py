"""Trees of drafts on the engine: a path is what a chain in its place would be, bit for bit, and so is what stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.harness import CHUNK, KV_TYPES, Bare, Logits, read_block, same_bits

from kvflash_ggml.pool.masks import leaving, moving, places
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.speculation.draft import Draft
from kvflash_ggml.speculation.tree import Rows, rows

Make = Callable[..., Bare]
ORDER = [5, 2, 7, 0, 6, 1, 3, 4]
"""Blocks of the pool in the order in which the text takes them."""
POOL = len(ORDER) * CHUNK


@dataclass
class Tree:
    """Rows behind a text, in slots of its blocks and of those that follow."""

    run: Bare
    tree: Rows
    where: Any
    slots: Any

    @property
    def start(self) -> int:
        return int(self.run.session.length)


def slot_of(pos: int) -> int:
    return ORDER[pos // CHUNK] * CHUNK + pos % CHUNK


def random_tree(seed: int, tokens: Any, most: int = 15) -> Rows:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, most + 1))
    parent = np.array([rng.integers(max(-1, i - 5), i) for i in range(n)], np.int32)
    draft = Draft(tokens[500 + np.arange(n)], parent, "a test", rng.uniform(-3, 0, n).astype(np.float32))
    return rows(int(tokens[499]), draft)


def plant(run: Bare, tree: Rows) -> Tree:
    where = places(tree.depth, tree.main)
    return Tree(run, tree, where, np.array([slot_of(run.session.length + int(at)) for at in where], np.int32))


def evaluate(it: Tree, tokens: Any | None = None, parent: Any | None = None) -> Logits:
    """The logits of each row: of the tree, or of other tokens that see something else from the same slots."""
    run, tree, n = it.run, it.tree, len(it.tree)
    engine, mask = run.session.engine, run.session.mask
    engine.token[:n] = tree.tokens if tokens is None else tokens
    engine.pos[:n] = it.start + tree.depth
    engine.slot[:n] = it.slots
    engine.output[:n], engine.query_row[:n] = 1, -1
    mask.fill_tree(it.start, it.slots, tree.parent if parent is None else parent)
    engine.step(n, 0, [])
    engine.synchronize()
    logits = [run._ctx.get_logits_ith(i) for i in range(n)]
    return np.stack([np.ctypeslib.as_array(x, shape=(run.n_vocab,)).copy() for x in logits])


def settle(it: Tree, path: Sequence[int]) -> None:
    engine = it.run.session.engine
    for at in leaving(path, it.where):
        engine.clear_cells(slot_of(it.start + at), 1)
    engine.settle(*([slot_of(it.start + at) for at in side] for side in moving(path, it.where)), [])


def path_to(tree: Rows, row: int) -> list[int]:
    path = [row]
    while path[0] > 0:
        path.insert(0, int(tree.parent[path[0]]))
    return path


def leaves(tree: Rows) -> list[int]:
    return sorted(set(range(len(tree))) - set(tree.parent.tolist()))


def text(bare: Make, tokens: Any, length: int, kind: str = "dense", kv: str = "f16", **settings: Any) -> Bare:
    run = bare(kind, pool=POOL, n_ctx=POOL, n_ubatch=96, type_kv=KV_TYPES[kv], block_order=ORDER, **settings)
    extend(run.session, tokens[:length] % run.n_vocab)
    for chunk, block in enumerate(ORDER):
        run.session.mask.place(block, chunk)
    return run


def images(run: Bare, first: int, count: int) -> list[bytes]:
    """Those of the chunks of some positions, as far as these: what lies beyond is nobody's."""
    engine, cut = run.session.engine, []
    for c in range(first // CHUNK, (first + count - 1) // CHUNK + 1):
        image = bytearray(read_block(run.session, ORDER[c]))
        engine.blank(memoryview(image), min(CHUNK, first + count - c * CHUNK))
        cut.append(bytes(image))
    return cut


LATENT = pytest.param("latent", "f16", marks=pytest.mark.slow)  # compiles the generator of such models first


@pytest.mark.parametrize(("kind", "kv"), [*(("dense", kv) for kv in KV_TYPES), LATENT])
@pytest.mark.parametrize(("seed", "length"), [*enumerate([100, 126, 190, 64, 255, 300])])
def test_a_path_is_a_chain_of_the_same_width_in_the_same_slots(
    seed: int, length: int, kind: str, kv: str, bare: Make, tokens: Any
) -> None:
    """The other rows are there, and change nothing: not in what it computes, and not in what it leaves behind."""
    run = text(bare, tokens, length, kind, kv)
    tree = random_tree(seed, tokens % run.n_vocab)
    whole = plant(run, tree)
    logits = evaluate(whole)
    engine = run.session.engine
    held = engine.cells(0, POOL)
    assert held[whole.slots].tolist() == (length + tree.depth).tolist()

    for leaf in leaves(tree):
        path = path_to(tree, leaf)
        off = np.setdiff1d(np.arange(len(tree)), path)
        alone = plant(text(bare, tokens, length, kind, kv), tree)
        others = tree.tokens.copy()
        others[off] = 7  # another token, that nobody of the path sees
        assert same_bits(evaluate(alone, others)[path], logits[path])

        again = plant(text(bare, tokens, length, kind, kv), tree)
        evaluate(again)
        settle(again, path)
        settle(alone, path)
        count = len(path)
        for one in (again, alone):
            cells = one.run.session.engine.cells(0, POOL)
            assert [cells[slot_of(p)] for p in range(length + count)] == list(range(length + count))
            assert np.count_nonzero(cells >= 0) == length + count
        assert images(again.run, length, count) == images(alone.run, length, count)
        steps = 64 if leaf == leaves(tree)[0] else 8
        assert same_bits(*(go_on(one.run, length + count, steps) for one in (again, alone)))


@pytest.mark.parametrize("seed", range(6))
def test_a_path_is_a_text_up_to_rounding(seed: int, bare: Make, tokens: Any) -> None:
    """Read token by token, each in its own place."""
    tree = random_tree(seed, tokens)
    whole = plant(text(bare, tokens, 190), tree)
    logits = evaluate(whole)
    path = path_to(tree, max(leaves(tree), key=lambda leaf: len(path_to(tree, leaf))))
    straight = text(bare, tokens, 190)
    alone = np.concatenate([straight.logits_along(tree.tokens[[row]]) for row in path])
    settle(whole, path)
    after = [go_on(run, 190 + len(path), 1) for run in (whole.run, straight)]
    for ours, theirs in zip([*logits[path], after[0]], [*alone, after[1]], strict=True):
        assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.999


def go_on(run: Bare, at: int, steps: int = 8) -> Logits:
    """The logits of a greedy answer, each token in its place."""
    engine, mask, out = run.session.engine, run.session.mask, []
    token = 9
    for pos in range(at, at + steps):
        slot = np.array([slot_of(pos)], np.int32)
        engine.token[0], engine.pos[0], engine.slot[0], engine.output[0], engine.query_row[0] = (
            token,
            pos,
            slot[0],
            1,
            -1,
        )
        mask.fill(pos, slot)
        engine.step(1, 0, [])
        out.append(run.row())
        token = int(out[-1].argmax())
    return np.stack(out)
