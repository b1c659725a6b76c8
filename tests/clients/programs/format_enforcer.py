"""An answer that lm-format-enforcer keeps to a form."""

import sys

from llama_cpp import Llama, LogitsProcessorList
from lmformatenforcer import RegexParser
from lmformatenforcer.integrations.llamacpp import build_llamacpp_logits_processor

model, prompt = sys.argv[1], sys.stdin.read()
llm = Llama(model, n_ctx=8192, verbose=False)
processor = build_llamacpp_logits_processor(llm, RegexParser(r" ?[0-9]{7}"))
answer = llm(prompt, logits_processor=LogitsProcessorList([processor]), max_tokens=12, temperature=0.0)
print(answer["choices"][0]["text"])
