"""Contents and arguments of tool calls, in the form that a chat template takes."""

import json

import pytest

from rl_csrc.inference.messages import messages_for, with_arguments

VALUES = {"a": 1, "b": 'x"y'}


class Templated:
    """Tokenizer whose template writes the arguments of calls by a function."""

    def __init__(self, write):
        self.write = write

    def apply_chat_template(self, chat, *, tokenize):
        assert not tokenize
        calls = [call for message in chat for call in message.get("tool_calls", ())]
        return "".join(self.write(call["function"]["arguments"]) for call in calls)


class Writing:
    """Tokenizer whose template writes contents by a function."""

    def __init__(self, write):
        self.chat_template, self.write = f"template of {id(write)}", write

    def apply_chat_template(self, chat, *, tokenize):
        assert not tokenize
        return "".join(self.write(message["content"]) for message in chat)


def of_parts(content):
    return "".join(part["text"] for part in content if isinstance(part, dict) and "text" in part)


def of_text(content):
    return f"{content}"


def of_both(content):
    return content if isinstance(content, str) else of_parts(content)


PART = {"type": "text", "text": "q"}
PICTURE = [{"type": "image"}, PART]


@pytest.mark.parametrize(
    ("write", "content", "wanted"),
    [
        (of_parts, "q", [PART]),
        (of_parts, [PART], [PART]),
        (of_text, "q", "q"),
        (of_text, [PART, PART], "qq"),
        (lambda content: content + "", [PART], "q"),
        (of_both, "q", "q"),
        (of_both, [PART, PART], [PART, PART]),
        (lambda content: "", "q", "q"),
        (lambda content: "", [PART], [PART]),
        (of_text, PICTURE, PICTURE),
        (of_parts, None, None),
    ],
)
def test_contents_have_the_form_that_the_template_writes(write, content, wanted):
    tokenizer = Writing(write)
    assert messages_for(tokenizer, [{"role": "user", "content": content}]) == [{"role": "user", "content": wanted}]
    assert messages_for(object(), [{"role": "user", "content": content}])[0]["content"] == content


def refusing(arguments):
    raise KeyError("no calls")


def chat(arguments, **message):
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call], **message}]


def arguments_of(messages):
    return messages[-1]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("given", [VALUES, json.dumps(VALUES)], ids=["object", "text"])
@pytest.mark.parametrize(
    ("write", "wanted"),
    [
        (json.dumps, VALUES),
        (lambda arguments: "".join(arguments.values()), VALUES),
        (lambda arguments: "<sep>" + arguments, json.dumps(VALUES)),
        (lambda arguments: f"{arguments}", json.dumps(VALUES)),
        (lambda arguments: arguments if isinstance(arguments, str) else json.dumps(arguments), VALUES),
    ],
    ids=["tojson", "items", "concatenated", "spelled", "either"],
)
def test_arguments_have_the_form_that_the_template_takes(write, wanted, given):
    messages = chat(given)
    assert arguments_of(with_arguments(Templated(write), messages)) == wanted
    assert arguments_of(messages) == given, "the row stays as it is"


@pytest.mark.parametrize("given", ['{"a": ', "[1]", "", 3, None])
def test_arguments_that_are_no_object_stay(given):
    assert arguments_of(with_arguments(Templated(json.dumps), chat(given))) == given


@pytest.mark.parametrize("calls", ["text", [1], [{}], [{"function": 3}], [{"arguments": '{"a": 1}'}], None, []])
def test_calls_of_other_shapes_end_in_no_error(calls):
    (_, message) = with_arguments(Templated(json.dumps), chat({}, tool_calls=calls))
    assert message["tool_calls"] == ([{"arguments": {"a": 1}}] if calls == [{"arguments": '{"a": 1}'}] else calls)


def test_a_template_that_leaves_out_calls_is_refused():
    with pytest.raises(ValueError, match="leaves out tool calls"):
        with_arguments(Templated(lambda arguments: ""), chat(VALUES))
    assert arguments_of(with_arguments(Templated(refusing), chat(VALUES))) == VALUES, "the row's rendering says why"
    assert with_arguments(Templated(lambda arguments: ""), [{"role": "user", "content": "q"}])
