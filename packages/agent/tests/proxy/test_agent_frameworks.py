"""Agent frameworks that nobody here wrote, unchanged but for the base URL: `uv sync --group frameworks` installs them.

What the model says is scripted; everything else is real: the framework, its HTTP client, sockets, shell commands.
"""

import asyncio
import json
import os
import sys

import pytest

from rl_agent import validate_output
from rl_agent.proxy import RecordingProxy
from rl_agent.testing import FakeGenerator, FakeTokenizer

pytestmark = pytest.mark.integration

TOKENIZER = FakeTokenizer()


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def recorded(turns, use):
    """Run `use(url)` against a proxy whose model says `turns`; its result and the one trajectory."""
    says = iter(turns)
    server = FakeGenerator(lambda _: [*TOKENIZER.encode(next(says)), 1])

    async def main():
        proxy = RecordingProxy(server, TOKENIZER, sampling_params={"max_new_tokens": 512})
        url = await proxy.start()
        try:
            async with asyncio.timeout(120):
                result = await use(url)
        finally:
            await proxy.stop()
        return result, proxy.finish("one", reward=1.0)

    result, (output,) = asyncio.run(main())
    validate_output(output)
    pairs = [*zip(output.completion_token_ids, output.loss_mask, strict=True)]
    assert TOKENIZER.decode([i for i, m in pairs if m]) == "".join(turn + "<|im_end|>" for turn in turns)
    assert output.num_turns == len(turns)
    return result, TOKENIZER.decode([i for i, m in pairs if not m])


@pytest.mark.parametrize("has_responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
def test_langgraph(has_responses, is_streaming):
    pytest.importorskip("langgraph", reason="uv sync --group frameworks")
    import httpx
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def use(url):
        http = httpx.AsyncClient()  # langchain's own is never closed
        model = ChatOpenAI(
            base_url=url,
            api_key="one",
            model="policy",
            use_responses_api=has_responses,
            streaming=is_streaming,
            http_async_client=http,
        ).bind_tools([add])

        async def think(state):
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("model", think)
        graph.add_node("tools", ToolNode([add]))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        async with http:
            state = await graph.compile().ainvoke({"messages": [("system", "be brief"), ("user", "1 + 2, then + 4?")]})
        return state["messages"][-1].text

    turns = ["First. " + call("add", a=1, b=2), call("add", a=3, b=4) + call("add", a=0, b=0), "7 in all"]
    text, context = recorded(turns, use)
    assert text == "7 in all"
    assert all(f"tool\n{n}<|im_end|>" in context for n in (3, 7, 0))


def test_mini_swe_agent(tmp_path):
    """Its own command line, which mends a file by shell commands and hands it in."""
    pytest.importorskip("minisweagent", reason="uv sync --group frameworks")
    (tmp_path / "sum.py").write_text("print(1 - 2)\n")

    async def use(url):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "minisweagent.run.mini", "-y", "--exit-immediately"),
            *("-m", "openai/policy", "-t", "sum.py should add", "-o", str(tmp_path / "trajectory.json")),
            cwd=tmp_path,
            env={
                **os.environ,
                "OPENAI_BASE_URL": url,
                "OPENAI_API_KEY": "one",
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "config"),
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()[-3000:]
        return json.loads((tmp_path / "trajectory.json").read_text())

    turns = [
        "I look. " + call("bash", command="python sum.py"),
        "I mend it. " + call("bash", command="sed -i s/-/+/ sum.py && python sum.py"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat sum.py"),
    ]
    trajectory, context = recorded(turns, use)
    assert trajectory["info"]["exit_status"] == "Submitted"
    assert trajectory["info"]["submission"] == "print(1 + 2)\n" == (tmp_path / "sum.py").read_text()
    assert '"output": "-1\\n"' in context
    assert '"output": "3\\n"' in context
