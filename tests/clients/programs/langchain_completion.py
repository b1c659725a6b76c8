"""A completion by LangChain, whose class always passes keywords that upstream no longer has, and a rope_freq_base."""

import sys

from langchain_community.llms import LlamaCpp

model, prompt = sys.argv[1], sys.stdin.read()
llm = LlamaCpp(
    model_path=model,
    n_ctx=8192,
    temperature=0.0,
    repeat_penalty=1.0,
    rope_freq_base=0.0,
    max_tokens=24,
    verbose=False,
)
print(llm.invoke(prompt))
print(llm.client.kvflash, file=sys.stderr)
