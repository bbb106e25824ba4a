"""The value pipe of a grade, with both of its ends in one process."""

import ast
import asyncio
import collections
import contextlib
import copy
import datetime
import decimal
import fractions
import inspect
import json
import socket
import struct
import sys
import threading
import types
from pathlib import Path

import pytest

import rl_agent.sandbox

FOLDER = Path(rl_agent.sandbox.__file__).parent / "process"
"""The import path of the process: its modules find each other by their bare names."""
SOLUTION = """
import asyncio, collections, copy, decimal
from collections import namedtuple

class Text(str):
    def __eq__(self, other): return True
    def __hash__(self): return 1

class Numbers(list):
    def __len__(self): return 0

class Money:
    "A sum."
    rate = 2
    def __init__(self, cents): self.cents, self.log = cents, []
    def __add__(self, other): return Money(self.cents + other.cents)
    def __radd__(self, other): return Money(self.cents + other)
    def __sub__(self, other): return Money(self.cents - getattr(other, "cents", other))
    def __iadd__(self, other): self.cents += other; return self
    def __neg__(self): return Money(-self.cents)
    def __eq__(self, other): return isinstance(other, Money) and self.cents == other.cents
    def __lt__(self, other): return self.cents < other.cents
    def __hash__(self): return self.cents
    def __str__(self): return f"{self.cents} cents"
    def __repr__(self): return f"Money({self.cents})"
    def __format__(self, form): return f"{self.cents:{form}}"
    def __int__(self): return self.cents
    def __float__(self): return float(self.cents)
    def __index__(self): return self.cents
    def __abs__(self): return abs(self.cents)
    def __round__(self, digits=0): return self.cents
    def __bool__(self): return self.cents != 0
    def startswith(self, other): return True
    def fail(self): raise Refused(self.cents)

class Refused(ValueError):
    def __init__(self, cents): super().__init__(cents); self.cents = cents
    def __str__(self): return f"{self.cents} are too few"

class Bag:
    def __init__(self, *items): self.items = list(items)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, key): return self.items[key]
    def __setitem__(self, key, value): self.items[key] = value
    def __delitem__(self, key): del self.items[key]
    def __reversed__(self): return reversed(self.items)
    def __enter__(self): return self
    def __exit__(self, *error): self.items.clear()
    async def __aenter__(self): return self
    async def __aexit__(self, *error): return True

class Liar(Bag):
    def __len__(self): return 7

class Lines:
    def __init__(self, *lines): self.left = list(lines)
    def __aiter__(self): return self
    async def __anext__(self):
        if not self.left: raise StopAsyncIteration
        return self.left.pop(0)

class Missing(dict):
    def __missing__(self, key): return key * 2

Point = namedtuple("Point", "x y")
origin = Point(0, 0)
money = Money(5)
bag = Bag(3, 1, 2)
def same(value): return value
def double(items): items.append(1); items *= 2
def apply(f, value): return f(value) + 1
def poke(thing, name): return getattr(thing, name)
def leave(): raise SystemExit(3)
def undecodable(): b"\\xff".decode()
def deep(levels):
    value = []
    for _ in range(levels): value = [value]
    return value
def count(n): yield from range(n)
async def later(value): await asyncio.sleep(0); return value
def signed(a: int, *rest, key="x", **others) -> str: ...
def cyclic():
    found = [1]; found.append(found); return found
def shared():
    inner = []; return [inner, inner]
def add_to(a, b): a.append(1); return a is b
"""


@pytest.fixture
def modules(monkeypatch):
    names = ("values", "remote", "judge", "execution", "surroundings")
    monkeypatch.syspath_prepend(str(FOLDER))
    before = {name: sys.modules.pop(name, None) for name in names}
    made = types.SimpleNamespace(**{name: __import__(name) for name in names})
    yield made
    for loop in made.remote._loops:
        loop.close()
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def nothing(*_):
    raise PermissionError("nothing is allowed")


@pytest.fixture
def judge(modules, monkeypatch):
    """The judge's end; the solution's end is served in a thread."""
    namespace = {"__name__": "solution"}
    exec(SOLUTION, namespace)
    monkeypatch.setitem(modules.remote.OPERATIONS, "global", namespace.__getitem__)
    ours, theirs = socket.socketpair()
    held = modules.values.Peer(theirs.fileno(), lambda *_: None, is_asked=True)

    def serve():
        with theirs, contextlib.suppress(modules.values.BrokenPipeOfValuesError):
            held.serve()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    peer = modules.values.Peer(ours.fileno(), nothing)
    peer.solution = namespace
    yield peer
    ours.close()
    thread.join(10)


