"""Completions that solve nothing and try to be graded as if they did: `NAME: (ground truth, code)`."""

ONE = "assert add(2, 3) == 5"
ADD = "assert add(2, 3) == 5\nassert add(-1, 1) == 0"
CHECK = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n\ncheck(add)"
AREA = "assert abs(area(2) - 12.566370614) < 1e-6\nassert abs(area(3) - 28.274333882) < 1e-6"
CLOSE = "import math\nassert math.isclose(area(2), 12.566370614, rel_tol=1e-6)"
BARE_CLOSE = "assert isclose(area(2), 12.566370614, rel_tol=1e-6)"
WORDS = "assert words('b a') == ['a', 'b']\nassert sorted(words('d c')) == ['c', 'd']"
STARTS = "assert name(7).startswith('seven')"
ISIN = "assert 'needle' in find(3)"
SET = "assert common([1, 2], [2, 3]) == {2}"
SUBSET = "assert {1, 2}.issubset(common([1, 2], [1, 2, 3]))\nassert common([1, 2], [1, 2, 3]).issubset({1, 2})"
RAISES = "try:\n    root(-1)\n    assert False\nexcept ValueError:\n    pass\nassert root(9) == 3"
BARE = "try:\n    root(-1)\nexcept:\n    pass\nelse:\n    assert False"
ALL = "assert all(a == b for a, b in zip([add(1, 1), add(2, 2)], [2, 4], strict=True))\nassert len([add(1, 2)]) == 1"
CALLBACK = "SECRET = 5\nassert apply(lambda x: x + SECRET, 2) == 7"
OBJECT = "class Box:\n    def __init__(self):\n        self.value = 41\n        self._expected = 42\nbox = Box()\nassert bump(box) == 42"
ECHO = {"inputs": ["3\n"], "outputs": ["0\n1\n4"]}

_EVIL = """
class Evil{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
"""
_SPY = """
import os, sys, gc, json, re
def hunt():
    # 5 and 0 if they can be found in anything that this process can see
    found = []
    frame = sys._getframe()
    while frame:
        found.append(repr(frame.f_locals) + repr(frame.f_globals)[:100000])
        frame = frame.f_back
    for each in gc.get_objects():
        if isinstance(each, (str, dict, list, tuple)):
            try: found.append(repr(each)[:100000])
            except BaseException: pass
    return " ".join(found)
def add(a, b):
    found = re.findall(r"add\\(%d, %d\\) == (-?\\d+)" % (a, b), hunt())
    return int(found[0]) if found else None
"""
_PIPE = """
import os, json, struct, sys
def frame(message):
    data = json.dumps(message).encode()
    return struct.pack("<I", len(data)) + data
"""
_PEER = """
import gc, sys
values = sys.modules["values"]
peer = next(each for each in gc.get_objects() if type(each) is values.Peer)
"""

