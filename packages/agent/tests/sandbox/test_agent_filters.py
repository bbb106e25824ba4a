"""Landlock: files that are mounted and not meant are refused; a kernel without it is described as such."""

import asyncio
import os
import subprocess

import pytest

from rl_agent import Grader
from rl_agent.sandbox import worker as workers
from rl_agent.sandbox.process import filters
from rl_agent.types import SandboxReport

has_landlock = pytest.mark.skipif(not filters.landlock_version(), reason="this kernel has no Landlock")

CONFINED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import filters
os.chdir(sys.argv[2])
filters._libc.prctl(38, 1, 0, 0, 0)
assert filters.confine(programs=["/usr", "/bin", "/lib", "/lib64", sys.base_prefix], readable=["may/read"],
                       writable=["may/write", "not there"])
def tried(do):
    try:
        return do() and "" or "done"
    except OSError as error:
        return error.strerror
print(tried(lambda: open("may/read/file").close()))
print(tried(lambda: open("may/read/file", "a")))
print(tried(lambda: os.unlink("may/read/file")))
print(tried(lambda: open("secret")))
print(tried(lambda: open("link")))
print(tried(lambda: os.listdir(".")))
print(tried(lambda: os.execv("may/read/program", ["x"])))
print(tried(lambda: os.makedirs("may/write/a/b")))
print(tried(lambda: os.rename("may/write/file", "may/write/a/b/file")))
print(tried(lambda: os.rename("may/write/a/b/file", "may/read/moved")))
print(os.system("cat secret 2>/dev/null") != 0)
"""


@pytest.mark.process
@has_landlock
def test_a_file_that_is_mounted_and_not_given_is_refused(tmp_path):
    for name in ("may/read/file", "may/read/program", "may/write/file", "secret"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "may/read/program").chmod(0o755)
    (tmp_path / "link").symlink_to("secret")
    command = [workers.PYTHON, "-I", "-S", "-c", CONFINED, str(workers.PROGRAM), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    no = "Permission denied"
    moved = done.stdout.splitlines()[-2]
    wanted = ["done", no, no, no, no, no, no, "done", "done", moved, "True"]
    assert done.stdout.splitlines() == wanted, done.stderr
    assert moved in (no, "Invalid cross-device link")


def outputs_of(*codes, **settings):
    async def main():
        grader = Grader(num_workers=1)
        async with grader.worker(is_kept=False, **settings) as worker:
            outputs = [(await worker.run(code, "", 30, is_fresh=True)) for code in codes]
        report = worker.report
        await grader.close()
        return [result.output.strip() or result.error.strip().splitlines()[-1] for result in outputs], report

    return asyncio.run(main())


@pytest.mark.promise("Sandboxed code opens the files it is given and no other, whatever is mounted")
@pytest.mark.process
@has_landlock
@pytest.mark.parametrize("may_isolate", [True, False], ids=["namespaces", "none"])
def test_code_reads_the_system_and_its_folders_alone(may_isolate, monkeypatch, tmp_path):
    """Without namespaces everything is mounted, and what is not meant is refused all the same."""
    start = workers.Worker.start
    given = {"may_isolate": may_isolate}
    monkeypatch.setattr(workers.Worker, "start", lambda *args, **kwargs: start(*args, **kwargs, **given))
    (tmp_path / "mine").write_text("mine")
    found, report = outputs_of(
        "import os; print(os.listdir('/etc'))",
        "print(open('/etc/hostname').read())",
        "print(open('mine').read())",
        "import tempfile, os; f = tempfile.mkdtemp(); os.rename(f, f + 'x'); print(os.listdir(f + 'x'))",
        "import subprocess; print(subprocess.run(['/bin/cat', '/etc/shadow'], capture_output=True).returncode)",
        "import multiprocessing; q = multiprocessing.get_context('fork').Lock(); print(q.acquire())",
        "open('/dev/null', 'w').write('x'); print(3, len(open('/proc/stat').read(1)))",
        folders={"/workspace": tmp_path},
    )  # fmt: skip
    is_refused = ("Permission denied", "No such file")
    assert all(any(why in text for why in is_refused) for text in found[:2]), found
    assert found[2:6] == ["mine", "[]", "1", "True"]
    assert found[6] == "3 1"
    assert report.landlock == filters.landlock_version()
    assert f"files are bounded by Landlock {report.landlock}" in str(report)


def test_a_kernel_without_landlock_is_described(monkeypatch):
    """The answer of such a kernel is ENOSYS, or EOPNOTSUPP where it is off: nothing is refused, and that is said."""
    monkeypatch.setattr(filters, "_call", lambda *_: -1)
    assert filters.landlock_version() == 0
    assert filters.confine(programs=[], readable=[], writable=[]) is False
    report = SandboxReport(
        isolation=frozenset({"files"}), memory="watcher", processes="watcher", has_filter=True, landlock=0
    )
    assert "mounts alone: this kernel has no Landlock" in str(report)


@pytest.mark.parametrize(
    ("version", "rights", "network", "scope", "size"),
    [(1, 0x1FFF, 0, 0, 8), (2, 0x3FFF, 0, 0, 8), (3, 0x7FFF, 0, 0, 8), (4, 0x7FFF, 3, 0, 16), (5, 0xFFFF, 3, 0, 16),
     (6, 0xFFFF, 3, 3, 24)],
)  # fmt: skip
def test_older_kernels_are_asked_what_they_know(version, rights, network, scope, size, monkeypatch):
    """Sizes and rights by version are those of the kernel's documentation of Landlock."""
    calls = []

    def call(number, *arguments):
        calls.append((number, *arguments))
        return version if arguments[-1] == 1 and arguments[0] is None else os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(filters, "_call", call)
    monkeypatch.setattr(filters, "_checked", lambda result: result)
    assert filters.confine(programs=["/usr"], readable=["/etc/passwd"], writable=["/tmp"])
    assert filters.struct.unpack("QQQ", calls[1][1]) == (rights, network, scope)
    assert calls[1][2] == size
    allowed = [filters.struct.unpack("=Qi", arguments[2])[0] for number, *arguments in calls if number == 445]
    assert allowed == [13, 4, rights & ~1]
