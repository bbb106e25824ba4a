"""The suite of escapes: what a model may try, in a sandbox of every kind; and what a sandbox has to do for it."""

import asyncio
import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from rl_agent.errors import RowError, SandboxError
from rl_agent.registry import create_sandboxes
from rl_agent.sandbox.base import SandboxSpec, exit_status
from rl_agent.sandbox.worker import Service
from rl_agent.types import SandboxLimits

pytestmark = pytest.mark.process
MIB = 1 << 20


def texts_in(folder):
    files = (path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    return {path.name: path.read_text(errors="replace") for path in files}


def ran(with_kind, *commands, spec=None, timeout_s=None, files=None, **options):
    """Results of commands in one sandbox, and the files of its working folder afterwards."""

    async def use(kind):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (files or {}).items():
                (Path(folder) / name).write_text(text)
            async with kind.open(SandboxSpec(folder=Path(folder), **(spec or {}))) as sandbox:
                results = [await sandbox.run(command, timeout_s=timeout_s) for command in commands]
                await sandbox.sync()
                return results, texts_in(Path(folder))

    return with_kind(use, **options)


def test_files_last_and_exit_statuses_are_read(with_kind):
    results, files = ran(with_kind, "cat a; echo b > b; exit 3", "cat b; rm a", "exit 0", files={"a": "x\n"})
    assert [exit_status(each) for each in results] == [3, 0, 0]
    assert [each.output for each in results] == ["x\n", "b\n", ""]
    assert files == {"b": "b\n"}


def test_python_runs_in_the_sandbox(with_kind):
    async def use(kind):
        async with kind.open(SandboxSpec()) as sandbox:
            return await sandbox.run_code("import sys; print(6 * 7); sys.exit(2)")

    result = with_kind(use)
    assert (result.output, exit_status(result)) == ("42\n", 2)


@pytest.mark.promise("The suite of escapes passes in a sandbox of every kind")
def test_no_file_of_the_machine_is_read(with_kind, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    monkeypatch.setenv("MY_SECRET", "s3cret")
    results, _ = ran(
        with_kind,
        f"cat {secret}",
        "env; cat /proc/*/environ | tr '\\0' '\\n'",
        "cat /etc/shadow",
        f"cat /proc/1/root{secret}; cat /proc/1/cwd/..{secret}",
        f"ln -s {secret} link; cat link",
    )
    assert not any("s3cret" in each.output or "root:" in each.output for each in results), results


def test_no_file_of_the_machine_is_written(with_kind, tmp_path):
    target = tmp_path / "target"
    ran(with_kind, f"mkdir -p {tmp_path}; echo x > {target}", "ln -s / root; echo x > root/escaped")
    assert not target.exists()
    assert not Path("/escaped").exists()


def test_a_link_out_of_the_sandbox_is_not_followed(with_kind, tmp_path):
    """Neither by files that are written over what a model left, nor by files that are read."""
    target = tmp_path / "target"
    target.write_text("mine")

    async def use(kind):
        with tempfile.TemporaryDirectory() as folder:
            async with kind.open(SandboxSpec(folder=Path(folder))) as sandbox:
                await sandbox.run(f"ln -s {target} out; ln -s {tmp_path} dir; ln -s /etc/hostname name")
                await sandbox.write("out", b"theirs")
                await sandbox.write("dir/target", b"theirs")
                read = {}
                for name in ("out", "dir/target", "name"):
                    try:
                        read[name] = await sandbox.read(name)
                    except FileNotFoundError:
                        read[name] = None
                await sandbox.sync()
                return read

    read = with_kind(use)
    assert target.read_text() == "mine"
    assert read["out"] == read["dir/target"] == b"theirs"
    assert read["name"] is None or read["name"] != Path("/etc/hostname").read_bytes()


def test_a_path_outside_is_refused(with_kind, kind_name):
    async def use(kind):
        async with kind.open(SandboxSpec()) as sandbox:
            await sandbox.write("../../etc/x", b"")

    if kind_name == "podman":
        return with_kind(use)  # it is the container's own
    with pytest.raises(RowError, match="outside of the working copy"):
        with_kind(use)
    return None


def test_the_network_is_shut(with_kind, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        results, _ = ran(
            with_kind,
            f"(exec 3<>/dev/tcp/127.0.0.1/{port}) && echo in",
            "(exec 3<>/dev/tcp/1.1.1.1/53) && echo in",
            timeout_s=10,
        )
    assert not any("in\n" in each.output for each in results), results


def test_an_abstract_socket_outside_is_shut(with_kind):
    with socket.socket(socket.AF_UNIX) as server:
        name = f"\0rl-agent-{os.getpid()}"
        server.bind(name)
        server.listen()
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({name!r}); print('in')"

        async def use(kind):
            async with kind.open(SandboxSpec()) as sandbox:
                return await sandbox.run_code(code)

        assert "in" not in with_kind(use).output.splitlines()


def test_the_service_is_reached_and_nothing_else(with_kind):
    async def use(kind):
        async def echo(reader, writer):
            writer.write(b"echo " + await reader.read(10) + b"\n")
            await writer.drain()
            writer.close()

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "socket"
            service = await asyncio.start_server(echo, "127.0.0.1", 0)
            inside = await asyncio.start_unix_server(echo, path)
            other = await asyncio.start_server(echo, "127.0.0.1", 0)
            port, another = (each.sockets[0].getsockname()[1] for each in (service, other))
            commands = [f"exec 3<>/dev/tcp/127.0.0.1/{each}; echo yo >&3; cat <&3" for each in (port, another)]
            async with kind.open(SandboxSpec(service=Service(port=port, socket=path))) as sandbox:
                assert sandbox.url_of(Service(port=port, socket=path)) == f"http://127.0.0.1:{port}"
                found = [await sandbox.run(command, timeout_s=20) for command in commands]
            for each in (service, inside, other):
                each.close()
                await each.wait_closed()
            return found

    reached, refused = with_kind(use)
    assert reached.output.startswith("echo yo"), reached
    assert "echo" not in refused.output


def test_privileges_are_not_gained(with_kind):
    results, _ = ran(
        with_kind,
        "mount -t tmpfs none /tmp && echo in",
        "unshare -Ur true && echo in",
        "unshare -n true && echo in",
        "cat /proc/sys/kernel/core_pattern > /proc/sys/kernel/core_pattern && echo in",
        "grep -c '^NoNewPrivs:.1' /proc/self/status",
        "dd if=/dev/mem count=1 of=/dev/null && echo in",
    )
    assert not any("in\n" in each.output for each in results), results
    assert results[4].output == "1\n"


def test_no_process_of_the_machine_is_seen_or_signalled(with_kind):
    ours = os.getpid()
    results, _ = ran(
        with_kind,
        f"test -e /proc/{ours}/status && grep -q pytest /proc/{ours}/cmdline && echo in",
        f"kill -0 {ours} && test ! -e /proc/{ours} && echo in",
        "kill -9 -1; true",
        "echo on",
    )
    assert not any("in\n" in each.output for each in results), results
    assert results[-1].output == "on\n"


def test_memory_of_all_processes_is_bounded(with_kind):
    hog = "for i in 1 2 3 4 5 6 7 8; do python3 -c 'x = bytearray(120 << 20); import time; time.sleep(30)' & done; wait"
    results, _ = ran(with_kind, hog, "echo on", timeout_s=4)
    assert results[0].kind in ("memory", "timeout", "error", "ok", "died")
    assert results[1].output == "on\n"


def test_one_process_does_not_take_more_memory(with_kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results, _ = ran(with_kind, "python3 -c 'x = bytearray(600 << 20); print(len(x))'", "echo on")
    assert results[0].kind in ("memory", "error", "died")
    assert str(600 << 20) not in results[0].output
    assert results[1].output == "on\n"
    assert not [*tmp_path.iterdir()], "podman's monitor leaves a file where it runs"


def test_a_fork_bomb_ends_at_its_deadline(with_kind):
    results, _ = ran(with_kind, "f() { f | f & }; f; while :; do :; done", "echo on", timeout_s=3)
    assert results[0].kind in ("timeout", "died", "error")
    assert results[1].output == "on\n"


def test_what_hangs_is_ended_with_all_it_started(with_kind):
    """Its processes too, those included that left its session."""
    counts = "ls -d /proc/[0-9]* | grep -c . "
    results, _ = ran(with_kind, counts, "(setsid sleep 77 &); sleep 88", counts, timeout_s=3)
    assert (results[1].kind, results[1].error) == ("timeout", "no end within 3 s")
    assert int(results[2].output) <= int(results[0].output) + 1


def test_output_and_files_are_cut(with_kind):
    flood = "while :; do echo yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy; done"
    large = "dd if=/dev/zero of=big bs=1M count=40 2>/dev/null; ls -l big | grep -c ' 8388608 '"
    results, _ = ran(with_kind, flood, large, "echo on", timeout_s=25)
    assert len(results[0].output) <= SandboxLimits().output_bytes
    assert results[0].kind in ("output", "error", "died")
    assert results[1].output.endswith("1\n")
    assert results[2].output == "on\n"


def test_the_scratch_folder_is_bounded(with_kind):
    fill = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do dd if=/dev/zero of=/tmp/$i bs=1M count=7 2>/dev/null || break; done"
    fill += "; test $i -lt 12 && echo full"
    results, _ = ran(with_kind, fill, timeout_s=25)
    assert results[0].output == "full\n"


def test_sandboxes_do_not_see_one_another(with_kind):
    async def use(kind):
        async with kind.open(SandboxSpec()) as one, kind.open(SandboxSpec()) as two:
            await one.run("echo x > mine; echo x > /tmp/mine")
            return await two.run("ls mine /tmp/mine 2>/dev/null; ls /tmp")

    assert "mine" not in with_kind(use).output


def test_a_sandbox_leaves_nothing(with_kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = threading.active_count()
    ran(with_kind, "chmod 0 . ; mkdir -p a/b; touch a/b/c; (setsid sleep 99 &)")
    assert not [*tmp_path.iterdir()]
    assert threading.active_count() <= before + 8


def test_the_plan_has_a_line_of_what_holds(with_kind, kind_name):
    async def use(kind):
        return await kind.check()

    wanted = {
        "process": "shut off from files",
        "http": "at http://127.0.0.1",
        "bubblewrap": "in bubblewrap",
        "podman": "in podman",
    }
    assert wanted[kind_name] in with_kind(use)


@pytest.mark.parametrize("path", ["/etc", "/", "work", "/usr/x", "/a/../etc"])
def test_folders_of_the_system_are_not_covered(path):
    kind = create_sandboxes("process", limits=SandboxLimits(), max_running=1)

    async def main():
        async with kind.open(SandboxSpec(workdir=path)):
            pass

    with pytest.raises(RowError, match="is none that commands can have"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("sandbox", "sentence"),
    [
        (
            "docker",
            "no sandbox 'docker' is installed as an entry point of rl_agent.sandboxes; there are: bubblewrap, http",
        ),
        (
            {"kind": "process", "image": "x"},
            "sandbox process has no image 'x': its commands run this machine's programs",
        ),
        ({"kind": "process", "network": "open"}, "sandbox process has network=none, proxy, and not 'open'"),
        (
            {"kind": "podman", "size": 3},
            "sandbox podman has no 'size'; it has: file_bytes, folder_bytes, image, memory_bytes, network",
        ),
        ({"kind": "process", "folder_bytes": 0}, "has folder_bytes=0; a whole number is needed, at least 1"),
        ({"kind": "http"}, "needs the URL of its server"),
        ({"kind": "http", "url": "http://10.1.2.3:80"}, "which has to reach the proxy: give proxy_host"),
    ],
)
def test_options_that_cannot_be_met_are_named(sandbox, sentence):
    with pytest.raises(SandboxError, match=sentence):
        create_sandboxes(sandbox, limits=SandboxLimits(), max_running=1)


@pytest.mark.parametrize(
    ("sandbox", "sentence"),
    [
        ("bubblewrap", "sandbox=bubblewrap needs the program bwrap: apt-get install bubblewrap"),
        ("podman", "sandbox=podman needs the program podman: apt-get install podman"),
        ({"kind": "http", "url": "http://127.0.0.1:9"}, "does not answer .* start it with rl-agent sandbox"),
    ],
)
def test_a_sandbox_that_cannot_start_says_what_to_install(sandbox, sentence, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    async def main():
        kind = create_sandboxes(sandbox, limits=SandboxLimits(), max_running=1)
        try:
            await kind.check()
        finally:
            await kind.close()

    with pytest.raises(SandboxError, match=sentence):
        asyncio.run(main())


FILL = "for i in {{1..9}}; do dd if=/dev/zero of={}/$i bs=1M count=7 2>/dev/null || break; done; echo $i"


@pytest.mark.promise("A sandbox's folders have a bound on their size in every kind")
def test_the_working_folder_is_bounded(with_kind):
    """All files in it together, those of each further folder too; files go in and come back as without a bound."""
    limits = SandboxLimits(timeout_s=30, memory_bytes=512 * MIB, file_bytes=8 * MIB, folder_bytes=24 * MIB)

    async def use(kind):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "given").write_text("mine\n")
            spec = SandboxSpec(folder=Path(folder), extra=("/logs",))
            async with kind.open(spec) as sandbox:
                said = [
                    (await sandbox.run(command)).output for command in ("cat given", "echo a > made; ln -s made by")
                ]
                await sandbox.write("deep/er", b"x\n")
                said += [await sandbox.read("by"), await sandbox.read("deep/er")]
                said += [(await sandbox.run(FILL.format(each))).output for each in (".", "/logs")]
                said.append((await sandbox.run("rm -r [0-9] given; cat deep/er")).output)
                await sandbox.sync()
                return said, texts_in(Path(folder))

    said, files = with_kind(use, limits=limits)
    assert said == ["mine\n", "", b"a\n", b"x\n", "4\n", "4\n", "x\n"]
    assert files == {"made": "a\n"}
