"""Speculative decoding with the DFlash draft in llama.cpp (CPU), checked against plain greedy.

  python -m scripts.train_recall.eval_dflash TARGET.gguf DRAFT.gguf --filler FILE...
      [--n-gen 64] [--prompt-len 1500]

The draft may lack token embeddings and output head: it then borrows the target's
through context_params.ctx_other.  Loop: inject the target's layer inputs of every
committed position into the draft's KV cache, draft one block [last token, mask * 15],
verify with one target call, keep the longest agreeing prefix.
The functions for layer inputs are C++ exports of libllama (src/llama-ext.h), looked up
by their mangled names.
"""

from __future__ import annotations

import argparse
import ctypes
import random
from collections.abc import Iterator, Sequence

import llama_cpp as lc
import numpy as np

from . import eval_niah

_lib = lc.llama_cpp._lib
_set_inp = _lib._Z30llama_set_embeddings_layer_inpP13llama_contextjb
_set_inp.argtypes, _set_inp.restype = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool], None
_get_inp = _lib._Z30llama_get_embeddings_layer_inpP13llama_contextj
_get_inp.argtypes, _get_inp.restype = (
    [ctypes.c_void_p, ctypes.c_uint32],
    ctypes.POINTER(ctypes.c_float),
)
_ids = _lib._Z28llama_model_target_layer_idsPK11llama_model
_ids.argtypes, _ids.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_int32)
_ids_n = _lib._Z30llama_model_target_layer_ids_nPK11llama_model
_ids_n.argtypes, _ids_n.restype = [ctypes.c_void_p], ctypes.c_uint32


