"""Launch scripts: what a shell script would run, found by letting bash run it, isolated, with nothing to run.

Bash is the only program there. Python, torchrun, ray and their like are stand-ins that record their arguments; `date`,
`dirname`, `seq` and a few more answer; what any other command would print is a marker that can be recognised. Whether
it would succeed is not known either: scripts are read with both outcomes, and refused if their launches differ.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_agent.errors import SandboxError, ScriptError
from rl_agent.sandbox.process.isolation import Watch
from rl_agent.sandbox.worker import PROGRAM, PYTHON
from rl_agent.types import Launch, Launches

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

_LAUNCHERS = ("python", "python3", "torchrun", "accelerate", "deepspeed", "ray", "srun", "uv")
_WRAPPERS = (
    "nohup", "timeout", "time", "numactl", "nsys", "stdbuf", "setsid", "nice", "sudo",
    "conda", "mpirun", "docker", "podman", "singularity", "apptainer",
)  # fmt: skip
_ANSWERING = (
    "env", "tee", "cat", "date", "basename", "dirname", "readlink", "realpath", "pwd", "seq", "wc", "nproc", "which",
)  # fmt: skip
_NAMES = (*_LAUNCHERS, *(f"python3.{i}" for i in range(8, 16)), *_WRAPPERS, *_ANSWERING, "mkdir")
_SHELLS = ("/bin/bash", "/bin/sh", "/usr/bin/bash", "/usr/bin/sh")
_COMPLAINT = re.compile(r"^(?!\+)(?P<file>.+?): line (?P<line>\d+): (?P<text>.+)$", re.MULTILINE)
_NOT_THERE = re.compile(
    r"^(?P<is_cd>cd: )?(?P<path>.+): (No such file or directory|Read-only file system|Permission denied)$"
)
_TEST = re.compile(r"\++ ((?:'\['|\[\[|case|\(\(|test) .*)")
_START_TIMEOUT_S = 60.0
_MAX_ROUNDS = 8
_PAUSES_S = (0.05, 0.2, 0.5, 1.0)
_EMPTY = "# a file that does not exist\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptLimits:
    """Limits of a script that is read, all its processes together."""

    wall_s: float = 10.0
    """Wall-clock seconds."""
    cpu_s: int = 5
    """Seconds of CPU time, of each process."""
    num_processes: int = 64
    """Processes at a time."""
    memory_bytes: int = 1 << 29
    """Memory, bytes."""
    scratch_bytes: int = 1 << 24
    """What is written, bytes."""
    grace_s: float = 0.5
    """Seconds after its end for what it left running in the background."""


class ScriptReader:
    """Reads launch scripts with bash, isolated: no network, no file but the script's folder, one scratch folder.

    Args:
        limits: Limits of a script.
        may_isolate: Make namespaces, where the kernel lets this user; without them no script is run.
    """

    def __init__(self, limits: ScriptLimits | None = None, *, may_isolate: bool = True) -> None:
        self._limits, self._may_isolate = limits or ScriptLimits(), may_isolate

    def read(self, script: Path, arguments: Sequence[str] = ()) -> Launches:
        """Find the launches of a script; it is read anew with folders that it makes or enters and that do not exist.

        Raises:
            ScriptError: it cannot be read, exceeds a limit, or reaches outside its folder.
            SandboxError: it cannot be isolated on this machine; the message has a command line for the user.
        """
        script = script.resolve()
        try:
            text = script.read_text(errors="replace")
        except OSError as error:
            raise ScriptError(f"{script} cannot be read: {error.strerror}") from error
        if any(script.parent in Path(path).parents for path in ("/dev", _bash() or "")):
            raise ScriptError(f"{script} is in a folder of the system; copy it to a separate folder")
        now = {"/stand_ins/.now": f"{time.time():.0f}\n"}
        folders, files, answer = [str(Path.cwd())], dict[str, str](), dict[str, Any]()
        deadline = time.monotonic() + self._limits.wall_s
        for _ in range(_MAX_ROUNDS):
            answer = self._run(script, text, arguments, folders, files | now, deadline)
            if answer["status"] is None:
                break
            made, wanted = _missing(answer, script, text.splitlines(), folders)
            made = [path for path in made if path not in folders]
            wanted = {path: text for path, text in wanted.items() if path not in files}
            if not (made or wanted):
                break
            folders, files = [*folders, *made], files | wanted
        assumed = [f"source {path}, a file that does not exist here" for path in files if files[path] == _EMPTY]
        found = self._checked(answer, script, assumed)
        until = time.monotonic() + self._limits.wall_s

        def again(failing: Collection[_Words]) -> dict[str, Any] | None:
            """Answer of a reading in which these commands fail; None if there is none, or no time for it."""
            listed = {"/stand_ins/.fails": "".join(f"\36{_key(words)}" for words in failing) + "\36"}
            try:
                if time.monotonic() > until:
                    return None
                return self._run(script, text, arguments, folders, files | now | listed, until)
            except (ScriptError, SandboxError):
                return None

        if not (commands := _asked(answer)):
            return found
        decisive, failing, untried = _decisive(answer, commands, again)
        if decisive:
            raise ScriptError(
                f"{script}: value unknown: whether the command {decisive!r:.200} succeeds, on which the launch "
                f"depends; {_ADVICE}"
            )
        if failing and (other := again(failing)) is not None:
            found = self._checked(other, script, [*assumed, *(f"{' '.join(words)} fails" for words in failing)])
        return replace(found, assumed=(*found.assumed, *(f"{' '.join(words)} succeeds" for words in untried)))

    def recorded(self, folder: Path) -> Launches:
        """What a user's own run of a script recorded in a folder, with the stand-ins that an error gave.

        Raises:
            ScriptError: nothing was recorded there.
        """
        files = sorted(file for file in folder.glob("[!.]*") if file.is_file())
        if not files:
            raise ScriptError(f"{folder} holds no record of a launch; run the script with the stand-ins first")
        return _launches([file.read_text(errors="replace").split("\0")[:-1] for file in files])

    def _run(
        self,
        script: Path,
        text: str,
        arguments: Sequence[str],
        folders: list[str],
        files: Mapping[str, str],
        deadline: float,
    ) -> dict[str, Any]:
        bash = _bash()
        if bash is None:
            raise SandboxError(f"{script} needs bash to be read, and there is none on this machine; {_advice(script)}")
        stand_in = _stand_in(bash)
        paths = [f"{folder}/{name}" for folder in ("/stand_ins", "/usr/bin", "/bin") for name in _NAMES]
        request = asdict(self._limits) | {
            "may_isolate": self._may_isolate,
            "wall_s": max(deadline - time.monotonic(), 0.1),
            "programs": [bash, *_libraries(bash)],
            "stand_ins": dict.fromkeys(["/stand_ins/stand_in", *paths], stand_in)
            | {path: bash for path in _SHELLS if path != bash}
            | dict(files),
            "script": str(script),
            "folder": str(script.parent),
            "folders": folders,
            "cwd": folders[0],
            "arguments": list(arguments),
            "environment": _environment(text),
        }
        answer = self._answer(script, request)
        for pause_s in _PAUSES_S if self._may_isolate else ():
            if not answer["isolated"]:  # a kernel may have no room for namespaces until it has freed others
                time.sleep(pause_s)
                answer = self._answer(script, request)
        if not answer["isolated"]:
            raise SandboxError(
                f"{script} is not run: this kernel does not let this user isolate it (user namespaces, seccomp); "
                f"{_advice(script)}"
            )
        return answer

    def _answer(self, script: Path, request: dict[str, Any]) -> dict[str, Any]:
        try:
            ended = subprocess.run(
                [PYTHON, "-I", "-S", str(PROGRAM), "launches"],
                input=json.dumps(request),
                capture_output=True,
                text=True,
                errors="replace",
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
                timeout=self._limits.wall_s + _START_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ScriptError(f"{script} was not read within {error.timeout:g} s") from error
        if ended.returncode == Watch.TOO_MANY_PROCESSES:
            raise ScriptError(f"{script} had more than {self._limits.num_processes} processes; {_ADVICE}")
        if ended.returncode == Watch.TOO_MUCH_MEMORY:
            raise ScriptError(f"{script} took more than {self._limits.memory_bytes >> 20} MiB; {_ADVICE}")
        try:
            return json.loads(ended.stdout)
        except ValueError:
            raise ScriptError(f"{script} ended its own reading {ended.stderr[-500:].strip()}; {_ADVICE}") from None

    def _checked(self, answer: dict[str, Any], script: Path, assumed: Sequence[str]) -> Launches:
        complaints = [(c["file"], int(c["line"]), c["text"]) for c in _COMPLAINT.finditer(answer["complaints"])]
        found = _launches(answer["records"], [f"line {line}: {text}" for _, line, text in complaints])
        for file, line, text in complaints:
            why = _outside(text)
            if marker := re.search(r"@unknown(\d+)@", text):
                why = f"needs what $({found.unknown.get(marker[1], '')}) prints, which is not known"
            if why:
                where = f"{script} line {line}" if file == str(script) else str(script)
                raise ScriptError(f"{where} {why}; {_ADVICE}")
        reached = {
            None: f"ran for more than {self._limits.wall_s:g} s",
            -signal.SIGXCPU: f"took more than {self._limits.cpu_s} s of CPU time",
            -signal.SIGKILL: f"took more than {self._limits.cpu_s} s of CPU time, or killed itself",
            -signal.SIGXFSZ: f"wrote more than {self._limits.scratch_bytes >> 20} MiB",
            -signal.SIGSEGV: "made bash crash, as a function does that calls itself without end",
        }
        if answer["is_full"]:
            reached[answer["status"]] = (
                f"wrote more than {self._limits.scratch_bytes >> 20} MiB, with what bash reported"
            )
        if answer["status"] in reached:
            raise ScriptError(f"{script} {reached[answer['status']]}; {_ADVICE}")
        tests = (_TEST.match(line) for line in answer["trace"])
        for test in dict.fromkeys(match[1] for match in tests if match):
            said = test.replace("'['", "[").replace("']'", "]")
            said = re.sub(r"@unknown(\d+)@", lambda marker: f"$({found.unknown.get(marker[1], '')})", said)
            assumed = [*assumed, f"{said} is decided with a text that is not known"]
        if answer["is_cut"]:
            assumed = [
                *assumed,
                "no test after the first commands, whose trace fills its file, depends on a text that is not known",
            ]
        return replace(found, assumed=(*assumed, *found.assumed))


_Words = tuple[str, ...]
"""Words of a command that is not known."""
_MAX_OUTCOMES = 48
"""Readings of a script with other outcomes of the commands that are not known."""


def _key(words: _Words) -> str:
    """Words as the stand-in compares them."""
    return "".join(f"{word}\37" for word in words)


def _asked(answer: Mapping[str, Any]) -> list[_Words]:
    """Commands whose outcome is not known, each once: those without a stand-in, and code that Python is given."""
    records = [record for record in answer["records"] if len(record) > 2]
    is_asked = (
        r[0] == "unknown" or (r[0] == "launch" and r[2].startswith("python") and r[3:4] == ["-c"]) for r in records
    )
    return list(dict.fromkeys(tuple(r[2:]) for r, is_one in zip(records, is_asked, strict=True) if is_one))


def _decisive(
    answer: dict[str, Any], commands: Sequence[_Words], again: Callable[[Collection[_Words]], dict[str, Any] | None]
) -> tuple[str, tuple[_Words, ...], list[_Words]]:
    """Commands on whose outcome the launches of a script depend, empty if there are none.

    With them, commands that have to fail for a launch, and commands that were not tried.

    A command has one outcome in a reading. All succeed at first; then all fail, and if bash does the same, no outcome
    matters. Else each fails by itself, and with it those that are reached by its failure alone. A script that ends
    early, with an error, or without a launch, is no other launch: one that launches is what its user means.
    """
    if (failed := again(commands)) is None or failed["digest"] == answer["digest"]:
        return "", (), [] if failed else [*commands]
    seen: list[tuple[tuple[_Words, ...], _Outcome]] = [((), _outcome(answer))]
    left: list[tuple[tuple[_Words, ...], set[_Words]]] = [((words,), {*commands}) for words in commands]
    untried: dict[_Words, None] = {}
    for failing, known in left:  # grows
        if len(seen) > _MAX_OUTCOMES or (found := again(failing)) is None:
            untried |= dict.fromkeys(failing)
            continue
        seen.append((failing, _outcome(found)))
        new = [words for words in _asked(found) if words not in known]
        left += [((*failing, words), known | {*new}) for words in new]
    seen.append((tuple(commands), _outcome(failed)))
    launching = [(failing, each) for failing, each in seen if each.launches]
    whole = [one for one in launching if not any(one[1].is_early_end_of(other) for _, other in launching)]
    other = next((failing for failing, each in whole if each.launches != whole[0][1].launches), ())
    named = other[-1:] if len(other) < len(commands) else other
    return " or ".join(map(" ".join, named)), whole[0][0] if whole else (), [*untried]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Launches of one reading, with markers spelled as the commands that they are of."""

    launches: tuple[tuple[str, ...], ...]
    status: int | None

    def is_early_end_of(self, other: _Outcome) -> bool:
        """Whether a script ended with an error before it launched all that it does in another reading."""
        num = len(self.launches)
        return bool(self.status) and num < len(other.launches) and other.launches[:num] == self.launches


