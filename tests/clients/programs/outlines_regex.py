"""An answer that Outlines keeps to a form. Nobody gives n_ctx: with a pool it is the trained length."""

import sys

import llama_cpp
import outlines
from outlines.types import Regex

model, prompt = sys.argv[1], sys.stdin.read()
llm = outlines.from_llamacpp(llama_cpp.Llama(model, verbose=False), chat_mode=False)
print(llm(prompt, Regex(r" ?[0-9]{7}"), max_tokens=12, temperature=0.0))
