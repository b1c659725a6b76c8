"""Measure GGUF models with llama.cpp on the CPU (llama-cpp-python; set LLAMA_CPP_LIB_PATH).

  python -m scripts.train_recall.eval_niah ...
    tokens  MODEL.gguf TOKENIZER.json FILE...     tokenizer parity
    dump    MODEL.gguf OUT.npz [--f32-kv]         logits of a fixed prompt
    compare CKPT.pt OUT.npz                       ... against torch (needs torch)
    niah    MODEL.gguf --filler FILE... [--lengths 2048,8192,32768]
    chat    MODEL.gguf

NIAH: each haystack holds three needles, at 10, 50 and 90 % depth. The haystack is evaluated once,
the state saved, and each question asked on a restored copy; a trial counts only if greedy decoding
gives exactly the seven digits. With --single, every question has a haystack of its own with only
its needle.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llama_cpp import Llama

WORDS = (
    "amber falcon copper meadow velvet harbor crimson glacier hollow lantern marble orchid quiet "
    "summit rustic beacon silver thicket solar canyon timber willow urban cobalt wintry pebble "
    "young juniper"
)
NAMES = WORDS.split()


def load(path: str, *, n_ctx: int, threads: int, f32_kv: bool = False) -> Llama:
    """A quiet ``Llama``; ``f32_kv`` also turns flash attention off, for the tightest comparison."""
    import llama_cpp

    kw: dict[str, Any] = dict(
        model_path=path,
        n_ctx=n_ctx,
        n_batch=2048,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        logits_all=False,
    )
    if f32_kv:
        kw.update(type_k=0, type_v=0, flash_attn=False)
    return llama_cpp.Llama(**kw)


def tokenize(llm: Llama, text: str, special: bool = False) -> list[int]:
    """Tokens without a leading bos."""
    return llm.tokenize(text.encode(), add_bos=False, special=special)


def prompt_text() -> str:
    """A little code, 22 facts, and the first 7 of them again: the same text every time."""
    rng = random.Random(5)
    lines = ["def load(path, mode='r'):\n    with open(path, mode) as f:\n        return f.read()\n"]
    for _ in range(22):
        a, b = rng.sample(NAMES, 2)
        lines.append(f"The access code for {a} {b} is {rng.randrange(10**7):07d}.\n")
    return "".join(lines) + "".join(lines[1:8])


def cmd_tokens(args: argparse.Namespace) -> None:
    """Compare with the Hugging Face tokenizer, token for token."""
    from tokenizers import Tokenizer

    tk = Tokenizer.from_file(args.tokenizer)
    llm = load(args.model, n_ctx=256, threads=1)
    texts = [Path(f).read_text(encoding="utf-8", errors="replace")[:20000] for f in args.files]
    texts += [
        "  leading\n\n\n   spaces\t\ttabs \r\n crlf",
        "x=1234567 0x7fff 3.14159e-10",
        "I'll they'RE we'd",
        "naïve café — “quotes” … 你好 мир 😀 e\u0301",
        "",
        " ",
        "\n",
        "a\u00a0b\u2003c",
        "<b>&amp;</b>//#@!$%^*()",
        prompt_text(),
    ]
    bad = total = 0
    for t in texts:
        want = tk.encode(t, add_special_tokens=False).ids
        got = tokenize(llm, t)
        total += len(want)
        if want != got:
            bad += 1
            i = next(
                (k for k, (x, y) in enumerate(zip(want, got, strict=False)) if x != y),
                min(len(want), len(got)),
            )
            print(
                "MISMATCH",
                repr(t[:40]),
                "at",
                i,
                [tk.decode([x]) for x in want[i : i + 4]],
                [tk.decode([x]) for x in got[i : i + 4]],
            )
    special = "<|im_start|>user\nHi<|im_end|>\n<|mask|><|endoftext|>"
    same = tk.encode(special, add_special_tokens=False).ids == tokenize(llm, special, True)
    print(f"tokenizer parity: {len(texts) - bad}/{len(texts)} texts, {total} tokens, specials {same}")


def cmd_dump(args: argparse.Namespace) -> None:
    """Write the logits of every token of the fixed prompt."""
    import llama_cpp

    llm = load(args.model, n_ctx=2048, threads=args.threads, f32_kv=args.f32_kv)
    toks = tokenize(llm, prompt_text())[:640]
    n = len(toks)
    # one batch asking for the logits of every token
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i, t in enumerate(toks):
        batch.token[i], batch.pos[i], batch.logits[i] = t, i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    rc = llama_cpp.llama_decode(llm.ctx, batch)
    assert rc == 0, rc
    nv = llm.n_vocab()
    out = np.stack([np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, i), (nv,)).copy() for i in range(n)])
    np.savez(args.out, tokens=np.array(toks), logits=out)
    print(f"dumped {n} tokens, std {out.std():.3f}")


def cmd_compare(args: argparse.Namespace) -> None:
    """Print how far dumped logits are from torch on the same weights."""
    import torch

    from .forward import logits_cpu
    from .params import load as load_checkpoint

    torch.set_num_threads(args.threads)
    cfg, p, _ = load_checkpoint(args.ckpt)
    z = np.load(args.out)
    ref = logits_cpu(p, cfg, z["tokens"].tolist()).numpy()
    d = np.abs(ref - z["logits"])
    top = np.sort(ref, 1)
    margin = top[:, -1] - top[:, -2]
    same = ref.argmax(1) == z["logits"].argmax(1)
    worst = margin[~same].max() if (~same).any() else 0
    print(
        f"{len(ref)} tokens: max abs diff {d.max():.2e}, mean {d.mean():.2e}, argmax agreement "
        f"{same.mean() * 100:.2f}% (largest torch margin where they differ {worst:.1e})"
    )


class Filler:
    """Stretches of consecutive lines of some files."""

    def __init__(self, llm: Llama, files: Sequence[str], *, rng: random.Random) -> None:
        self.rng = rng
        texts = [Path(f).read_text(encoding="utf-8", errors="replace")[:400_000] for f in files]
        self.lines = "\n".join(texts).split("\n")
        self.llm = llm

    def take(self, n: int) -> list[int]:
        """n tokens of consecutive lines from a random place."""
        out, i = [], self.rng.randrange(len(self.lines))
        while len(out) < n:
            chunk = "\n".join(self.lines[i : i + 40]) + "\n"
            out += tokenize(self.llm, chunk)
            i = (i + 40) % len(self.lines)
        return out[:n]


DEPTHS = (0.1, 0.5, 0.9)


def haystack(
    llm: Llama, filler: Filler, *, rng: random.Random, n: int, depths: Sequence[float] = DEPTHS
) -> tuple[list[int], list[tuple[str, str]]]:
    """About n tokens with one needle per depth, and the needles as (name, digits)."""
    names = rng.sample([f"{a} {b}" for a in NAMES[::2] for b in NAMES[1::2]], len(depths))
    facts = [(x, f"{rng.randrange(10**7):07d}") for x in names]
    room = n - len(depths) * 24 - 40
    fill = filler.take(room)
    toks: list[int] = []
    at = 0
    for depth, (x, v) in zip(depths, facts, strict=True):
        cut = int(depth * room)
        toks += fill[at:cut] + tokenize(llm, f"\nThe access code for {x} is {v}.\n")
        at = cut
    return toks + fill[at:], facts


def greedy(llm: Llama, toks: list[int], *, n: int) -> list[int]:
    """Evaluate ``toks``, then decode n tokens by argmax."""
    import llama_cpp

    out: list[int] = []
    llm.eval(toks)
    for _ in range(n):
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),))
        out.append(int(logits.argmax()))
        llm.eval(out[-1:])
    return out


def cmd_niah(args: argparse.Namespace) -> None:
    """Print hits per depth and context length, and the first misses."""
    lengths = [int(x) for x in args.lengths.split(",")]
    llm = load(args.model, n_ctx=max(lengths) + 256, threads=args.threads)
    for n in lengths:
        rng = random.Random(args.seed + n)
        filler = Filler(llm, args.filler, rng=rng)
        ok, t0, misses = [0, 0, 0], time.time(), []
        for trial in range(args.trials):
            groups = [(d,) for d in DEPTHS] if args.single else [DEPTHS]
            for depths in groups:
                llm.reset()
                toks, facts = haystack(llm, filler, rng=rng, n=n, depths=depths)
                llm.eval(toks)
                state = llm.save_state() if len(facts) > 1 else None
                for depth, (x, v) in zip(depths, facts, strict=True):
                    if state is not None:
                        llm.load_state(state)
                    ask = tokenize(llm, f"\nWhat is the access code for {x}? The access code for {x} is")
                    got = llm.detokenize(greedy(llm, ask, n=9)).decode(errors="replace")
                    good = got.strip()[:7] == v and not got.strip()[7:8].isdigit()
                    ok[DEPTHS.index(depth)] += good
                    if not good:
                        asked = f"depth {depth}", f"asked {x}, want {v}, got {got!r}"
                        misses.append((trial, *asked, "needles", facts))
            if time.time() - t0 > args.max_seconds:
                break
        done = trial + 1
        hits = " ".join(f"{k}/{done}" for k in ok)
        print(
            f"{Path(args.model).name} ctx {n}: depth 10/50/90 % = {hits} "
            f"({(time.time() - t0) / done:.1f} s per haystack)",
            flush=True,
        )
        for m in misses[:6]:
            print("   miss", m, flush=True)


def cmd_chat(args: argparse.Namespace) -> None:
    """Print a few replies and a continuation."""
    llm = load(args.model, n_ctx=4096, threads=args.threads)
    for q in [
        "Hello",
        "The access code for amber falcon is 4812345. What is the access code for amber falcon?",
        "Repeat this: The river runs to the sea.",
    ]:
        r = llm.create_chat_completion([{"role": "user", "content": q}], temperature=0, max_tokens=40)
        print(repr(q), "->", repr(r["choices"][0]["message"]["content"]))
    r = llm("import os\n\ndef main():\n", max_tokens=60, temperature=0)
    print(repr(r["choices"][0]["text"]))


def main() -> None:
    """The command line."""
    ap = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    sub = ap.add_subparsers(dest="cmd", required=True)

    def cmd(name, fn, *pos):
        s = sub.add_parser(name)
        for a in pos:
            s.add_argument(a, **({"nargs": "*"} if a == "files" else {}))
        s.add_argument("--threads", type=int, default=2)
        s.set_defaults(fn=fn)
        return s

    cmd("tokens", cmd_tokens, "model", "tokenizer", "files")
    cmd("dump", cmd_dump, "model", "out").add_argument("--f32-kv", action="store_true")
    cmd("compare", cmd_compare, "ckpt", "out")
    s = cmd("niah", cmd_niah, "model")
    s.add_argument("--filler", nargs="+", required=True)
    s.add_argument("--lengths", default="2048,8192,32768")
    s.add_argument("--trials", type=int, default=16)
    s.add_argument("--seed", type=int, default=100)
    s.add_argument("--single", action="store_true")
    s.add_argument("--max-seconds", type=float, default=1e9)
    cmd("chat", cmd_chat, "model")
    args = ap.parse_args()
    args.fn(args)


if __name__ == "__main__":
    main()
