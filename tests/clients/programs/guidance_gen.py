"""Guidance calls llama_decode by itself. Its further arguments are keywords of Llama."""

import sys

from guidance import gen, models

model, prompt = sys.argv[1], sys.stdin.read()
settings = {"kvflash": None} if "without" in sys.argv[2:] else {}
llm = models.LlamaCpp(model, n_ctx=8192, echo=False, **settings)
llm += prompt + gen("answer", max_tokens=24, temperature=0.0)
print(llm["answer"])
