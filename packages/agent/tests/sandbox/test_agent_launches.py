"""Launch scripts: what bash would start is found, and nothing outside the scratch folder is touched."""

import os
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from packages.agent.tests.support.peaks import Peak

from rl_agent.errors import SandboxError, ScriptError
from rl_agent.registry import create_script_reader
from rl_agent.sandbox import launches
from rl_agent.sandbox.launches import ScriptLimits, ScriptReader
from rl_agent.sandbox.process import filters

pytestmark = pytest.mark.process
LAUNCH = "\npython3 -m verl.trainer.main_ppo a=1\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder with something to lose, next to which no script is."""
    folder = tmp_path / "home"
    (folder / "deep").mkdir(parents=True)
    (folder / "precious").write_text("precious")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def script(tmp_path, text):
    file = tmp_path / "scripts" / "run.sh"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def state(folder):
    return {str(path): path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*"))}


def linked(file, home):
    (file.parent / "link").symlink_to(home / "precious")
    return file


ATTACKS = {
    "rm by its path": ("/bin/rm -rf ~/precious", "uses /bin/rm"),
    "a hashed path": ("hash -p /bin/rm rm; rm -rf ~/precious", "uses /bin/rm"),
    "output to the home folder": ("echo x > ~/precious", "precious, outside the folder"),
    "output to a new file there": ("echo x > ~/f", "home/f, outside the folder"),
    "a descriptor": ("exec 3> ~/f; echo x >&3", "home/f, outside the folder"),
    "a descriptor for both": ("exec 3<> ~/precious; echo x >&3", "precious, outside the folder"),
    "a file of the system": ("source /etc/profile", "uses /etc/profile"),
    "a secret": ("python3 -m verl.trainer.main_ppo a=$(< /etc/shadow)", "uses /etc/shadow"),
    "the input of a stand-in": ("python3 -m verl.trainer.main_ppo a=$(cat /etc/passwd)", "uses /etc/passwd"),
    "a connection": ("exec 3<>/dev/tcp/127.0.0.1/PORT; echo x >&3", "opens a network connection"),
    "a datagram": ("echo x > /dev/udp/127.0.0.1/PORT", "opens a network connection"),
    "code for bash": ("enable -f /usr/lib/bash/mkdir mkdir", "loads code into bash"),
    "code of its own for bash": ('enable -f "$(dirname "$0")/run.sh" x', "loads code into bash"),
    "a device": ("echo x > /dev/sda", "launches|uses /dev"),
    "a file of the kernel": ("echo 1 > /proc/sys/vm/drop_caches", "uses /proc/sys/vm/drop_caches|launches"),
    "a program in its folder": ('"$(dirname "$0")/run.sh"', "uses .*/run.sh|runs or writes"),
    "a program by the loader": ("/lib64/ld-linux-x86-64.so.2 /usr/bin/python3 -c 1", "launches|uses"),
    "a fork bomb": (":(){ :|:& };:", "processes|ran for more"),
    "many processes": (
        "for i in {1..500}; do { read -t 5 x < <(:); while :; do :; done; } & done; wait",
        "processes|ran for",
    ),
    "an endless loop": ("while :; do :; done", "CPU time|ran for more|wrote more"),
    "an endless wait": ("read -t 60 x < <(while :; do read -t 1 y; done)", "ran for more|CPU|launches"),
    "much output": ("printf -v x '%9000d' 1; while :; do echo $x >> big; done", "wrote more|writes more|CPU|ran for"),
    "much memory": ("x=$(printf '%9000000s'); while :; do x=$x$x; done", "MiB|CPU|ran for|ended|launches"),
    "open descriptors": ("for f in /proc/self/fd/*; do echo x > $f; done", "uses /proc/self/fd|launches"),
    "the root of another process": ("x=$(< /proc/1/root/etc/passwd); y=$(< /proc/$PPID/environ)", "uses /proc/1/root"),
    "another name for a program": ("exec -a bash /bin/rm -rf ~/precious", "uses /bin/rm"),
    "a coprocess": ("coproc { while :; do :; done; }; /bin/rm -rf ~/precious", "uses /bin/rm"),
    "a trap": ("trap '/bin/rm -rf ~/precious' EXIT DEBUG ERR TERM; kill $$", "uses /bin/rm"),
    "signals that are ignored": ("trap '' TERM INT HUP XCPU XFSZ; while :; do :; done", "CPU time|ran for more"),
    "a library in its folder": ("cd; export LD_PRELOAD=$PWD/x.so; echo x > x.so; bash -c :", "x.so|launches"),
    "a start file in the home folder": ("echo x > ~/e; export BASH_ENV=~/e ENV=~/e; bash -c :", "home/e, outside"),
    "a start file of its own": ("echo '/bin/rm -rf ~/precious' > /tmp/e; BASH_ENV=/tmp/e bash -c :", "uses /bin/rm"),
    "limits that are raised": ("builtin ulimit -t unlimited; while :; do :; done", "CPU time|ran for more"),
    "lines of a file of the system": ('mapfile -t x < /etc/passwd; python3 -m m "${x[@]}" > ~/f', "uses /etc/passwd"),
    "large files": ("printf -v x '%400000s' y; set +x; for i in {1..9}; do echo $x > /tmp/$i; printf \"$x\"; done", ""),
    "many files": (
        "set +x; printf -v x '%9000d' 1; for ((i = 0;; i++)); do echo $x > /tmp/$i; done",
        "writes more|CPU|ran for more",
    ),
    "a link in its folder": ("cd $(dirname $0); cp=$(cat link); x=$(< link); echo x > link", "launches|link"),
    "a wait on a pipe": ("read -t 300 x <> <(read -t 300 y <> /dev/fd/1)", "ran for more|launches|uses"),
    "processes that outlive it": (
        "(while :; do :; done) & disown -a; setsid bash -c 'while :; do :; done' &",
        "launches",
    ),
    "a flood of output": (
        "x=$(printf '%1000000s' y); while :; do echo \"$x\"; done",
        "wrote more|CPU|MiB|ran for more",
    ),
    "a flood of errors": (
        "x=$(printf '%1000000s' y); while :; do echo \"$x\" >&2; done",
        "wrote more|CPU|MiB|ran for more",
    ),
    "a long trace": ("printf -v x '%900000s' y; for i in {1..40}; do : \"$x\"; done", "launches"),
    "its parent": ("kill -9 $PPID; kill -STOP $PPID", "launches"),
    "itself": ("kill -STOP $$", "ran for more"),
    "a program that answers": ("cat < /dev/tcp/127.0.0.1/PORT", "opens a network connection"),
    "a prompt of the trace": ("PS4='$(/bin/rm -rf ~/precious)'; set -x; :", "uses /bin/rm"),
    "a function without end": ("f() { f; }; f", "crash|CPU|MiB|wrote more|ran for more"),
    "a script without end": ('exec bash "$0"', "CPU time|ran for more|wrote more"),
    "a list without end": ("echo {1..100000000}", "MiB|CPU|ran for more"),
    "a file of the kernel's own": ("echo '|/bin/x' > /proc/sys/kernel/core_pattern", "uses /proc/sys"),
    "memory of the machine": ("echo x > /dev/mem", "uses /dev/mem"),
    "a stand-in": ("echo '/bin/rm -rf ~/precious' > /stand_ins/rm; rm", "Read-only|launches"),
    "records that are links": (
        "for i in {1000..1100}; do ln -s /dev/zero /records/$i; : > /records/$i; done",
        "launches",
    ),
    "records that are gone": ("cd /records; : > .complaints; : > /trace/lines; echo 9999 > .last", "launches"),
    "history": ("set -o history; HISTFILE=~/precious; history -w ~/f; history -a", "launches|outside"),
    "its own reader": ("kill -9 1 2 3 -1; kill -9 $PPID", "killed itself|ended its own|launches|ran for"),
}


def message_of(file):
    """The error of a script, or that it launches nothing, which is the error of who asked."""
    limits = ScriptLimits(wall_s=4.0, cpu_s=1, scratch_bytes=1 << 20)
    try:
        assert not ScriptReader(limits).read(file).launches
    except ScriptError as error:
        return str(error)
    return "launches nothing"


@pytest.mark.promise("Bash reads launch scripts in the sandbox, and nothing outside the scratch folder is touched")
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_with_one_error(name, home, tmp_path):
    """Nothing of the user's changes, whether or not a launch follows."""
    text, words = ATTACKS[name]
    before = state(home)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        file = linked(script(tmp_path, text.replace("PORT", str(listener.getsockname()[1])) + "\n"), home)
        folder, start = state(file.parent), time.monotonic()
        said = message_of(file)
        assert time.monotonic() - start < 60  # its own deadline, and what a busy machine adds
        assert re.search(words, said), said
        assert said == "launches nothing" or str(file) in said
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert state(home) == before
    assert state(file.parent) == folder
    assert not [line for line in processes() if str(file) in line]


def test_a_fork_bomb_is_bounded_while_it_runs(home, tmp_path):
    """By the kernel, so that it takes no process from the rest of the machine; the watcher alone let through 23,000."""
    with Peak() as peak:
        assert re.search("processes|ran for", message_of(script(tmp_path, ":(){ :|:& };:\n")))
    assert peak.num_processes < 1000


def processes():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "text",
    [
        "command -p rm -rf ~/precious",
        "PATH=; rm -rf ~/precious; PATH=/stand_ins:/usr/bin",
        "PATH=/usr/sbin:/sbin:/usr/bin:/bin; rm -rf ~/precious",
        "unset -f command_not_found_handle; rm -rf ~/precious",
        "env -i rm -rf ~/precious",
        "cd ~ && rm -rf precious && echo x > f && rm f",
        "alias rm=rm; \\rm -rf ~/precious; builtin cd ~; > precious",
        "bash -c 'rm -rf ~/precious'; sh -c 'rm -rf ~/precious'",
        "mkdir -p ~/made && echo x > ~/made/f",
        "find ~ -delete; dd if=/dev/zero of=~/precious; mv ~/precious ~/gone",
    ],
)
def test_programs_are_not_run_and_the_launch_is_found(text, home, tmp_path):
    before = state(home)
    found = create_script_reader().read(script(tmp_path, text + LAUNCH))
    assert [launch.arguments for launch in found.launches] == [("a=1",)]
    assert state(home) == before
    assert len(state(tmp_path / "scripts")) == 1


