"""Train the byte-level BPE tokenizer (vocab 4096) and collect a word list for needle names.

Runs on any machine with `tokenizers` installed:
    python -m scripts.train_recall.train_tokenizer OUT_DIR ROOT...
Text is sampled from .py/.md/.rst/.txt files below the given roots.
The pre-tokenizer is the Qwen2 one (digits split singly), which llama.cpp
calls tokenizer.ggml.pre = "qwen2".  Specials take the last four ids.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sample_files(roots: list[str], budget: dict[str, int], *, seed: int = 0) -> dict[str, list[str]]:
    """Random files up to a byte budget per kind; returns {kind: [text, ...]}."""
    rng = random.Random(seed)
    paths = []
    for root in roots:
        for dp, dn, fn in os.walk(root):
            dn[:] = [d for d in dn if d not in ("awscli", "botocore", "__pycache__")]
            paths += [f"{dp}/{f}" for f in fn if f.endswith((".py", ".md", ".rst", ".txt"))]
    rng.shuffle(paths)
    out, used, seen = collections.defaultdict(list), collections.Counter(), set()
    for p in paths:
        kind = "py" if p.endswith(".py") else "doc"
        if used[kind] >= budget[kind]:
            continue
        try:
            with Path(p).open(encoding="utf-8") as f:
                text = f.read(60_000)
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.md5(text.encode()).digest()
        if len(text) < 400 or digest in seen:
            continue
        seen.add(digest)
        out[kind].append(text)
        used[kind] += len(text)
    return out


def main() -> None:
    """Write tokenizer.json and words.json to the folder named on the command line."""
    ap = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    ap.add_argument("out_dir")
    ap.add_argument("roots", nargs="+")
    args = ap.parse_args()
    out_dir, roots = args.out_dir, args.roots
    data = sample_files(roots, {"py": 14_000_000, "doc": 9_000_000})
    texts = data["py"] + data["doc"]
    # make the needle vocabulary cheap to write
    texts += [
        "What is the access code for amber falcon? The access code for amber falcon is 1.\n"
        "The pass key of silver river is 2. The magic number for quiet forest is 3.\n" * 200
    ]
    tok = Tokenizer(models.BPE(byte_fallback=False))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIALS),
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=24,
    )
    tok.train_from_iterator(texts, trainer)
    tok.add_special_tokens(SPECIALS)
    assert tok.get_vocab_size() == VOCAB, tok.get_vocab_size()
    tok.save(f"{out_dir}/tokenizer.json")

    counts = collections.Counter()
    for text in data["doc"] + data["py"]:
        counts.update(set(re.findall(r"(?<![A-Za-z_.])[a-z]{4,9}(?![A-Za-z_.(])", text)))
    words = [w for w, _ in counts.most_common(4300)][100:]
    random.Random(1).shuffle(words)
    split = {"train": words[:3800], "held_out": words[3800:]}
    Path(out_dir, "words.json").write_text(json.dumps(split), encoding="utf-8")
    n = sum(len(t) for t in texts[:300])
    k = sum(len(e.ids) for e in tok.encode_batch(texts[:300]))
    print("docs", len(texts), "bytes/token", n / k, "words", len(words), words[:20])


if __name__ == "__main__":
    main()
