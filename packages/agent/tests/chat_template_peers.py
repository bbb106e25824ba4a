"""Chat templates and parsers of rl-agent beside `renderers`, `openai-harmony` and transformers' response templates.

`python chat_template_peers.py FAMILY=FOLDER ...` with folders of a tokenizer and its chat template, and the peers
installed (`pip install renderers`; openai-harmony reads its vocabulary from `TIKTOKEN_ENCODINGS_BASE` where there is no
network). Prints one Markdown table per question: prompts, continuations by appending, turns taken apart. "same" means
the same token ids as the tokenizer's own chat template, or the same content, reasoning and calls as rl-agent's parser.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

from rl_agent import load_tokenizer
from rl_agent.chat_template import TurnTemplate
from rl_agent.errors import TemplateError
from rl_agent.registry import load_plugin

CONFIGS = {
    "qwen": "Qwen3RendererConfig",
    "llama": "Llama3RendererConfig",
    "gpt_oss": "GptOssRendererConfig",
    "glm": "GLM45RendererConfig",
    "kimi": "KimiK2RendererConfig",
    "deepseek": "DeepSeekV3RendererConfig",
}
ENDS = {
    "qwen": ["<|im_end|>"],
    "llama": ["<|eot_id|>"],
    "gpt_oss": ["<|call|>", "<|end|>", "<|return|>"],
    "glm": ["<|user|>", "<|observation|>"],
    "kimi": ["<|im_end|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
}
ARGUMENTS = {"a": 19, "b": 23}
NUMBERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}},
    {"type": "function", "function": {"name": "now", "description": "Time.", "parameters": {"type": "object"}}},
]
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 19 + 23?"}
ANSWER, NEXT = {"role": "assistant", "content": "It is 42."}, {"role": "user", "content": "And 1 + 1?"}
CALL, SHARP = "call00000", '{"name": "add", "arguments": {"a": 19, "b": 23}}'
RECORD = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
DS, DE = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n", "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
TURNS = {  # family: turns by what they are
    "qwen": {
        "reasoning, a call": f"<think>\nhm\n</think>\n\nok\n<tool_call>\n{SHARP}\n</tool_call>",
        "two calls": f"<tool_call>\n{SHARP}\n</tool_call>\n<tool_call>\n{SHARP}\n</tool_call>",
        "JSON cut off": '<tool_call>\n{"name": "add", "arguments": {"a":\n</tool_call>',
        "arguments are a list": '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
    },
    "llama": {
        "a call": '{"name": "add", "parameters": {"a": 19, "b": 23}}',
        "two calls": '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "now", "parameters": {}}',
        "after <|python_tag|>": '<|python_tag|>{"name": "add", "parameters": {"a": 19, "b": 23}}',
        "JSON cut off": '{"name": "add", "parameters": {"a": 19',
    },
    "gpt_oss": {
        "reasoning, a call": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add"
        '<|channel|>commentary json<|message|>{"a": 19, "b": 23}<|call|>',
        "recipient after the channel": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 19}'
        "<|call|>",
        "an answer": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>",
        "JSON cut off": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": <|call|>',
    },
    "glm": {
        "reasoning, a call": "\n<think>hm</think>\nok\n<tool_call>add\n<arg_key>a</arg_key>\n"
        "<arg_value>19</arg_value>\n<arg_key>b</arg_key>\n<arg_value>23</arg_value>\n</tool_call>",
        "no arguments": "\n<think></think>\n<tool_call>now\n</tool_call>",
        "a key without a value": "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>",
    },
    "kimi": {
        "a call": f'ok<|tool_calls_section_begin|>{RECORD}{{"a": 19}}<|tool_call_end|><|tool_calls_section_end|>',
        "JSON cut off": f'<|tool_calls_section_begin|>{RECORD}{{"a":<|tool_call_end|><|tool_calls_section_end|>',
    },
    "deepseek": {
        "a call": f'ok<｜tool▁calls▁begin｜>{DS}{{"a": 19}}{DE}',
        "reasoning, a call": f'hm</think>ok<｜tool▁calls▁begin｜>{DS}{{"a": 19}}{DE}',
        "JSON cut off": f'<｜tool▁calls▁begin｜>{DS}{{"a":{DE}',
    },
}


class Family:
    """One family's tokenizer and what each library makes of it."""

    def __init__(self, name: str, folder: str) -> None:
        from renderers import configs, create_renderer

        self.name, self.tokenizer = name, load_tokenizer(folder)
        self.kwargs = {"date_string": "26 Jul 2024"} if name == "llama" else {}  # renderers' own, not today's
        self.renderer = create_renderer(self.tokenizer, getattr(configs, CONFIGS[name])())
        self.parse = load_plugin("parsers", name)

    def fitted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with ids and arguments as the family's template wants them."""
        fitted = copy.deepcopy(messages)
        for message in fitted:
            for call in message.get("tool_calls", ()):
                if self.name == "kimi":
                    call["id"] = "functions.add:0"
                if self.name == "deepseek":
                    call["function"]["arguments"] = json.dumps(ARGUMENTS)
            if self.name == "kimi" and message["role"] == "tool":
                message["tool_call_id"] = "functions.add:0"
        return fitted

    def template(self, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
        given = {**self.kwargs, **({"tools": tools} if tools else {})}
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **given
        )

    def shown(self, ids: list[int]) -> str:
        return repr(self.tokenizer.decode(ids))