def test_the_environment_that_a_script_names_is_there(monkeypatch, tmp_path):
    monkeypatch.setenv("A_TOKEN_OF_THE_USER", "secret")
    monkeypatch.setenv("MODEL_OF_A_TEST", "q")
    monkeypatch.setenv("LD_PRELOAD_OF_A_TEST", "")
    file = script(tmp_path, "python3 -m m $(env | while read l; do echo $l; done) model=$MODEL_OF_A_TEST LD_PRELOAD\n")
    arguments = create_script_reader().read(file).launches[0].arguments
    assert "model=q" in arguments
    assert not [word for word in arguments if "secret" in word]


def test_limits_hold_for_a_script_in_the_background(tmp_path):
    file = script(tmp_path, f"while :; do :; done &\n{LAUNCH}")
    assert len(create_script_reader().read(file).launches) == 1


def test_without_isolation_nothing_is_run(tmp_path):
    """The message has a line that the user runs; what it records is read in the script's place."""
    file = script(
        tmp_path, f"set -e\nmkdir -p {tmp_path}/made{LAUNCH}nohup torchrun --nnodes 2 -m verl.x b=2 > /dev/null\n"
    )
    with pytest.raises(SandboxError, match=r"give the overrides of its command line instead; or") as error:
        ScriptReader(may_isolate=False).read(file)
    assert not (tmp_path / "made").exists()
    line = re.search(r"record what it launches: (.*), and give (\S+) in its place", str(error.value))
    subprocess.run(["bash", "-c", line[1]], check=True, timeout=60)
    found = create_script_reader().recorded(Path(line[2]))
    assert [(each.module, each.options, each.arguments) for each in found.launches] == [
        ("verl.trainer.main_ppo", (), ("a=1",)),
        ("verl.x", ("--nnodes", "2"), ("b=2",)),
    ]


