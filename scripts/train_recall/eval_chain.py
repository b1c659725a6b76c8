"""Acceptance of the MTP head and the EAGLE3 drafter in llama.cpp (CPU), position by position.

  python -m scripts.train_recall.eval_chain TARGET.gguf DRAFT.gguf --filler FILE...
      [--n-gen 64] [--prompt-len 1500] [--chain 4]

Greedy speculation writes what greedy decoding writes, so the target runs once over each prompt and
its own continuation, and the chains are compared with that: nothing has to be rolled back in it.
Loop: hand the drafter one pair per committed token, draft a chain, keep the longest agreeing
prefix. A pair is a token and what the target knew just before it; EAGLE3's pairs stand at the
position of that knowledge, MTP's at the position of the token.
"""

from __future__ import annotations

import argparse
import ctypes
import random
from collections.abc import Sequence

import llama_cpp as lc
import numpy as np

from . import eval_niah
from .eval_dflash import Target, prompts

_lib = lc.llama_cpp._lib
_set_nextn = _lib._Z26llama_set_embeddings_nextnP13llama_contextbb
_set_nextn.argtypes, _set_nextn.restype = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool], None
_get_nextn = _lib._Z26llama_get_embeddings_nextnP13llama_context
_get_nextn.argtypes, _get_nextn.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)
_ids = _lib._Z28llama_model_target_layer_idsPK11llama_model
_ids.argtypes, _ids.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_int32)
_ids_n = _lib._Z30llama_model_target_layer_ids_nPK11llama_model
_ids_n.argtypes, _ids_n.restype = [ctypes.c_void_p], ctypes.c_uint32
UBATCH = 512


def observe(target: Target, tokens: list[int], layers: list[int]) -> np.ndarray:
    """What a drafter reads of the target at each of ``tokens``: ``layers`` inputs, or its last state."""
    lc.llama_memory_clear(target.mem, True)
    rows = []
    for a in range(0, len(tokens), 1024):
        part = tokens[a : a + 1024]
        _, feats = target.decode(part, a)
        if not layers:
            feats = np.ctypeslib.as_array(_get_nextn(target.ctx), (len(part), target.d)).copy()
        rows.append(feats)
    return np.concatenate(rows)


def watch(target: Target, draft: Chain) -> None:
    """Let the target keep what the drafter reads."""
    if draft.layers:
        target.extract(draft.layers)
    else:
        _set_nextn(target.ctx, True, False)


class Chain:
    """A drafter in a context of its own: an MTP head, or an EAGLE3 that borrows embeddings."""

    def __init__(self, path: str, target: Target, *, n_ctx: int, threads: int) -> None:
        mp = lc.llama_model_default_params()
        mp.load_mtp = True
        self.model = lc.llama_model_load_from_file(path.encode(), mp)
        assert self.model, "draft did not load"
        self.layers = [_ids(self.model)[i] for i in range(_ids_n(self.model))]
        cp = lc.llama_context_default_params()
        cp.n_ctx, cp.n_batch, cp.n_ubatch = n_ctx, 2048, UBATCH
        cp.n_threads, cp.n_threads_batch = threads, threads
        if self.layers:
            cp.ctx_other = target.ctx
        else:
            cp.ctx_type = lc.llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        self.ctx = lc.llama_init_from_model(self.model, cp)
        assert self.ctx, "no draft context"
        _set_nextn(self.ctx, True, True)
        self.mem = lc.llama_get_memory(self.ctx)
        self.d, self.n_vocab = target.d, target.n_vocab
        self.batch = lc.llama_batch_ext_init(self.ctx)
        self.state = np.zeros(self.d, np.float32)

    def close(self) -> None:
        """Free everything; before the target, whose context it may have borrowed from."""
        lc.llama_batch_ext_free(self.batch)
        lc.llama_free(self.ctx)
        lc.llama_model_free(self.model)

    def fuse(self, feats: np.ndarray) -> np.ndarray:
        """The rows [n, d] that pairs carry: EAGLE3 encodes its three layers to one."""
        if not self.layers:
            return feats
        out = []
        for a in range(0, len(feats), UBATCH):
            part = np.ascontiguousarray(feats[a : a + UBATCH])
            lc.llama_batch_ext_clear(self.batch)
            # the encoder does not read positions, but they must go on from those in memory
            pos = lc.llama_memory_seq_pos_max(self.mem, 0) + 1
            for i, row in enumerate(part, pos):
                k = lc.llama_batch_ext_add_embd(self.batch, 0, _embd(row))
                lc.llama_batch_ext_set_pos(self.batch, k, (ctypes.c_int32 * 4)(i, i, i, 0))
                lc.llama_batch_ext_set_output_embd(self.batch, k, True)
            self._run(lc.llama_cpp.LLAMA_PROCESS_TYPE_ENCODE)
            out.append(np.ctypeslib.as_array(_get_nextn(self.ctx), (len(part), self.d)).copy())
        return np.concatenate(out)

    def _run(self, kind: int) -> None:
        rc = lc.llama_process(self.ctx, kind, self.batch)
        assert rc == 0, rc

    def _decode(self, tokens: Sequence[int], states: np.ndarray, pos: int, *, output: bool) -> None:
        lc.llama_batch_ext_clear(self.batch)
        for i, (token, state) in enumerate(zip(tokens, states, strict=True)):
            k = lc.llama_batch_ext_add_token(self.batch, 0, token)
            lc.llama_batch_ext_set_pos(self.batch, k, (ctypes.c_int32 * 4)(pos + i, pos + i, pos + i, 0))
            lc.llama_batch_ext_set_embd_token(self.batch, k, _embd(state))
            lc.llama_batch_ext_set_output_logits(self.batch, k, output)
        self._run(lc.llama_cpp.LLAMA_PROCESS_TYPE_DECODE)

    def place(self, i: int) -> int:
        """The position of the pair of token ``i``."""
        return i - 1 if self.layers else i

    def feed(self, tokens: Sequence[int], rows: np.ndarray, start: int = 0) -> None:
        """Commit ``tokens`` from number ``start`` on; ``rows`` [n, d] begin with token 0's."""
        before = np.concatenate([np.zeros((1, self.d), np.float32), rows])
        start = max(start, 1 if self.layers else 0)  # EAGLE3 has no pair for the first token
        for a in range(start, len(tokens), UBATCH):
            b = min(a + UBATCH, len(tokens))
            self._decode(tokens[a:b], before[a:b], self.place(a), output=False)

    def draft(self, last: int, row: np.ndarray, index: int, *, n: int) -> np.ndarray:
        """Logits [n, vocab] of the greedy chain after token ``index``, ``last``; ``row`` is of the one before."""
        out, state = [], row
        for i in range(n):
            self._decode([last], state[None], self.place(index + i), output=True)
            logits = np.ctypeslib.as_array(lc.llama_get_logits_ith(self.ctx, 0), (self.n_vocab,)).copy()
            state = np.ctypeslib.as_array(_get_nextn(self.ctx), (self.d,)).copy()
            out.append(logits)
            last = int(logits.argmax())
        lc.llama_memory_seq_rm(self.mem, 0, self.place(index), -1)
        return np.stack(out)


