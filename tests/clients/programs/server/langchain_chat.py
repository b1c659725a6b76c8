"""A streamed answer by langchain-openai."""

import sys

from langchain_openai import ChatOpenAI

llm = ChatOpenAI(model="recall", base_url=sys.argv[1], api_key="none", max_tokens=24, temperature=0.0)
print("".join(piece.text for piece in llm.stream(sys.stdin.read())))