def _outcome(answer: Mapping[str, Any]) -> _Outcome:
    found = _launches(answer["records"])

    def spelled(word: str) -> str:
        return re.sub(r"@unknown(\d+)@", lambda marker: f"$({found.unknown.get(marker[1], '')})", word)

    launches = [tuple(map(spelled, (each.folder, *each.words))) for each in found.launches if "-c" not in each.options]
    retried = [words for at, words in enumerate(launches) if at == 0 or launches[at - 1] != words]
    return _Outcome(tuple(retried), answer["status"])


_ADVICE = "take that out of a copy of the script, or give the overrides of its command line instead"


def _launches(records: Sequence[Sequence[str]], complaints: Sequence[str] = ()) -> Launches:
    launches, assumed, unknown = list[Launch](), list[str](), dict[str, str]()
    for i, record in enumerate(records):
        if len(record) < 3:
            continue
        kind, folder, *words = record
        if kind == "launch":
            launches.append(_launch(words, folder))
        elif kind == "assumed":
            assumed.append(f"{' '.join(words)} fails")
        if kind in ("launch", "unknown"):
            unknown[str(1000 + i)] = " ".join(words)
    return Launches(
        launches=tuple(launches),
        unknown=unknown,
        assumed=tuple(dict.fromkeys(assumed)),
        complaints=tuple(dict.fromkeys(complaints)),
    )


