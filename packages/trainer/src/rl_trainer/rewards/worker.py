"""Program of a reward process: runs the function that its first argument names, for `FunctionPool`.

The second argument says what it gives: a `reward`, or of a judge the `prompt` or the `score`.

Requests and answers are JSON behind its length on the descriptors that it was started with as standard input and
output: never pickles, for a function may run what a policy wrote, and whoever reaches the pipe must not be able to make
the trainer run something. A plain function runs in the main thread, one call at a time; calls of a coroutine function
run side by side.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import json
import os
import queue
import signal
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

from rl_agent.errors import contained, described
from rl_agent.types import well_formed
from rl_trainer.plugins import Serialized, find
from rl_trainer.rewards.trl import finite, is_batched, of_batch

HEADER = struct.Struct("<Q")
"""Bytes of the JSON that follows."""
MAX_ANSWER_BYTES = 1 << 24
GROUP = "rl_trainer.rewards"
"""Entry points that are reward functions."""
OBJECT = "-"
"""Argument in place of a function's name: the function itself is the first message."""
_BYTES = "\0bytes"
"""The key of an object that represents bytes."""
Request = tuple[int, Any, Mapping[str, Any], float]
"""Number, completion text (or the fields of a `Batch`), row, and deadline in seconds of a coroutine function."""
Answer = tuple[int, str, Any]
"""Number, `ok`, `error` or `timeout`, and the value or the sentence. The first has number -1: `ok` with `is_async` and
`is_batched`, or `error`."""


def main() -> None:
    """Serve calls until standard input ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a KeyboardInterrupt is the function's own
    os.dup2(2, 1)  # what the function prints is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        name = sys.argv[1]
        if name == OBJECT:  # of the process that started this one, before anything of others is read
            name = Serialized.from_payload(decoded(_framed(requests)))
        function = find(name, GROUP, key="reward.path")
        if not callable(function):
            raise TypeError(f"{function!r} is not a function of the completion's text and the row")
        if (check := CHECKS.get(sys.argv[2])) is None:
            function, takes_batch = adapted(function)
        else:
            function, takes_batch = _with_check(function, check), False
    except BaseException as error:  # noqa: BLE001 - a file of the user's may raise anything
        _write(answers, (-1, "error", described(error)))
        return
    is_async = inspect.iscoroutinefunction(function)
    _write(answers, (-1, "ok", {"is_async": is_async, "is_batched": takes_batch}))
    if is_async:
        loop = asyncio.new_event_loop()
        serving = loop.create_task(_serve_together(function, requests, answers))
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task that the function started: it waits
                loop.run_until_complete(serving)
    inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
    _read_aside(requests, inbox.put)
    while True:
        number, given, row, _ = inbox.get()
        kind, result = _call(function, given, row)
        _write(answers, (number, kind, result))


_VERL = ("data_source", "solution_str", "ground_truth")
"""Parameters of a `compute_score` as verl calls it, other than `extra_info`."""


def adapted(function: Callable[..., Any]) -> tuple[Callable[[Any, Mapping[str, Any]], Any], bool]:
    """A reward function as it is called here, `(text, row)`, or `(batch, row)` where the second value is true.

    Those written for verl, `compute_score(data_source, solution_str, ground_truth, extra_info)`, and for TRL are known
    by the names of their parameters.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin
        return _with_check(function), False
    if is_batched(parameters.values()):
        return of_batch(function, parameters), True
    is_verls = all(name in parameters for name in _VERL)
    return _with_check(_of_verl(function, parameters) if is_verls else function), False


def _with_check(
    function: Callable[..., Any], check: Callable[[Any], Any] | None = None
) -> Callable[[Any, Mapping[str, Any]], Any]:
    check = check or checked
    if inspect.iscoroutinefunction(function):

        async def score(text: str, row: Mapping[str, Any]) -> Any:
            return check(await function(text, row))

        return score
    return lambda text, row: check(function(text, row))


