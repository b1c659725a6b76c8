"""An answer that the server keeps to a pydantic model for Outlines."""

import sys

import openai
import outlines
from pydantic import BaseModel, Field


class Code(BaseModel):
    code: str = Field(pattern=r"^[0-9]{7}$")


model = outlines.from_openai(openai.OpenAI(base_url=sys.argv[1], api_key="none"), "recall")
print(model(sys.stdin.read(), Code, max_tokens=24, temperature=0.0))
