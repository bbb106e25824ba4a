"""Remote objects of a grade: proxies in one process of what stays in the other, and what may be asked of it.

What a test compares with never travels: a `Remote` equals a plain value only by the plain value that it holds itself.
An object is asked for the same thing once, until something is called that may change it.
"""

# What is asked of objects here is known when it is asked.
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import collections
import copy
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BASES = (int, float, complex, str, bytes, tuple, frozenset, list, dict, set, bytearray, collections.deque)
_ITERATED = (tuple, list, set, frozenset, bytes, bytearray, collections.deque)


def base_value(value: Any) -> Any:
    """Plain value of an instance of a subclass of a plain type, by the plain type's own methods."""
    if isinstance(value, int):
        return value if isinstance(value, bool) else int.__add__(value, 0)
    if isinstance(value, (float, complex)):
        return float.__pos__(value) if isinstance(value, float) else complex.__pos__(value)
    if isinstance(value, str):
        return "".join(str.__iter__(value))
    if isinstance(value, dict):
        return dict(dict[Any, Any].items(value))
    kind: Any
    for kind in _ITERATED:
        if isinstance(value, kind):
            return kind(kind.__iter__(value))
    raise TypeError(f"{type(value).__name__} holds no plain value")


async def coroutine(remote: Remote) -> Any:
    """Coroutine that is awaited in the other process."""
    return await remote


def _run_coroutine(target: Any) -> Any:
    """Result of an awaitable. Within a running loop its steps are taken here: it may wait for nothing of that loop."""
    import asyncio

    async def wait() -> Any:
        return await target

    running = asyncio._get_running_loop()  # pyright: ignore[reportAttributeAccessIssue]
    if running is None:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
        return _loops[0].run_until_complete(wait())
    steps = wait()
    try:
        while True:
            if steps.send(None) is not None:
                raise TypeError("a coroutine of the test may not wait for something else")
    except StopIteration as end:
        return end.value


_loops: list[Any] = []
"""Event loop of this process: what one coroutine made, such as a lock, another one may use."""


def _items(target: Any) -> list[Any] | None:
    """Items of a sequence or set of a custom class; None otherwise."""
    kind = type(target)
    is_sized = hasattr(kind, "__len__") and hasattr(kind, "__iter__") and not hasattr(kind, "keys")
    return list(target) if is_sized else None


def _signature(target: Any) -> list[Any]:
    """Parameters of a function: name, kind, default in a list, annotation."""
    import inspect

    def described(annotation: Any) -> Any:
        return [] if annotation is inspect.Parameter.empty else [getattr(annotation, "__name__", str(annotation))]

    signature = inspect.signature(target)
    parameters = [
        [p.name, int(p.kind), [] if p.default is p.empty else [p.default], described(p.annotation)]
        for p in signature.parameters.values()
    ]
    return [parameters, described(signature.return_annotation)]


def _inspect(target: Any, name: str) -> Any:
    """Answer of a function of `inspect`."""
    import inspect

    return getattr(inspect, name)(target)


_COMPARISONS = ("eq", "lt", "le", "gt", "ge")
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": operator.call,
    "make": operator.call,
    "get": getattr,
    "set": setattr,
    "unset": delattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "unset item": operator.delitem,
    "contains": operator.contains,
    "iter": iter,
    "next": next,
    "items": _items,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "format": format,
    "hash": hash,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "round": round,
    "abs": abs,
    "reversed": reversed,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "isinstance": lambda target, value: isinstance(value, target),
    "issubclass": lambda target, kind: issubclass(kind, target),
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target: type(target).__exit__(target, None, None, None),
    "await": _run_coroutine,
    "aiter": lambda target: type(target).__aiter__(target),
    "anext": lambda target: _run_coroutine(type(target).__anext__(target)),
    "aenter": lambda target: _run_coroutine(type(target).__aenter__(target)),
    "aexit": lambda target: _run_coroutine(type(target).__aexit__(target, None, None, None)),
    "base": base_value,
    "signature": _signature,
    "inspect": _inspect,
    **{name: getattr(operator, name) for name in (*_COMPARISONS, "neg", "pos", "invert")},
}
"""What one side may ask of an object of the other, by name."""
READS = frozenset(
    {"get", "item", "items", "len", "bool", "str", "repr", "format", "hash", "int", "float", "complex", "index",
     "round", "abs", "isinstance", "issubclass", "base", "signature", "inspect", "global", "file", "contains",
     *_COMPARISONS}
)  # fmt: skip
"""Operations that change nothing, and are asked once."""
_ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and_",
               "or_", "xor")  # fmt: skip
for _name in _ARITHMETIC:
    OPERATIONS[_name] = divmod if _name == "divmod" else getattr(operator, _name)
    OPERATIONS[f"r{_name}"] = lambda target, other, do=OPERATIONS[_name]: do(other, target)
    OPERATIONS[f"i{_name}"] = getattr(operator, f"i{_name.strip('_')}", divmod)
MAKING = frozenset({"make", "copy", "deepcopy", *(f"i{name}" for name in _ARITHMETIC)})
"""Operations whose result is an object under test, even if it is a container."""

