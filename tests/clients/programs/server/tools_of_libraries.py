"""Three calls of a tool through each interface, by libraries for agents; prints the answer of each."""

import asyncio
import json
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")
import litellm  # noqa: E402
from langchain.agents import create_agent  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
from pydantic_ai import Agent  # noqa: E402
from pydantic_ai.models.anthropic import AnthropicModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

URL = sys.argv[1]
CALLED: list[str] = []


def run(command: str) -> str:
    """Run a command."""
    CALLED.append(command)
    return "seven"


async def pydantic_ai() -> None:
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    anthropic = AnthropicProvider(base_url=URL, api_key="none")
    for model in (
        OpenAIChatModel("scripted", provider=openai),
        OpenAIResponsesModel("scripted", provider=openai),
        AnthropicModel("scripted", provider=anthropic),
    ):
        agent = Agent(model, tools=[run])
        print(type(model).__name__, (await agent.run("Go on.")).output)


def langchain() -> None:
    for responses in (False, True):
        model = ChatOpenAI(
            model="scripted",
            base_url=f"{URL}/v1",
            api_key="none",
            use_responses_api=responses,  # type: ignore[arg-type]
        )
        said = create_agent(model, [tool(run)]).invoke({"messages": [{"role": "user", "content": "Go on."}]})
        print("ChatOpenAI", said["messages"][-1].text)


def with_litellm() -> None:
    """Its translation of chats to Anthropic's interface, call by call."""
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "run", "parameters": schema}}]
    litellm.suppress_debug_info = True
    messages: list[Any] = [{"role": "user", "content": "Go on."}]
    while True:
        made = litellm.completion(
            model="anthropic/scripted", api_base=URL, api_key="none", messages=messages, tools=tools, max_tokens=1000
        )
        said = made.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            result = run(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print("litellm", said.content)


asyncio.run(pydantic_ai())
langchain()
with_litellm()
print("calls", len(CALLED))