@pytest.mark.parametrize("folder", ["a b:c,d", "a\nb", "[x] $(y) 'z'"])
def test_a_script_may_be_in_any_folder(folder, tmp_path):
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "run.sh"
    file.write_text('cd "$(dirname "$0")" && > log && python3 -m m n="$(wc -l < run.sh)"\n')
    assert create_script_reader().read(file).launches[0].arguments == ("n=1",)
    assert [each.name for each in file.parent.iterdir()] == ["run.sh"]


def test_a_script_may_launch_a_thousand_times(tmp_path):
    file = script(tmp_path, "for i in {1..1000}; do python3 -m m a=$i; done\n")
    found = ScriptReader(ScriptLimits(wall_s=120.0)).read(file)  # a busy machine takes more than the usual ten seconds
    assert [each.arguments for each in found.launches] == [(f"a={i}",) for i in range(1, 1001)]


def test_all_readings_of_a_script_share_its_time(tmp_path):
    """A script that is read anew for a folder that it lacks does not start its clock anew."""
    file = script(tmp_path, "for i in {1..9}; do cd /lacking/$i && read -t 2 < <(kill -STOP $BASHPID); done\n")
    start = time.monotonic()
    with pytest.raises(ScriptError, match="ran for more than 3 s"):
        ScriptReader(ScriptLimits(wall_s=3.0)).read(file)
    assert time.monotonic() - start < 20, "nine readings of three seconds each take 27"