_TELLING = frozenset(
    {"startswith", "endswith", "issubset", "issuperset", "isdisjoint", "difference", "symmetric_difference", "union",
     "intersection", "equals", "equal", "isclose", "allclose", "is_close", "array_equal", "assert_called_with"}
)  # fmt: skip
"""Methods by which a test compares: a plain argument would send the expected value to the other side."""


_NAMES = frozenset({"__name__", "__doc__", "__qualname__"})
_ASKED_NAMES = _NAMES | {"__annotations__", "__class__", "__module__", "__dict__", "__defaults__", "__mro__"}
"""Attributes of Python's own that a test reads of a solution's object; a solution reads the first of a test's."""
_MEASURES = frozenset({"abs", "round", "int", "float", "complex", "index", "len", "bool", "neg", "pos", "invert"})
"""Operations by which a test would compare the result of an operator: `abs(f(x) - 3.14) < 1e-6`."""


def id_of(remote: Remote) -> int:
    """Number of the object."""
    return object.__getattribute__(remote, "_number")


def _peer_of(remote: Remote) -> Any:
    return object.__getattribute__(remote, "_peer")


def _has_base(remote: Remote) -> bool:
    return object.__getattribute__(remote, "_kind") == "base"


def _ask(remote: Remote, operation: str, *given: Any) -> Any:
    peer, number = _peer_of(remote), id_of(remote)
    if operation in _MEASURES and number in peer.tainted:
        raise TypeError(
            f"{operation} of the result of an operator with a plain value: compare values that are returned"
        )
    return peer.ask(operation, number, *given)


def _is_made(remote: Remote) -> bool:
    return id_of(remote) in _peer_of(remote).made


class Remote:
    """Proxy of an object of the other process. Values that a test compares it with are never sent there."""

    __slots__ = ("__weakref__", "_kind", "_number", "_peer")

    def __init__(self, peer: Any, number: int, kind: str) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_kind", kind)

    def __getattribute__(self, name: str) -> Any:
        if name == "__signature__":
            return _signature_of(self)
        asked = _NAMES if _peer_of(self).is_asked else _ASKED_NAMES
        if name.startswith("__") and name.endswith("__") and name not in asked:
            return object.__getattribute__(self, name)
        if name in ("count", "index") and _has_base(self) and isinstance(_plain(self), (list, tuple, str, bytes)):
            return getattr(_plain(self), name)  # not the object's own, which would see what is looked for
        found = _ask(self, "get", name)
        if name == "__class__" and type(found) is not Remote:
            return object.__getattribute__(self, name)  # a builtin that it only claims to be
        if type(found) is Remote:
            if name[:1].isupper():
                _peer_of(self).classes.add(id_of(found))
            if name in _TELLING and not _is_made(self):
                return _only_with_remotes(name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "unset", name)

    def __call__(self, /, *given: Any, **named: Any) -> Any:
        """Call the object in its process."""
        peer, is_class = _peer_of(self), id_of(self) in _peer_of(self).classes
        made = peer.ask("make" if is_class else "call", id_of(self), *given, **named)
        if is_class and type(made) is Remote:
            peer.made.add(id_of(made))
        return made

    def __eq__(self, other: object) -> Any:
        if type(other) is Remote:
            return self is other or bool(_ask(self, "eq", other))
        return _plain(self) == other if _has_base(self) else NotImplemented

    def __hash__(self) -> int:
        return _ask(self, "hash")

    def __len__(self) -> int:
        if _has_base(self):
            return len(_plain(self))
        number = _ask(self, "len")
        if (items := _known(self, "items")) is not None and len(items) != number:
            raise TypeError(f"an object of length {number} has {len(items)} items")
        return number

    def __bool__(self) -> bool:
        return bool(_plain(self)) if _has_base(self) else _ask(self, "bool")

    def __getitem__(self, key: Any) -> Any:
        if _has_base(self):
            content = _plain(self)
            try:
                return content[key]
            except (LookupError, TypeError):
                return _ask(self, "item", key)  # such as a `__missing__`
        value = _ask(self, "item", key)
        items = _known(self, "items")
        if items is not None and type(key) is int and 0 <= key < len(items) and _differ(value, items[key]):
            raise TypeError(f"item {key} is not what iteration gives")
        return value

    def __contains__(self, value: object) -> bool:
        """Membership by iteration: asking the other side would send it the expected value."""
        if _has_base(self):
            return value in _plain(self)
        try:
            items = iter(self)
        except TypeError:
            if not _is_made(self):
                raise
            return bool(_ask(self, "contains", value))  # what the test put there
        return any(value is each or value == each for each in items)

    def __iter__(self) -> Any:
        if _has_base(self):
            return iter(_plain(self))
        items = None if _peer_of(self).is_asked else _ask(self, "items")
        if type(items) is list:
            _check_items(self, items)
            return iter(items)
        found = _ask(self, "iter")
        return found if type(found) is Remote else iter(found)

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __reversed__(self) -> Any:
        content = _plain(self) if _has_base(self) else None
        return reversed(content) if isinstance(content, (list, dict)) else _ask(self, "reversed")

    def __await__(self) -> Any:
        return _ask(self, "await")
        yield  # a generator, as the event loop wants

    def __aiter__(self) -> Any:
        return _ask(self, "aiter")

    async def __anext__(self) -> Any:
        return _ask(self, "anext")

    async def __aenter__(self) -> Any:
        return _ask(self, "aenter")

    async def __aexit__(self, *error: object) -> bool:
        return bool(_ask(self, "aexit"))

    def __round__(self, *digits: Any) -> Any:
        return _ask(self, "round", *digits)

    def __format__(self, form: str) -> str:
        return _ask(self, "format", form)

    def __copy__(self) -> Any:
        return _copied(self, "copy")

    def __deepcopy__(self, memo: object) -> Any:
        return _copied(self, "deepcopy")

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Remote and bool(_ask(self, "isinstance", value))

    def __subclasscheck__(self, kind: object) -> bool:
        return type(kind) is Remote and bool(_ask(self, "issubclass", kind))

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return bool(_ask(self, "exit"))