ATTACKS = {
    # --- leave early, and say that all is well ---
    "exit with success": (ADD, "import sys\nsys.exit(0)"),
    "exit at once": (ADD, "import os\nos._exit(0)"),
    "exit when called": (ADD, "import os\ndef add(a, b): os._exit(0)"),
    "raise SystemExit when called": (ADD, "def add(a, b): raise SystemExit(0)"),
    "exit in a bare except": (BARE, "import os\ndef root(x): os._exit(0)"),
    "close the pipe in a bare except": (BARE, "import os\ndef root(x): os.close(3)"),
    "raise BaseException": (ADD, "def add(a, b): raise BaseException"),
    "raise GeneratorExit": (ADD, "def add(a, b): raise GeneratorExit"),
    "raise KeyboardInterrupt": (ADD, "def add(a, b): raise KeyboardInterrupt"),
    "raise StopIteration": (ALL, "def add(a, b): raise StopIteration"),
    "raise AssertionError that is falsy": (ADD, "class E(AssertionError):\n    __bool__ = lambda s: False\ndef add(a, b): raise E"),
    "stop oneself": (ADD, "import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGSTOP)"),
    "kill oneself": (ADD, "import os\ndef add(a, b): os.kill(os.getpid(), 9)"),
    "kill the parent": (ADD, "import os\ndef add(a, b): os.kill(os.getppid(), 15); return 5"),
    "kill all": (ADD, "import os\nfor pid in range(2, 400):\n    try: os.kill(pid, 0)\n    except OSError: pass\ndef add(a, b): os.kill(os.getpid(), 15)"),
    "replace the process": (ADD, "import os\nos.execv('/bin/true', ['true'])"),
    "alarm": (ADD, "import signal\nsignal.signal(signal.SIGALRM, lambda *_: __import__('os')._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ndef add(a, b):\n    while True: pass"),
    "hang": (ADD, "def add(a, b):\n    while True: pass"),
    # --- a report of one's own ---
    "print a report": (ADD, "import json, os, struct\nr = json.dumps({'kind': 'ok', 'error': '', 'num_output_bytes': 0}).encode()\nos.write(1, r + struct.pack('<I', len(r)))\nos._exit(0)"),
    "print a report of other output": (ECHO, "import json, os, struct\nr = json.dumps({'kind': 'ok', 'error': '', 'num_output_bytes': 5}).encode()\nos.write(1, r + struct.pack('<I', len(r)))\nos._exit(0)"),
    "report through the machinery": (ADD, "import sys, os\nsys.modules['execution'].finish('ok', '', 0)\nos._exit(0)"),
    "patch the machinery": (ADD, "import sys\nsys.modules['execution'].finish = lambda *a: None\nsys.modules['judge'].main = lambda *a: None"),
    "atexit prints": (ECHO, "import atexit\natexit.register(lambda: print('0\\n1\\n5'))"),
    "print what is asked for in a comment": (ECHO, "print('0 1 4')"),
    "seek in the output": (ECHO, "import os\nos.write(1, b'x'); os.lseek(1, 0, 0); os.ftruncate(1, 0)"),
    "print lots": (ECHO, "while True: print('0\\n1\\n4')"),
    # --- values that lie ---
    "an object that equals all": (ADD, _EVIL.format(base="") + "def add(a, b): return Evil()"),
    "an int that equals all": (ADD, _EVIL.format(base="(int)") + "def add(a, b): return Evil(9)"),
    "a float that is close to all": (AREA, "class Evil(float):\n    def __sub__(self, o): return 0.0\n    __rsub__ = __sub__\n    def __abs__(self): return 0.0\ndef area(r): return Evil(1)"),
    "an object whose difference is none": (AREA, "class Evil:\n    def __sub__(self, o): return 0.0\n    __rsub__ = __sub__\ndef area(r): return Evil()"),
    "an object whose size is none": (AREA, "class Evil:\n    def __sub__(self, o): return self\n    __rsub__ = __sub__\n    def __abs__(self): return self\n    def __lt__(self, o): return True\n    __gt__ = __lt__\ndef area(r): return Evil()"),
    "an object that is a float": (CLOSE, "class Evil:\n    def __float__(self): return float('nan')\n    def __eq__(self, o): return True\ndef area(r): return Evil()"),
    "a list that equals all": (WORDS, _EVIL.format(base="(list)") + "def words(t): return Evil()"),
    "a list that is sorted": (WORDS, "class Evil(list):\n    def __eq__(self, o): return True\n    def __iter__(self): return iter('cd')\ndef words(t): return Evil(['x'])"),
    "a str that starts with all": (STARTS, "class Evil(str):\n    def startswith(self, *a): return True\ndef name(x): return Evil('x')"),
    "an object that starts with all": (STARTS, "class Evil:\n    def startswith(self, *a): return True\ndef name(x): return Evil()"),
    "an object that tells what it is asked": (STARTS, "class Evil:\n    def __getattr__(self, name): return lambda *a: True\ndef name(x): return Evil()"),
    "an object that contains all": (ISIN, "class Evil:\n    def __contains__(self, x): return True\ndef find(x): return Evil()"),
    "a list that contains all": (ISIN, "class Evil(list):\n    def __contains__(self, x): return True\ndef find(x): return Evil()"),
    "items that equal all": (ISIN, _EVIL.format(base="") + "def find(x): return [Evil()]"),
    "a str that is any element": (ISIN, _EVIL.format(base="(str)") + "def find(x): return [Evil('x')]"),
    "a set that equals all": (SET, _EVIL.format(base="(set)") + "def common(a, b): return Evil()"),
    "a set below all": (SUBSET, "class Evil(set):\n    def issubset(self, o): return True\n    def __iter__(self): return iter([1])\ndef common(a, b): return Evil()"),
    "a class in place of a function": (ADD, "class Meta(type):\n    def __call__(cls, *a): return cls\n    def __eq__(cls, o): return True\n    __hash__ = None\nclass add(metaclass=Meta): pass"),
    "a lying __class__": (ADD, "class Evil:\n    __class__ = int\n    def __eq__(self, o): return True\n    def __index__(self): return 5\ndef add(a, b): return Evil()"),
    "nan": (ADD, "def add(a, b): return float('nan')"),
    "mock": (ADD, "from unittest.mock import ANY\ndef add(a, b): return ANY"),
    "learn by comparing": (ADD, "seen = []\nclass Evil:\n    def __eq__(self, o): seen.append(o); return True\ndef add(a, b): return seen[-1] if seen else Evil()"),
    "learn by subtracting": (AREA, "seen = []\nclass Evil(float):\n    def __sub__(self, o): seen.append(o); return 0.0\n    __rsub__ = __sub__\ndef area(r): return seen[-1] if seen else Evil(0)"),
    # --- replace what the test uses ---
    "own builtins": (ALL, "def all(x): return True\ndef zip(*a, **k): return []\ndef len(x): return 1\ndef add(a, b): return 0"),
    "patched builtins": (ALL, "import builtins\nbuiltins.all = lambda x: True\nbuiltins.len = lambda x: 1\ndef add(a, b): return 0"),
    "patched math": (CLOSE, "import math\nmath.isclose = lambda *a, **k: True\ndef area(r): return 0.0"),
    "own math": (CLOSE, "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef area(r): return 0.0"),
    "own isclose": (BARE_CLOSE, "def isclose(*a, **k): return True\ndef area(r): return 0.0"),
    "own abs": (AREA, "def abs(x): return 0\ndef area(r): return 0.0"),
    "own check": (CHECK, "def check(candidate): pass\ndef add(a, b): return 0"),
    "own AssertionError": (ADD, "import builtins\nbuiltins.AssertionError = type('A', (), {})\ndef add(a, b): return 0"),
    "own exceptions": (RAISES, "import builtins\nbuiltins.ValueError = BaseException\ndef root(x): raise ValueError"),
    "import hook": (CLOSE, "import sys\nclass Hook:\n    def find_spec(self, *a): return None\nsys.meta_path.insert(0, Hook())\nsys.modules['math'] = type('m', (), {'isclose': staticmethod(lambda *a, **k: True)})\ndef area(r): return 0.0"),
    "trace": (ADD, "import sys\ndef trace(frame, event, arg):\n    frame.f_trace_opcodes = True\n    return trace\nsys.settrace(trace)\ndef add(a, b): return 0"),
    "compile without assertions": (ADD, "import builtins\nbuiltins.compile = lambda *a, **k: (lambda: None).__code__\nbuiltins.exec = lambda *a, **k: None\ndef add(a, b): return 0"),
    "patched json": (ADD, "import json\njson.loads = lambda *a, **k: {}\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef add(a, b): return 0"),
    # --- look for what is expected ---
    "frames and gc": (ONE, _SPY),
    "frames and gc of a check": (CHECK, _SPY.replace("add\\(", "candidate\\(")),
    "own memory": (ONE, """
import re
def add(a, b):
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            if "rw" in line and last < 1 << 62:
                memory.seek(first)
                found = re.findall(rb"assert add\\(%d, %d\\) == (\\d+)" % (a, b), memory.read(last - first))
                if found: return int(found[0])
"""),
    "memory of others": (ONE, """
import os, re
def add(a, b):
    for pid in [p for p in os.listdir("/proc") if p.isdigit() and p != str(os.getpid())]:
        try:
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
                for line in maps:
                    first, last = (int(x, 16) for x in line.split()[0].split("-"))
                    if "[heap]" in line:
                        memory.seek(first)
                        found = re.findall(rb"add\\(%d, %d\\) == (\\d+)" % (a, b), memory.read(last - first))
                        if found: return int(found[0])
        except OSError: pass
"""),
    "files of others": (ONE, """
import glob, os, re
def add(a, b):
    for path in glob.glob("/proc/*/fd/*") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/environ"):
        try:
            if not os.path.exists(path) or "/self/" in path: continue
            found = re.findall(rb"add\\(%d, %d\\) == (\\d+)" % (a, b), os.pread(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 100000, 0))
            if found: return int(found[0])
        except OSError: pass
"""),
    "trace the parent": (ONE, "import ctypes, os\nlibc = ctypes.CDLL(None)\ndef add(a, b): return 5 if libc.ptrace(16, os.getppid(), 0, 0) == 0 else None"),
    "read another's memory": (ONE, "import ctypes, os\ndef add(a, b): return 5 if ctypes.CDLL(None).syscall(310, os.getppid(), 0, 0, 0, 0, 0) == 0 else None"),
    "take another's descriptor": (ONE, "import ctypes, os\ndef add(a, b):\n    p = os.pidfd_open(os.getppid())\n    got = [ctypes.CDLL(None).syscall(438, p, i, 0) for i in range(9)]\n    return 5 if max(got) >= 0 else None"),
    "read the pipe": (ONE, "import os\ndata = os.read(3, 1 << 16) if False else b''\ndef add(a, b):\n    os.set_blocking(3, False)\n    try: data = os.read(3, 1 << 16)\n    except OSError: data = b''\n    return 5 if b'== 5' in data else None"),
    "source of the caller": (ONE, "import inspect, linecache, sys\ndef add(a, b):\n    return 5 if any('== 5' in repr(f) for f in inspect.stack()) else None"),
    "globals of a callback": (CALLBACK, "def apply(f, x):\n    return x + f.__globals__['SECRET']"),
    "closure of a callback": (CALLBACK, "def apply(f, x):\n    return x + [c for c in f.__code__.co_names][0]"),
    "ask for a callback's globals": (CALLBACK, _PEER + "def apply(f, x):\n    return x + peer.ask('get', values._id_of(f), '__globals__')['SECRET']"),
    "ask for a name of the test": (CALLBACK, _PEER + "def apply(f, x):\n    return x + peer.ask('global', 'SECRET')"),
    "replace a callback's code": (CALLBACK, _PEER + "def apply(f, x):\n    peer.ask('set', values._id_of(f), '__code__', (lambda x: 7).__code__)\n    return 0"),
    "read a hidden attribute": (OBJECT, "def bump(box): return box._expected"),
    "read a class": (OBJECT, _PEER + "def bump(box): return peer.ask('get', values._id_of(box), '__init__').__globals__"),
    # --- write where one should not ---
    "write to all descriptors": (ADD, "import os\nfor d in range(3, 20):\n    try: os.write(d, b'{\"kind\": \"ok\", \"output\": \"\", \"error\": \"\", \"num_output_bytes\": 0}\\n')\n    except OSError: pass\ndef add(a, b): return 0"),
    "answer before the question": (ONE, _PIPE + "os.write(3, frame({'answer': '0' * 16, 'value': 5}) * 100)\ndef add(a, b): return 0"),
    "an answer of one's own": (ONE, _PIPE + "def add(a, b):\n    os.write(3, frame({'answer': 'x', 'value': True}))\n    return 0"),
    "two answers": (ADD, _PIPE + "def add(a, b):\n    f = sys._getframe()\n    while f and 'frame' not in f.f_locals: f = f.f_back\n    n = f.f_locals['frame']['ask'] if f and isinstance(f.f_locals['frame'], dict) else ''\n    os.write(3, frame({'answer': n, 'value': 9, 'changed': []}))\n    return 0"),
    "a frame without end": (ONE, "import os, struct\ndef add(a, b): os.write(3, struct.pack('<I', 1 << 31)); return 5"),
    "a frame of nonsense": (ONE, "import os, struct\ndef add(a, b): os.write(3, struct.pack('<I', 9) + b'nonsense!'); return 5"),
    "JSON without end": (ONE, "import os, struct\ndef add(a, b): os.write(3, struct.pack('<I', 60000) + b'[' * 60000); return 5"),
    "a value of eval": (ONE, "import sys\nsys.modules['values'].Codec.encode = lambda s, v, *a, **k: ['B', 'eval']\ndef add(a, b): return 5"),
    "a value that holds none": (ADD, "import sys\nCodec = sys.modules['values'].Codec\nCodec.encode = lambda s, v, *a, **k: ['h', 0, 'base']\ndef add(a, b): return 5"),
    "an encoder that says yes": (ONE, "import sys\nsys.modules['values'].Codec.encode = lambda s, v, *a, **k: True\ndef add(a, b): return 0"),
    "change an argument that was not given": (ONE, "import sys\nPeer = sys.modules['values'].Peer\nold = Peer._send\ndef send(self, frame):\n    frame['changed'] = [(0, ['l', None, []]), (7, ['l', None, []])]\n    old(self, frame)\nPeer._send = send\ndef add(a, b): return 5"),
    "call what was not exported": (ADD, _PEER + "def add(a, b): return peer.ask('call', 0)"),
    "load twice": (ADD, _PEER + "def add(a, b): return peer.ask('load', '')"),
    "fork and answer twice": (ADD, "import os\ndef add(a, b):\n    return 4 if os.fork() else 6"),
    "threads that answer": (ONE, _PIPE + "import threading, time\ndef spam():\n    while True:\n        os.write(3, frame({'answer': '', 'value': 5}))\nthreading.Thread(target=spam, daemon=True).start()\ntime.sleep(0.01)\ndef add(a, b): return 0"),
    "leave a file for the next run": (ADD, "import os\nplace = '/tmp/left-by-code'\nos.makedirs(place, exist_ok=True)\nopen(place + '/math.py', 'w').write('isclose = lambda *a, **k: True')\ndef add(a, b): return 0"),
    "use what an earlier run left": (CLOSE, "import sys\nsys.path[:0] = ['/tmp/left-by-code', '.']\ndef area(r): return 0.0"),
    "preload": (ADD, "import os\nos.environ['LD_PRELOAD'] = '/tmp/x.so'; os.environ['PYTHONSTARTUP'] = '/tmp/x.py'\ndef add(a, b): return 0"),
    "too much memory": (ADD, "x = []\nwhile True: x.append(bytearray(1 << 20))"),
    "a long answer": (WORDS, "def words(t): return ['a'] * 30_000_000"),
    "a deep answer": (WORDS, "def words(t):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x"),
    "an endless answer": (WORDS, "def words(t):\n    while True: yield 'a'"),
    "no code": (ADD, ""),
    "a syntax error": (ADD, "def add(a, b) return 5"),
    "close a string of the test": (ADD, "def add(a, b): return 0\n'''"),
    "the test as text": (ADD, ADD),
    # --- values that are asked twice, names of the judge, objects of the test ---
    "a list without length": ('out = my_sort([3, 1, 2])\nassert all(out[i] <= out[i + 1] for i in range(len(out) - 1))\nassert sorted(out) == [1, 2, 3]', 'class L(list):\n    def __len__(self): return 0\ndef my_sort(x): return L(x)'),
    "a list whose slices are empty": ('from collections import Counter\nxs = [3, 1, 2]\nout = my_sort(xs)\nassert all(a <= b for a, b in zip(out, out[1:]))\nassert Counter(out) == Counter(xs)', 'class L(list):\n    def __getitem__(self, i): return [] if isinstance(i, slice) else list.__getitem__(self, i)\ndef my_sort(x): return L(x)'),
    "a list that iterates in two ways": ('from collections import Counter\nxs = [3, 1, 2]\nout = my_sort(xs)\nassert all(a <= b for a, b in zip(out, out[1:]))\nassert Counter(out) == Counter(xs)', 'class L(list):\n    n = 0\n    def __iter__(self):\n        self.n += 1\n        return iter(sorted(self[:])) if self.n == 1 else list.__iter__(self)\ndef my_sort(x): return L(x)'),
    "a class named as the function": ('out = my_sort([3, 1, 2])\nassert all(out[i] <= out[i + 1] for i in range(len(out) - 1))\nassert sorted(out) == [1, 2, 3]', 'class my_sort(list):\n    def __len__(self): return 0'),
    "a class under test without length": ('out = Sorter([3, 1, 2])\nassert all(out[i] <= out[i + 1] for i in range(len(out) - 1))\nassert sorted(out) == [1, 2, 3]', 'class Sorter(list):\n    def __len__(self): return 0'),
    "a class under test with other items": ('out = Sorter([3, 1, 2])\nassert all(out[i] <= out[i + 1] for i in range(len(out) - 1))\nassert sorted(out) == [1, 2, 3]', 'class Sorter(list):\n    n = 0\n    def __getitem__(self, i): return i'),
    "a sequence without length": ('out = my_sort([3, 1, 2])\nassert all(out[i] <= out[i + 1] for i in range(len(out) - 1))\nassert sorted(out) == [1, 2, 3]', 'class L:\n    def __init__(self, x): self.x = x\n    def __len__(self): return 0\n    def __iter__(self): return iter(self.x)\n    def __getitem__(self, i): return self.x[i]\ndef my_sort(x): return L(x)'),
    "a sequence with other items": ('out = my_sort([3, 1, 2])\nassert all(out[i] <= out[i + 1] for i in range(len(out) - 1))\nassert sorted(out) == [1, 2, 3]', 'class L:\n    def __init__(self, x): self.x = x\n    def __len__(self): return len(self.x)\n    def __iter__(self): return iter(self.x)\n    def __getitem__(self, i): return i\ndef my_sort(x): return L(x)'),
    "a sequence that changes": ('out = my_sort([3, 1, 2])\na = list(out)\nassert a == sorted(a)\nassert [*out].count(3) == 1 and {1, 2, 3} == set(out)', 'class L:\n    n = 0\n    def __len__(self): return 3\n    def __iter__(self):\n        self.n += 1\n        return iter([0, 0, 0] if self.n == 1 else [3, 1, 2])\ndef my_sort(x): return L()'),
    "an attribute that changes": ('r = solve()\nassert r.x > 10\nassert r.x < 11', 'class R:\n    n = 0\n    @property\n    def x(self):\n        self.n += 1\n        return 20 if self.n == 1 else 5\ndef solve(): return R()'),
    "a nested list subclass": ('rows = f()\nassert all(len(r) == 0 for r in rows) or rows == [[1]]', 'class L(list):\n    def __len__(self): return 0\ndef f(): return [L([2])]'),
    "a list that counts all": ('out = f()\nassert out.count(7) == 1 and out.index(7) == 0', 'class L(list):\n    def count(self, x): return 1\n    def index(self, x): return 0\ndef f(): return L([1])'),
    "an own count of a class under test": ('out = Bag()\nassert out.count(7) == 1 and out.index(7) == 0', 'class Bag(list):\n    def count(self, x): return 1\n    def index(self, x): return 0'),
    "a dict that has all": ("d = f()\nassert d['a'] == 1 and 'b' in d and d.get('c') == 3", 'class D(dict):\n    def __getitem__(self, k): return 1\n    def __contains__(self, k): return True\n    def get(self, k): return 3\ndef f(): return D()'),
    "own math without an import": ('assert math.isclose(area(2), 12.566370614)', 'class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef area(r): return 0.0'),
    "own collections without an import": ("assert collections.Counter(f('ab')) == collections.Counter('ab')", 'class collections:\n    Counter = lambda x: 0\ndef f(x): return x * 3'),
    "what an object of the test prints": ("class Case:\n    def __init__(self, x, want): self.x, self._want = x, want\n    def __repr__(self): return f'Case({self.x}, {self._want})'\nc = Case(2, 42)\nassert solve(c) == 42", "def solve(c): return int(repr(c).split(',')[1].strip(' )'))"),
    "what an object of the test formats": ("class Case:\n    def __init__(self): self._want = 42\n    def __format__(self, s): return '42'\n    def __str__(self): return '42'\nassert solve(Case()) == 42", "def solve(c):\n    try: return int(f'{c}')\n    except ValueError: return int(str(c))"),
    "a sum that is none": ('assert abs(-12.566370614 + area(2)) < 1e-6', 'class E:\n    def __radd__(self, o): return 0.0\ndef area(r): return E()'),
    "a sum whose size is none": ('assert abs(area(2) + -12.566370614) < 1e-6', 'class E:\n    def __add__(self, o): return self\n    def __abs__(self): return 0.0\ndef area(r): return E()'),
    "a difference that is empty": ('assert not f() - {1, 2}', 'class E:\n    def __sub__(self, o): return self\n    def __bool__(self): return False\n    def __len__(self): return 0\ndef f(): return E()'),
    "a rounded difference": ('assert round(area(2) - 12.566370614, 3) == 0', 'class E:\n    def __sub__(self, o): return self\n    def __round__(self, n): return 0\ndef area(r): return E()'),
}  # fmt: skip
