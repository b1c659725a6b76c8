"""A streamed answer by LlamaIndex's class for servers like OpenAI's."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model="recall", api_base=sys.argv[1], api_key="none", is_chat_model=True, max_tokens=24, temperature=0.0
)
print("".join(piece.delta for piece in llm.stream_chat([ChatMessage(sys.stdin.read())])))
