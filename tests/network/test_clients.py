"""Clients as people have them, against the real server: openai's async one, litellm, langchain-openai and curl."""

from __future__ import annotations

import asyncio
import json
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from servers import Server
from spelling import CITY, Paint, Weather, name_spellers

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]
CALLS: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
MESSAGES: Any = [{"role": "user", "content": "paint it"}]


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    return start(*name_spellers(tmp_path_factory.mktemp("spellers"), "smollm2-135m"))


@pytest.fixture(scope="module")
def expected(server: Server) -> str:
    options: Any = {"model": "smollm2-135m", "messages": MESSAGES, "temperature": 0, "max_tokens": 100}
    return str(server.client().chat.completions.create(**options).choices[0].message.content)


def test_openai_asynchronously(server: Server, expected: str) -> None:
    options: Any = {"model": "smollm2-135m", "messages": MESSAGES, "temperature": 0, "max_tokens": 100}

    async def test() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            create, parse = client.chat.completions.create, client.chat.completions.parse

            async def stream() -> str:
                chunks = [
                    chunk
                    async for chunk in await create(stream=True, stream_options={"include_usage": True}, **options)
                ]
                usage = chunks[-1].usage
                assert usage is not None
                assert (usage.completion_tokens, chunks[-1].choices) == (100, [])
                return "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])

            async def fail() -> str:
                with pytest.raises(openai.BadRequestError, match="n: must be at most 128") as refused:
                    await create(**options, n=1000)
                return str(refused.value.param)

            tool = openai.pydantic_function_tool(Weather, name="weather")
            whole, streamed, param, parsed, called = await asyncio.gather(
                create(**options), stream(), fail(), parse(response_format=Paint, **options),
                parse(**{**options, **CALLS, "tools": [tool]}),
            )  # fmt: skip
            assert (whole.choices[0].message.content, streamed, param) == (expected, expected, "n")
            assert isinstance(parsed.choices[0].message.parsed, Paint)
            (call,) = called.choices[0].message.tool_calls or ()
            assert isinstance(call.function.parsed_arguments, Weather)
            left = await create(stream=True, **{**options, "max_tokens": 400})
            await anext(aiter(left))
            await left.close()

    asyncio.run(test())
    server.wait_until_idle()


def test_curl(server: Server, expected: str) -> None:
    if (curl := shutil.which("curl")) is None:
        pytest.skip("there is no curl")

    def ask(*options: str, **body: Any) -> str:
        data = json.dumps({"messages": MESSAGES, "temperature": 0, "max_tokens": 100, **body})
        command = [
            curl,
            "-sS",
            "--noproxy",
            "*",
            f"{server.url}/v1/chat/completions",
            "-H",
            "content-type: application/json",
            *options,
        ]
        return subprocess.run([*command, "-d", data], capture_output=True, text=True, check=True, timeout=300).stdout

    assert json.loads(ask())["choices"][0]["message"]["content"] == expected
    *events, done, end = ask("-N", stream=True).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected
    (call,) = json.loads(ask(**CALLS))["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("rome", "oslo")
    *_, status = ask("-w", "\n%{http_code}", n=1000).splitlines()
    assert status == "400"


@pytest.mark.slow  # it takes seconds to import
def test_litellm(server: Server, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network for prices
    import litellm

    options: Any = {
        "model": "openai/smollm2-135m", "api_base": f"{server.url}/v1", "api_key": "none", "messages": MESSAGES,
        "temperature": 0, "max_tokens": 100,
    }  # fmt: skip
    whole = litellm.completion(**options)
    assert (whole.choices[0].message.content, whole.usage.completion_tokens) == (expected, 100)
    chunks = litellm.completion(stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    called = litellm.completion(**options, **CALLS).choices[0]
    (call,) = called.message.tool_calls
    assert (called.finish_reason, call.function.name) == ("tool_calls", "weather")
    pieces = [*litellm.completion(stream=True, stream_options={"include_usage": True}, **options, **CALLS)]
    (joined,) = litellm.stream_chunk_builder(pieces).choices[0].message.tool_calls
    assert joined.function.arguments == call.function.arguments
    with pytest.raises(litellm.BadRequestError, match="n: must be at most 128"):
        litellm.completion(n=1000, **options)


@pytest.mark.slow
def test_an_agent_of_langchain(
    server: Server, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one of examples/: its first answer is a call, whose result is read; and what else chats are asked for."""
    import langchain_openai as chats

    monkeypatch.setattr("sys.argv", ["agent.py", f"{server.url}/v1"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "agent.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "multiply" in printed, printed
    model = chats.ChatOpenAI(
        model="smollm2-135m", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_completion_tokens=100
    )
    assert model.invoke("paint it").content == expected
    assert "".join(chunk.content for chunk in model.stream("paint it")) == expected
    assert isinstance(model.with_structured_output(Paint, method="json_schema").invoke("paint it"), Paint)
    bound = model.bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke("paint it").tool_calls
    assert (call["name"], call["args"]["city"] in ("rome", "oslo")) == ("weather", True)
    streamed = None
    for chunk in bound.stream("paint it"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert streamed.tool_calls[0]["args"] == call["args"]
