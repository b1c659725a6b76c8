"""The same server from LangChain (pip install langchain-openai).

python chat_langchain.py http://127.0.0.1:8080/v1
"""

import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
model = ChatOpenAI(base_url=url, api_key="none", model="any", max_tokens=60)
history = [SystemMessage("Be brief."), HumanMessage("Hello there")]
history += [model.invoke(history), HumanMessage("What can you do?")]
for piece in model.stream(history):
    print(piece.content, end="", flush=True)
print()