_WITH_VALUE = ("-X", "-W", "-Q", "--nnodes", "--nproc_per_node", "--nproc-per-node", "--node_rank", "--node-rank",
               "--master_addr", "--master-addr", "--master_port", "--master-port", "--rdzv_backend", "--rdzv-backend",
               "--rdzv_endpoint", "--rdzv-endpoint", "--rdzv_id", "--rdzv-id", "--config_file", "--num_processes",
               "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port")  # fmt: skip


_LAUNCHING_MODULES = (
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "pdb", "cProfile",
)  # fmt: skip


def _launch(words: Sequence[str], folder: str) -> Launch:
    """Module of a command line of Python or one of its launchers, and its arguments."""
    options, left = list[str](), list(words[1:])
    module = ""
    while left and not module:
        word = left.pop(0)
        if word in ("-m", "--module") and left:
            module = left.pop(0)
            if module in _LAUNCHING_MODULES:
                module, options = "", [*options, word, module]
        elif word.startswith("-m") and len(word) > 2 and not word.startswith("--"):
            module = word[2:]
        elif word.endswith(".py") and not word.startswith("-"):
            module = word.removesuffix(".py").lstrip("./").replace("/", ".")
        elif word in _WITH_VALUE and left:
            options += [word, left.pop(0)]
        elif word.startswith("-") or word == "launch":
            options.append(word)
        else:
            module = word
    return Launch(
        words=tuple(words), folder=folder, module=module or words[0], options=tuple(options), arguments=tuple(left)
    )