@pytest.fixture
def get(judge):
    def find(name):
        found = judge.ask("global", name)
        if name[:1].isupper():
            judge.classes.add(judge.number_of(found))
        return found

    return find


Pair = collections.namedtuple("Pair", "left right")
PLAIN = [
    None, True, 3, -(1 << 80), 1.5, "é\u2028", b"\x00\xff", bytearray(b"ab"), 2 - 3j, range(1, 9, 2), Ellipsis,
    NotImplemented, int, [1, [2.0]], (1, "a"), {1, 2}, frozenset({3}), {"a": [1], 2: None},
    collections.deque([1, 2]), collections.OrderedDict(a=1), collections.Counter("aab"),
    decimal.Decimal("1.10"), fractions.Fraction(1, 3), datetime.date(2024, 2, 29),
    datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.UTC), datetime.timedelta(1, 2, 3),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_a_plain_value_arrives_as_one_of_its_own_type(get, value):
    got = get("same")(value)
    assert (got, type(got)) == (value, type(value))


def test_a_named_tuple_arrives_with_its_fields(get):
    got = get("same")(Pair(1, [2]))
    assert (got, got.left, got.right, type(got).__name__) == ((1, [2]), 1, [2], "Pair")
    assert get("origin").x == 0


def test_a_default_dictionary_arrives_by_its_content(get):
    got = get("same")(collections.defaultdict(list, a=[1]))
    assert (got, type(got)) == ({"a": [1]}, collections.defaultdict)


def test_a_subclass_is_what_it_holds(get, judge):
    judge.solution.update(lied=judge.solution["Text"]("a"), short=judge.solution["Numbers"]([1, 2]))
    assert get("lied") == "a" != get("lied") + "b"
    assert (get("short"), len(get("short"))) == ([1, 2], 2)
    assert type(get("short")) is list


def test_changes_of_an_argument_come_back(get):
    items, queue, table = [5], collections.deque([1]), {"a": [1]}
    get("double")(items)
    assert items == [5, 1, 5, 1]
    get("double")(queue)
    assert queue == collections.deque([1, 1, 1, 1])
    get("double")(table["a"])
    assert table == {"a": [1, 1, 1, 1]}


def test_one_list_given_twice_is_one_list_there(get):
    one = []
    assert get("add_to")(one, one) is True
    assert one == [1]


def test_a_list_within_itself_and_deep_lists_arrive(get):
    found = get("cyclic")()
    assert (found[0], len(found)) == (1, 2)
    (inner, again) = get("shared")()
    assert inner == again == []
    value, depth = get("deep")(400), 0
    while len(value):
        value, depth = value[0], depth + 1
    assert depth == 400


def test_an_object_stays_there_and_is_asked(get):
    money = get("money")
    assert (str(money), repr(money), f"{money:03}") == ("5 cents", "Money(5)", "005")
    assert (int(money), float(money), abs(money), round(money), [7] * 6 and [*range(6)][money]) == (5, 5.0, 5, 5, 5)
    assert (money.cents, money.rate, bool(money), hash(money), money.__doc__) == (5, 2, True, 5, "A sum.")
    money.cents = 6
    assert money.cents == 6
    money.extra = 1
    del money.extra
    with pytest.raises(AttributeError, match="extra"):
        _ = money.extra


def test_an_object_equals_only_objects_from_there(get):
    kind = get("Money")
    assert kind(5) == get("money")
    assert kind(6) != get("money")
    assert get("money") != 5
    assert kind(4) < kind(5)
    assert isinstance(kind(5), kind)
    assert not isinstance(5, kind)


def test_operators_of_objects_are_done_there(get):
    kind = get("Money")
    two, three = kind(2), kind(3)
    assert (two + three).cents == 5
    assert (two - three).cents == -1
    assert (-two).cents == -2
    two += 4
    assert two.cents == 6
    assert (1 + kind(2)).cents == 3


def test_an_operator_s_result_does_not_measure_a_plain_value(get):
    difference = get("money") - 5
    with pytest.raises(TypeError, match="compare values that are returned"):
        abs(difference)


