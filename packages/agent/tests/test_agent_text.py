"""Text of foreign code: lone surrogates are replaced at every boundary, and exceptions are failures of one rollout."""

import asyncio
import importlib
import json
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from rl_agent import AgentLoop, AgentRunner, Failure, ParsedTurn, PluginError, ToolCall
from rl_agent.errors import FailureError, LoopError, ToolError, described, is_foreign
from rl_agent.loops.gym import GymLoop
from rl_agent.loops.single_turn import SingleTurnLoop
from rl_agent.loops.tool import ToolLoop
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_agent.text import parse_turn
from rl_agent.tools.base import Tool
from rl_agent.types import ToolResult, well_formed

LONE, MARK = "a\ud800b", "a\ufffdb"


class StrictTokenizer(FakeTokenizer):
    """Raises on text that is not well formed, as the tokenizers package does."""

    def encode(self, text, *, add_special_tokens=True):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TypeError("TextEncodeInput must be Union[TextInputSequence, ...]") from None
        return super().encode(text, add_special_tokens=add_special_tokens)


def ids(text):
    return [*FakeTokenizer().encode(text), FakeTokenizer.eos_token_id]


def run(loop, row, num=1):
    async def collect():
        return [r async for r in AgentRunner(lambda _: loop).run([row] * num, {"max_new_tokens": 512})]

    return asyncio.run(collect())


def asking(answers):
    left = iter(answers)
    return FakeGenerator(lambda _: ids(next(left)))


class Echo(Tool):
    def __init__(self, answer):
        super().__init__("echo", LONE, {"type": "object", "properties": {LONE: {"type": "string"}}})
        self.answer, self.seen = answer, []

    async def call(self, arguments, session_id):
        self.seen.append(arguments)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


PROMPT = {"prompt": [{"role": "user", "content": "q"}]}
CALL = '<tool_call>{"name": "echo", "arguments": {"x": "a\\ud800b"}}</tool_call>'


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (LONE, MARK),
        ("\ude00", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("plain é", "plain é"),
        ({LONE: [LONE, (LONE, 1, None)]}, {MARK: [MARK, (MARK, 1, None)]}),
        (b"\xff", b"\xff"),
    ],
)
def test_lone_surrogates_are_replaced(given, wanted):
    assert well_formed(given) == wanted


@pytest.mark.parametrize("answer", [LONE, {"text": LONE}, ToolError(LONE), ValueError(LONE)])
def test_a_tools_text_is_made_well_formed(answer):
    tool = Echo(answer)
    loop = ToolLoop(asking([CALL, "done"]), StrictTokenizer(), tools=[tool])
    (result,) = run(loop, PROMPT)
    assert not isinstance(result.outputs, Failure), result.outputs
    assert tool.seen == [{"x": MARK}], "the policy's JSON spells a surrogate"
    assert MARK in FakeTokenizer().decode(result.outputs[0].completion_token_ids)


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (KeyError("x"), "echo: KeyError: 'x'"),
        (ToolError("no such page"), "echo: ToolError: no such page"),
        (SystemExit(3), "echo: SystemExit: 3"),
        (ValueError(LONE), f"echo: ValueError: {MARK}"),
        (ValueError("x" * 9999), f"echo: ValueError: {'x' * 482}"),
    ],
)
def test_the_type_of_a_tools_error_is_recorded(error, recorded):
    (result,) = run(ToolLoop(asking([CALL, "done"]), StrictTokenizer(), tools=[Echo(error)]), PROMPT)
    (output,) = result.outputs
    assert output.extra_fields == {"end": "answer", "tool_error": recorded}
    assert output.metrics["num_tool_error"] == 1


def test_the_last_of_several_tool_errors_is_recorded():
    class Failing(Echo):
        async def call(self, arguments, session_id):
            self.seen.append(arguments)
            raise KeyError(len(self.seen))

    (result,) = run(ToolLoop(asking([CALL * 2, CALL, "done"]), FakeTokenizer(), tools=[Failing("")]), PROMPT)
    assert result.outputs[0].extra_fields["tool_error"] == "echo: KeyError: 3"
    (result,) = run(ToolLoop(asking([CALL, "done"]), FakeTokenizer(), tools=[Echo("ok")]), PROMPT)
    assert "tool_error" not in result.outputs[0].extra_fields


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_a_tool_whose_error_cannot_be_printed_is_answered():
    (result,) = run(ToolLoop(asking([CALL, "done"]), StrictTokenizer(), tools=[Echo(UnprintableError())]), PROMPT)
    assert result.outputs[0].metrics["num_tool_error"] == 1
    assert described(UnprintableError()) == "UnprintableError"


