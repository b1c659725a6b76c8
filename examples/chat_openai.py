"""A chat with the official client. The conversation is on the server: each turn reads only what is new.

kvflash-run serve model.gguf
python chat_openai.py http://127.0.0.1:8080/v1
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1", api_key="none")
model = client.models.list().data[0].id
messages = []

for question in ("Hello there", "What can you do?", "Thank you"):
    messages.append({"role": "user", "content": question})
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
    )
    answer, usage = "", None
    print(f"> {question}")
    for chunk in stream:
        if chunk.choices:
            piece = chunk.choices[0].delta.content or ""
            answer += piece
            print(piece, end="", flush=True)
        usage = chunk.usage or usage
    messages.append({"role": "assistant", "content": answer})
    print(f"\n  [{usage.prompt_tokens} tokens, {usage.prompt_tokens_details.cached_tokens} of them known]")
