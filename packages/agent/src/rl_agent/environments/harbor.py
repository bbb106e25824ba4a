"""Tasks in Harbor's format (https://harborframework.com/docs/tasks): a folder of folders, played by shell or harness.

A task has `task.toml`, `instruction.md`, `environment/Dockerfile` and `tests/test.sh`, which writes the reward to
`/logs/verifier/reward.json` or `reward.txt`. A Dockerfile that only places files on a plain system needs no image: this
machine's programs stand in for it. Any other needs podman, or the image that `docker_image` names.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from rl_agent.environments.base import EnvironmentSource
from rl_agent.errors import PluginError, RowError

TESTS, LOGS, REWARD = "/tests", "/logs", "/logs/verifier/reward"
_PLAIN_SYSTEMS = ("debian", "ubuntu", "python")
_WITHOUT_EFFECT = ("LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "SHELL", "VOLUME")


class HarborTasks(EnvironmentSource):
    """Tasks of one folder, in the order of their names; the last are held out, at most a tenth of them.

    Raises:
        PluginError: there are no tasks, or one of them is no task.
    """

    loop = "swe"
    is_endless = False

    def __init__(self, name: str, arguments: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, arguments)
        if arguments:
            raise PluginError(f"environment harbor:{name} takes no arguments, and has {', '.join(arguments)}")
        self.tasks = sorted(file.parent.resolve() for file in Path(name).glob("*/task.toml"))
        """Folders of the tasks."""
        if not self.tasks:
            raise PluginError(f"environment harbor:{name}: no folder of it has a task.toml")

    def rows(self, *, seed: int, num_train: int, num_eval: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Tasks by folder."""
        del seed
        try:
            rows = [{"harbor": str(folder), "prompt": HarborTask.read(folder).instruction} for folder in self.tasks]
        except RowError as error:
            raise PluginError(str(error)) from error
        first = len(rows) - min(num_eval, max(len(rows) // 10, 1))
        return rows[:first][:num_train], rows[first:]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """Task of one folder."""

    folder: Path
    """Folder of the task."""
    instruction: str
    """Task for the agent."""
    config: Mapping[str, Any]
    """Sections of `task.toml`."""

    @classmethod
    def read(cls, folder: Path) -> HarborTask:
        """Read a task.

        Raises:
            RowError: a file is missing, or it asks for what is not supported; names the task.
        """
        missing = [each for each in ("task.toml", "instruction.md", "tests/test.sh") if not (folder / each).is_file()]
        if missing:
            raise RowError(f"task {folder.name} of {folder.parent} has no {missing[0]}")
        try:
            config = tomllib.loads((folder / "task.toml").read_text())
        except tomllib.TOMLDecodeError as error:
            raise RowError(f"task {folder.name}: task.toml cannot be read: {error}") from error
        task = cls(folder=folder, instruction=(folder / "instruction.md").read_text(), config=config)
        if task.section("environment").get("gpus"):
            raise RowError(f"task {folder.name} asks for gpus, and a sandbox has none")
        if (folder / "environment/docker-compose.yaml").exists():
            raise RowError(f"task {folder.name} has a docker-compose.yaml: a sandbox is one container")
        return task

    def section(self, name: str) -> Mapping[str, Any]:
        """Section of `task.toml`; empty if it has none."""
        found = self.config.get(name, {})
        return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}

    def number(self, name: str) -> float:
        """Number of the section `environment`; 0 if it has none.

        Raises:
            RowError: it is no number, or negative.
        """
        found = self.section("environment").get(name) or 0
        if isinstance(found, bool) or not isinstance(found, (int, float)) or found < 0:
            raise RowError(f"task {self.folder.name} has {name}={found!r}; a number is needed")
        return found

    @property
    def image(self) -> str | None:
        """Image that exists already."""
        return self.section("environment").get("docker_image")

    @property
    def verifier_variables(self) -> dict[str, str]:
        """Variables of the tests; `${NAME}` is that of this process.

        Raises:
            RowError: one is not set here.
        """
        found = dict[str, str]()
        for name, value in self.section("verifier").get("env", {}).items():
            match = re.fullmatch(r"\$\{(\w+)(:-.*)?\}", str(value))
            if match is None:
                found[name] = str(value)
            elif match[1] in os.environ or match[2]:
                found[name] = os.environ.get(match[1], (match[2] or "")[2:])
            else:
                raise RowError(f"task {self.folder.name}: its tests need the variable {match[1]}, which is not set")
        return found

    @property
    def build_name(self) -> str:
        """Name of the image that is built from its Dockerfile: another for other files."""
        files = sorted(file for file in (self.folder / "environment").rglob("*") if file.is_file())
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.relative_to(self.folder)}\0{file.stat().st_mode:o}\0".encode() + file.read_bytes())
        return f"rl-agent-harbor:{digest.hexdigest()[:24]}"

    def test_files(self) -> dict[str, bytes]:
        """Files of the tests by their path in the sandbox."""
        tests = self.folder / "tests"
        files = (file for file in tests.rglob("*") if file.is_file())
        return {f"{TESTS}/{file.relative_to(tests).as_posix()}": file.read_bytes() for file in files}

    def unbuilt(self, copy: Path | None = None) -> tuple[str, dict[str, str]]:
        """Working folder and variables of a Dockerfile that needs no image.

        Args:
            copy: Folder to fill with what it copies to the working folder.

        Raises:
            RowError: it needs one; says for which line.
        """
        file = self.folder / "environment/Dockerfile"
        if not file.is_file():
            raise RowError(f"task {self.folder.name} has no environment/Dockerfile, and no docker_image")
        if copy is not None:
            copy.mkdir()
        workdir, variables = PurePosixPath("/"), dict[str, str]()
        text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", file.read_text() + "\n"))
        for line in filter(None, map(str.strip, text.splitlines())):
            word, _, rest = line.partition(" ")
            words = shlex.split(rest) if word.upper() in ("FROM", "WORKDIR", "ENV", "COPY", "USER") else []
            match word.upper():
                case "FROM" if words[0].partition(":")[0] in _PLAIN_SYSTEMS and len(words) == 1:
                    pass
                case "WORKDIR":
                    workdir /= words[0]
                case "ENV" if "=" in words[0]:
                    variables |= dict(each.split("=", 1) for each in words)
                case "ENV":
                    variables[words[0]] = " ".join(words[1:])
                case "USER" if words[0] in ("root", "0"):
                    pass
                case "COPY" if not words[0].startswith("-") and self._copies(words, workdir, copy):
                    pass
                case other if other not in _WITHOUT_EFFECT:
                    raise RowError(
                        f"task {self.folder.name}: its image cannot be made without Docker's format, for {line!r:.80} "
                        "in environment/Dockerfile; install podman, and take agent.options={sandbox: podman}"
                    )
                case _:
                    pass
        if workdir == PurePosixPath("/"):
            raise RowError(f"task {self.folder.name}: its Dockerfile has no WORKDIR: take sandbox=podman")
        return str(workdir), variables

    def _copies(self, words: list[str], workdir: PurePosixPath, copy: Path | None) -> bool:
        """Copy as a COPY line does; False if it leads out of the working folder."""
        *sources, target = words
        place = workdir / target
        if not (place == workdir or place.is_relative_to(workdir)) or ".." in place.parts:
            return False
        if copy is None:
            return True
        to = copy / place.relative_to(workdir)
        for source in sources:
            for found in (self.folder / "environment").glob(source) if source != "." else [self.folder / "environment"]:
                if found.is_dir():
                    shutil.copytree(found, to, dirs_exist_ok=True)
                else:
                    is_folder = target.endswith(("/", ".")) or len(sources) > 1 or to.is_dir()
                    (to if is_folder else to.parent).mkdir(parents=True, exist_ok=True)
                    shutil.copy2(found, to)
        return True


def read_reward(texts: Mapping[str, str]) -> dict[str, float]:
    """Rewards by name that a task's tests wrote, the reward itself as `reward`.

    Args:
        texts: Content of `reward.json` and `reward.txt` by ending, of those that exist.

    Raises:
        ValueError: there is none, or it is no number.
    """
    if "json" in texts:
        found = json.loads(texts["json"])
        values = cast("dict[str, Any]", found) if isinstance(found, dict) else {"reward": found}
        if "reward" not in values and len(values) == 1:
            values = {"reward": next(iter(values.values()))}
    elif "txt" in texts:
        values = {"reward": float(texts["txt"])}
    else:
        raise ValueError(f"they wrote neither {REWARD}.json nor {REWARD}.txt")
    rewards = {name: float(value) for name, value in values.items()}
    if "reward" not in rewards or not all(map(math.isfinite, rewards.values())):
        raise ValueError(f"they wrote {values!r:.200}; a number named reward is needed")
    return rewards