def _check_items(self: Remote, items: list[Any]) -> None:
    """Check that length and items that have been read agree with the iteration."""
    if (number := _known(self, "len")) is not None and number != len(items):
        raise TypeError(f"an object of length {number} has {len(items)} items")
    for index, item in enumerate(items):
        found = _peer_of(self).known("item", id_of(self), index)
        if found is not None and _differ(_peer_of(self).codec.decode(found[0], []), item):
            raise TypeError(f"item {index} is not what iteration gives")


def _known(remote: Remote, operation: str) -> Any:
    """Result of a read that has been asked; None if it has not."""
    found = _peer_of(remote).known(operation, id_of(remote))
    return None if found is None else _peer_of(remote).codec.decode(found[0], [])


def _differ(one: Any, other: Any) -> bool:
    return (one is not other) if type(one) is Remote or type(other) is Remote else bool(one != other)


def _copied(remote: Remote, operation: str) -> Any:
    found = _ask(remote, operation)
    if type(found) is Remote and _is_made(remote):
        _peer_of(remote).made.add(id_of(found))
    return found


def _signature_of(remote: Remote) -> Any:
    import inspect

    parameters, returned = _ask(remote, "signature")
    empty: Any = inspect.Parameter.empty
    made = [
        inspect.Parameter(name, type(inspect.Parameter.VAR_KEYWORD)(kind), default=(default or [empty])[0],
                          annotation=(annotation or [empty])[0])
        for name, kind, default, annotation in parameters
    ]  # fmt: skip
    return inspect.Signature(made, return_annotation=(returned or [empty])[0])


def _plain(remote: Remote) -> Any:
    """Plain value of an instance of a subclass of a plain type; else the comparison fails."""
    value = _ask(remote, "base")
    if type(value) not in BASES:
        _peer_of(remote).end("an object that claims to hold a plain value holds none")
    return value


def _only_with_remotes(name: str, method: Remote) -> Any:
    def call(*given: Any) -> Any:
        if not all(type(value) is Remote for value in given):
            raise TypeError(f"{name} of an object of the solution with a value of the test: compare plain values")
        return method(*given)

    return call


def _asking(operation: str) -> Any:
    def method(self: Remote, *given: Any) -> Any:
        return _ask(self, operation, *given)

    return method


def _comparing(name: str) -> Any:
    """Comparison: by the other side if both operands are there, here if the value is plain."""
    plain = getattr(operator, name)

    def method(self: Remote, other: Any) -> Any:
        if type(other) is Remote:
            return _ask(self, name, other)
        return plain(_plain(self), other) if _has_base(self) else NotImplemented

    return method


def _operating(name: str, prefix: str = "") -> Any:
    """Operator: the result with a plain value is an object of the solution's, and no measure of that value."""
    plain = divmod if name == "divmod" else getattr(operator, name)
    asked = f"{prefix}{name}"

    def method(self: Remote, other: Any) -> Any:
        if type(other) is not Remote and _has_base(self) and not (prefix == "i" and _is_made(self)):
            return plain(other, _plain(self)) if prefix == "r" else plain(_plain(self), other)
        found, peer = _ask(self, asked, other), _peer_of(self)
        if type(other) is Remote:
            return found
        if type(found) is not Remote:
            if _is_made(self):
                return found
            raise TypeError(f"{name} of an object of the solution with a value of the test: compare plain values")
        if id_of(found) not in peer.made:
            (peer.made if _is_made(self) else peer.tainted).add(id_of(found))
        return found

    return method


for _name in ("str", "repr", "int", "float", "complex", "index", "abs", "enter", "neg", "pos", "invert"):
    setattr(Remote, f"__{_name}__", _asking(_name))
for _dunder, _name in (("setitem", "set item"), ("delitem", "unset item")):
    setattr(Remote, f"__{_dunder}__", _asking(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _comparing(_name))
for _name in _ARITHMETIC:
    for _prefix in ("", "r", "i"):
        setattr(Remote, f"__{_prefix}{_name.strip('_')}__", _operating(_name, _prefix))
