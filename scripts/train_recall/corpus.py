"""The text corpus: files found, deduplicated, tokenized and stored as three arrays per split."""

from __future__ import annotations

import hashlib
import os
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

DOC_EXT = (".md", ".rst", ".txt")
CODE_EXT = (".py", ".pyi")
TEXT_EXT = DOC_EXT + CODE_EXT

TokenizedFile = tuple[str, bool, np.ndarray]  # hash, is prose, uint16 tokens


def _list_texts(root: str) -> list[tuple[str, int]]:
    """(path, bytes) of the text files below ``root``."""
    out = []
    for dp, dn, fn in os.walk(root):
        dn[:] = [d for d in dn if d != "__pycache__"]
        for f in fn:
            if f.endswith(TEXT_EXT):
                path = f"{dp}/{f}"
                try:
                    size = Path(path).stat().st_size
                except OSError:
                    continue
                if 500 < size < 400_000:
                    out.append((path, size))
    return out


def _tokenize_files(job: tuple[list[str], str]) -> list[TokenizedFile]:
    from tokenizers import Tokenizer

    paths, tok_file = job
    tok = Tokenizer.from_file(tok_file)
    meta, texts = [], []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digits = sum(c.isdigit() for c in text[:4000])
        if not text.isascii() and sum(ord(c) > 127 for c in text[:4000]) > 200:
            continue
        if digits > 0.2 * min(len(text), 4000):
            continue
        meta.append((hashlib.md5(text.encode()).hexdigest(), not path.endswith(CODE_EXT)))
        texts.append(text)
    return [(h, d, np.array(e.ids, np.uint16)) for (h, d), e in zip(meta, tok.encode_batch(texts), strict=True)]


def build_corpus(roots: list[str], data_dir: str, *, out_dir: str, max_bytes: int, procs: int) -> None:
    """Tokenise text files into train/valid arrays: tokens, document starts, is-prose flags."""
    files = [file for root in roots for file in _list_texts(root)]
    random.Random(0).shuffle(files)
    files.sort(key=lambda ps: ps[0].endswith(CODE_EXT))  # documents first, then code
    total, take = 0, []
    for path, size in files:
        if total > max_bytes:
            break
        total += size
        take.append(path)
    random.Random(1).shuffle(take)
    jobs = [(take[i :: procs * 8], f"{data_dir}/tokenizer.json") for i in range(procs * 8)]
    seen, parts = set(), {"train": [], "valid": []}
    with ProcessPoolExecutor(procs) as ex:
        for res in ex.map(_tokenize_files, jobs):
            for h, doc, ids in res:
                if h not in seen and len(ids) > 150:
                    seen.add(h)
                    parts["valid" if int(h[:4], 16) % 60 == 0 else "train"].append((doc, ids))
    for name, docs in parts.items():
        np.save(f"{out_dir}/{name}_tok.npy", np.concatenate([d[1] for d in docs]))
        np.save(f"{out_dir}/{name}_start.npy", np.cumsum([0] + [len(d[1]) for d in docs]))
        np.save(f"{out_dir}/{name}_doc.npy", np.array([d[0] for d in docs]))
        print(
            f"corpus {name}: {len(docs)} files ({sum(d[0] for d in docs)} prose), "
            f"{sum(len(d[1]) for d in docs) / 1e6:.1f}M tokens, read {total / 1e6:.0f} MB",
            flush=True,
        )
