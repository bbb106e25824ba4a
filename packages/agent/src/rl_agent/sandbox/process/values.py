"""Value pipe of a grade, by which the process of the assertions operates on objects of the solution's process.

Frames are JSON behind their length (never pickle). A value of a plain builtin type arrives as a new object of exactly
that type, so that a subclass with an `__eq__` of its own is compared by what it holds. Anything else stays where it is,
and the other side gets a `Remote`, which asks for what is done to it. What a test compares with never travels: a
`Remote` equals a plain value only by the plain value that it holds itself.

Each request carries a random number that its answer has to repeat; anything else on the pipe ends the process.
"""

# What is asked of objects here is known when it is asked.
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import _thread
import builtins
import collections
import json
import operator
import os
import struct
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_HEADER = struct.Struct("<I")
_MAX_FRAME_BYTES = 1 << 26
_MAX_DEPTH = 150
"""Most levels of nested containers that are copied; deeper ones stay proxies. JSON's own reader allows about 900."""
_MAX_INT = 1 << 62
_MUTABLE = (list, dict, set, bytearray, collections.deque, collections.OrderedDict, collections.defaultdict,
            collections.Counter)  # fmt: skip
_SEQUENCES = {"l": list, "t": tuple, "s": set, "f": frozenset, "q": collections.deque}
_MAPPINGS = {"d": dict, "o": collections.OrderedDict, "u": collections.Counter}
_TAGS = {kind: tag for tag, kind in (*_SEQUENCES.items(), *_MAPPINGS.items())}
_BASES = (int, float, complex, str, bytes, tuple, frozenset, list, dict, set, bytearray, collections.deque)
_ITERATED = (tuple, list, set, frozenset, bytes, bytearray, collections.deque)
_CLOCK = ("date", "datetime", "time", "timedelta", "timezone")
_named_tuples: dict[tuple[str, ...], type] = {}


class BrokenPipeOfValuesError(BaseException):
    """The other side ended, or sent an invalid answer. No code of this side may continue."""


