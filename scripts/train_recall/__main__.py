"""Train tiny long-context recall models from scratch (one GPU, minutes).

Two architectures that llama.cpp knows:

  qwen3   dense decoder: full attention with QK-norm, SwiGLU
  qwen35  hybrid decoder: gated delta net on most layers, gated full attention
          (partial rotary) on every `full_interval`-th layer

and drafters for speculative decoding, trained against a frozen one of these:

  dflash  block diffusion over layer inputs of qwen3
  eagle3  one layer over fused layer inputs of qwen3, a token at a time
  mtp     the "nextn" layer of qwen35, a token at a time

Design notes
  * Parameters live in a plain dict whose keys are the GGUF tensor names, so
    the exporter has nothing to rename.
  * Every step has the same number of tokens, whatever the sequence length: all
    compiled regions work on flat [tokens, ...] tensors and are compiled once.
    Only attention and the delta-net scan see the length.
  * The delta net runs in chunks of 64 tokens.  Inside a chunk everything is
    batched matrix products; between chunks the state obeys S' = M S + N with a
    64x64 matrix M per chunk, which a small Triton kernel scans (the same
    kernel, reversed and transposed, is its own backward pass).
  * Part of the sequences is plain text, the rest are synthetic recall tasks
    (see synth.py).  Positions are often skipped (PoSE) so that rotary
    distances up to 131072 are seen at every sequence length.
  * All phases are boxed by wall-clock time, not by step count.

  python -m scripts.train_recall --out DIR --plan qwen3:165,qwen35:195,scorer:45,dflash:45
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sysconfig
import time
from pathlib import Path

import torch

from .chain import train_chain
from .config import TARGETS, Config, Settings
from .corpus import build_corpus
from .dflash import train_dflash
from .evaluation import evaluate
from .loader import Loader
from .params import Params, load, save
from .regions import compile_regions
from .synth import Synth
from .training import train

HERE = Path(__file__).resolve().parent
LIBRARY = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")})
VALIDATION_SEED = 12345
DEFAULT = Settings(out="")
MAX_CACHE_BYTES = 16_000_000

# the smallest run that goes through every part: two or three steps a model, on a CPU
SMOKE = dict(
    device="cpu",
    compile=0,
    workers=1,
    plan="qwen3:3,scorer:3,qwen35:3,dflash:3,eagle3:3,mtp:3",
    roots=sysconfig.get_path("stdlib"),
    max_bytes=3_000_000,
    stages=[(1.0, (256, 512))],
    niah="512",
    tokens=1024,
    dflash_seq=512,
    dflash_anchors=4,
    chain_anchors=4,
    trials=2,
)


def parse_args() -> argparse.Namespace:
    """The command line; ``--smoke`` only changes defaults."""
    ap = argparse.ArgumentParser(
        prog="train_recall",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    ap.add_argument("--out", required=True, help="folder for the checkpoints")
    ap.add_argument("--data", default=str(HERE), help="folder with tokenizer.json and words.json")
    ap.add_argument("--corpus", default="corpus", help="folder of the tokenized corpus; made once")
    ap.add_argument("--plan", default="qwen3:200,scorer:60,qwen35:240", help="name:seconds[:init.pt],...")
    ap.add_argument("--roots", default=",".join(LIBRARY), help="folders of text to train on")
    ap.add_argument("--max-bytes", type=int, default=260_000_000)
    ap.add_argument("--workers", type=int, default=13)
    ap.add_argument("--lr", type=float, default=DEFAULT.lr)
    ap.add_argument("--warm", type=int, default=DEFAULT.warm)
    ap.add_argument("--hold", type=float, default=DEFAULT.hold)
    ap.add_argument("--tokens", type=int, default=DEFAULT.tokens, help="tokens of the target per step")
    ap.add_argument("--seed", type=int, default=DEFAULT.seed)
    ap.add_argument("--device", default=DEFAULT.device, choices=("cuda", "cpu"))
    ap.add_argument("--compile", type=int, default=1)
    ap.add_argument("--cache", default="", help="torch.compile cache artifact to load")
    ap.add_argument("--stages", type=json.loads, default=None, help="[[until, [lengths]], ...]")
    ap.add_argument("--niah", default="2048,8192,32768,65536,131072", help="lengths to evaluate")
    ap.add_argument("--target", default="", help="checkpoint or GGUF file for a plan of drafters alone")
    ap.add_argument("--smoke", action="store_true", help="a few tiny steps of everything on a CPU")
    ap.set_defaults(
        dflash_seq=DEFAULT.dflash_seq,
        dflash_anchors=DEFAULT.dflash_anchors,
        chain_anchors=DEFAULT.chain_anchors,
        trials=DEFAULT.trials,
    )
    if ap.parse_known_args()[0].smoke:
        ap.set_defaults(**SMOKE)
    return ap.parse_args()


def load_target(path: str, device: str) -> tuple[Config, Params]:
    """A model to train a drafter against, from a checkpoint or a GGUF file."""
    if path.endswith(".gguf"):
        from .import_gguf import load_gguf

        return load_gguf(path, device)[:2]
    return load(path, device)[:2]


def save_cache(path: str) -> None:
    """Keep the compiled graphs for the next run, where torch can and they are small."""
    with contextlib.suppress(Exception):
        artifacts = torch.compiler.save_cache_artifacts()
        assert artifacts is not None
        if len(artifacts[0]) < MAX_CACHE_BYTES:
            Path(path).write_bytes(artifacts[0])
        print("compile cache", len(artifacts[0]), flush=True)


def main() -> None:
    """Build the corpus if it is missing, then train and evaluate the plan's models in order."""
    args = parse_args()
    run = Settings(**{k: v for k, v in vars(args).items() if k in Settings.__slots__})
    t0 = time.time()
    torch.set_float32_matmul_precision("high")
    for folder in (args.corpus, args.out):
        Path(folder).mkdir(parents=True, exist_ok=True)
    if not Path(args.corpus, "train_tok.npy").exists():
        build_corpus(
            [r for r in args.roots.split(",") if Path(r).is_dir()],
            args.data,
            out_dir=args.corpus,
            max_bytes=args.max_bytes,
            procs=os.cpu_count() or 1,
        )
    print(f"corpus ready {time.time() - t0:.1f}s", flush=True)
    loader = Loader(args.data, args.corpus, workers=args.workers, seed=args.seed, tokens=run.tokens)
    synth = Synth.open(args.data, args.corpus, seed=VALIDATION_SEED, split="valid")
    if run.compile:
        if args.cache and Path(args.cache).exists():
            torch.compiler.load_cache_artifacts(Path(args.cache).read_bytes())
        compile_regions()
    lengths = [int(x) for x in args.niah.split(",") if x]
    done = {}
    for item in args.plan.split(","):
        name, seconds, *init = item.split(":")
        if name in TARGETS:
            tcfg, target = done.get(TARGETS[name]) or load_target(args.target, run.device)
            if name == "dflash":
                train_dflash(float(seconds), target, tcfg=tcfg, loader=loader, run=run)
            else:
                train_chain(name, float(seconds), target, tcfg=tcfg, loader=loader, run=run)
            continue
        start = load(init[0], run.device)[1] if init else None
        cfg, p, info = train(name, float(seconds), loader=loader, run=run, init=start)
        done[name] = (cfg, p)
        info["niah_torch"] = evaluate(name, cfg, p, synth=synth, lengths=lengths, run=run)
        save(p, cfg, path=f"{run.out}/{name}.pt", info=info)
        print(f"total {time.time() - t0:.1f}s", flush=True)
    if run.compile:
        save_cache(f"{run.out}/compile_cache.bin")
    loader.close()


if __name__ == "__main__":
    main()