class Target:
    """The model that decides; it gives logits and, where asked, the inputs of some layers."""

    def __init__(self, path: str, *, n_ctx: int, threads: int) -> None:
        self.llm = eval_niah.load(path, n_ctx=n_ctx, threads=threads)
        self.ctx, self.n_vocab = self.llm.ctx, self.llm.n_vocab()
        self.d = lc.llama_model_n_embd(self.llm.model)
        self.layers: list[int] = []
        self.mem = lc.llama_get_memory(self.ctx)

    def extract(self, layers: list[int]) -> None:
        """Keep the inputs of ``layers`` from now on."""
        self.layers = layers
        for i in layers:
            _set_inp(self.ctx, i, True)

    def decode(self, toks: list[int], pos: int, *, all_logits: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """(logits of all or the last token, features [n, layers * d])."""
        n = len(toks)
        b = lc.llama_batch_init(n, 0, 1)
        b.n_tokens = n
        for i, t in enumerate(toks):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = t, pos + i, 1, 0
            b.logits[i] = all_logits or i == n - 1
        rc = lc.llama_decode(self.ctx, b)
        assert rc == 0, rc
        rows = range(n) if all_logits else [n - 1]
        logits = np.stack(
            [np.ctypeslib.as_array(lc.llama_get_logits_ith(self.ctx, i), (self.n_vocab,)).copy() for i in rows]
        )
        feats = [np.ctypeslib.as_array(_get_inp(self.ctx, i), (n, self.d)).copy() for i in self.layers]
        lc.llama_batch_free(b)
        return logits, np.concatenate(feats, 1) if feats else None


class Draft:
    """The block-diffusion draft in a context of its own, which borrows the target's embeddings."""

    def __init__(self, path: str, target: Target, *, n_ctx: int, threads: int) -> None:
        mp = lc.llama_model_default_params()
        self.model = lc.llama_model_load_from_file(path.encode(), mp)
        assert self.model, "draft did not load"
        cp = lc.llama_context_default_params()
        cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_threads, cp.n_threads_batch = (
            n_ctx,
            2048,
            512,
            threads,
            threads,
        )
        cp.ctx_other = target.ctx
        self.ctx = lc.llama_init_from_model(self.model, cp)
        assert self.ctx, "no draft context"
        self.layers = [_ids(self.model)[i] for i in range(_ids_n(self.model))]
        lc.llama_set_causal_attn(self.ctx, False)
        self.mem = lc.llama_get_memory(self.ctx)
        self.n_vocab = target.n_vocab
        self.mask = lc.llama_vocab_mask(lc.llama_model_get_vocab(self.model))
        buf = ctypes.create_string_buffer(32)
        lc.llama_model_meta_val_str(self.model, b"dflash.block_size", buf, 32)
        self.block = int(buf.value)
        self.batch = lc.llama_batch_ext_init(self.ctx)

    def _run(self) -> None:
        rc = lc.llama_process(self.ctx, lc.llama_cpp.LLAMA_PROCESS_TYPE_DECODE, self.batch)
        assert rc == 0, rc

    def inject(self, feats: np.ndarray, pos: int) -> None:
        """Put the target features of positions ``pos`` and on into the KV cache."""
        feats = np.ascontiguousarray(feats, np.float32)
        for a in range(0, len(feats), 512):
            lc.llama_batch_ext_clear(self.batch)
            for i in range(a, min(len(feats), a + 512)):
                e = lc.llama_cpp.llama_embd(
                    data=feats[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
                    n_rows=1,
                    n_embd=feats.shape[1],
                )
                k = lc.llama_batch_ext_add_embd(self.batch, 0, e)
                assert k >= 0, k
                lc.llama_batch_ext_set_pos(self.batch, k, (ctypes.c_int32 * 4)(pos + i, pos + i, pos + i, 0))
            self._run()

    def draft(self, last: int, pos: int, *, n: int) -> np.ndarray:
        """Logits [n, vocab] of the n tokens after ``last``, which stands at ``pos``."""
        lc.llama_batch_ext_clear(self.batch)
        for i in range(n + 1):
            k = lc.llama_batch_ext_add_token(self.batch, 0, last if i == 0 else self.mask)
            lc.llama_batch_ext_set_pos(self.batch, k, (ctypes.c_int32 * 4)(pos + i, pos + i, pos + i, 0))
            lc.llama_batch_ext_set_output_logits(self.batch, k, True)
        self._run()
        out = [
            np.ctypeslib.as_array(lc.llama_get_logits_ith(self.ctx, i), (self.n_vocab,)).copy() for i in range(1, n + 1)
        ]
        lc.llama_memory_seq_rm(self.mem, 0, pos, -1)
        return np.stack(out)


def prompts(
    target: Target, files: Sequence[str], *, length: int, rng: random.Random
) -> Iterator[tuple[str, list[int]]]:
    """(kind, prompt tokens): recall questions, verbatim copying, plain continuation."""
    llm = target.llm
    fill = eval_niah.Filler(llm, files, rng=rng)
    toks, facts = eval_niah.haystack(llm, fill, rng=rng, n=length)
    ask = "".join(f"\nWhat is the access code for {x}? The access code for {x} is {v}." for x, v in facts[:1])
    yield (
        "recall",
        toks + eval_niah.tokenize(llm, ask + f"\nWhat is the access code for {facts[1][0]}?"),
    )
    block = fill.take(300)
    yield (
        "copy",
        eval_niah.tokenize(llm, "Text:\n") + block + eval_niah.tokenize(llm, "\nText again:\n") + block[:24],
    )
    yield "text", fill.take(length)


def plain(target: Target, prompt: list[int], *, n: int) -> list[int]:
    """n tokens of greedy decoding."""
    lc.llama_memory_clear(target.mem, True)
    for a in range(0, len(prompt), 1024):
        logits, _ = target.decode(prompt[a : a + 1024], a)
    out = []
    for i in range(n):
        out.append(int(logits[-1].argmax()))
        logits, _ = target.decode(out[-1:], len(prompt) + i)
    return out


def speculative(target: Target, draft: Draft, *, prompt: list[int], n: int) -> tuple[list[int], list[int]]:
    """n tokens, and how many drafted tokens every target call accepted."""
    lc.llama_memory_clear(target.mem, True)
    lc.llama_memory_clear(draft.mem, True)
    for a in range(0, len(prompt), 1024):
        logits, feats = target.decode(prompt[a : a + 1024], a)
        draft.inject(feats, a)
    out, pos, accepted = [int(logits[-1].argmax())], len(prompt), []
    while len(out) < n:
        guess = draft.draft(out[-1], pos, n=draft.block - 1).argmax(1).tolist()
        logits, feats = target.decode([out[-1], *guess], pos, all_logits=True)
        best = logits.argmax(1).tolist()
        k = 0
        while k < len(guess) and guess[k] == best[k]:
            k += 1
        accepted.append(k)
        out += best[: k + 1]
        draft.inject(feats[: k + 1], pos)
        pos += k + 1
        lc.llama_memory_seq_rm(target.mem, 0, pos, -1)
    return out[:n], accepted


def main() -> None:
    """The command line."""
    ap = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    ap.add_argument("target")
    ap.add_argument("draft")
    ap.add_argument("--filler", nargs="+", required=True)
    ap.add_argument("--n-gen", type=int, default=64)
    ap.add_argument("--prompt-len", type=int, default=1500)
    ap.add_argument("--trials", type=int, default=6)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--dump", default="", help="write features, tokens and the draft logits of one block (npz)")
    args = ap.parse_args()
    n_ctx = args.prompt_len + args.n_gen + 256
    target = Target(args.target, n_ctx=n_ctx, threads=args.threads)
    draft = Draft(args.draft, target, n_ctx=n_ctx, threads=args.threads)
    print("draft: target layers", draft.layers, "block", draft.block, "mask token", draft.mask)
    target.extract(draft.layers)
    rng = random.Random(3)
    if args.dump:
        toks = eval_niah.tokenize(target.llm, eval_niah.prompt_text())[:500]
        lc.llama_memory_clear(target.mem, True)
        _, feats = target.decode(toks[:400], 0)
        draft.inject(feats, 0)
        np.savez(
            args.dump,
            tokens=np.array(toks),
            feats=feats,
            logits=draft.draft(toks[400], 400, n=draft.block - 1),
        )
        return
    stats: dict[str, list[int]] = {}
    for _ in range(args.trials):
        for kind, prompt in prompts(target, args.filler, length=args.prompt_len, rng=rng):
            a = plain(target, prompt, n=args.n_gen)
            b, acc = speculative(target, draft, prompt=prompt, n=args.n_gen)
            s = stats.setdefault(kind, [0, 0, 0, 0])
            s[0] += sum(acc)
            s[1] += len(acc)
            s[2] += a == b
            s[3] += 1
    for kind, (tot, calls, same, n) in stats.items():
        print(
            f"{kind:7s} mean accepted {tot / calls:.2f} of {draft.block - 1} per block, "
            f"{tot / calls + 1:.2f} tokens per target call, "
            f"output equals plain greedy in {same}/{n}"
        )


if __name__ == "__main__":
    main()
