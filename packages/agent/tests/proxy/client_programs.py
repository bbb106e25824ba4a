"""Programs over agent libraries, each as its documentation has it: `python client_programs.py NAME`.

Every one reads `answer.txt`, edits it, reads it again and says that it is done, as its model tells it.
"""

import asyncio
import os
import sys
from pathlib import Path

TASK = os.environ["RL_TASK"]


def read(path: str) -> str:
    """Read a file.

    Args:
        path: Path of the file.
    """
    return Path(path).read_text()


def edit(path: str, text: str) -> str:
    """Replace a file.

    Args:
        path: Path of the file.
        text: New text.
    """
    Path(path).write_text(text)
    return "ok"


TOOLS = {"read": read, "edit": edit}
SCHEMAS = {
    name: {"type": "object", "properties": {p: {"type": "string"} for p in parameters}, "required": parameters}
    for name, parameters in {"read": ["path"], "edit": ["path", "text"]}.items()
}


def openai_chat():
    import json

    import openai

    client, messages = openai.OpenAI(), [{"role": "user", "content": TASK}]
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
    while True:
        with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            said = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def openai_responses():
    import json

    import openai

    client, given, last = openai.OpenAI(), [{"role": "user", "content": TASK}], None
    tools = [{"type": "function", "name": n, "parameters": s} for n, s in SCHEMAS.items()]
    while given:
        answer = client.responses.create(model="policy", input=given, tools=tools, previous_response_id=last)
        last, calls = answer.id, [item for item in answer.output if item.type == "function_call"]
        given = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": TOOLS[call.name](**json.loads(call.arguments)),
            }
            for call in calls
        ]


def anthropic():
    import anthropic

    client, messages = anthropic.Anthropic(), [{"role": "user", "content": TASK}]
    tools = [{"name": n, "description": n, "input_schema": s} for n, s in SCHEMAS.items()]
    assert client.messages.count_tokens(model="policy", messages=messages, tools=tools).input_tokens > 0
    while True:
        given = {"model": "policy", "max_tokens": 512, "messages": messages, "tools": tools}
        with client.messages.stream(**given) as stream:
            message = stream.get_final_message()
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": TOOLS[call.name](**call.input)} for call in calls
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


def litellm():
    import json

    import litellm

    messages = [{"role": "user", "content": TASK}]
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
    while True:
        answer = litellm.completion(model="openai/policy", messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            said = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def openai_agents():
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(disabled=True)
    agent = Agent(name="editor", model="policy", tools=[function_tool(read), function_tool(edit)])
    asyncio.run(Runner.run(agent, TASK))


def pydantic_ai():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    Agent(OpenAIChatModel("policy"), tools=[read, edit]).run_sync(TASK)


def _smolagents(kind):
    import smolagents

    model = smolagents.OpenAIModel("policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    getattr(smolagents, kind)(tools=[smolagents.tool(read), smolagents.tool(edit)], model=model, max_steps=6).run(TASK)


def smolagents_tool():
    _smolagents("ToolCallingAgent")


def smolagents_code():
    _smolagents("CodeAgent")


def langgraph():
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    tools = [tool(read), tool(edit)]
    model = ChatOpenAI(model="policy").bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    graph.compile().invoke({"messages": [("user", TASK)]})


if __name__ == "__main__":
    globals()[sys.argv[1]]()
