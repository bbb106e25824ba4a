"""Plug-ins: whatever a key names by entry point, `FILE.py:NAME` or `MODULE:NAME`, or `rl_trainer.train` was given.

Advantages, policy losses, stages, filters, staleness policies, schedules, agent loops, datasets, rewards and trackers
are looked up here.
Their code is the user's: it runs with the rights of the process that asks for it.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from rl_trainer.equivalents import hint
from rl_trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import ModuleType

    from tensordict import TensorDict

T = TypeVar("T")
LOOPS, FILTERS = "rl_agent.loops", "rl_trainer.filters"
_STAGE_READS = ("prompt_token_ids", "completion_token_ids", "loss_mask", "rewards")


class Serialized(str):
    """A Python object of the caller's on its way to the workers, by value: what defined it need not be there.

    It stands in the configuration where the name of a plug-in may, and reads `<qualified name>`. Made and read by
    processes of one run: a file cannot hold one.
    """

    payload: bytes
    """By cloudpickle."""

    @classmethod
    def of(cls, value: Any) -> Serialized:
        """A function, class or object; a module that is not installed travels with it.

        Raises:
            ConfigError: it cannot be serialized.
        """
        made = cls(f"<{getattr(value, '__qualname__', type(value).__qualname__)}>")
        module = _own_module(value)
        try:
            if module is not None:
                cloudpickle.register_pickle_by_value(module)
            made.payload = cloudpickle.dumps(value)
        except Exception as error:
            raise ConfigError(f"{made} cannot be sent to the workers: {type(error).__name__}: {error}") from error
        finally:
            if module is not None:
                cloudpickle.unregister_pickle_by_value(module)
        return made

    @classmethod
    def from_payload(cls, payload: bytes) -> Serialized:
        """What another process of the run has serialized."""
        made = cls("<object>")
        made.payload = payload
        return made

    def load(self) -> Any:
        """The object."""
        return cloudpickle.loads(self.payload)


def _own_module(value: Any) -> ModuleType | None:
    """The module that defined it, unless workers can import that; `__main__` travels with its functions anyway."""
    module = sys.modules.get(getattr(value, "__module__", None) or "__main__")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return None
    top = module.__name__.partition(".")[0]
    is_installed = top in sys.stdlib_module_names or top in packages_distributions()
    return None if is_installed else module


def find(name: str, group: str, *, key: str, known: Collection[str] = ()) -> Any:
    """The plug-in that a key names.

    Args:
        name: An entry point of `group`, `FILE.py:NAME`, `MODULE:NAME`, or a `Serialized` object.
        group: Of entry points, `rl_trainer.advantages` or the like.
        key: For messages.
        known: Further names, for messages.

    Raises:
        ConfigError: there is none (lists what there is).
    """
    if ":" not in name and not isinstance(name, Serialized):
        return _installed(name, group, key, known).load()
    cached = name.payload if isinstance(name, Serialized) else name
    if cached not in _FOUND:
        _FOUND[cached] = _load(name, key)
    return _FOUND[cached]


_FOUND: dict[str | bytes, Any] = {}
"""What was loaded: a file runs once in a process."""


def named(
    name: str,
    known: Mapping[str, T],
    *,
    group: str,
    kind: type[T],
    key: str,
    make: Callable[[Callable[..., Any]], T] | None = None,
) -> T:
    """The plug-in of one kind that a key names: one of `known`, or see `find`.

    Args:
        name: What the key holds.
        known: Those that ship.
        group: Of entry points.
        kind: What it has to be.
        key: For messages.
        make: Makes one of a plain function; None: a function is none.

    Raises:
        ConfigError: there is none (lists what there is), or it is something else.
    """
    if name in known:
        return known[name]
    found = find(name, group, key=key, known=known)
    if isinstance(found, kind):
        return found
    if make is not None and inspect.isroutine(found):
        return make(found)
    what = f"has to be a {kind.__name__}" + (", or a function" if make is not None else "")
    raise ConfigError(f"{key}={name!r} of {group} leads to a {type(found).__name__}; it {what}")


def check(name: str, group: str, *, key: str) -> None:
    """Check that a plug-in is there, running none of its code; see `find`.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(name, Serialized):
        return
    place, mark, attribute = name.rpartition(":")
    if not mark:
        _installed(name, group, key)
    elif place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            raise ConfigError(f"{key}={name} is not there: {file} is no file")
        if attribute not in (there := _names(file)):
            near = difflib.get_close_matches(attribute, there, 1)
            raise ConfigError(
                f"{key}={name}: {file} defines no {attribute!r} at its top level"
                + (f"; did you mean {near[0]!r}?" if near else "; it is given as FILE.py:NAME")
            )
    elif importlib.util.find_spec(place.partition(".")[0]) is None:
        raise ConfigError(f"{key}={name} is not there: no module {place!r} is installed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Columns of one's own between the rollouts and the loss (`algorithm.stages`); a plain function makes one."""

    compute: Callable[[TensorDict], Mapping[str, Any]]
    """From the columns that it reads of a rank's rows to new ones, as `rl_tq.TransferQueue.put` takes them."""
    reads: tuple[str, ...] = _STAGE_READS
    """Columns, of the rollouts and of the passes that the configuration has, and of stages before."""


def stage_named(name: str) -> Stage:
    """The stage that `algorithm.stages` names.

    Raises:
        ConfigError: there is none.
    """
    return named(
        name,
        {},
        group="rl_trainer.stages",
        kind=Stage,
        key="algorithm.stages",
        make=lambda compute: Stage(compute=compute, reads=reads_of(compute, _STAGE_READS)),
    )


def loop_named(name: str) -> Any:
    """What `rl_agent.create_loop` makes the loop of `agent.loop` of: an installed name, or a class by its path."""
    return find(name, LOOPS, key="agent.loop") if ":" in name or isinstance(name, Serialized) else name


Filter = Callable[[Sequence[Mapping[str, Any]]], bool]
"""Whether a group is learned from, by the tags of its samples: `reward`, `num_tokens`, `finish_reason` and the like."""


def filter_named(name: str) -> Filter:
    """The filter that `batch.filter` names.

    Raises:
        ConfigError: there is none.
    """
    found: Any = find(name, FILTERS, key="batch.filter")
    if not inspect.isroutine(found):
        raise ConfigError(
            f"batch.filter={name!r} leads to a {type(found).__name__}; it has to be a function of a group's tags"
        )
    return found


def reads(*columns: str) -> Callable[[T], T]:
    """Mark a function with the columns of the queue that it wants: a policy loss beside its own, or a stage."""

    def mark(function: T) -> T:
        function.reads = columns  # pyright: ignore[reportAttributeAccessIssue]
        return function

    return mark


def reads_of(function: object, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What `reads` marked."""
    return getattr(function, "reads", default)


def absolute(name: str) -> str:
    """`FILE.py:NAME` with the file's whole path, because workers may run elsewhere; anything else as it is."""
    place, mark, attribute = name.rpartition(":")
    is_file = mark and place.endswith(".py") and attribute.isidentifier()
    return f"{Path(place).absolute()}:{attribute}" if is_file else name


def _load(name: str, key: str) -> Any:
    if isinstance(name, Serialized):
        return name.load()
    check(name, "", key=key)
    place, _, attribute = name.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}={name} cannot be loaded: {type(error).__name__}: {error}") from error


def _installed(name: str, group: str, key: str, known: Collection[str] = ()):  # noqa: ANN202 - importlib's own type
    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name not in installed:
        there = ", ".join([*sorted(known), *sorted(installed)]) or "none"
        raise ConfigError(
            f"{key}={name!r} is not known{hint(key, name)}; there are {there}. One of your own is given as "
            f"FILE.py:NAME or MODULE:NAME, or installed as an entry point of {group}"
        )
    return installed[name]


def _load_file(file: Path):  # noqa: ANN202 - a module
    """Under a name of its own, its folder last in the path: a `datasets.py` beside it stands in nobody's way."""
    spec = importlib.util.spec_from_file_location(f"rl_trainer_plugin_{file.stem}", file)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.append(str(file.resolve().parent))  # what lies beside it can be imported
    spec.loader.exec_module(module)
    return module


def _names(file: Path) -> set[str]:
    """What a file's top level defines."""
    try:
        tree = ast.parse(file.read_text(), str(file))
    except SyntaxError as error:
        raise ConfigError(f"{file} is not valid Python: {error}") from error
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names
