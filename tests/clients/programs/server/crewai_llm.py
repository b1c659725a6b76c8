"""An answer by CrewAI's class for models."""

import sys

from crewai import LLM

llm = LLM("openai/recall", base_url=sys.argv[1], api_key="none", max_tokens=24, temperature=0.0)
print(llm.call(sys.stdin.read()))