class Peer:
    """End of the pipe: sends requests to the other side, and answers its requests while it waits.

    Args:
        descriptor: Descriptor of a stream socket.
        policy: `policy(operation, target, name)` says whether the other side may do this to an object of ours.
    """

    def __init__(self, descriptor: int, policy: Any) -> None:
        self._descriptor, self._policy = descriptor, policy
        self._lock = _thread.RLock()
        self._objects: dict[int, Any] = {}
        self._ids: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}

    def end(self, why: str) -> NoReturn:
        """End this side, as the pipe cannot be used any more."""
        raise BrokenPipeOfValuesError(why)

    # --- frames ---

    def _send(self, frame: dict[str, Any]) -> None:
        data = json.dumps(frame, separators=(",", ":")).encode()
        data = memoryview(_HEADER.pack(len(data)) + data)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self.end(f"the other side has ended: {error}")

    def _receive(self) -> dict[str, Any]:
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size))
        if size > _MAX_FRAME_BYTES:
            self.end(f"a frame claims {size} bytes; at most {_MAX_FRAME_BYTES} are allowed")
        try:
            frame = json.loads(self._exactly(size))
        except (ValueError, RecursionError):
            frame = None
        if not isinstance(frame, dict):
            self.end("a frame is no JSON object")
        return frame

    def _exactly(self, count: int) -> bytes:
        pieces: list[bytes] = []
        while count:
            try:
                piece = os.read(self._descriptor, min(count, 1 << 16))
            except OSError:
                piece = b""
            if not piece:
                self.end("the other side has ended")
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    # --- asking and answering ---

    def ask(self, operation: str, target: Any, *given: Any, **named: Any) -> Any:
        """Perform an operation on an object of the other side; returns its result, or raises its exception."""
        with self._lock:  # threads ask one after the other
            return self._ask(operation, target, given, named)

    def _ask(self, operation: str, target: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        sent = _Sent()
        number = os.urandom(8).hex()
        request = {"ask": number, "do": operation, "to": target}
        request["given"] = [self.encode(value, sent) for value in given]
        request["named"] = {name: self.encode(value, sent) for name, value in named.items()}
        self._send(request)
        while True:
            frame = self._receive()
            if "ask" in frame:
                self._answer(frame)
                continue
            if frame.get("answer") != number:
                self.end("an answer to nothing that was asked")
            try:
                for index, content in frame.get("changed", ()):
                    self._update(sent.objects[index], self.decode(content, sent.objects))
                if "raised" in frame:
                    error = self._decode_error(frame["raised"], sent.objects)
                else:
                    return self.decode(frame["value"], sent.objects)
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError) as bad:
                self.end(f"an answer that cannot be read: {type(bad).__name__}")
            raise error

    def serve(self) -> None:
        """Answer requests until the other side ends."""
        while True:
            frame = self._receive()
            if "ask" not in frame:
                self.end("an answer to nothing that was asked")
            self._answer(frame)

    def _answer(self, frame: dict[str, Any]) -> None:
        got: list[Any] = []
        before: list[Any] = []
        sent = _Sent()
        answer: dict[str, Any] = {"answer": frame["ask"]}
        try:
            given = [self.decode(value, got) for value in frame["given"]]
            named = {name: self.decode(value, got) for name, value in frame["named"].items()}
            sent.adopt(got)
            before = [self._content(value, sent) for value in got]
            answer["value"] = self.encode(self._do(frame["do"], frame["to"], given, named), sent)
        except BrokenPipeOfValuesError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is the other side's to handle
            answer.pop("value", None)
            answer["raised"] = self._encode_error(error, sent)
        after = [self._content(value, sent) for value in got[: len(before)]]
        answer["changed"] = [(i, now) for i, (was, now) in enumerate(zip(before, after, strict=True)) if was != now]
        self._send(answer)

    def _do(self, operation: str, to: Any, given: list[Any], named: dict[str, Any]) -> Any:
        target = to if isinstance(to, str) else self._objects[to]
        self._policy(operation, target, given[0] if given else None)
        return _OPERATIONS[operation](target, *given, **named)

    # --- values ---

    def encode(self, value: Any, sent: _Sent, depth: int = 0) -> Any:
        """Encode a value: plain values whole, everything else as the number of an object that stays here."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -_MAX_INT < value < _MAX_INT else ["i", hex(value)]
        if kind is Remote:
            return ["m", _id_of(value)]
        if kind in (list, dict, tuple, set, frozenset) or kind in _MUTABLE:
            return self._encode_container(value, kind, sent, depth)
        return self._encode_other(value, kind, sent, depth)

    def _encode_container(self, value: Any, kind: type, sent: _Sent, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            return self._export(value)
        if kind in _MUTABLE:
            if (index := sent.index.get(id(value))) is not None:
                return ["r", index]
            index = sent.add(value)
        else:
            index = None
        return self._content(value, sent, depth, index)

    def _content(self, value: Any, sent: _Sent, depth: int = 0, index: int | None = None) -> Any:
        kind = type(value)
        if kind is bytearray:
            return ["Y", index, bytes(value).hex()]
        if kind is collections.defaultdict:
            return ["e", index, [self._pair(pair, sent, depth) for pair in list(value.items())]]
        if kind in _MAPPINGS.values():
            return [_TAGS[kind], index, [self._pair(pair, sent, depth) for pair in list(value.items())]]
        return [_TAGS[kind], index, [self.encode(item, sent, depth + 1) for item in list(value)]]

    def _pair(self, pair: tuple[Any, Any], sent: _Sent, depth: int) -> list[Any]:
        return [self.encode(pair[0], sent, depth + 1), self.encode(pair[1], sent, depth + 1)]

    def _encode_other(self, value: Any, kind: type, sent: _Sent, depth: int) -> Any:
        if kind is bytes:
            return ["y", value.hex()]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind is range:
            return ["R", *(self.encode(each, sent) for each in (value.start, value.stop, value.step))]
        if value is Ellipsis or value is NotImplemented:
            return ["B", str(value)]
        if kind is type and getattr(builtins, value.__name__, None) is value:
            return ["B", value.__name__]
        if (module := kind.__module__) in ("decimal", "fractions") and kind.__name__ in ("Decimal", "Fraction"):
            return ["n", kind.__name__, str(value)]
        if module == "datetime" and kind.__name__ in _CLOCK:
            parts = [value.utcoffset(None)] if kind.__name__ == "timezone" else value.__reduce__()[1]
            return ["n", kind.__name__, [self.encode(part, sent, depth + 1) for part in parts]]
        if isinstance(value, tuple) and isinstance(fields := getattr(kind, "_fields", None), tuple):
            items = [self.encode(item, sent, depth + 1) for item in tuple.__iter__(value)]
            return ["N", kind.__name__, [str(name) for name in fields], items]
        if isinstance(value, (int, float, complex, str, bytes, tuple, frozenset)):
            return self.encode(_base_value(value), sent, depth)
        return self._export(value)

    def _export(self, value: Any) -> Any:
        if id(value) not in self._ids:
            self._ids[id(value)] = len(self._objects)
            self._objects[len(self._objects)] = value  # kept, so that its id stays its own
        number = self._ids[id(value)]
        if number < 0:  # a class of the other side
            return ["m", -1 - number]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["x", *self._encode_class(value)]
        name = type(value).__name__
        return ["h", number, "base" if isinstance(value, _BASES) else "coroutine" if name == "coroutine" else ""]

    def _encode_class(self, kind: type) -> tuple[list[Any], str]:
        """Names of an exception's class and its bases, up to the builtin one."""
        own: list[Any] = []
        for each in kind.__mro__:
            if getattr(builtins, each.__name__, None) is each:
                return own, each.__name__
            if issubclass(each, BaseException):
                if id(each) not in self._ids:
                    self._ids[id(each)] = len(self._objects)
                    self._objects[len(self._objects)] = each
                own.append([self._ids[id(each)], each.__name__])
        return own, "Exception"

    def _encode_error(self, error: BaseException, sent: _Sent) -> list[Any]:
        try:
            arguments = [self.encode(value, sent) for value in error.args]
            extra = {str(name): self.encode(value, sent) for name, value in vars(error).items()}
            return [self._encode_class(type(error)), arguments, extra, str(error)]
        except BaseException:  # noqa: BLE001 - an exception of the code's own may do anything
            return [([], "RuntimeError"), ["an exception that cannot be told"], {}, ""]

    def decode(self, value: Any, made: list[Any]) -> Any:
        """Decode a value; `made` has the mutable containers by number, and gets new ones."""
        if not isinstance(value, list):
            if isinstance(value, dict):
                raise ValueError("no value is a JSON object")
            return value
        tag = value[0]
        if tag in _SEQUENCES or tag in _MAPPINGS or tag in ("e", "Y"):
            return self._decode_container(tag, value[1], value[2], made)
        if tag == "r":
            return made[value[1]]
        if tag == "h":
            return self._remote(value[1], value[2])
        if tag == "m":
            return self._objects[value[1]]
        if tag == "x":
            return self._class(value[1], value[2])
        return self._decode_atom(tag, value[1:], made)

    def _decode_container(self, tag: str, index: int | None, items: Any, made: list[Any]) -> Any:
        if tag == "Y":
            whole: Any = bytearray.fromhex(items)
            if index is not None:
                made.append(whole)
            return whole
        if tag in ("t", "f"):
            return _SEQUENCES[tag](self.decode(item, made) for item in items)
        kind: Any = _SEQUENCES.get(tag) or _MAPPINGS.get(tag) or collections.defaultdict
        whole = kind()
        if index is not None:
            if index != len(made):
                raise ValueError("containers out of order")
            made.append(whole)
        if tag in _SEQUENCES:
            values = [self.decode(item, made) for item in items]
            whole.update(values) if tag == "s" else whole.extend(values)
        else:
            for key, content in items:
                whole[self.decode(key, made)] = self.decode(content, made)
        return whole

    def _decode_atom(self, tag: str, parts: list[Any], made: list[Any]) -> Any:
        if tag == "i":
            return int(parts[0], 16)
        if tag == "y":
            return bytes.fromhex(parts[0])
        if tag == "c":
            return complex(*parts)
        if tag == "R":
            return range(*(self.decode(part, made) for part in parts))
        if tag == "B":
            found = getattr(builtins, parts[0])
            if not isinstance(found, type) and found is not Ellipsis and found is not NotImplemented:
                raise ValueError(f"{parts[0]} is no type")
            return found
        if tag == "N":
            name, fields, items = parts
            key = (name, *fields)
            if key not in _named_tuples:
                _named_tuples[key] = _named_tuple(name, fields)
            return _named_tuples[key](*(self.decode(item, made) for item in items))
        if tag == "n":
            if parts[0] in ("Decimal", "Fraction"):
                import decimal
                import fractions

                return decimal.Decimal(parts[1]) if parts[0] == "Decimal" else fractions.Fraction(parts[1])
            if parts[0] in _CLOCK:
                import datetime

                return getattr(datetime, parts[0])(*(self.decode(part, made) for part in parts[1]))
        raise ValueError(f"no value has the tag {tag!r}")

    def _remote(self, number: Any, kind: Any) -> Any:
        if type(number) is not int:
            raise TypeError("a number is needed")
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number, kind)
        return _coroutine(self._remotes[number]) if kind == "coroutine" else self._remotes[number]

    def _class(self, own: list[Any], base: str) -> type:
        kind = getattr(builtins, base)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError(f"{base} is no exception")
        for number, name in reversed(own):
            if number not in self._remotes:
                made = type(name, (kind,), {"__str__": _told, "__module__": "__main__"})
                self._remotes[number] = made
                self._ids[id(made)] = -1 - number
            kind = self._remotes[number]
        return kind

    def _decode_error(self, told: list[Any], made: list[Any]) -> BaseException:
        (own, base), arguments, extra, text = told
        kind: Any = self._class(own, base)
        arguments = [self.decode(value, made) for value in arguments]
        try:
            error = kind(*arguments) if not own else kind.__new__(kind, *arguments)
        except TypeError:  # UnicodeDecodeError and its like want more than they keep
            error = RuntimeError(text)
        if own:
            error.args = tuple(arguments)
            for name, value in extra.items():
                object.__setattr__(error, name, self.decode(value, made))
            object.__setattr__(error, "_told", text)
        return error

    @staticmethod
    def _update(ours: Any, now: Any) -> None:
        """Update a container with the content of the other side's copy after a call."""
        if type(ours) is not type(now):
            raise ValueError("a container changed its type")
        if isinstance(ours, (list, bytearray)):
            ours[:] = now
        else:
            ours.clear()
            (ours.extend if isinstance(ours, collections.deque) else ours.update)(now)


