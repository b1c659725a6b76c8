"""A streamed answer by Griptape's driver."""

import sys

from griptape.common import PromptStack
from griptape.drivers.prompt.openai import OpenAiChatPromptDriver

driver = OpenAiChatPromptDriver(
    model="recall", base_url=sys.argv[1], api_key="none", max_tokens=24, temperature=0.0, stream=True
)
stack = PromptStack()
stack.add_user_message(sys.stdin.read())
print(driver.run(stack).to_text())