class Room:
    def __init__(self, first, then):
        self.first, self.then = first, then

    def reset(self, *, seed):
        return self.first

    def step(self, action):
        return self.then


def played(first, then):
    return GymLoop(asking(["go", "go"]), StrictTokenizer(), environments={"room": lambda: Room(first, then)})


def test_an_environments_text_is_made_well_formed():
    (result,) = run(played((LONE, {}), (LONE, 1.0, True, False, {"note": LONE})), {})
    assert MARK in FakeTokenizer().decode(result.outputs[0].prompt_token_ids)


@pytest.mark.process
@pytest.mark.parametrize(
    ("first", "then", "stage"),
    [
        ("no pair", None, "reset"),
        (("seen", {}), None, "step"),
        (("seen", {}), ("seen", 1.0, False, False, 7), "step"),
        ((b"seen", {}), None, "reset"),
    ],
)
def test_an_environment_that_breaks_its_interface_fails_alone(first, then, stage):
    (result,) = run(played(first, then), {})
    assert (result.outputs.kind, result.outputs.stage) == ("environment", stage)


def test_a_rows_text_is_made_well_formed():
    row = {"prompt": [{"role": "user", "content": LONE}]}
    (result,) = run(SingleTurnLoop(FakeGenerator(), StrictTokenizer()), row)
    assert MARK in FakeTokenizer().decode(result.outputs[0].prompt_token_ids)


@pytest.mark.process
@pytest.mark.parametrize("text", ["a\0b", "\ud83d", "x" * 1_000_000], ids=["nul", "lone", "long"])
@pytest.mark.parametrize("place", ["tool", "reset", "step", "row", "policy"])
def test_any_text_at_any_boundary_ends_as_a_result(place, text):
    call = json.dumps({"name": "echo", "arguments": {"x": text}})
    loop, row = {
        "tool": lambda: (ToolLoop(asking([CALL, "done"]), StrictTokenizer(), tools=[Echo(text)]), PROMPT),
        "reset": lambda: (played((text, {}), ("", 1.0, True, False, {})), {}),
        "step": lambda: (played(("", {}), (text, 1.0, False, False, {text: text})), {}),
        "row": lambda: (
            SingleTurnLoop(FakeGenerator(), StrictTokenizer()),
            {"prompt": [{"role": "user", "content": text}], text: [text]},
        ),
        "policy": lambda: (
            ToolLoop(asking([f"<tool_call>{call}</tool_call>", "done"]), StrictTokenizer(), tools=[Echo("ok")]),
            PROMPT,
        ),
    }[place]()
    (result,) = run(loop, row)
    assert isinstance(result.outputs, Failure | tuple)
    json.dumps(repr(result.outputs)).encode()


def broken_parser(text):
    raise RecursionError(LONE)


@pytest.mark.parametrize("parser", [broken_parser, lambda text: None, lambda text: ParsedTurn(content="", calls=(1,))])
def test_a_parser_that_raises_fails_its_rollout(parser):
    results = run(ToolLoop(FakeGenerator(), StrictTokenizer(), tools=[Echo("ok")], parser=parser), PROMPT, num=2)
    assert [(r.outputs.kind, r.outputs.stage) for r in results] == [("tool", "parser")] * 2
    assert "Error" in results[0].outputs.message
    assert well_formed(results[0].outputs.message) == results[0].outputs.message


def test_a_parsed_call_is_made_well_formed():
    turn = parse_turn(lambda text: ParsedTurn(content=text, calls=(ToolCall(name=text, arguments={"x": text}),)), LONE)
    assert json.dumps([turn.content, turn.calls[0].name, dict(turn.calls[0].arguments)], ensure_ascii=False).encode()


class Refusing(StrictTokenizer):
    def encode(self, text, *, add_special_tokens=True):
        if "poison" in text:
            raise OverflowError("this text")
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_a_tokenizer_that_refuses_a_text_fails_its_rollout():
    (result,) = run(ToolLoop(asking([CALL]), Refusing(), tools=[Echo("poison")]), PROMPT)
    assert (result.outputs.kind, result.outputs.message) == ("loop", "OverflowError: this text")


def test_a_failures_message_is_well_formed():
    failure = Failure(kind="tool", stage="x", message=LONE, is_retryable=False)
    assert failure.message == MARK
    assert MARK in str(FailureError(failure))


