"""An answer by a prompt function of Magentic."""

import sys

from magentic import OpenaiChatModel, prompt

model = OpenaiChatModel("recall", base_url=sys.argv[1], api_key="none", max_tokens=24, temperature=0.0)


@prompt("{text}", model=model)
def answer(text: str) -> str: ...


print(answer(sys.stdin.read()))
