"""Ray as a run starts it: nothing listens beyond loopback, and nobody without the run's token may submit work."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(400), pytest.mark.process]

RUN = """
import json, os, sys
from rl_trainer.runtime.base import ResourcePool
from rl_trainer.runtime import create_runtime
with create_runtime("ray") as runtime:
    runtime.start([ResourcePool(name="one", num_workers=1, num_cpus=0.1)])
    import ray
    told = {"address": ray.get_runtime_context().gcs_address, "token": os.environ["RAY_AUTH_TOKEN"]}
    print(json.dumps(told), flush=True)
    sys.stdin.read()
"""
STRANGER = """
import sys, ray
ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
print("ran", ray.get(ray.remote(lambda: 40 + 2).options(num_cpus=0).remote()))
"""
JOB = """
import sys
from ray.job_submission import JobSubmissionClient
print("submitted", JobSubmissionClient(sys.argv[1]).submit_job(entrypoint="true"))
"""


@pytest.fixture(scope="module")
def started():
    """A run's Ray: its address, its token, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean()
    )
    yield json.loads(process.stdout.readline()) | {"pid": process.pid}
    process.communicate("", timeout=120)


def clean(**variables):
    """The environment of a user who has set nothing for Ray, or these variables alone, and has no token file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "HOME": "/nonexistent"} | variables


ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Without it a client looks for 127.0.0.1 at the machine's own address, where nobody listens."""


def run(script, *arguments, timeout_s=150.0, **variables):
    """The exit code, None if it was still trying at its end, and what was printed."""
    command = [sys.executable, "-c", script, *arguments]
    try:
        ended = subprocess.run(
            command, env=clean(**variables), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        return None, str(error.stdout)
    return ended.returncode, ended.stdout


@pytest.mark.promise("The run's Ray: a stranger can neither join nor submit")
def test_a_stranger_can_neither_join_nor_submit(started):
    assert started["address"].startswith("127.0.0.1:")
    start = time.monotonic()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": started["token"]}
    known = run(STRANGER, started["address"], **ON_LOOPBACK, **token)
    assert known == (0, "ran 42\n"), "with the token it works, or the rest of this test would show nothing"
    long_s = 3 * (time.monotonic() - start) + 10.0
    strangers = {}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, {"RAY_AUTH_MODE": "disabled"}
    with ThreadPoolExecutor() as pool:  # most of their time they wait
        tried = [
            pool.submit(run, STRANGER, started["address"], timeout_s=long_s, **ON_LOOPBACK, **variables)
            for variables in strangers
        ]
        job = pool.submit(run, JOB, f"http://{started['address']}", timeout_s=long_s)
    for variables, one in zip(strangers, tried, strict=True):
        code, printed = one.result()
        assert code != 0, f"with {variables} a stranger ran {printed}"
        assert "ran" not in printed
    code, printed = job.result()
    assert code != 0
    assert "submitted" not in printed


def test_nothing_listens_beyond_loopback(started):
    ours = descendants(started["pid"])
    listening = [(pid, address) for pid in ours for address in listeners(pid)]
    assert len(listening) >= 4, "Ray's own servers are not among them: the test shows nothing"
    assert [found for found in listening if not found[1].startswith(("127.", "::1", "::ffff:127."))] == []


def descendants(pid):
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listeners(pid):
    """Addresses that a process listens at, of IPv4 and IPv6."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            links.append(str(fd.readlink()))
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                words = fields[1].partition(":")[0]
                raw = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
                yield socket.inet_ntop(family, raw)
