"""Train a DFlash drafter for a plain Llama on its own answers: chats of it, then a drafter that knows how they go on.

python -m scripts.train_draft.prompts MODEL.gguf prompts.npz TEXT...
python -m scripts.train_draft MODEL.gguf prompts.npz OUT.gguf --mask TOKEN
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import torch

from . import export, training
from .answers import Prompts, collect
from .drafter import Params, Plan, begin, fresh
from .target import load
from .training import Settings


def parse_args() -> argparse.Namespace:
    """The command line."""
    ap = argparse.ArgumentParser(
        prog="train_draft", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__
    )

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(x) for x in text.split(","))

    ap.add_argument("model")
    ap.add_argument("prompts")
    ap.add_argument("out")
    ap.add_argument("--layers", type=numbers, help="the target's, that its own begin as; default: 1 and the last two")
    ap.add_argument("--taps", type=numbers, help="the target's, whose inputs it reads, ascending; default: 4 spread")
    ap.add_argument("--mask", type=int, required=True, help="a token that texts have not")
    ap.add_argument("--block", type=int, default=8)
    ap.add_argument("--vocab", type=int, default=16384, help="tokens that it can draft; 0 for all")
    ap.add_argument("--length", type=int, default=512, help="tokens of a chat")
    ap.add_argument("--batch", type=int, default=2048, help="chats at once")
    ap.add_argument("--rounds", type=int, default=16, help="of so many chats, at most")
    ap.add_argument("--chat-seconds", type=float, default=80)
    ap.add_argument("--train-seconds", type=float, default=140)
    ap.add_argument("--rows", type=int, default=64, help="chats of a step")
    ap.add_argument("--anchors", type=int, default=64, help="blocks of each")
    ap.add_argument("--tries", default="fresh:1e-2", help="beginning:rate,... of which the best is taken")
    ap.add_argument("--try-seconds", type=float, default=9, help="for each, if there are several")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return ap.parse_args()


def main() -> None:
    """Chats, then the drafter, which is written whenever it has become better."""
    args, begun = parse_args(), time.time()
    torch.manual_seed(args.seed)
    target = load(args.model, device=args.device, dtype=torch.bfloat16)
    prompts = Prompts.load(args.prompts, args.device)
    last = target.shape.layers - 1
    taps = args.taps or tuple(2 + round(i * (last - 2) / 3) for i in range(4))
    plan = Plan(args.layers or (1, last - 1, last), taps, args.block, args.mask)
    print(f"[model] {target.shape} after {time.time() - begun:.1f}s", flush=True)
    store = collect(
        target, prompts, taps=plan.taps, n=args.length, batch=args.batch, rounds=args.rounds,
        seconds=args.chat_seconds, seed=args.seed,
    )  # fmt: skip
    run = Settings(seconds=args.try_seconds, rows=args.rows, anchors=args.anchors, seed=args.seed)
    ids = training.vocabulary(store, args.vocab, target)

    def parameters(kind: str) -> Params:
        torch.manual_seed(args.seed)
        p = begin(target, plan, store.tokens[:16].long())
        return fresh(p) if kind == "fresh" else p

    found = dict[str, float]()
    ways = args.tries.split(",")
    for way in ways if len(ways) > 1 else ():
        kind, rate = way.split(":")
        tried = replace(run, lr=float(rate))
        found[way] = training.train(target, plan, store, parameters(kind), ids=ids, run=tried, save=None)
        print(f"[try] {way}: loss {found[way]:.3f}", flush=True)
    kind, rate = min(found or ways, key=lambda way: found.get(way, math.inf)).split(":")
    run = replace(run, seconds=args.train_seconds, lr=float(rate))

    def save(p: Params) -> None:
        out, model = Path(args.out), Path(args.model)
        export.write(out, model, target, plan, p, ids=ids if args.vocab else None)
        print(f"[saved] {out}: {out.stat().st_size / 1e6:.1f} MB after {time.time() - begun:.0f}s", flush=True)

    training.train(target, plan, store, parameters(kind), ids=ids, run=run, save=save)


if __name__ == "__main__":
    main()
