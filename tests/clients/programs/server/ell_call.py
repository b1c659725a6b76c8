"""An answer by a function of ell."""

import sys

import ell
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none")


@ell.simple(model="recall", client=client, max_tokens=24, temperature=0.0)
def answer(text: str) -> list:
    return [ell.user(text)]


print(answer(sys.stdin.read()))
