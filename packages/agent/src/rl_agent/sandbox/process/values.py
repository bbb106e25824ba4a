"""Value pipe of a grade, by which the process of the assertions operates on objects of the solution's process.

Frames are JSON behind their length (never pickle). A value of a plain builtin type arrives as a new object of exactly
that type, and so does one of a subclass: by what it holds, whatever its own methods say. Anything else stays where it
is, and the other side gets a `Remote`, which asks for what is done to it.

Each request carries a random number that its answer has to repeat; anything else on the pipe ends the process.
"""

from __future__ import annotations

import _thread
import builtins
import collections
import json
import os
import struct
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rl_agent.sandbox.process import remote
else:
    import remote

Remote = remote.Remote

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
_CLOCK = ("date", "datetime", "time", "timedelta", "timezone")
_named_tuples: dict[tuple[str, ...], type] = {}


class BrokenPipeOfValuesError(BaseException):
    """The other side ended, or sent an invalid answer. No code of this side may continue."""


class Peer:
    """End of the pipe: sends requests to the other side, and answers its requests while it waits.

    Args:
        descriptor: Descriptor of a stream socket.
        policy: `policy(operation, target, name)` says whether the other side may do this to an object of ours.
        is_asked: Whether this side is the solution's: its containers travel by content, and nothing that it asks is
            remembered.
    """

    def __init__(self, descriptor: int, policy: Any, *, is_asked: bool = False) -> None:
        self._descriptor, self._policy, self.is_asked = descriptor, policy, is_asked
        self._known: dict[tuple[Any, ...], Any] = {}
        self.classes: set[int] = set()
        """Numbers of classes that the test names in CapWords: what it makes of them is an object under test."""
        self.made: set[int] = set()
        """Numbers of objects that the test made of such classes."""
        self.tainted: set[int] = set()
        """Numbers of results of an operator with a plain value: they do not measure that value."""
        self.printed: Any = None
        """Takes and returns what this side printed since it was last called, by stream; None: nothing is sent."""
        self._lock = _thread.RLock()
        self.codec = Codec(self)
        """Codec of the values that travel."""

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
            self.end("a frame is not a JSON object")
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
        """Perform an operation on an object of the other side; returns its result, or raises its exception.

        The same read is asked once, until an operation that may change something.
        """
        with self._lock:  # threads ask one after the other
            if operation not in remote.READS:
                self.forget()
            elif not self.is_asked and (key := self.known(operation, target, *given)) is not None:
                return self.codec.decode(key[0], [])
            return self._ask(operation, target, given, named)

    def forget(self) -> None:
        """Ask again for everything that has been read."""
        self._known.clear()

    def known(self, operation: str, target: Any, *given: Any) -> tuple[Any] | None:
        """Encoded result of a read that has been asked already, in a tuple."""
        key = _key(operation, target, given)
        return (self._known[key],) if key is not None and key in self._known else None

    def _ask(self, operation: str, target: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        sent = _Sent()
        number = os.urandom(8).hex()
        request = {"ask": number, "do": operation, "to": target}
        request["given"] = [self.codec.encode(value, sent) for value in given]
        request["named"] = {name: self.codec.encode(value, sent) for name, value in named.items()}
        self._send(request)
        while True:
            frame = self._receive()
            if "ask" in frame:
                self._answer(frame)
                continue
            if frame.get("answer") != number:
                self.end("an answer to nothing that was asked")
            try:
                self.show(frame.get("printed"))
                for index, content in frame.get("changed", ()):
                    self.codec.update(sent.objects[index], self.codec.decode(content, sent.objects))
                if "raised" in frame:
                    error = self.codec.decode_error(frame["raised"], sent.objects)
                else:
                    if operation in remote.READS and (key := _key(operation, target, given)) is not None:
                        self._known[key] = frame["value"]
                    return self.codec.decode(frame["value"], sent.objects)
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError) as bad:
                self.end(f"an answer that cannot be read: {type(bad).__name__}")
            raise error

    @staticmethod
    def number_of(value: Any) -> int | None:
        """Number of an object of the other side; None of anything else."""
        return remote.id_of(value) if type(value) is Remote else None

    def show(self, printed: Any) -> None:
        """Show what the other side printed while it did what it was asked."""

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
            given = [self.codec.decode(value, got) for value in frame["given"]]
            named = {name: self.codec.decode(value, got) for name, value in frame["named"].items()}
            sent.adopt(got)
            before = [self.codec.content(value, sent) for value in got]
            value = self._do(frame["do"], frame["to"], given, named)
            is_made = frame["do"] in remote.MAKING and type(value) not in _MUTABLE
            is_kept = is_made and isinstance(value, _MUTABLE)
            answer["value"] = self.codec.export(value) if is_kept else self.codec.encode(value, sent)
        except BrokenPipeOfValuesError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is the other side's to handle
            answer.pop("value", None)
            answer["raised"] = self.codec.encode_error(error, sent)
        after = [self.codec.content(value, sent) for value in got[: len(before)]]
        if self.printed is not None and (printed := self.printed()):
            answer["printed"] = printed
        answer["changed"] = [(i, now) for i, (was, now) in enumerate(zip(before, after, strict=True)) if was != now]
        self._send(answer)

    def _do(self, operation: str, to: Any, given: list[Any], named: dict[str, Any]) -> Any:
        target = to if isinstance(to, str) else self.codec.objects[to]
        self._policy(operation, target, given[0] if given else None)
        return remote.OPERATIONS[operation](target, *given, **named)


