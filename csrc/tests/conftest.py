"""Fixtures of the kernel tests."""

from __future__ import annotations

import pytest

from rl_csrc.testing import Implementation, MissingImplementationError, implementation

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def kernels(request: pytest.FixtureRequest) -> Implementation:
    """The kernels of each device: the CPU runs are the twins of the GPU runs."""
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