@pytest.mark.parametrize("name", ["sampling_params", "self", "loop", "row", "kwargs"])
def test_a_column_may_have_any_name(name):
    (result,) = run(SingleTurnLoop(FakeGenerator(), FakeTokenizer()), {**PROMPT, name: 1})
    assert not isinstance(result.outputs, Failure), result.outputs


def test_a_loop_with_the_former_signature_is_refused():
    with pytest.raises(LoopError, match=r"Old.run\(self, sampling_params, \*\*row\).*one mapping"):

        class Old(AgentLoop):
            async def run(self, sampling_params, **row):
                return []


def test_the_measured_prompt_is_the_prompt_that_is_sent():
    """With tools' schemas, an environment's first observation, or the row's messages alone."""
    for loop, row in (
        (SingleTurnLoop(FakeGenerator(), FakeTokenizer()), PROMPT),
        (ToolLoop(FakeGenerator(), FakeTokenizer(), tools=[Echo("ok")]), PROMPT),
        (played(("a long observation", {}), ("", 0.0, True, False, {})), {"system": "play"}),
    ):
        ((measured, images),) = asyncio.run(AgentRunner(lambda _, loop=loop: loop).prompts([row]))
        (result,) = run(loop, row)
        assert (measured, images) == (result.outputs[0].prompt_token_ids, ())


def test_rows_that_cannot_be_rendered_are_named_one_by_one():
    runner = AgentRunner(lambda _: SingleTurnLoop(FakeGenerator(), FakeTokenizer()))
    found = asyncio.run(runner.prompts([PROMPT, {}, PROMPT, {"prompt": [{"role": "user", "content": 3}]}]))
    assert [isinstance(each, Failure) for each in found] == [False, True, False, True]


class PanicException(BaseException):
    """Derives from `BaseException`, as panics of Rust extensions do."""


class MuteError(Exception):
    def __str__(self):
        raise PanicException("no text")


STRAYS = [
    PanicException("called `Option::unwrap()`"),
    SystemExit(3),
    KeyboardInterrupt("mine"),
    asyncio.CancelledError("stray"),
    RecursionError("deep"),
    MemoryError(),
    StopIteration(1),
    StopAsyncIteration(1),
    MuteError(),
    ExceptionGroup("two", [ValueError("a"), OSError("b")]),
    BaseExceptionGroup("two", [SystemExit(1), ValueError("a")]),
]


def thrown(error):
    def throw(*args, **kwargs):
        raise error

    return throw


