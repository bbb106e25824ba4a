"""What the grader shuts code off from, and tells: for root, for an ordinary user, and where the kernel refuses."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rl_agent.sandbox import worker as workers
from rl_agent.sandbox.process import filters

pytestmark = pytest.mark.process

NOBODY = 65534
PYTHONS = (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3")
TRY = "import os, sys; os.setgroups([]); os.setgid({0}); os.setuid({0}); os.execv({1!r}, [{1!r}, '-c', ''])"

# Runs in a process that may do to itself what the test asks for; tells what the grader claims, and what code can do.
SCRIPT = """
import asyncio, ctypes, json, os, sys
from pathlib import Path
from rl_agent import Grader, SandboxError, SandboxLimits
from rl_agent.sandbox import worker as workers

settings = json.loads(sys.argv[1])
workers.PROGRAM, workers.PYTHON = Path(settings["worker"]), settings["python"]
libc = ctypes.CDLL(None, use_errno=True)


def checked(result):
    if result:
        raise OSError(ctypes.get_errno(), "cannot be had here")


def without_namespaces():  # in a user namespace of our own, whose limit is ours to set
    uid, gid = os.getuid(), os.getgid()
    checked(libc.unshare(0x10000000))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def without_id_maps():  # namespaces can be made, but nobody may be somebody in them
    checked(libc.unshare(0x20000))
    checked(libc.mount(b"none", b"/", None, ctypes.c_ulong(16384 | 1 << 18), None))
    checked(libc.mount(b"none", b"/proc", None, ctypes.c_ulong(32 | 4096 | 1), None))


if settings["change"]:
    try:
        {"namespaces": without_namespaces, "id maps": without_id_maps}[settings["change"]]()
    except OSError as error:
        print(json.dumps({"skip": str(error)}))
        sys.exit()
if settings["uid"] is not None:
    os.setgroups([])
    os.setgid(settings["uid"])
    os.setuid(settings["uid"])
os.chdir("/")

CODES = {
    "who": "import os; os.getuid()",
    "network": f"import socket; socket.create_connection(('127.0.0.1', {settings['port']}), 5); 'in'",
    "files": f"import os; os.path.exists({settings['worker']!r})",
    "processes": f"import os; os.path.exists('/proc/{os.getpid()}')",
}
if settings["uid"] is not None:
    CODES["mount"] = "import os; os.system('mount -t tmpfs none /tmp') != 0"


async def main():
    grader = Grader(num_workers=1, limits=SandboxLimits(timeout_s=30, memory_bytes=1 << 28))
    told = {name: (await grader.run(code)).output.strip() for name, code in CODES.items()}
    await grader.close()
    strict = Grader(num_workers=1, needs=("network", "processes", "files"))
    try:
        refusal = (await strict.run("1")).error
    except SandboxError as error:
        refusal = str(error)
    await strict.close()
    print(json.dumps({"isolation": sorted(grader.isolation), "code": told, "refusal": refusal}))


asyncio.run(main())
"""


def python_of(uid):
    """A Python that this user can start: ours may lie in somebody's home."""
    for path in PYTHONS:
        tried = subprocess.run([sys.executable, "-c", TRY.format(uid, path)], capture_output=True, timeout=60)
        if tried.returncode == 0:
            return path
    return pytest.skip(f"user {uid} can start none of {', '.join(PYTHONS)}")


def run_grader(*, uid=None, change=""):
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        folder.chmod(0o755)
        shutil.copytree(workers.PROGRAM, folder / "worker")
        python = os.path.realpath(sys.executable) if uid is None else python_of(uid)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            settings = {"uid": uid, "change": change, "port": port, "worker": str(folder / "worker"), "python": python}
            command = [sys.executable, "-c", SCRIPT, json.dumps(settings)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    finally:
        shutil.rmtree(folder)


def check_claims(found):
    """What is claimed is so; what is not claimed is told to whoever needs it."""
    code, isolation = found["code"], found["isolation"]
    is_refused = "network" in isolation or filters.landlock_version() >= 4
    assert code["network"] == ("" if is_refused else "'in'")
    assert code["files"] == str("files" not in isolation)
    assert code["processes"] == str(not {"files", "processes"} <= set(isolation))
    missing = sorted({"network", "processes", "files"}.difference(isolation))
    assert found["refusal"] == "" if not missing else f"shut off from {', '.join(missing)} here" in found["refusal"]


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can become another user; the other tests then run as one")
def test_an_ordinary_user_gets_what_the_kernel_gives_and_is_told():
    found = run_grader(uid=NOBODY)
    become = f"--reuid={NOBODY} --regid={NOBODY} --clear-groups"
    permits = subprocess.run(
        ["setpriv", *become.split(), "unshare", "--user", "--net", "--pid", "--fork", "true"], capture_output=True
    )
    assert ({"network", "processes"} <= set(found["isolation"])) == (permits.returncode == 0)
    assert found["code"]["who"] == str(NOBODY)
    assert found["code"]["mount"].splitlines()[-1] == "True"
    check_claims(found)


@pytest.mark.parametrize("change", ["namespaces", "id maps"])
def test_a_kernel_without_the_sandbox_is_reported_and_code_runs(change):
    found = run_grader(change=change)
    if "skip" in found:
        pytest.skip(f"a kernel that refuses {change} {found['skip']}")
    assert found["isolation"] == []
    assert found["code"]["who"].isdigit()
    check_claims(found)