def calling(count: int = 1) -> dict[str, Any]:
    call = {"type": "function", "id": CALL, "function": {"name": "add", "arguments": ARGUMENTS}}
    return {"role": "assistant", "content": "", "tool_calls": [call] * count}


def told(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": CALL, "content": text}


PROMPTS = {
    "user": ([USER], []),
    "system": ([SYSTEM, USER], []),
    "tools": ([SYSTEM, USER], TOOLS),
    "second turn": ([SYSTEM, USER, ANSWER, NEXT], []),
    "after a call": ([USER, calling(), told("42")], TOOLS),
    "after call and answer": ([USER, calling(), told("42"), ANSWER, NEXT], TOOLS),
}
CONTINUATIONS = {  # the assistant's turn, what comes after it, tools, whether the turn was cut off
    "tool answer": (calling(), [told("42")], TOOLS, False),
    "user": (ANSWER, [NEXT], [], False),
    "user after a cut turn": (ANSWER, [NEXT], [], True),
}


def difference(family: Family, got: list[int] | None, wanted: list[int]) -> str:
    if got is None or got == wanted:
        return "refuses" if got is None else "same"
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    there = slice(max(at - 2, 0), at + 6)
    return f"{family.shown(got[there])} for {family.shown(wanted[there])}"


def prompts(family: Family) -> None:
    for case, (messages, tools) in PROMPTS.items():
        fitted = family.fitted(messages)
        found = family.renderer.render_ids(fitted, tools=tools or None, add_generation_prompt=True)
        row(family, case, "same (it is the template)", difference(family, list(found), family.template(fitted, tools)))


def continuations(family: Family) -> None:
    ends = [family.tokenizer.convert_tokens_to_ids(end) for end in ENDS[family.name]]
    for case, (turn, messages, tools, is_cut) in CONTINUATIONS.items():
        turn, *added = family.fitted([turn, *messages])
        try:
            ours = TurnTemplate(family.tokenizer, tools, family.kwargs)
        except TemplateError as error:
            row(family, case, f"refuses: {error}", "")
            continue
        before, whole = family.template([USER], tools), family.template([USER, turn, *added], tools)
        start = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        end = next(i for i in range(start, len(whole)) if whole[i] in ends) + (not is_cut)
        prompt, completion, wanted = whole[:start], whole[start:end], whole[end:]
        made = list(ours.continuation(added, last_token_id=completion[-1], is_stopped=not is_cut))
        theirs = family.renderer.bridge_to_next_turn(prompt, completion, added, tools=tools or None)
        beyond = None if theirs is None else list(theirs.token_ids)[end:]
        row(family, case, difference(family, made, wanted), difference(family, beyond, wanted))


def turns(family: Family) -> None:
    for case, text in TURNS[family.name].items():
        ours = family.parse(text)
        wanted = (ours.content, ours.reasoning, [(call.name, dict(call.arguments)) for call in ours.calls])
        if broken := [call.error for call in ours.calls if call.error]:
            wanted = f"tells: {broken[0]}"
        end = [] if family.name == "gpt_oss" else [family.tokenizer.convert_tokens_to_ids(ENDS[family.name][0])]
        ids = [*family.tokenizer.encode(text, add_special_tokens=False), *end]
        prompt = family.template([USER], TOOLS)
        if family.name == "gpt_oss":  # renderers takes a Harmony message from its start, or after its own prompt
            header = family.tokenizer.encode("<|start|>assistant", add_special_tokens=False)
            found = family.renderer.parse_response([*header, *ids])
        else:
            found = family.renderer.parse_response(ids, prompt_ids=prompt)
        calls = [(c.name, c.arguments) for c in found.tool_calls if str(c.status) == "ok"]
        theirs: Any = (found.content.strip(), (found.reasoning_content or "").strip(), calls)
        if broken and (told_by := [str(c.status) for c in found.tool_calls if str(c.status) != "ok"]):
            theirs = f"tells: {told_by[0]}"
        others = harmony(ids) if family.name == "gpt_oss" else ""
        row(family, case, wanted, "same" if theirs == wanted else theirs, others)


def harmony(ids: list[int]) -> str:
    import openai_harmony as oh

    encoding = oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)
    try:
        messages = encoding.parse_messages_from_completion_tokens(ids, oh.Role.ASSISTANT)
    except oh.HarmonyError as error:
        return f"raises HarmonyError: {error}"
    return "; ".join(f"{m.channel} {m.recipient or ''} {m.content[0].text}" for m in messages)


def row(family: Family, *cells: object) -> None:
    text = " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in (family.name, *cells))
    print(f"| {text} |")


def main() -> None:
    families = [Family(*argument.split("=", 1)) for argument in sys.argv[1:]]
    for title, ask in (("Prompts", prompts), ("Continuations", continuations), ("Turns", turns)):
        print(f"\n{title}\n\n| family | case | rl-agent | renderers | openai-harmony |\n|---|---|---|---|---|")
        for family in families:
            ask(family)


if __name__ == "__main__":
    main()
