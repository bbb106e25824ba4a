"""A data plane that a stranger wrote (examples/mmap_transport.py) against the published suites."""

import ast
import sys
from pathlib import Path

import pytest
from stranger import EXAMPLE, install

import rl_ckpt.testing
from rl_ckpt import session
from rl_ckpt.testing import CheckpointEngineSuite, KillSuite, ProcessSuite, VersionSuite, new_name

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract UNIX sockets need Linux")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """As after `pip install` of a distribution with this entry point."""
    monkeypatch.setattr(session, "entry_points", session.entry_points)  # put back after the test
    install()


class InFolderOfTest:
    """The file of a sender that is killed stays behind: in a folder that pytest clears away."""

    set_up = install

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.path = tmp_path

    def new_address(self):
        return f"mmap://{new_name()}?folder={self.path}"


@pytest.mark.process
@pytest.mark.contract
@on_linux
class TestMmap(InFolderOfTest, CheckpointEngineSuite, VersionSuite, ProcessSuite):
    pass


@pytest.mark.contract
@pytest.mark.slow
@on_linux
class TestMmapKilled(InFolderOfTest, KillSuite):
    pass


@pytest.mark.promise("A transport of one's own is about 100 lines and passes the published suites")
def test_it_is_short_and_uses_what_is_published():
    code = EXAMPLE.read_text()
    assert len(code.splitlines()) <= 150
    assert _modules(code) <= {"rl_ckpt.errors", "rl_ckpt.transports", "rl_ckpt.types"}


def test_published_suites_use_only_public_names():
    for path in Path(rl_ckpt.testing.__file__).parent.glob("*.py"):
        code = path.read_text()
        assert not [module for module in _modules(code) if "._" in module], path
        assert "unittest.mock" not in code, path


def _modules(code):
    names = {node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)}
    return {name for name in names if name and name.startswith("rl_ckpt")}