def test_a_method_that_compares_is_not_shown_the_expected_value(get):
    with pytest.raises(TypeError, match="compare plain values"):
        get("money").startswith("5")
    assert get("Money")(5).startswith("5"), "what the test itself made may know it"


def test_a_sequence_of_its_own_class(get):
    bag = get("bag")
    assert ([*bag], len(bag), bag[0], 2 in bag, 9 in bag) == ([3, 1, 2], 3, 3, True, False)
    assert [*reversed(bag)] == [2, 1, 3]
    bag[0] = 9
    del bag[1]
    assert sorted(bag) == [2, 9]
    with bag as entered:
        assert entered == bag
    assert len(bag) == 0


def test_a_length_that_does_not_match_the_items_is_an_error(get):
    liar = get("Liar")(1, 2)
    assert [*liar] == [1, 2]
    with pytest.raises(TypeError, match="an object of length 7 has 2 items"):
        len(liar)


def test_generators_and_coroutines_run_there(get):
    assert [*get("count")(3)] == [0, 1, 2]
    assert next(get("count")(2)) == 0
    assert asyncio.run(get("later")(4)) == 4


def test_asynchronous_iteration_and_contexts(get):
    async def read():
        async with get("Bag")(1) as bag:
            assert len(bag) == 1
        return [line async for line in get("Lines")("a", "b")]

    assert asyncio.run(read()) == ["a", "b"]


def test_copies_are_objects_from_there(get):
    bag = get("Bag")([1])
    shallow, deep = copy.copy(bag), copy.deepcopy(bag)
    bag[0] = 2
    assert (shallow.items, deep.items) == ([2], [[1]])


def test_a_dictionary_subclass_keeps_its_own_method(get):
    table = get("Missing")(a=1)
    assert (table["a"], table["b"], "b" in table, len(table), [*table]) == (1, "bb", False, 1, ["a"])


def test_an_exception_has_its_class_arguments_and_text(get):
    with pytest.raises(ValueError, match="5 are too few") as caught:
        get("money").fail()
    assert (type(caught.value).__name__, caught.value.args, caught.value.cents) == ("Refused", (5,), 5)
    with pytest.raises(get("Refused")):
        get("money").fail()
    with pytest.raises(SystemExit):
        get("leave")()
    with pytest.raises(UnicodeDecodeError, match="can't decode byte 0xff"):
        get("undecodable")()


def test_a_signature_is_that_of_the_function(get):
    assert str(inspect.signature(get("signed"))) == "(a: 'int', *rest, key='x', **others) -> 'str'"


def test_a_function_of_the_test_is_called_only_where_allowed(get, judge):
    def half(value):
        return value // 2

    def allow(operation, target, name):
        if operation != "call" or target is not half:
            raise PermissionError(f"{operation} of an object of the test")

    judge._policy = allow
    assert get("apply")(half, 8) == 5
    with pytest.raises(PermissionError, match="get of an object of the test"):
        get("poke")(half, "secret")


def test_a_read_is_asked_once_until_something_is_called(get, judge):
    money, asked = get("money"), []
    send = judge._send
    judge._send = lambda frame: (asked.append(frame.get("do")), send(frame))
    assert (money.cents, money.cents, asked) == (5, 5, ["get"])
    money.cents = 7
    assert (money.cents, asked) == (7, ["get", "set", "get"])


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        struct.pack("<I", 1 << 30),
        struct.pack("<I", 4) + b"nope",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 200_000) + b"[" * 200_000,
        struct.pack("<I", 14) + b'{"answer": "x"}'[:14],
        *[
            struct.pack("<I", len(data)) + data
            for data in (b'{"answer": "x"}', json.dumps({"answer": "@", "changed": []}).encode())
        ],
    ],
    ids=["end", "size", "no json", "no object", "deep", "cut off", "other number", "unknown"],
)
def test_a_frame_that_answers_nothing_ends_the_pipe(modules, sent):
    ours, theirs = socket.socketpair()
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    peer = modules.values.Peer(ours.fileno(), nothing)
    with pytest.raises(modules.values.BrokenPipeOfValuesError):
        peer.ask("global", "f")
    with pytest.raises(modules.values.BrokenPipeOfValuesError):
        peer.serve()
    ours.close()
    theirs.close()


