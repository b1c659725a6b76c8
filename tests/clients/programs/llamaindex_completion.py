"""A completion by LlamaIndex."""

import sys

from llama_index.llms.llama_cpp import LlamaCPP

model, prompt = sys.argv[1], sys.stdin.read()
llm = LlamaCPP(model_path=model, context_window=8192, temperature=0.0, max_new_tokens=24, verbose=False)
print(llm.complete(prompt, formatted=True).text)