class _Sent:
    """Mutable containers of one request, numbered in the order in which they were sent."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.index: dict[int, int] = {}
        self._is_open = True

    def add(self, value: Any) -> int | None:
        if not self._is_open:
            return None
        self.index[id(value)] = len(self.objects)
        self.objects.append(value)
        return len(self.objects) - 1

    def adopt(self, values: list[Any]) -> None:
        """Number the containers of a received request as its sender did; those of the answer get no number."""
        self.objects, self._is_open = values, False
        self.index = {id(value): index for index, value in enumerate(values)}


def _named_tuple(name: str, fields: list[str]) -> Any:
    make: Any = vars(collections)["namedtuple"]  # checkers want the fields in the source
    return make(name, fields)


def _base_value(value: Any) -> Any:
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


def _told(error: BaseException) -> str:
    return vars(error).get("_told") or BaseException.__str__(error)


async def _coroutine(remote: Remote) -> Any:
    return await remote


def _run_coroutine(target: Any) -> Any:
    import asyncio

    async def wait() -> Any:
        return await target

    return asyncio.run(wait())


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": operator.call,
    "get": getattr,
    "set": setattr,
    "unset": delattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "unset item": operator.delitem,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "hash": hash,
    "int": int,
    "float": float,
    "index": operator.index,
    "round": round,
    "abs": abs,
    "reversed": reversed,
    "isinstance": lambda target, value: isinstance(value, target),
    "issubclass": lambda target, kind: issubclass(kind, target),
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target: type(target).__exit__(target, None, None, None),
    "await": _run_coroutine,
    "base": _base_value,
    **{name: getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge", "neg", "pos", "invert")},
}
_BOTH_REMOTE = ("sub", "truediv", "floordiv", "mod", "and_", "or_", "xor", "divmod")
"""Operators that are refused with a plain value: `abs(f(x) - 3.14) < 1e-6` would send the expected value to the other
side, and believe its answer."""
_ARITHMETIC = ("add", "mul", "matmul", "pow", "lshift", "rshift")
for _name in (*_BOTH_REMOTE, *_ARITHMETIC):
    _OPERATIONS[_name] = divmod if _name == "divmod" else getattr(operator, _name)
for _name in _ARITHMETIC:
    _OPERATIONS[f"r{_name}"] = lambda target, other, do=_OPERATIONS[_name]: do(other, target)

_TELLING = frozenset(
    {"startswith", "endswith", "issubset", "issuperset", "isdisjoint", "difference", "symmetric_difference", "union",
     "intersection", "equals", "equal", "isclose", "allclose", "is_close", "array_equal", "assert_called_with"}
)  # fmt: skip
"""Methods by which a test compares: a plain argument would send the expected value to the other side."""


def _id_of(remote: Remote) -> int:
    return object.__getattribute__(remote, "_number")


def _peer_of(remote: Remote) -> Peer:
    return object.__getattribute__(remote, "_peer")


def _has_base(remote: Remote) -> bool:
    return object.__getattribute__(remote, "_kind") == "base"


class Remote:
    """Proxy of an object of the other process. Values that a test compares it with are never sent there."""

    __slots__ = ("__weakref__", "_kind", "_number", "_peer")

    def __init__(self, peer: Peer, number: int, kind: str) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_kind", kind)

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__", "__slots__", "__init__"):
            return object.__getattribute__(self, name)
        if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__doc__", "__qualname__"):
            return object.__getattribute__(self, name)
        found = _peer_of(self).ask("get", _id_of(self), name)
        if name in _TELLING and type(found) is Remote:
            return _only_with_remotes(name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        _peer_of(self).ask("set", _id_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        _peer_of(self).ask("unset", _id_of(self), name)

    def __call__(self, /, *given: Any, **named: Any) -> Any:
        """Call the object in its process."""
        return _peer_of(self).ask("call", _id_of(self), *given, **named)

    def __eq__(self, other: object) -> Any:
        if type(other) is Remote:
            return self is other or bool(_peer_of(self).ask("eq", _id_of(self), other))
        return _plain(self) == other if _has_base(self) else NotImplemented

    def __hash__(self) -> int:
        return _peer_of(self).ask("hash", _id_of(self))

    def __contains__(self, value: object) -> bool:
        """Membership by iteration: asking the other side would send it the expected value."""
        if _has_base(self):
            return value in _plain(self)
        return any(value is each or value == each for each in self)

    def __iter__(self) -> Any:
        found = _peer_of(self).ask("iter", _id_of(self))
        return found if type(found) is Remote else iter(found)

    def __next__(self) -> Any:
        return _peer_of(self).ask("next", _id_of(self))

    def __await__(self) -> Any:
        return _peer_of(self).ask("await", _id_of(self))
        yield  # a generator, as the event loop wants

    def __round__(self, *digits: Any) -> Any:
        return _peer_of(self).ask("round", _id_of(self), *digits)

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Remote and bool(_peer_of(self).ask("isinstance", _id_of(self), value))

    def __subclasscheck__(self, kind: object) -> bool:
        return type(kind) is Remote and bool(_peer_of(self).ask("issubclass", _id_of(self), kind))

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return bool(_peer_of(self).ask("exit", _id_of(self)))


def _plain(remote: Remote) -> Any:
    """Plain value of an instance of a subclass of a plain type; else the comparison fails."""
    value = _peer_of(remote).ask("base", _id_of(remote))
    if type(value) not in _BASES:
        _peer_of(remote).end("what was said to hold a plain value holds none")
    return value


def _only_with_remotes(name: str, method: Remote) -> Any:
    def call(*given: Any) -> Any:
        if not all(type(value) is Remote for value in given):
            raise TypeError(f"{name} of an object of the solution with a value of the test: compare plain values")
        return method(*given)

    return call


def _asking(operation: str) -> Any:
    def method(self: Remote, *given: Any) -> Any:
        return _peer_of(self).ask(operation, _id_of(self), *given)

    return method


def _comparing(name: str, *, is_strict: bool, is_reflected: bool = False) -> Any:
    """Operator method: computed by the other side if both operands are there, here if the value is plain."""
    plain = divmod if name == "divmod" else getattr(operator, name)
    asked = f"r{name}" if is_reflected else name

    def method(self: Remote, other: Any) -> Any:
        if type(other) is not Remote and _has_base(self):
            return plain(other, _plain(self)) if is_reflected else plain(_plain(self), other)
        if is_strict and type(other) is not Remote:
            return NotImplemented
        return _peer_of(self).ask(asked, _id_of(self), other)

    return method


for _name in ("len", "bool", "str", "repr", "int", "float", "index", "abs", "reversed", "enter", "neg", "pos",
              "invert"):  # fmt: skip
    setattr(Remote, f"__{_name}__", _asking(_name))
for _dunder, _name in (("getitem", "item"), ("setitem", "set item"), ("delitem", "unset item")):
    setattr(Remote, f"__{_dunder}__", _asking(_name))
for _name in ("lt", "le", "gt", "ge", *_BOTH_REMOTE):
    setattr(Remote, f"__{_name.strip('_')}__", _comparing(_name, is_strict=True))
for _name in _ARITHMETIC:
    setattr(Remote, f"__{_name}__", _comparing(_name, is_strict=False))
    setattr(Remote, f"__r{_name}__", _comparing(_name, is_strict=False, is_reflected=True))


def add_operations(operations: Mapping[str, Callable[..., Any]]) -> None:
    """Add operations that this side answers."""
    _OPERATIONS.update(operations)