BAD = [
    {},
    {"value": {"a": 1}},
    {"value": ["z", 1]},
    {"value": ["l", 5, []]},
    {"value": ["r", 0]},
    {"value": ["h", "x", ""]},
    {"value": ["B", "print"]},
    {"value": ["x", [], "int"]},
    {"value": ["n", "Popen", []]},
    {"changed": [[0, ["l", None, []]]], "value": 1},
    {"raised": [[], "ValueError"]},
]


@pytest.mark.parametrize("answer", BAD, ids=json.dumps)
def test_an_answer_that_is_no_value_ends_the_pipe(modules, answer):
    ours, theirs = socket.socketpair()
    peer = modules.values.Peer(ours.fileno(), nothing)
    send = peer._send

    def answered(frame):
        send(frame)
        data = json.dumps({"answer": frame["ask"], **answer}).encode()
        theirs.sendall(struct.pack("<I", len(data)) + data)

    peer._send = answered
    with pytest.raises(modules.values.BrokenPipeOfValuesError):
        peer.ask("global", "f")
    ours.close()
    theirs.close()


def test_names_that_a_test_does_not_define_are_the_solution_s(modules, judge):
    names = modules.judge._Names(judge, {"math"})
    assert names["math"].isclose(1.0, 1.0)
    assert names["Counter"] is collections.Counter
    assert names["Money"](5).cents == 5
    assert judge.number_of(names["Money"]) in judge.classes
    for missing in ("len", "__file__", "no_such_name"):
        with pytest.raises(KeyError):
            names[missing]
    module = modules.judge._SolutionModule(names)
    assert module.same(3) == 3
    with pytest.raises(AttributeError, match="the solution has no nothing"):
        _ = module.nothing
    assert not hasattr(module, "__path__")


def test_modules_that_a_test_uses_without_importing_them(modules):
    tree = ast.parse("assert math.pi > 3 and random != 3\nstring = string.digits\nos.sep; x.y")
    assert modules.judge.modules_of(tree) == {"math", "os"}


class Spy:
    def __init__(self):
        self.seen = 1

    def __next__(self):
        return 1


@pytest.mark.parametrize(
    ("operation", "target", "name"),
    [
        ("call", len, None), ("str", Spy(), None), ("line", "", None), ("next", Spy(), None),
        ("get", Spy.__next__, "__name__"),
    ],
)  # fmt: skip
def test_what_a_solution_may_do_to_an_argument(modules, operation, target, name):
    modules.judge.allow(operation, target, name)


@pytest.mark.parametrize(
    ("operation", "target", "name"),
    [
        ("call", Spy(), None), ("get", Spy(), "_hidden"), ("get", Spy.__next__, "__code__"), ("set", Spy, "seen"),
        ("make", Spy, None), ("await", Spy(), None), ("len", [1], None), ("load", "", None),
    ],
)  # fmt: skip
def test_what_a_solution_may_not_do_to_an_argument(modules, operation, target, name):
    with pytest.raises(PermissionError, match=f"{operation} of an object of the test"):
        modules.judge.allow(operation, target, name)


@pytest.mark.parametrize(
    ("code", "ending", "printed"),
    [
        ("x = 1\nx + 1", ("ok", ""), "2\n"),
        ("print('a')", ("ok", ""), "a\n"),
        ("raise SystemExit(0)", ("ok", ""), ""),
        ("raise SystemExit(4)", ("error", "SystemExit: 4"), ""),
        ("raise MemoryError", ("memory", "MemoryError: the memory limit was reached"), ""),
        ("raise OSError(27, 'File too large')", ("output", "too much output"), ""),
        ("def f():\n  1 / 0\nf()",
         ("error", "line 3, in <module>\nline 2, in f\nZeroDivisionError: division by zero"), ""),
    ],
)  # fmt: skip
def test_how_code_ended(modules, capsys, code, ending, printed):
    assert modules.execution._execute(code, {}) == ending
    assert capsys.readouterr().out == printed


def test_plain_values_of_subclasses_use_none_of_their_methods(modules):
    class Odd(int):
        def __add__(self, other):
            return 9

    class Loud(dict):
        def items(self):
            return [("b", 2)]

    base = modules.remote.base_value
    assert [base(Odd(3)), base(True), base(Loud(a=1)), base(collections.deque([1]))] == [
        3,
        True,
        {"a": 1},
        collections.deque([1]),
    ]
    with pytest.raises(TypeError, match="object holds no plain value"):
        base(object())
