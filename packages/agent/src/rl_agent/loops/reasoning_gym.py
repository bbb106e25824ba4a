"""Loop over tasks of reasoning-gym: one answer, scored by the task's own verifier."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_agent.base import AgentLoop
from rl_agent.chat_template import tokenize_prompt
from rl_agent.errors import FailureError, RowError, described
from rl_agent.loops.gym import environment_failure
from rl_agent.session import Session
from rl_agent.tools.base import DeadlineError, in_thread, with_deadline
from rl_agent.types import AgentLoopOutput, Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_agent.base import Generator
    from rl_agent.types import Message, Tokenizer

_SCORE_TIMEOUT_S = 60.0


class ReasoningGymLoop(AgentLoop):
    """Loop that asks one procedurally generated question (https://github.com/open-thought/reasoning-gym).

    A row holds `task` (a dataset of reasoning-gym, for example `basic_arithmetic`), `index` and, if it wants,
    `task_args` (the dataset's settings, `seed` and `size` among them) and `system`. The answer is what stands in the
    last `<answer>` and `</answer>`, or all of the text. Install it with `pip install 'rl-agent[reasoning_gym]'`.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        environment: `reasoning_gym:TASK`, the task of rows that name none.
    """

    def __init__(self, server: Generator, tokenizer: Tokenizer, *, environment: str | None = None) -> None:
        super().__init__(server, tokenizer)
        self._task = {} if environment is None else {"task": environment.partition(":")[2]}

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids of the question."""
        _, entry = await _asked(self._task | dict(row))
        return tokenize_prompt(self.tokenizer, {"prompt": _messages(row, entry)})

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        """Run one row.

        Raises:
            RowError: the row names no task, or one that reasoning-gym does not have, or settings that it refuses.
            FailureError: the task or its verifier failed.
        """
        row = self._task | dict(row)
        task = row.get("task")
        dataset, entry = await _asked(row)
        prompt, _ = tokenize_prompt(self.tokenizer, {"prompt": _messages(row, entry)})
        session = Session(self.server, self.tokenizer, prompt, sampling_params)
        await session.generate()
        output = session.finish()
        answer = output.text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        try:
            reward = await with_deadline(_score(dataset, answer, entry), _SCORE_TIMEOUT_S)
        except Exception as error:
            message = f"the verifier of {task} failed on {answer[:100]!r}: {described(error)}"
            failure = Failure(kind=FailureKind.GRADER, stage="verifier", message=message, is_retryable=False)
            raise FailureError(failure) from error
        return replace(output, reward=reward, extra_fields={"answer": answer, "task": task})


async def _asked(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Dataset of a row's task, and the row's entry of it."""
    import reasoning_gym

    task, index = row.get("task"), row.get("index", 0)
    if not isinstance(task, str):
        raise RowError(f"field 'task' of the row is {task!r}; it needs the name of a reasoning-gym dataset")
    settings = {"seed": 0, "size": index + 1, **(row.get("task_args") or {})}
    try:
        dataset = reasoning_gym.create_dataset(task, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise RowError(f"reasoning-gym cannot make task {task!r} with {settings}: {error}") from error
    try:
        return dataset, await with_deadline(_item(dataset, index), _SCORE_TIMEOUT_S)
    except DeadlineError as error:
        raise environment_failure("task", f"{task} made no question within {_SCORE_TIMEOUT_S:g} s") from error


def _messages(row: Mapping[str, Any], entry: Mapping[str, Any]) -> list[Message]:
    system: list[Message] = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [*system, {"role": "user", "content": entry["question"]}]


async def _item(dataset: Any, index: int) -> dict[str, Any]:
    return await in_thread(lambda: dataset[index])


async def _score(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    return float(await in_thread(lambda: dataset.score_answer(answer=answer, entry=entry)))