def _embd(row: np.ndarray) -> object:
    data = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return lc.llama_cpp.llama_embd(data=data, n_rows=1, n_embd=row.size)


def greedy(target: Target, prompt: list[int], *, n: int) -> list[int]:
    """The prompt and n tokens of greedy decoding."""
    lc.llama_memory_clear(target.mem, True)
    tokens = list(prompt)
    for a in range(0, len(prompt), 1024):
        logits, _ = target.decode(prompt[a : a + 1024], a)
    for _ in range(n):
        tokens.append(int(logits[-1].argmax()))
        logits, _ = target.decode(tokens[-1:], len(tokens) - 1)
    return tokens


def accepted(draft: Chain, tokens: list[int], rows: np.ndarray, *, prompt: int, n: int) -> list[int]:
    """How many tokens of each chain of ``n`` were the target's, from the end of the prompt on."""
    lc.llama_memory_clear(draft.mem, True)
    out, done, index = [], 0, prompt
    while index + n < len(tokens):
        draft.feed(tokens[:index], rows, done)
        done = index
        guess = draft.draft(tokens[index], rows[index - 1], index, n=n).argmax(1)
        same = guess == tokens[index + 1 : index + 1 + n]
        out.append(int(same.cumprod().sum()))
        index += out[-1] + 1
    return out


def main() -> None:
    """The command line."""
    ap = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    ap.add_argument("target")
    ap.add_argument("draft")
    ap.add_argument("--filler", nargs="+", required=True)
    ap.add_argument("--n-gen", type=int, default=64)
    ap.add_argument("--prompt-len", type=int, default=1500)
    ap.add_argument("--chain", type=int, default=4)
    ap.add_argument("--trials", type=int, default=6)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--dump", default="", help="write tokens, features and the draft logits of a chain (npz)")
    args = ap.parse_args()
    n_ctx = args.prompt_len + args.n_gen + 256
    target = Target(args.target, n_ctx=n_ctx, threads=args.threads)
    draft = Chain(args.draft, target, n_ctx=n_ctx, threads=args.threads)
    print("draft:", f"EAGLE3, target layers {draft.layers}" if draft.layers else "MTP", "chain", args.chain)
    watch(target, draft)
    if args.dump:
        tokens = eval_niah.tokenize(target.llm, eval_niah.prompt_text())[:401]
        feats = observe(target, tokens[:-1], draft.layers)
        rows = draft.fuse(feats)
        draft.feed(tokens[:-1], rows)
        logits = draft.draft(tokens[-1], rows[-1], len(rows), n=args.chain)
        np.savez(args.dump, tokens=tokens, feats=feats, logits=logits)
        return
    rng = random.Random(3)
    chains: dict[str, list[int]] = {}
    for _ in range(args.trials):
        for kind, prompt in prompts(target, args.filler, length=args.prompt_len, rng=rng):
            tokens = greedy(target, prompt, n=args.n_gen)
            rows = draft.fuse(observe(target, tokens, draft.layers))
            chains.setdefault(kind, []).extend(accepted(draft, tokens, rows, prompt=len(prompt), n=args.chain))
    for kind, lengths in chains.items():
        got = np.array(lengths)
        share = " ".join(f"{100 * (got > i).mean():.0f}" for i in range(args.chain))
        print(
            f"{kind:7s} mean accepted {got.mean():.2f} of {args.chain}, {got.mean() + 1:.2f} tokens per target call, "
            f"percent of chains accepted to each position {share} ({len(got)} chains)"
        )


if __name__ == "__main__":
    main()