class Codec:
    """Codec of values: plain ones by content, anything else by the number of an object that stays on its side.

    Args:
        peer: Peer that the proxies of the other side's objects ask.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.objects: dict[int, Any] = {}
        """Objects of this side that the other side knows, by number."""
        self._ids: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}

    def encode(self, value: Any, sent: _Sent, depth: int = 0) -> Any:
        """Encode a value: plain values whole, everything else as the number of an object that stays here."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -_MAX_INT < value < _MAX_INT else ["i", hex(value)]
        if kind is Remote:
            return ["m", remote.id_of(value)]
        if kind in (list, dict, tuple, set, frozenset) or kind in _MUTABLE:
            return self._encode_container(value, kind, sent, depth)
        return self._encode_other(value, kind, sent, depth)

    def _encode_container(self, value: Any, kind: type, sent: _Sent, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            return self.export(value)
        if kind in _MUTABLE:
            if (index := sent.index.get(id(value))) is not None:
                return ["r", index]
            index = sent.add(value)
        else:
            index = None
        return self.content(value, sent, depth, index)

    def content(self, value: Any, sent: _Sent, depth: int = 0, index: int | None = None) -> Any:
        """Encode what a container holds."""
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
        is_copied = isinstance(value, (int, float, complex, str, bytes, tuple, frozenset))
        if is_copied or (self._peer.is_asked and isinstance(value, remote.BASES) and depth < _MAX_DEPTH):
            return self.encode(remote.base_value(value), sent, depth + 1)
        return self.export(value)

    def export(self, value: Any) -> Any:
        """Encode an object by its number."""
        if id(value) not in self._ids:
            self._ids[id(value)] = len(self.objects)
            self.objects[len(self.objects)] = value  # kept, so that its id stays its own
        number = self._ids[id(value)]
        if number < 0:  # a class of the other side
            return ["m", -1 - number]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["x", *self._encode_class(value)]
        name = type(value).__name__
        return ["h", number, "base" if isinstance(value, remote.BASES) else "coroutine" if name == "coroutine" else ""]

    def _encode_class(self, kind: type) -> tuple[list[Any], str]:
        """Names of an exception's class and its bases, up to the builtin one."""
        own: list[Any] = []
        for each in kind.__mro__:
            if getattr(builtins, each.__name__, None) is each:
                return own, each.__name__
            if issubclass(each, BaseException):
                if id(each) not in self._ids:
                    self._ids[id(each)] = len(self.objects)
                    self.objects[len(self.objects)] = each
                own.append([self._ids[id(each)], each.__name__])
        return own, "Exception"

    def encode_error(self, error: BaseException, sent: _Sent) -> list[Any]:
        """Encode an exception: classes, arguments, attributes, text."""
        try:
            arguments = [self.encode(value, sent) for value in error.args]
            extra = {str(name): self.encode(value, sent) for name, value in vars(error).items()}
            return [self._encode_class(type(error)), arguments, extra, str(error)]
        except BaseException:  # noqa: BLE001 - an exception of the code's own may do anything
            return [([], "RuntimeError"), ["an exception that cannot be described"], {}, ""]

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
            return self.objects[value[1]]
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
                raise ValueError(f"{parts[0]} is not a type")
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
            self._remotes[number] = Remote(self._peer, number, kind)
        return remote.coroutine(self._remotes[number]) if kind == "coroutine" else self._remotes[number]

    def _class(self, own: list[Any], base: str) -> type:
        kind = getattr(builtins, base)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError(f"{base} is not an exception")
        for number, name in reversed(own):
            if number not in self._remotes:
                made = type(name, (kind,), {"__str__": _message, "__module__": "__main__"})
                self._remotes[number] = made
                self._ids[id(made)] = -1 - number
            kind = self._remotes[number]
        return kind

    def decode_error(self, encoded: list[Any], made: list[Any]) -> BaseException:
        """Decode an exception."""
        (own, base), arguments, extra, text = encoded
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
            object.__setattr__(error, "_message", text)
        return error

    @staticmethod
    def update(ours: Any, now: Any) -> None:
        """Update a container with the content of the other side's copy after a call."""
        if type(ours) is not type(now):
            raise ValueError("a container changed its type")
        if isinstance(ours, (list, bytearray)):
            ours[:] = now
        else:
            ours.clear()
            (ours.extend if isinstance(ours, collections.deque) else ours.update)(now)


def _key(operation: str, target: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Key of a read in the cache; None if the value has no key."""
    parts: list[Any] = []
    for value in given:
        if type(value) is Remote:
            parts.append(("remote", remote.id_of(value)))
        elif value is None or type(value) in (str, int, float, bool):
            parts.append((type(value).__name__, value))
        else:
            return None
    return (operation, target, *parts)


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


def _message(error: BaseException) -> str:
    return vars(error).get("_message") or BaseException.__str__(error)
