"""An answer that Instructor keeps to a pydantic model, by a JSON schema."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Code(BaseModel):
    code: str = Field(pattern=r"^[0-9]{7}$")


client = instructor.from_openai(OpenAI(base_url=sys.argv[1], api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
messages = [{"role": "user", "content": sys.stdin.read()}]
print(client.chat.completions.create(model="recall", messages=messages, response_model=Code, temperature=0.0).code)
