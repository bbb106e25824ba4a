"""Plug-in look-up: by entry point, `FILE.py:NAME`, `MODULE:NAME`, or as a Python object given to `rl_trainer.train`.

Advantages, policy losses, stages, filters, staleness and elastic policies, schedules, agent loops, datasets, rewards
and trackers are looked up here. Their code is the user's, and runs with the rights of the process that loads it.
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
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points, packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
from packaging.requirements import Requirement

from rl_trainer.equivalents import hint
from rl_trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import ModuleType

    from tensordict import TensorDict

T = TypeVar("T")
LOOPS, FILTERS = "rl_agent.loops", "rl_trainer.filters"
_OWN = "rl-post-trainer"
"""Our distribution, which runs already; Ray, which may be missing, is the runtime's alone."""
_STAGE_READS = ("prompt_token_ids", "completion_token_ids", "loss_mask", "rewards")


class Serialized(str):
    """Plug-in given as a Python object, pickled by value: the workers need not have the code that defined it.

    It stands in the configuration in place of a plug-in's name, and reads `<qualified name>`. Only processes of one run
    exchange it: a file cannot hold one.
    """

    payload: bytes
    """The object, by cloudpickle."""

    @classmethod
    def of(cls, value: Any) -> Serialized:
        """Serialize a function, class or object, together with its module if that is not installed.

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
        """Rebuild from the `payload` that another process of the run made."""
        made = cls("<object>")
        made.payload = payload
        return made

    def load(self) -> Any:
        """Unpickle the object."""
        return cloudpickle.loads(self.payload)


def _own_module(value: Any) -> ModuleType | None:
    """Module of an object that has to be pickled by value; None if workers can import it, or it is `__main__`."""
    module = sys.modules.get(getattr(value, "__module__", None) or "__main__")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return None
    top = module.__name__.partition(".")[0]
    is_installed = top in sys.stdlib_module_names or top in packages_distributions()
    return None if is_installed else module


def find(name: str, group: str, *, key: str, known: Collection[str] = ()) -> Any:
    """Load the plug-in that a key names.

    Args:
        name: An entry point of `group`, `FILE.py:NAME`, `MODULE:NAME`, or a `Serialized` object.
        group: Entry point group, `rl_trainer.advantages` or the like.
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
"""Cache of loaded plug-ins: a file runs once in a process."""


def named(
    name: str,
    known: Mapping[str, T],
    *,
    group: str,
    kind: type[T],
    key: str,
    make: Callable[[Callable[..., Any]], T] | None = None,
) -> T:
    """Look up a plug-in of one kind: one of `known`, or loaded by `find`.

    `make` wraps a plain function, which is refused without it.

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
    """Check that a plug-in exists and that its extra is installed, without running its code; see `find`.

    Raises:
        ConfigError: unknown (lists what there is), or known but incomplete (the pip line).
    """
    if isinstance(name, Serialized):
        return
    place, mark, attribute = name.rpartition(":")
    if not mark:
        point = _installed(name, group, key)
        if (owner := point.dist) is None:
            return
        requirements = [Requirement(text) for text in owner.requires or []]
        in_extra = [each for each in requirements if each.marker and each.marker.evaluate({"extra": name})]
        in_all = [each for each in requirements if each.marker is None and owner.name != _OWN]
        if missing := [each.name for each in (*in_all, *in_extra) if not is_installed(each.name)]:
            raise ConfigError(f"{key}={name} needs {', '.join(missing)}: pip install '{owner.name}[{name}]'")
    elif place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            raise ConfigError(f"{key}={name} is not there: {file} is not a file")
        if attribute not in (there := _names(file)):
            near = difflib.get_close_matches(attribute, there, 1)
            raise ConfigError(
                f"{key}={name}: {file} defines no {attribute!r} at its top level"
                + (f"; did you mean {near[0]!r}?" if near else "; it is given as FILE.py:NAME")
            )
    elif importlib.util.find_spec(place.partition(".")[0]) is None:
        raise ConfigError(f"{key}={name} is not there: no module {place!r} is installed")


def is_installed(package: str) -> bool:
    """Whether a distribution is installed; nothing of it is imported."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage (`algorithm.stages`): a user's columns between rollouts and loss. A plain function is one too."""

    compute: Callable[[TensorDict], Mapping[str, Any]]
    """New columns from a rank's rows of the columns in `reads`, as `rl_tq.TransferQueue.put` takes them."""
    reads: tuple[str, ...] = _STAGE_READS
    """Columns that it reads, of the rollouts, of configured passes and of earlier stages, or numeric tags."""


def stage_named(name: str) -> Stage:
    """Look up a stage of `algorithm.stages`.

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
    """Resolve `agent.loop` for `rl_agent.create_loop`: an installed name as it is, a path or an object as a class."""
    return find(name, LOOPS, key="agent.loop") if ":" in name or isinstance(name, Serialized) else name


Filter = Callable[[Sequence[Mapping[str, Any]]], bool]
"""Filter: whether a group is learned from, by its samples' tags (`reward`, `num_tokens`, `finish_reason`, ...)."""


def filter_named(name: str) -> Filter:
    """Look up the filter of `batch.filter`.

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
    """Decorator: columns of the queue, or numbers among the tags, that a stage, a loss or an advantage reads."""

    def mark(function: T) -> T:
        function.reads = columns  # pyright: ignore[reportAttributeAccessIssue]
        return function

    return mark


def reads_of(function: object, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Columns that `reads` named for a function."""
    return getattr(function, "reads", default)


def absolute(name: str) -> str:
    """Make the path of `FILE.py:NAME` absolute, because workers run in other folders; other names stay."""
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


def _installed(name: str, group: str, key: str, known: Collection[str] = ()) -> EntryPoint:
    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name not in installed:
        there = ", ".join([*sorted(known), *sorted(installed)]) or "none"
        raise ConfigError(
            f"{key}={name!r} is not known{hint(key, name)}; there are {there}. One of your own is given as "
            f"FILE.py:NAME or MODULE:NAME, or installed as an entry point of {group}"
        )
    return installed[name]


def _load_file(file: Path):  # noqa: ANN202 - a module
    """Import a file under a private module name, with its folder last in `sys.path`: it shadows no other module."""
    spec = importlib.util.spec_from_file_location(f"rl_trainer_plugin_{file.stem}", file)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.append(str(file.resolve().parent))  # files next to it can be imported
    spec.loader.exec_module(module)
    return module


def _names(file: Path) -> set[str]:
    """Names that a file defines at its top level."""
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