@pytest.mark.parametrize("error", STRAYS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("is_plain", [False, True], ids=["async", "thread"])
def test_whatever_a_tool_raises_is_counted(error, is_plain):
    def echo(x: str) -> str:
        """Echo."""
        raise error

    (result, other) = run(
        ToolLoop(asking([CALL, CALL, "done", "done"]), FakeTokenizer(), tools=[echo if is_plain else Echo(error)]),
        PROMPT,
        2,
    )
    for each in (result, other):
        assert each.outputs[0].metrics["num_tool_error"] == 1
        said = FakeTokenizer().decode(each.outputs[0].completion_token_ids)
        assert f"error: {type(error).__name__}" in said or "StopIteration" in said


@pytest.mark.parametrize("error", STRAYS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("place", ["tokenizer", "parser", "template", "loop", "reset", "step"])
def test_whatever_foreign_code_raises_fails_one_rollout(error, place):
    class Poisoned(FakeTokenizer):
        def encode(self, text, **kwargs):
            return thrown(error)() if place == "tokenizer" and "poison" in text else super().encode(text, **kwargs)

        def apply_chat_template(self, conversation, **kwargs):
            if place == "template" and "poison" in str(conversation):
                raise error
            return super().apply_chat_template(conversation, **kwargs)

    class Own(AgentLoop):
        async def run(self, sampling_params, row):
            if row.get("is_bad"):
                raise error
            return await SingleTurnLoop(self.server, self.tokenizer).run(sampling_params, row)

    class Broken(Room):
        def reset(self, *, seed):
            return thrown(error)() if place == "reset" and seed == 1 else ("seen", {})

        def step(self, action):
            return thrown(error)() if place == "step" else ("seen", 0.0, True, False, {})

    good = {"prompt": [{"role": "user", "content": "q"}]}
    bad = {"prompt": [{"role": "user", "content": "poison"}], "is_bad": True, "seed": 1}
    model, tokenizer = FakeGenerator(lambda _: ids("poison")), Poisoned()
    loop = {
        "parser": lambda: ToolLoop(model, tokenizer, tools=[Echo("poison")], parser=thrown(error)),
        "tokenizer": lambda: ToolLoop(asking([CALL] * 4), tokenizer, tools=[Echo("poison")]),
        "loop": lambda: Own(model, tokenizer),
        "reset": lambda: GymLoop(model, tokenizer, environments={"room": lambda: Broken("", "")}),
        "step": lambda: GymLoop(model, tokenizer, environments={"room": lambda: Broken("", "")}),
    }.get(place, lambda: SingleTurnLoop(model, tokenizer))()
    runner = AgentRunner(lambda _: loop, max_attempts=1)

    async def collect():
        return {g.row_index: g async for g in runner.run_groups([good, bad], {}, group_size=1)}

    found = asyncio.run(collect())
    failed = found[1].failures[0]
    assert type(error).__name__ in failed.message or "StopIteration" in failed.message
    assert len(found) == 2
    if place in ("template", "loop", "reset"):
        assert found[0].failures == (), "the other row is not concerned"


def test_a_loop_that_cancels_its_own_task_fails_alone():
    class Leaving(AgentLoop):
        async def run(self, sampling_params, row):
            asyncio.current_task().cancel()
            await asyncio.sleep(60)

    results = run(Leaving(FakeGenerator(), FakeTokenizer()), PROMPT, 2)
    assert [r.outputs.message for r in results] == ["CancelledError"] * 2


def interrupted(inside):
    """Press Ctrl-C while a tool runs, in a loop that keeps Python's own handler or asyncio's."""

    class Waits(Tool):
        async def call(self, arguments, session_id):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)

    loop = ToolLoop(asking([CALL]), FakeTokenizer(), tools=[Waits("echo", "", {"type": "object", "properties": {}})])

    async def collect():
        return [r async for r in AgentRunner(lambda _: loop).run([PROMPT], {})]

    return inside(collect())


def test_ctrl_c_stops_the_run():
    with pytest.raises(KeyboardInterrupt):
        interrupted(asyncio.run)

    def with_pythons_handler(work):
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(work)
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.close()

    with pytest.raises(KeyboardInterrupt):
        interrupted(with_pythons_handler)
    assert is_foreign(KeyboardInterrupt()) is (signal.getsignal(signal.SIGINT) is not signal.default_int_handler)


class Page:
    """A browser whose page shows, answers and refuses with the given text."""

    def __init__(self, text):
        self.text = text

    async def open(self, session_id, url, html):
        return ToolResult(text=self.text)

    async def act(self, session_id, action):
        raise ToolError(self.text)

    async def evaluate(self, session_id, check):
        return self.text

    async def leave(self, session_id):
        return


@pytest.mark.parametrize("text", [LONE, "a\0b", "\ud83d", "\udfff\0"])
def test_a_pages_text_is_made_well_formed(text, monkeypatch):
    stub = SimpleNamespace(Error=type("Error", (Exception,), {}), async_playwright=None)
    if "rl_agent.loops.gui" not in sys.modules:
        monkeypatch.setitem(sys.modules, "playwright", SimpleNamespace(async_api=stub))
        monkeypatch.setitem(sys.modules, "playwright.async_api", stub)
        monkeypatch.delitem(sys.modules, "rl_agent.loops.gui", raising=False)
    gui = importlib.import_module("rl_agent.loops.gui")
    monkeypatch.delitem(sys.modules, "rl_agent.loops.gui", raising=False)
    loop = gui.GuiLoop(asking(['<tool_call>{"name": "look", "arguments": {}}</tool_call>', "done"]), StrictTokenizer())
    loop._browser = Page(text)
    for tool in loop._tools.values():
        tool._browser = loop._browser
    (result,) = run(loop, {**PROMPT, "html": text, "check": text})
    assert (result.outputs.kind, result.outputs.stage) == ("grader", "check"), "no number for a reward"
    result.outputs.message.encode()


@pytest.mark.parametrize("text", [LONE, "a\0b"])
@pytest.mark.parametrize("column", ["environment", "environment_args", "system", "seed", "tools", "images"])
def test_odd_text_in_any_column_ends_as_a_result(column, text):
    row = {**PROMPT, column: {text: text} if column == "environment_args" else text}
    for loop in (
        played(("seen", {}), ("", 1.0, True, False, {})),
        ToolLoop(asking(["done"] * 2), StrictTokenizer(), tools=[Echo("ok")]),
    ):
        try:
            (result,) = run(loop, row)
        except PluginError as error:
            found = str(error)
        else:
            found = repr(result.outputs)
        found.encode()