def test_tests_of_unknown_texts_are_reported(tmp_path):
    file = script(tmp_path, f'name=$(hostname -s)\nif [ "$name" = head ]; then exit 0; fi{LAUNCH}')
    found = create_script_reader().read(file)
    assert found.assumed == ("[ $(hostname -s) = head ] is decided with a text that is not known",)


def test_scripts_are_read_at_the_same_time(tmp_path):
    results, file = [], script(tmp_path, LAUNCH)
    threads = [
        threading.Thread(target=lambda: results.append(create_script_reader().read(file).launches)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(launches) for launches in results] == [1] * 4


def test_a_script_is_read_by_a_user_who_is_not_root(tmp_path):
    """Also without root the kernel gives namespaces; limits of processes are the kernel's then."""
    if os.getuid() != 0:
        pytest.skip("this user is not root: the other tests show it")
    file = script(tmp_path, f":(){{ :|:& }};:\n{LAUNCH}")
    assert ScriptReader(ScriptLimits(wall_s=4.0))._limits.num_processes == 64
    with pytest.raises(ScriptError, match="processes|ran for more"):
        ScriptReader(ScriptLimits(wall_s=4.0)).read(file)


def test_a_kernel_without_overlays_reads_scripts_too(tmp_path, monkeypatch):
    """What is in the folder can be read and not changed; new files are in the scratch folder."""
    program = shutil.copytree(launches.PROGRAM, tmp_path / "process")
    isolation = program / "isolation.py"
    isolation.write_text(isolation.read_text().replace('"overlay"', '"no_such_filesystem"'))
    monkeypatch.setattr(launches, "PROGRAM", program)
    file = script(tmp_path, 'cd "$(dirname "$0")"\necho 9 > n.txt\npython3 -m m n=$(cat n.txt) l=$(cat link) > log\n')
    (file.parent / "n.txt").write_text("4")
    (file.parent / "link").symlink_to("n.txt")
    before = state(file.parent)
    found = create_script_reader().read(file)
    assert found.launches[0].arguments == ("n=4", "l=4")
    assert "Read-only file system" in found.complaints[0]
    assert state(file.parent) == before


@pytest.mark.skipif(not filters.landlock_version(), reason="this kernel has no Landlock")
def test_a_file_that_a_mount_shows_is_refused_all_the_same(tmp_path, monkeypatch):
    program = shutil.copytree(launches.PROGRAM, tmp_path / "process")
    isolation = program / "isolation.py"
    shown = isolation.read_text().replace("in (*programs, *DEVICES)}", 'in (*programs, *DEVICES, "/etc/passwd")}')
    isolation.write_text(shown)
    monkeypatch.setattr(launches, "PROGRAM", program)
    file = script(tmp_path, "[ -e /etc/passwd ] && python3 -m m there=1\nx=$(< /etc/passwd)\n")
    with pytest.raises(ScriptError, match="line 2 uses /etc/passwd, outside the folder that it may read"):
        create_script_reader().read(file)
    (program / "filters.py").write_text((program / "filters.py").read_text().replace("_CREATE, _ADD", "_OFF, _ADD"))
    (program / "filters.py").write_text((program / "filters.py").read_text() + "\n_CREATE = 9999\n")
    assert create_script_reader().read(file).launches[0].arguments == ("there=1",)


END = "\npython3 -m verl.trainer.main_ppo n=$n\n"
DECISIVE = {
    "a branch": ("if foo; then n=8; else n=1; fi", "foo"),
    "a status": ("foo; if [ $? -ne 0 ]; then n=1; else n=8; fi", "foo"),
    "a loop": ("n=1; while ! foo; do n=2; break; done", "foo"),
    "two, one of them inverted": ("n=1; foo && ! bar && n=8", "bar"),
    "two, by a variable": ('foo && x=1; bar && y=1; n=1; [ "$x$y" = "" ] && n=8', "foo or bar"),
    "a pipe": ("n=1; if nvidia-smi -L | grep -q H100; then n=8; fi", "grep -q H100"),
    "code of Python": ("n=1; python3 -c 'import x' && n=8", "python3 -c import x"),
    "a program that is looked up": ("n=1; command -v nvcc > /dev/null && n=8", "command -v nvcc"),
    "its type": ("n=1; type nvcc > /dev/null && n=8", "type nvcc"),
    "its path": ("n=1; if which nvcc; then n=8; fi", "which nvcc"),
}


@pytest.mark.parametrize("name", DECISIVE)
def test_a_launch_that_an_unknown_status_decides_is_refused(name, tmp_path):
    text, command = DECISIVE[name]
    with pytest.raises(ScriptError, match="value unknown: whether the command .* on which the launch depends") as error:
        create_script_reader().read(script(tmp_path, text + END))
    assert f"the command {command!r} succeeds" in str(error.value)


SAME = {
    "a wait": "n=1; until foo; do sleep 1; done",
    "a limited wait": "n=1; for i in 1 2 3; do foo && break; sleep 5; done",
    "messages": "n=1; foo || true; bar || echo no; if baz; then echo x; fi",
    "the end at an error": "set -e; n=1; pip install x; foo; bar",
    "the end by hand": "n=1; foo || exit 1",
    "a pipe that fails": "set -eo pipefail; n=1; foo | tee log; bar 2>&1 | grep x > out",
    "a program that is there": "command -v torchrun > /dev/null && type python3 > /dev/null && n=1",
    "a repair": "n=1; python3 -c 'import x' || pip install x",
    "the time": "n=1; foo || true; date > log; echo $RANDOM",
    "a trap": "n=1; trap 'rm -f x' EXIT; foo || true",
}


@pytest.mark.parametrize("name", SAME)
def test_a_launch_that_no_status_decides_is_found(name, tmp_path):
    found = create_script_reader().read(script(tmp_path, SAME[name] + END))
    assert [each.arguments for each in found.launches if "-c" not in each.options] == [("n=1",)]


def test_a_launch_that_needs_a_failure_is_found(tmp_path):
    """A script that ends where a run is under way is meant for where there is none."""
    file = script(tmp_path, "n=1; if pgrep -f verl; then echo running; exit 0; fi" + END)
    found = create_script_reader().read(file)
    assert ([each.arguments for each in found.launches], found.assumed) == ([("n=1",)], ("pgrep -f verl fails",))


def test_a_launch_that_is_repeated_until_it_succeeds_is_one(tmp_path):
    found = create_script_reader().read(script(tmp_path, f"n=1; until{END[:-1]}; do sleep 1; done\n"))
    assert [each.arguments for each in found.launches] == [("n=1",)]
