"""Environments of verifiers (https://github.com/PrimeIntellect-ai/verifiers) by the name of an installed taskset."""

# Verifiers is there where its tests run, and not where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib.util
import itertools
from typing import TYPE_CHECKING, Any

from rl_agent.environments.base import EnvironmentSource
from rl_agent.errors import PluginError, RowError, described, is_foreign

if TYPE_CHECKING:
    from collections.abc import Mapping


class VerifiersEnvironments(EnvironmentSource):
    """Tasks of one taskset, in its order; the loop `verifiers` plays them.

    Args:
        name: Name of the taskset: an installed package, or one that comes with verifiers, such as `textarena`.
        arguments: Keys of verifiers' environment configuration: `taskset`, and one for each agent.

    Raises:
        PluginError: verifiers or the taskset is not installed, or refuses its configuration.
    """

    is_endless = False

    def __init__(self, name: str, arguments: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, arguments)
        if importlib.util.find_spec("verifiers") is None:
            raise PluginError(f"environment verifiers:{name} needs verifiers: pip install verifiers")
        given = self.arguments
        try:
            self.environment = _made({**given, "taskset": {**given.get("taskset", {}), "id": name}})
        except BaseException as error:  # a taskset is code of others, and verifiers leaves by SystemExit
            if not is_foreign(error):
                raise
            raise PluginError(
                f"environment verifiers:{name} cannot be made: {described(error)}. A harness that runs code needs a "
                "place to run it, such as environment_args={agent: {runtime: {type: docker}}}; a chat without one is "
                "environment_args={agent: {harness: {id: 'null'}}}"
            ) from error
        self._tasks = list[Any]()
        self._more = iter(self.environment.taskset)

    def task(self, index: int) -> Any:
        """The task of this index.

        Raises:
            RowError: there are fewer tasks.
        """
        self._tasks += itertools.islice(self._more, max(index + 1 - len(self._tasks), 0))
        if index >= len(self._tasks):
            raise RowError(
                f"field 'index' of the row is {index}, and verifiers:{self.name} has {len(self._tasks)} tasks"
            )
        return self._tasks[index]

    def rows(self, *, seed: int, num_train: int, num_eval: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Tasks by index: the last are held out, at most a tenth of them; of endless tasksets the first."""
        taskset = self.environment.taskset
        try:
            if taskset.INFINITE:
                return self._rows(range(num_eval, num_eval + num_train)), self._rows(range(num_eval))
            num_tasks = sum(1 for _ in itertools.islice(taskset, num_train + num_eval))
        except Exception as error:
            raise PluginError(f"the tasks of verifiers:{self.name} cannot be loaded: {error}") from error
        num_held_out = min(num_eval, max(num_tasks // 10, 1))
        first = num_tasks - num_held_out
        return self._rows(range(first)), self._rows(range(first, num_tasks))

    def _rows(self, indices: range) -> list[dict[str, Any]]:
        return [{"index": index, "prompt": _prompt(self.task(index).data)} for index in indices]


def _made(given: dict[str, Any]) -> Any:
    """Environment of a configuration. Agents run here, unless it says where, if their harness runs no code."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import harness_class, load_environment, resolve_env_config
    from verifiers.v1.utils.prime import ensure_prime_auth

    for name, harness in resolve_env_config(given).agent_harnesses().items():
        if not harness_class(harness.id).EXECUTES_CODE:
            given = {**given, name: {"runtime": {"type": "subprocess"}, **given.get(name, {})}}
    config = resolve_env_config(given)
    if any(agent.runtime.type == "prime" for agent in agent_config_fields(config).values()):
        ensure_prime_auth()  # later it would end the process
    return load_environment(config)


def _prompt(data: Any) -> list[dict[str, Any]] | str:
    """Chat messages that a task begins with, as far as its data have them."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is None or isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt or "begin"}]
    return [*system, *(message.model_dump(exclude_none=True) for message in data.prompt)]
