"""Output folder of a run: made and locked in one step, before anything is planned."""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rl_csrc import FolderInUseError, hold_lock
from rl_engine.errors import naming
from rl_trainer.errors import InputError, sentence_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from rl_trainer.config import Config

_LOCK_FILE = "run.lock"
_OUTPUTS = Path("outputs")
_MAX_ATTEMPTS = 100
"""Each one meets another run that removed its unused folder between our mkdir and our lock."""


@contextmanager
def locked_output_dir(config: Config) -> Generator[Path]:
    """Make the output folder if it is missing, and lock it: one run at a time.

    Without `output_dir` the folder is a new one, `outputs/NAME-TIME`. Folders that this call made, and in which nothing
    was written, are removed at the end: a run that was refused leaves nothing behind.

    Raises:
        InputError: another run holds the folder, or it cannot be written.
    """
    with ExitStack() as stack:
        try:
            folder, made = _make_and_lock(config, stack)
        except FolderInUseError as error:
            raise InputError(str(error)) from error
        except OSError as error:
            raise InputError(sentence_of(error) or str(error)) from error
        try:
            yield folder
        finally:  # the lock is still ours
            if made and [path.name for path in folder.iterdir()] == [_LOCK_FILE]:
                (folder / _LOCK_FILE).unlink()
                with suppress(OSError):  # up to one that is not empty
                    for each in made:
                        each.rmdir()


def _make_and_lock(config: Config, stack: ExitStack) -> tuple[Path, list[Path]]:
    """The locked folder, and which folders were missing, the innermost first."""
    for _ in range(_MAX_ATTEMPTS):
        folder, made = _make(config)
        with suppress(FileNotFoundError):
            stack.enter_context(hold_lock(folder / _LOCK_FILE, f"output_dir={folder}"))
            return folder, made
    raise FileNotFoundError(f"output_dir={config.output_dir} is removed again and again by another process.")


def _make(config: Config) -> tuple[Path, list[Path]]:
    if config.output_dir is not None:
        folder = Path(config.output_dir)
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        return folder, made
    made = [path for path in (_OUTPUTS, *_OUTPUTS.parents) if not path.exists()]
    folder = new_output_dir(config.name)
    return folder, [folder, *made]


def new_output_dir(name: str) -> Path:
    """Make a new folder `outputs/NAME-TIME`; two runs of one second get two."""
    base = _OUTPUTS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        base.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def write_whole(file: Path, text: str) -> None:
    """Write a text file; it appears whole or not at all."""
    draft = file.with_name(f"{file.name}.unfinished")
    with naming(file):
        draft.write_text(text)
        draft.replace(file)


def append_line(file: Path, line: str) -> None:
    """Append a line to a log. One that is torn, because the disk is full, is dropped by the run that goes on."""
    with naming(file), file.open("a") as log:
        log.write(f"{line}\n")
