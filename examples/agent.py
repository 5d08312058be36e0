"""A tool-calling agent of langchain-openai against `selfjudge serve`: python examples/agent.py [http://HOST:PORT/v1]"""

import sys

from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI


@tool
def multiply(a: int, b: int) -> int:
    """The product of two whole numbers."""
    return a * b


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
name = OpenAI(base_url=url, api_key="none").models.list().data[0].id
model = ChatOpenAI(model=name, base_url=url, api_key="none", temperature=0, max_completion_tokens=200)
messages: list[AnyMessage] = [HumanMessage("How much is 17 times 23?")]
choice = "any"  # the first answer is a call; whether more follow is the model's choice
for _ in range(4):
    answer = model.bind_tools([multiply], tool_choice=choice, strict=True, parallel_tool_calls=False).invoke(messages)
    messages += [answer, *(multiply.invoke(call) for call in answer.tool_calls)]
    choice = "auto"
    if not answer.tool_calls:
        break
for message in messages:
    message.pretty_print()
