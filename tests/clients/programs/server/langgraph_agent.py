"""An agent of LangGraph with a tool that it may call, and need not."""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def clock() -> str:
    """The time of day."""
    return "12:00"


llm = ChatOpenAI(model="recall", base_url=sys.argv[1], api_key="none", max_tokens=24, temperature=0.0)
agent = create_agent(llm, [clock])
print(agent.invoke({"messages": [{"role": "user", "content": sys.stdin.read()}]})["messages"][-1].text)
