"""A streamed answer of a chat by LangChain; the pool is given by keyword and wins over the default."""

import sys

from langchain_community.chat_models import ChatLlamaCpp
from langchain_core.messages import HumanMessage

model, prompt = sys.argv[1], sys.stdin.read()
llm = ChatLlamaCpp(
    model_path=model,
    n_ctx=8192,
    temperature=0.0,
    repeat_penalty=1.0,
    rope_freq_base=0.0,
    max_tokens=24,
    verbose=False,
    model_kwargs={"kvflash": 1024},
)
print("".join(piece.content for piece in llm.stream([HumanMessage(prompt)])))
