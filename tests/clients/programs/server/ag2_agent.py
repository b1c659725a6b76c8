"""An answer by an agent of AG2."""

import asyncio
import sys

from ag2 import Agent
from ag2.config import OpenAIConfig

config = OpenAIConfig("recall", base_url=sys.argv[1], api_key="none", max_tokens=24, temperature=0.0)
print(asyncio.run(Agent("reader", config=config).ask(sys.stdin.read())).body)
