"""An answer by Mirascope."""

import sys

from mirascope import llm

llm.register_provider("openai:completions", scope="recall/", base_url=sys.argv[1], api_key="none")
print(llm.Model("recall/recall", max_tokens=24, temperature=0.0).call(sys.stdin.read()).text())
