"""Paths of the original's submodules: each imports, and has the names that have a counterpart here.

They are made by an import hook for `rl_tq_transfer_queue.*` alone, since most of them would be files without a line.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_HERE = "rl_tq_transfer_queue"
_SUBMODULES = {
    "sampler": "base sequential_sampler grpo_group_n_sampler rank_aware_sampler seqlen_balanced_sampler",
    "dataloader": "streaming_dataloader streaming_dataset",
    "utils": "accept_probe common enum_utils mooncake_utils perf_utils serial_utils tensor_utils"
    " yuanrong_utils zmq_utils",
    "storage": "simple_storage managers clients bootstrap",
    "storage.managers": "base simple_storage_manager ray_storage_manager mooncake_manager yuanrong_manager",
    "storage.clients": "base ray_storage_client mooncake_client yuanrong_client",
    "storage.bootstrap": "provider simple_storage_bootstrap mooncake_bootstrap yuanrong_bootstrap",
}
_COUNTERPARTS = {"sampler": "sampler", "dataloader": "dataloader", "storage": "client"}
"""Module here that has the names of a module there and of those below it."""
_PATHS = {"storage", "metrics"} | {
    f"{parent}.{name}" for parent, names in _SUBMODULES.items() for name in names.split()
}


class _Original(ModuleType):
    def __getattr__(self, name: str) -> Any:
        path = self.__name__.removeprefix(f"{_HERE}.")
        counterpart = _COUNTERPARTS.get(path.partition(".")[0])
        public = counterpart and vars(import_module(f"{_HERE}.{counterpart}")).get(name)
        if public is not None and not name.startswith("_"):
            return public
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{name} of transfer_queue.{path} has no counterpart: values and messages are rl-tq's here")


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        name = fullname.removeprefix(f"{_HERE}.")
        return (
            ModuleSpec(fullname, self, is_package=name in _SUBMODULES) if name != fullname and name in _PATHS else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Original(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Let the original's paths be imported, below this package alone."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    for name in ("sampler", "dataloader"):  # modules here, packages there
        vars(import_module(f"{_HERE}.{name}")).setdefault("__path__", [])
