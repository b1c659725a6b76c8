"""Trees of drafts against all trees there are."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.speculation.costs import expected
from kvflash_ggml.speculation.draft import ROOT, Draft, chain, checked
from kvflash_ggml.speculation.tree import SIBLINGS, from_lattice, from_positions, main_chain, rows

Path = tuple[int, ...]


def worth(draft: Draft) -> float:
    """Tokens it wins by what the drafter thinks, the root's own among them."""
    assert draft.logp is not None
    return float(expected(draft, np.exp(draft.logp.astype(np.float64)))[-1])


def best_worth(paths: dict[Path, float], most: int) -> float:
    """That of the best tree of at most so many nodes, by trying all. paths: the probability of each."""
    best = 1.0
    for chosen in combinations(paths, min(most, len(paths))):
        there = set(chosen)
        if all(len(path) == 1 or path[:-1] in there for path in chosen):
            best = max(best, 1 + sum(paths[path] for path in chosen))
    return best


def log_shares(rng: np.random.Generator, *shape: int) -> np.ndarray:
    weights = rng.random((*shape[:-1], shape[-1] + 1)) ** 3 + 1e-6
    return np.log(weights / weights.sum(axis=-1, keepdims=True))[..., :-1].astype(np.float32)


def paths_of(draft: Draft) -> list[Path]:
    found: list[Path] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parent.tolist(), strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return found


@given(seed=st.integers(0, 10_000), most=st.integers(1, 8))
def test_no_tree_of_independent_positions_is_better(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    positions, k = [(1, 4), (2, 3), (3, 2), (8, 1)][seed % 4]
    tokens = np.stack([rng.permutation(50)[:k] for _ in range(positions)]).astype(np.int32)
    logp = log_shares(rng, positions, k)
    paths = {
        tuple(int(tokens[at, i]) for at, i in enumerate(path)): float(
            np.exp(sum(logp[at, i] for at, i in enumerate(path)))
        )
        for length in range(1, positions + 1)
        for path in product(range(k), repeat=length)
    }
    draft = from_positions(tokens, logp, most, "made up")
    assert len(draft) == min(most, len(paths))
    assert worth(draft) == pytest.approx(best_worth(paths, most), rel=1e-5)


@given(seed=st.integers(0, 10_000), most=st.integers(1, 8))
def test_no_tree_of_a_lattice_is_better(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    positions, k = [(1, 3), (2, 3), (3, 2)][seed % 3]
    tokens = np.stack([rng.permutation(50)[:k] for _ in range(positions)]).astype(np.int32)
    first, steps = log_shares(rng, k), log_shares(rng, positions - 1, k, k)
    paths = {}
    for length in range(1, positions + 1):
        for path in product(range(k), repeat=length):
            logp = first[path[0]] + sum(steps[at, i, j] for at, (i, j) in enumerate(pairwise(path)))
            paths[tuple(int(tokens[at, i]) for at, i in enumerate(path))] = float(np.exp(logp))
    draft = from_lattice(tokens, first, steps, most, "made up")
    assert worth(draft) == pytest.approx(best_worth(paths, most), rel=1e-5)
    for path, chance in zip(paths_of(draft), _path_shares(draft), strict=True):
        assert chance == pytest.approx(paths[path], rel=1e-4)


def _path_shares(draft: Draft) -> list[float]:
    return np.diff(expected(draft, np.exp(np.asarray(draft.logp, np.float64)))).tolist()


@given(seed=st.integers(0, 10_000), most=st.integers(0, 40))
def test_trees_can_be_verified_and_cut(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 12, (5, 12)).astype(np.int32)  # the same one may be there twice
    draft = from_positions(tokens, log_shares(rng, 5, 12), most, "made up")
    assert len(checked(draft, n_vocab=12, max_tokens=most)) == len(draft) == min(most, len(draft))
    assert max(np.bincount(draft.parent + 1, minlength=1)) <= SIBLINGS
    shares = _path_shares(draft)
    assert shares == sorted(shares, reverse=True), "the first n are the best tree of n"
    half = from_positions(tokens, log_shares(np.random.default_rng(seed), 5, 12), most // 2, "made up")
    assert len(half) == most // 2 or most > 40


def test_what_is_no_probability_is_left_out() -> None:
    tokens = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    logp = np.array([[-np.inf, -1, np.nan], [-0.5, -np.inf, -1]], np.float32)
    draft = from_positions(tokens, logp, 20, "made up")
    assert sorted(paths_of(draft)) == [(2,), (2, 4), (2, 6)]
    assert len(from_positions(tokens, np.full((2, 3), np.nan, np.float32), 20, "made up")) == 0
    empty = np.empty((0, 3), np.int32)
    assert len(from_lattice(empty, np.zeros(3, np.float32), np.empty((0, 3, 3), np.float32), 8, "made up")) == 0


@given(seed=st.integers(0, 10_000), n=st.integers(0, 30), sure=st.booleans())
def test_rows_are_in_order_of_depth(seed: int, n: int, sure: bool) -> None:
    rng = np.random.default_rng(seed)
    parent = np.array([rng.integers(-1, node) if node else -1 for node in range(n)], np.int32)
    logp = -rng.random(n).astype(np.float32) if sure else None
    draft = Draft(np.arange(100, 100 + n, dtype=np.int32), parent, "made up", logp)
    plan = rows(7, draft)
    assert len(plan) == n + 1
    assert (plan.tokens[0], plan.depth[0], plan.parent[0], plan.node[0]) == (7, 0, ROOT, ROOT)
    assert np.all(np.diff(plan.depth) >= 0)
    assert sorted(plan.node.tolist()) == list(range(-1, n))
    for row in range(1, n + 1):
        before, node = int(plan.parent[row]), int(plan.node[row])
        assert before < row
        assert plan.depth[row] == plan.depth[before] + 1
        assert plan.node[before] == draft.parent[node]
        assert plan.tokens[row] == draft.tokens[node]
    on = np.flatnonzero(plan.main)
    assert plan.depth[on].tolist() == list(range(len(on)))
    assert plan.node[on].tolist() == [ROOT, *main_chain(draft)]
    assert all(plan.parent[row] == before for before, row in pairwise(on))


def test_the_main_chain_is_the_best_child_of_the_best_child() -> None:
    tokens, parent = np.arange(5, dtype=np.int32), np.array([-1, -1, 0, 1, 1], np.int32)
    logp = np.log(np.array([0.3, 0.6, 0.9, 0.2, 0.7], np.float32))
    assert main_chain(Draft(tokens, parent, "made up", logp)) == [1, 4]
    assert main_chain(Draft(tokens, parent, "made up")) == [0, 2]
    assert rows(9, chain([1, 2, 3], "made up")).main.all()
