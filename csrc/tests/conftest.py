"""Fixtures of the kernel tests."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import rl_csrc

sys.path.insert(0, str(Path(__file__).parent / "support"))

from csrc_kit import Implementation, MissingImplementationError, implementation  # needs the path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

EMULATED = pytest.param("emulated", marks=pytest.mark.process)  # compiled by the first test that asks for it
DEVICES = ["cpu", EMULATED, pytest.param("cuda", marks=pytest.mark.gpu)]
ORDERS = {"ascending": 0, "descending": 1, "shuffled": 2}
"""In which order the emulated threads and blocks run. The last two also let what is sent asynchronously arrive late."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `process` what asks for the emulated kernels by name: its first test compiles them, for minutes if busy."""
    for item in items:
        asked = {"emulated", "emulated_module", "kernels", "gpu"}.intersection(getattr(item, "fixturenames", ()))
        if asked:
            item.add_marker(pytest.mark.timeout(1800))
        if not asked.isdisjoint({"emulated", "emulated_module"}):
            item.add_marker("process")


@pytest.fixture(params=DEVICES)
def kernels(request: pytest.FixtureRequest) -> Implementation:
    """The kernels of each device, and those of CUDA on an emulated one: the CPU runs are the twins of the GPU runs."""
    return _of_device(request)


@pytest.fixture(params=DEVICES[1:])
def gpu(request: pytest.FixtureRequest) -> Implementation:
    """The kernels of CUDA, on the emulated device and on a real one."""
    return _of_device(request)


def _of_device(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "emulated":
        return request.getfixturevalue("emulated")
    try:
        return implementation(request.param)
    except MissingImplementationError as error:
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> object:
    """An op that an implementation leaves to plain torch skips its twin, with the reason."""
    try:
        return (yield)
    except MissingImplementationError as error:
        pytest.skip(str(error))


@dataclass(frozen=True, kw_only=True)
class Emulated(Implementation):
    """The CUDA kernels compiled for the host. A call runs in every order; all must give the same bits."""

    library: ctypes.CDLL

    def configure(self, order: str, *, seed: int = 1, compute_capability: int = 9, resident_clusters: int = 2) -> None:
        """Choose what a GPU leaves open, until the next call."""
        self.library.rl_emulated_configure(ORDERS[order], seed, compute_capability, resident_clusters)

    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """As that of any implementation; raises `AssertionError` where the bits depend on the order."""
        storages = {x.untyped_storage().data_ptr(): _bytes_of(x.untyped_storage()) for x in _tensors([args, kwargs])}
        before = {address: storage.clone() for address, storage in storages.items()}
        first: tuple[Any, list[torch.Tensor]] | None = None
        for order in ORDERS:
            for address, storage in storages.items():
                storage.copy_(before[address])
            self.configure(order)
            found = Implementation.call(self, function, *args, **kwargs)
            bits = [x.detach().contiguous().flatten().view(torch.uint8) for x in _tensors(found)]
            bits += [storage.clone() for storage in storages.values()]
            first = first or (found, bits)
            assert len(bits) == len(first[1])
            for ours, theirs in zip(bits, first[1], strict=True):
                assert torch.equal(ours, theirs), f"{function}: the bits depend on the order of the threads ({order})"
        assert first is not None
        return first[0]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, dict):
        yield from _tensors([*x.values()])
    elif isinstance(x, list | tuple):
        for part in x:
            yield from _tensors(part)


class _OnlyStream:
    """What the launches ask of a stream."""

    cuda_stream, device_index = 0, 0

    def synchronize(self) -> None:
        """Everything is done when a launch returns."""


@pytest.fixture
def emulated(emulated_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """The emulated kernels, whose tensors are torch's CPU tensors. New tensors hold NaN where nothing was written."""
    from rl_csrc.cuda import launch, linear_logprobs

    for name, value in (
        ("current_stream", _OnlyStream()),
        ("current_device", None),
        ("is_current_stream_capturing", False),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(launch, "_counters", {})
    monkeypatch.setattr(launch, "_taken", {})
    # torch has products with another type of result on CUDA alone
    monkeypatch.setattr(linear_logprobs, "_mm_f32", lambda a, b, out: torch.mm(a.float(), b.float(), out=out))
    monkeypatch.setattr(linear_logprobs, "_addmm_f32", lambda total, a, b: total.addmm_(a.float(), b.float()))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield Emulated(
            name="emulated",
            device=torch.device("cpu"),
            module=importlib.import_module("rl_csrc.cuda"),
            library=ctypes.CDLL(emulated_module.__file__),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(not zeros.any() for zeros in launch._counters.values()), "a kernel left its counter changed"


@pytest.fixture(scope="session")
def emulated_module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """`rl_csrc._cuda`, compiled for the host (see emulated/build.py); skips where the real one is installed."""
    if importlib.util.find_spec("rl_csrc._cuda") is not None:
        pytest.skip("the CUDA module itself is installed here")
    path = Path(os.environ.get("RL_CSRC_EMULATED", ""))  # a sanitized one, say
    if not path.is_file():
        builder = _load("emulated_build", Path(__file__).parent / "emulated" / "build.py")
        cache = getattr(request.config, "cache", None)
        path = builder.build(tmp_path_factory.mktemp("emulated") if cache is None else cache.mkdir("rl-csrc-emulated"))
    sys.modules["rl_csrc._cuda"] = rl_csrc._cuda = module = _load("rl_csrc._cuda", path)
    return module


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