def _of_verl(
    function: Callable[..., Any], names: Mapping[str, inspect.Parameter]
) -> Callable[[str, Mapping[str, Any]], Any]:
    """Reward function of verl as one of text and row; `score` is the reward of a mapping that it gives, as there."""

    def arguments(text: str, row: Mapping[str, Any]) -> dict[str, Any]:
        truth = row.get("reward_model", {}).get("ground_truth")
        given = {"data_source": row.get("data_source"), "solution_str": text, "ground_truth": truth}
        return given | ({"extra_info": row.get("extra_info") or {}} if "extra_info" in names else {})

    def score_of(value: Any) -> Any:
        return value["score"] if isinstance(value, Mapping) and "score" in value else value

    if inspect.iscoroutinefunction(function):

        async def scores(text: str, row: Mapping[str, Any]) -> Any:
            return score_of(await function(**arguments(text, row)))

        return scores
    return lambda text, row: score_of(function(**arguments(text, row)))


def _read_aside(requests: IO[bytes], deliver: Callable[[Request], object]) -> None:
    """Read requests in a thread, so that this process ends with its parent, even inside a stuck function."""

    def read() -> None:
        with contextlib.suppress(EOFError):
            while True:
                deliver(decoded(_framed(requests)))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()


async def _serve_together(function: Callable[..., Any], requests: IO[bytes], answers: IO[bytes]) -> None:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(request: Request) -> None:
        number, given, row, timeout_s = request
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                kind, result = "ok", await contained(function(given, row))
        except Exception as error:  # noqa: BLE001 - it is reported
            kind, result = "timeout" if deadline.expired() else "error", described(error)
        _write(answers, (number, kind, result))

    def begin(request: Request) -> None:
        task = asyncio.create_task(answer(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    _read_aside(requests, lambda request: loop.call_soon_threadsafe(begin, request))
    await asyncio.Event().wait()


def _call(function: Callable[..., Any], given: Any, row: Mapping[str, Any]) -> tuple[str, Any]:
    try:
        return "ok", function(given, row)
    except BaseException as error:  # noqa: BLE001 - it is reported; SystemExit as well
        return "error", described(error)


def checked(value: Any) -> float | dict[str, float]:
    """Check what a function returned: a finite number, or such numbers by name.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, Mapping):
        named = cast("Mapping[Any, Any]", value)
        if not named:
            raise ValueError("it gave no part of a reward; a number, or numbers by name, are needed")
        return {str(name): _number(part) for name, part in named.items()}
    return _number(value)


def _number(value: Any) -> float:
    return finite(value, "it gave", "a number, or numbers by name, are needed")


def asked(value: Any) -> str | list[dict[str, Any]]:
    """Check the prompt of a judge: a text, or chat messages.

    Raises:
        ValueError: it is neither.
    """
    messages = cast("list[Any]", value) if isinstance(value, list) else []
    if isinstance(value, str) or (messages and all(isinstance(m, dict) and "role" in m for m in messages)):
        return value
    raise ValueError(f"it gave {value!r:.100}; a text, or a list of chat messages, is needed")


def read(value: Any) -> float | None:
    """Check the score that was read in a judge's answer: a finite number, or None if there is none in it.

    Raises:
        ValueError: it is something else.
    """
    return None if value is None else finite(value, "it gave", "a number, or None if there is no score, is needed")


CHECKS: Mapping[str, Callable[[Any], Any]] = {"prompt": asked, "score": read}
"""Checks of what functions give that are no rewards."""


def _write(answers: IO[bytes], answer: Answer) -> None:
    answers.write(framed(answer))
    answers.flush()


def framed(message: object) -> bytes:
    """Frame a message: its length, then JSON; bytes in it stay bytes.

    Raises:
        TypeError, ValueError: something in it has no JSON.
    """
    data = json.dumps(message, default=_plain).encode()
    return HEADER.pack(len(data)) + data


def _plain(value: Any) -> Any:
    """JSON values of bytes, arrays and array numbers."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {_BYTES: base64.b64encode(value).decode()}
    if (to_list := getattr(value, "tolist", None)) is not None:
        return to_list()
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to a reward function: use JSON's, or bytes")


def decoded(data: bytes) -> Any:
    """Decode a message; lone surrogates in its texts are replaced.

    Raises:
        ValueError: it is no JSON.
    """
    return well_formed(json.loads(data, object_hook=_bytes))


def _bytes(found: dict[str, Any]) -> Any:
    return base64.b64decode(found[_BYTES]) if found.keys() == {_BYTES} else found


def _framed(stream: IO[bytes]) -> bytes:
    return _exactly(stream, HEADER.unpack(_exactly(stream, HEADER.size))[0])


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data
