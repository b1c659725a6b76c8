"""Compare a chain that llama.cpp drafted with torch, from the features that llama.cpp read.

python -m scripts.train_recall.eval_chain TARGET.gguf DRAFT.gguf --filler FILE... --dump CHAIN.npz
python -m scripts.train_recall.compare_chain CKPT.pt TARGET.gguf CHAIN.npz
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from .chain import chain_forward
from .import_gguf import load_gguf
from .params import load, out_weight


def main() -> None:
    """The command line."""
    ap = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    for name in ("ckpt", "target", "chain"):
        ap.add_argument(name)
    args = ap.parse_args()
    cfg, p, _ = load(args.ckpt)
    target = load_gguf(args.target)[1]
    dump = np.load(args.chain)
    logits, feats = dump["logits"], torch.from_numpy(dump["feats"])
    tok = torch.from_numpy(np.concatenate([dump["tokens"], logits.argmax(1)])).long()
    with torch.no_grad():
        hidden = chain_forward(
            p,
            replace(cfg, chain=len(logits)),
            embed=target["token_embd.weight"],
            feats=F.pad(feats, (0, 0, 0, len(tok) - len(feats))),
            pos=torch.arange(len(tok)),
            seq=len(tok),
            anchors=torch.tensor([[len(dump["tokens"]) - 1]]),
            tok=tok,
            dt=torch.float32,
        )
        want = F.linear(hidden[0], out_weight(target)).numpy()
    print(
        f"max abs diff {np.abs(want - logits).max():.1e} mean {np.abs(want - logits).mean():.1e} "
        f"standard deviation {want.std():.2f} argmax agreement {(want.argmax(1) == logits.argmax(1)).mean():.0%}"
    )


if __name__ == "__main__":
    main()
