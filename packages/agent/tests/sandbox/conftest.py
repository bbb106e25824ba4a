"""Sandboxes of every kind: podman's image is made on the spot of this machine's own programs."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rl_agent.registry import create_sandboxes
from rl_agent.sandbox.server import SandboxServer
from rl_agent.types import SandboxLimits

MIB = 1 << 20
LIMITS = SandboxLimits(timeout_s=30, memory_bytes=256 * MIB, num_processes=60, file_bytes=8 * MIB)
PROGRAMS = "bash sh cat ls grep mkdir rm sleep base64 env id touch ln chmod mount unshare kill head python3 sed true dd"
IMAGE = "localhost/rl-agent-test:1"


def write_root(root):
    """A small root file system: some programs of this machine, with their libraries and Python's standard ones."""
    for name in PROGRAMS.split():
        program = "/usr/bin/python3" if name == "python3" else shutil.which(name, path="/usr/bin:/bin")
        copy_file(Path(program), root / "usr/bin" / name)
    for name in ("python3.11", "python3.12", "python3.13"):
        if (found := Path("/usr/lib", name)).is_dir():
            shutil.copytree(found, root / "usr/lib" / name, ignore=shutil.ignore_patterns("test*", "__pycache__"))
            for each in (found / "lib-dynload").glob("*.so"):
                copy_libraries(each, root)
    for name in ("bin", "lib", "lib64"):
        if (root / name).is_dir():
            shutil.copytree(root / name, root / "usr" / name, dirs_exist_ok=True)
            shutil.rmtree(root / name)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "proc", "dev", "sys", "etc"):
        (root / name).mkdir()
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")


def copy_file(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    copy_libraries(source, target.parents[len(target.parts) - 1 - target.parts.index("usr")])


def copy_libraries(program, root):
    said = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
    for word in said.split():
        if word.startswith("/") and not (root / word[1:]).exists():
            (root / word[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(word, root / word[1:])


@pytest.fixture(scope="session")
def root_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image") / "root"
    write_root(folder)
    return folder


@pytest.fixture(scope="session")
def podman_image(root_folder, tmp_path_factory):
    """Image of podman, skipped where that is not installed."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed: apt-get install podman")
    found = podman_program(tmp_path_factory.mktemp("podman"))
    with subprocess.Popen(["tar", "-C", str(root_folder), "-c", "."], stdout=subprocess.PIPE) as packed:
        subprocess.run([*found, "import", "-q", "-", IMAGE], stdin=packed.stdout, check=True, timeout=300)
    yield IMAGE
    subprocess.run([*found, "rmi", "-f", IMAGE], timeout=120, capture_output=True)


def podman_program(folder):
    """Podman; with a mount namespace of its own where crun refuses this machine's two kinds of control groups."""
    if Path("/sys/fs/cgroup/unified").is_dir() and os.getuid() == 0:
        wrapper = folder / "podman"
        real = shutil.which("podman")
        hidden = "umount /sys/fs/cgroup/unified 2>/dev/null"
        wrapper.write_text(f'#!/bin/bash\nexec unshare -m bash -c \'{hidden}; exec {real} "$@"\' podman "$@"\n')
        wrapper.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    return ["podman"]


KINDS = ["process", "http", *(pytest.param(each, marks=pytest.mark.integration) for each in ("bubblewrap", "podman"))]


@pytest.fixture(params=KINDS)
def kind_name(request):
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: apt-get install bubblewrap")
    return request.param


@pytest.fixture
def with_kind(kind_name, request, monkeypatch):
    """Call a coroutine function with a kind of sandboxes, and return what it returns."""
    image = request.getfixturevalue("podman_image") if kind_name == "podman" else None
    monkeypatch.setenv("RL_AGENT_SANDBOX_TOKEN", "secret")

    def call(use, *, limits=LIMITS, is_made=True, **options):
        """Of a kind, or of the option of a loop that makes it (`is_made=False`)."""

        async def main():
            server = None
            given = {"kind": kind_name, **options, **({} if image is None else {"image": image})}
            if kind_name == "http":

                def made(*, limits, network):
                    options = {"kind": "process", "network": network}
                    return create_sandboxes(options, limits=limits, max_running=4)

                server = SandboxServer(made, limits=limits, token="secret")
                given["url"] = await server.start()
            kind = create_sandboxes(given, limits=limits, max_running=4)
            try:
                return await use(kind if is_made else given)
            finally:
                await kind.close()
                if server is not None:
                    await server.stop()

        return asyncio.run(main())

    return call