def _missing(
    answer: dict[str, Any], script: Path, lines: Sequence[str], folders: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Folders that a script makes or enters and that it lacked, and texts of files by path: sourced ones, programs."""
    complaints = list(_COMPLAINT.finditer(answer["complaints"]))
    records = (record for record in answer["records"] if record[:1] == ["folders"])
    made = [str(Path(folder, path)) for _, folder, *paths in records for path in paths]
    wanted, below = dict[str, str](), f"{script.parent}/"
    for complaint in complaints:
        if (found := _NOT_THERE.match(complaint["text"])) is None:
            continue
        path, line = found["path"], int(complaint["line"])
        if found["is_cd"]:
            made += [str(Path(folder, path)) for folder in folders]  # which one it was in is not known
        elif path.startswith("/") and (path.rpartition("/")[2] in _NAMES or re.search(r"/python[\d.]*$", path)):
            wanted[path] = _stand_in(_bash() or "")
        elif path.startswith("/") and not _exists(path) and complaint["file"] == str(script):
            is_sourced = re.match(r"\s*(source|\.)\s", lines[line - 1] if line <= len(lines) else "")
            wanted |= {path: _EMPTY} if is_sourced else {}
    made = [os.path.normpath(path) for path in made] if complaints else []
    made = [p for p in made if p != "/" and not f"{p}/".startswith(("/proc/", "/dev/", "/stand_ins/"))]
    return [p for p in dict.fromkeys(made) if not (p.startswith(below) and Path(p).is_dir())], wanted


def _outside(complaint: str) -> str:
    """How a complaint of bash comes from the isolation, and not from the script; empty if it does not."""
    if "/dev/tcp/" in complaint or "/dev/udp/" in complaint or "Network is unreachable" in complaint:
        return "opens a network connection, and there is none"
    if complaint.startswith("fork: "):
        return "starts more processes than it may"
    if complaint.startswith("enable: "):
        return f"loads code into bash ({complaint})"
    if complaint.endswith(("No space left on device", "File too large")):
        return f"writes more than it may ({complaint})"
    found = _NOT_THERE.match(complaint)
    if found is None:
        return ""
    path = found["path"].rpartition(": ")[2]
    if complaint.endswith("Permission denied") and not path.startswith("/"):
        return f"runs or writes {path}, which it may not; a script can be run with: bash {path}"
    if path.startswith("/") and (_exists(path) or _exists(str(Path(path).parent))):
        return f"uses {path}, outside the folder that it may read and the scratch folder that it may write"
    return ""


def _exists(path: str) -> bool:
    """Whether a path exists, or does not have to."""
    try:
        Path(path).lstat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _bash() -> str | None:
    found = shutil.which("bash", path=os.defpath) or shutil.which("bash")
    return None if found is None else os.path.realpath(found)


def _libraries(bash: str) -> list[str]:
    """Loader and libraries of bash, as the loader itself lists them."""
    traced = subprocess.run(
        [bash, "--norc", "-c", ":"],
        env={"LD_TRACE_LOADED_OBJECTS": "1"},
        capture_output=True,
        text=True,
        timeout=_START_TIMEOUT_S,
    )
    return re.findall(r"(/\S+) \(0x", traced.stdout)


def _stand_in(bash: str) -> str:
    return f"#!{bash} -p\n{(PROGRAM / 'stand_in.sh').read_text()}"


_OURS = re.compile(
    r"LD_|BASH|SHELLOPTS$|PATH$|IFS$|PS4$|ENV$|CDPATH$|GLOBIGNORE$|POSIXLY_CORRECT$|TMPDIR$|RL_LAUNCHES$"
)


_FOUND = """() {{
    [[ $1 != {options} ]] || builtin {name} "$@" 2>/dev/null || {{ /stand_ins/stand_in {name} "$@"; return; }}
    [[ $1 == {options} ]] || builtin {name} "$@"
}}"""
"""A builtin that looks a program up: whether one that is not here is there is not known."""


def _environment(text: str) -> dict[str, str]:
    """Variables for the script: those of this process that its text names, and no others."""
    named = set(re.findall(r"[A-Za-z_]\w*", text))
    given = {key: value for key, value in os.environ.items() if key in named and not _OURS.match(key)}
    return {
        "HOME": str(Path.home()),
        "USER": os.environ.get("USER", "user"),
        "TERM": "dumb",
        **given,
        "PATH": "/stand_ins:/usr/bin:/bin",
        "BASH_FUNC_command_not_found_handle%%": '() { /stand_ins/stand_in "$@"\n}',
        "BASH_FUNC_ulimit%%": "() { :\n}",  # it may raise no limit here
        "BASH_FUNC_command%%": _FOUND.format(name="command", options="-[vV]"),
        "BASH_FUNC_type%%": _FOUND.format(name="type", options="*"),
    }


def _advice(script: Path) -> str:
    """What a user does where no script is run: with stand-ins that record in front, in a folder that is made here."""
    bash = _bash() or "/bin/bash"
    folder = Path(tempfile.mkdtemp(prefix="rl-launches-"))
    for name in ("bin", "records"):
        (folder / name).mkdir()
    for name in _LAUNCHERS:
        file = folder / "bin" / name
        file.write_text(_stand_in(bash))
        file.chmod(0o755)
    return (
        "give the overrides of its command line instead; or, if you trust it, run it yourself with stand-ins that "
        f"record what it launches: RL_LAUNCHES={folder}/records PATH={folder}/bin:$PATH bash {script}, and give "
        f"{folder}/records in its place"
    )
