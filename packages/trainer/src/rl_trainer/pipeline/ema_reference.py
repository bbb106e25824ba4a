"""EMA reference (`algorithm.ref_ema`): its weights follow the policy's, instead of the frozen start policy.

After every `every`-th step its weights become `decay` times themselves plus the rest of the policy's: an exponential
moving average, or with `decay=0` a reference that is set anew (as in ProRL, arXiv 2505.24864). The weights travel by
model folders, which any engine backend writes and reads in any layout. They are part of a checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rl_trainer.errors import InputError

if TYPE_CHECKING:
    from rl_trainer.config import Config
    from rl_trainer.config.schema import EmaSection
    from rl_trainer.workers.engine_worker import EngineWorker
    from rl_trainer.workers.reference import ReferenceWorker

FOLDER = "reference"
"""Folder of the weights in a checkpoint, and in `output_dir`."""


class EmaReference:
    """EMA reference: averages the policy's weights into the reference's."""

    def __init__(
        self,
        actor: EngineWorker,
        reference: ReferenceWorker,
        section: EmaSection,
        *,
        folder: Path,
        start: Path,
        is_offloaded: bool = False,
    ) -> None:
        self._actor, self._reference, self._section = actor, reference, section
        self._folder, self._path, self._is_offloaded = folder, start, is_offloaded

    def follow(self, step: int) -> None:
        """Average after step `step`, if `every` divides it."""
        if step % self._section.every:
            return
        policy, into = self._folder / "policy", self._folder / f"step-{step}"
        self._actor.save_model(str(policy))
        self._reference.average(str(policy), str(into), self._section.decay)
        self._reference.load_model(str(into))
        if self._is_offloaded:
            self._reference.offload()
        shutil.rmtree(policy)
        if self._path.parent == self._folder and self._path != into:
            shutil.rmtree(self._path)
        self._path = into

    def save(self, checkpoint: Path) -> None:
        """Copy the reference's weights into a checkpoint."""
        shutil.copytree(self._path, checkpoint / FOLDER, dirs_exist_ok=True)


def start_of(config: Config, model_path: Path) -> Path:
    """Folder of the reference's first weights: the policy's, or that in the checkpoint.

    Raises:
        InputError: the checkpoint's run had no EMA reference.
    """
    if config.algorithm.ref_ema is None or config.resume_from is None:
        return model_path
    folder = Path(config.resume_from) / FOLDER
    if not folder.is_dir():
        raise InputError(
            f"resume_from={config.resume_from} has no {FOLDER}/, so its run had no algorithm.ref_ema; leave that out, "
            "or resume from another checkpoint"
        )
    return folder
